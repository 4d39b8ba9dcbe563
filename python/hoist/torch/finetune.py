# SPDX-License-Identifier: Apache-2.0
"""Runs a training recipe of LLaMA-Factory or axolotl: SFT or DPO with TRL's trainers, state where the DeepSpeed file says.

    python -m hoist.torch.finetune llama3_lora_sft.yaml
    python -m hoist.torch.finetune lora-1b.yml --set sample_packing=false --set optimizer=adamw_torch
    torchrun --nproc-per-node 2 -m hoist.torch.finetune recipe.yaml

Without `deepspeed:` in the recipe, parameters and optimizer states are on NVMe, in the output directory. A key that hoist does
not know, or cannot do, stops the run before it begins. docs/trainers.md has the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from typing import Any, cast

import peft
import torch
import transformers
import trl
import yaml

from hoist import _hoist
from hoist.torch.finetune_data import load_rows
from hoist.torch.transformers import Trainer, from_pretrained, newest_complete_checkpoint

__all__ = ["main", "run"]

# Recipes' names for fields of SFTConfig or DPOConfig. Equal names need no line here.
_ARGUMENTS = {
    "cutoff_len": "max_length", "sequence_len": "max_length", "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size", "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim", "wandb_name": "run_name", "pref_beta": "beta", "rl_beta": "beta", "pref_loss": "loss_type",
    "dpo_loss_type": "loss_type", "dpo_loss_weights": "loss_weights", "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting", "dataset_processes": "dataset_num_proc"}
_LORA = {
    "lora_rank": "r", "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target": "target_modules",
    "lora_target_modules": "target_modules", "additional_target": "modules_to_save", "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora", "peft_use_rslora": "use_rslora", "use_dora": "use_dora", "peft_use_dora": "use_dora",
    "lora_fan_in_fan_out": "fan_in_fan_out", "lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern",
    "peft_layers_to_transform": "layers_to_transform"}
# Keys of one value or a few. The first value is what the error proposes.
_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "stage": (("sft", "dpo"), "hoist runs SFT and DPO"),
    "do_train": ((True,), "hoist trains, and evaluates on the way"),
    "do_predict": ((False,), "hoist trains, and evaluates on the way"),
    "predict_with_generate": ((False,), "evaluation computes the loss"),
    "finetuning_type": (("lora", "full"), "hoist trains all weights or LoRA adapters"),
    "adapter": (("lora",), "weights are offloaded as they are, without quantization"),
    "rl": (("dpo", "ipo"), "hoist runs SFT, DPO and IPO"),
    "pref_loss": (("sigmoid", "hinge", "ipo"), "the other losses are not DPO's"),
    "pref_ftx": ((0,), "TRL averages this loss otherwise"),
    "quantization_bit": ((None,), "weights are offloaded as they are, without quantization"),
    "load_in_8bit": ((False,), "weights are offloaded as they are, without quantization"),
    "load_in_4bit": ((False,), "weights are offloaded as they are, without quantization"),
    "packing": ((False,), "TRL would pack rows into other batches"),
    "neat_packing": ((False,), "TRL would pack rows into other batches"),
    "sample_packing": ((False,), "TRL would pack rows into other batches"),
    "eval_sample_packing": ((False,), "TRL would pack rows into other batches"),
    "optim": (("adamw_torch", "adamw_torch_fused", "adagrad", "sgd"), "hoist's own optimizers keep 32-bit state"),
    "optimizer": (("adamw_torch", "adamw_torch_fused", "adagrad", "sgd"), "hoist's own optimizers keep 32-bit state"),
    "pure_bf16": ((False,), "hoist updates fp32 masters"),
    "bf16": ((True, False, "auto"), "evaluation uses the weights that are trained"),
    "gradient_checkpointing": ((True, False), "activations are recomputed or kept"),
    "streaming": ((False,), "data are read as files"),
    "mix_strategy": (("concat",), "data sets are concatenated"),
    "mask_history": ((False,), "all answers are trained"),
    "enable_thinking": ((True,), "the tokenizer's chat template is used as it is"),
    "precompute_ref_log_probs": ((False,), "weights are read when training begins"),
    **{key: ((False,), "hoist does not have it") for key in (
        "use_unsloth", "enable_liger_kernel", "use_liger_kernel", "use_galore", "use_apollo", "use_badam", "use_muon",
        "use_adam_mini", "pissa_init", "resize_vocab", "train_from_scratch", "shift_attn", "curriculum_sampling",
        "shuffle_before_merging_datasets", "auto_find_batch_size", "activation_offloading")},
    **{key: ((None,), "hoist does not have it") for key in (
        "adapter_name_or_path", "lora_model_dir", "ref_model", "plugins", "fsdp", "fsdp_config", "loraplus_lr_ratio",
        "rope_scaling", "unfrozen_parameters", "chat_template_kwargs", "early_stopping_patience", "early_stopping_steps")}}
# Keys that this module or finetune_data.py reads.
_READ = set("""model_name_or_path base_model model_type tokenizer_type trust_remote_code model_revision revision_of_model cache_dir
    flash_attn attn_implementation flash_attention sdp_attention eager_attention stage rl finetuning_type adapter lora_target_linear
    dataset eval_dataset dataset_dir max_samples val_size template train_on_prompt datasets test_datasets val_set_size chat_template
    chat_template_jinja train_on_inputs special_tokens shuffle_merged_datasets min_sample_len deepspeed warmup_ratio evals_per_epoch
    saves_per_epoch disable_gradient_checkpointing group_by_length wandb_project wandb_entity overwrite_output_dir tf32
    auto_resume_from_checkpoints""".split())
# Keys that do not change what is trained.
_WITHOUT_EFFECT = set("""plot_loss overwrite_cache preprocessing_num_workers preprocessing_batch_size data_shared_file_system
    tokenized_path print_param_status use_fast_tokenizer low_cpu_mem_usage use_reentrant_gc ray_num_workers media_dir buffer_size
    gradient_checkpointing_kwargs dataset_prepared_path dataset_keep_in_memory pad_to_sequence_len wandb_watch wandb_log_model
    wandb_run_id strict save_safetensors is_llama_derived_model is_mistral_derived_model is_qwen_derived_model local_rank ddp
    include_tkps loss_watchdog_threshold loss_watchdog_patience save_first_step""".split())
# Fields of TRL that would be without effect here, because finetune_data.py makes the tokens.
_NOT_TAKEN = set("""max_length truncation_mode packing_strategy eval_packing padding_free dataset_kwargs dataset_text_field eos_token
    pad_token chat_template_path assistant_only_loss completion_only_loss shuffle_dataset model_init_kwargs""".split())


@dataclasses.dataclass
class _Plan:
    """What a recipe's keys ask for."""

    dpo: bool
    arguments: dict[str, Any]
    lora: dict[str, Any] | None
    notices: list[str]


def _plan(recipe: dict[str, Any], command: str) -> _Plan:
    """Every key goes to its place, or into one error. Errors: UsageError."""
    dpo = recipe.get("stage") == "dpo" or recipe.get("rl") is not None
    fields = {field.name for field in dataclasses.fields(trl.DPOConfig if dpo else trl.SFTConfig)}
    with_lora = (recipe.get("finetuning_type", "lora") if "model_name_or_path" in recipe else recipe.get("adapter")) == "lora"
    plan = _Plan(dpo, {}, {} if with_lora else None, [])
    problems, overrides, without_effect = [], [], []
    for key, value in recipe.items():
        accepted, why = _VALUES.get(key, ((value,), ""))
        if value not in accepted:
            problems.append(f"{key}: {value}: {why}")
            overrides.append(f"--set {key}={'null' if accepted[0] is None else str(accepted[0]).lower()}")
        elif key in _LORA and plan.lora is not None:
            plan.lora[_LORA[key]] = value
        elif key in _ARGUMENTS and _ARGUMENTS[key] in fields:
            plan.arguments[_ARGUMENTS[key]] = value
        elif key in fields - _NOT_TAKEN - _READ:
            plan.arguments[key] = value
        elif key in _WITHOUT_EFFECT or key in _LORA or key in _ARGUMENTS:
            without_effect.append(key)
        elif key not in _READ and key not in _VALUES:
            problems.append(f"{key}: hoist does not know this key; if the run does not need it, leave it out")
            overrides.append(f"--set {key}=null")
    if problems:
        raise _hoist.UsageError("the recipe asks for what hoist does not do:\n  " + "\n  ".join(problems) + "\nTo run it with "
                                f"these changes:\n  {command} {' '.join(overrides)}")
    if without_effect:
        plan.notices.append("keys without effect on this run: " + ", ".join(without_effect))
    return plan


def _complete(plan: _Plan, recipe: dict[str, Any], rows: int) -> None:
    """Derived arguments, and the defaults of the recipe's own project where TRL has others."""
    given, own = plan.arguments, recipe.get
    llama_factory = "model_name_or_path" in recipe
    defaults: dict[str, Any] = {"bf16": False, "seed": 42, "max_length": 2048 if llama_factory else 512}
    if llama_factory:
        defaults |= {"learning_rate": 5e-5, "logging_steps": 500, "warmup_steps": own("warmup_ratio", 0),
                     "gradient_checkpointing": not own("disable_gradient_checkpointing", False)}
    else:
        batch = own("micro_batch_size", 1) * own("gradient_accumulation_steps", 1) * int(os.environ.get("WORLD_SIZE", "1"))
        steps = own("max_steps") or math.ceil(rows * own("num_epochs", 1) / batch)
        warmup = int(own("warmup_ratio") * steps) if own("warmup_ratio") is not None else min(int(0.03 * steps), 100)
        warmup = own("warmup_steps", warmup)
        defaults |= {"max_steps": steps, "logging_steps": max(min(int(0.005 * steps), 10), 1), "lr_scheduler_type": "cosine",
                     "num_train_epochs": 1, "gradient_checkpointing": False, "per_device_train_batch_size": 1,
                     "per_device_eval_batch_size": own("micro_batch_size", 1), "save_total_limit": 4, "save_strategy": "epoch"}
        given["warmup_steps"] = 2 if warmup == 1 else warmup
        for kind, count in (("save", own("saves_per_epoch")), ("eval", own("evals_per_epoch"))):
            if count and (kind == "save" or own("val_set_size") or own("test_datasets")):
                given[f"{kind}_steps"] = 1 / (count * own("num_epochs", 1))
            if given.get(f"{kind}_steps"):
                given[f"{kind}_strategy"] = "steps"
        given["eval_on_start"] = given.get("eval_strategy", "no") != "no"
        if own("rl") == "ipo":
            given["loss_type"] = ["ipo"]
        if own("group_by_length"):
            given["train_sampling_strategy"] = "group_by_length"
        if own("wandb_project"):
            os.environ["WANDB_PROJECT"], given["report_to"] = own("wandb_project"), "wandb"
            os.environ |= {"WANDB_ENTITY": own("wandb_entity")} if own("wandb_entity") else {}
    plan.arguments = given = defaults | given
    if own("tf32") is True:
        given["tf32"] = True
    if given["bf16"] == "auto":
        cuda = torch.cuda.is_available()
        given["bf16"] = cuda and torch.cuda.is_bf16_supported()
        given["fp16"] = cuda and not given["bf16"]
        plan.notices.append(f"bf16: auto is {given['bf16']} on this machine")
    if not plan.dpo:
        given["max_length"] = None  # rows are cut already
    given.update(gradient_checkpointing_kwargs={"use_reentrant": False}, do_eval=given.get("eval_strategy", "no") != "no")
    if plan.lora is not None:
        _complete_lora(plan.lora, recipe, llama_factory)


def _complete_lora(lora: dict[str, Any], recipe: dict[str, Any], llama_factory: bool) -> None:
    if llama_factory:
        lora.setdefault("r", 8)
        lora.setdefault("lora_alpha", 2 * lora["r"])
        for key in ("target_modules", "modules_to_save"):
            if isinstance(lora.get(key), str) and lora[key] != "all":
                lora[key] = [name.strip() for name in lora[key].split(",")]
        if lora.get("target_modules", "all") == "all":
            lora["target_modules"] = "all-linear"
    elif recipe.get("lora_target_linear"):
        if lora.get("target_modules"):
            raise _hoist.UsageError("lora_target_linear and lora_target_modules: give one of them")
        lora["target_modules"] = "all-linear"
    if not {"r", "lora_alpha", "target_modules"} <= lora.keys():
        raise _hoist.UsageError("adapter: lora needs lora_r, lora_alpha, and lora_target_linear or lora_target_modules")


def _tokenizer(recipe: dict[str, Any], name: str, places: dict[str, Any], notices: list[str]) -> Any:
    tokenizer = getattr(transformers, recipe.get("tokenizer_type", "AutoTokenizer")).from_pretrained(name, **places)
    for token, text in (recipe.get("special_tokens") or {}).items():
        if text is None:
            continue
        if text not in tokenizer.get_vocab():
            raise _hoist.UsageError(f"special_tokens: {token}: {text} is not in the vocabulary, and hoist adds no rows to the "
                                    "embedding: name a token that is")
        setattr(tokenizer, token, text)
    if recipe.get("chat_template_jinja"):
        tokenizer.chat_template = recipe["chat_template_jinja"]
    elif named := recipe.get("template") or recipe.get("chat_template"):
        notices.append(f"template {named}: the chat template of the model's own tokenizer is used; compare the two if the model is "
                       "not of that family")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _attention(recipe: dict[str, Any], notices: list[str]) -> str | None:
    """Kernels compute the same attention up to rounding."""
    named = recipe.get("attn_implementation") or {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}.get(
        recipe.get("flash_attn", "auto"))
    for key, kernel in (("flash_attention", "flash_attention_2"), ("sdp_attention", "sdpa"), ("eager_attention", "eager")):
        named = kernel if recipe.get(key) else named
    if named == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        notices.append("flash_attention_2 is not installed or has no GPU here: sdpa computes the same attention")
        named = "sdpa"
    return named


def run(recipe: dict[str, Any], command: str = "python -m hoist.torch.finetune RECIPE") -> Any:
    """Trains what the recipe says, and saves it to its output_dir. Returns the trainer, its engine closed.

    Errors: UsageError with all keys that hoist cannot honour, before anything is read.
    """
    recipe = {key: value for key, value in recipe.items() if value is not None}
    if ("model_name_or_path" in recipe) == ("base_model" in recipe):
        raise _hoist.UsageError("a recipe of LLaMA-Factory has model_name_or_path, and one of axolotl has base_model: this file "
                                "has neither, or both")
    for key in ("output_dir", "dataset" if "model_name_or_path" in recipe else "datasets",
                *(() if "model_name_or_path" in recipe else ("learning_rate",))):
        if key not in recipe:
            raise _hoist.UsageError(f"the recipe has no {key}")
    plan = _plan(recipe, command)
    name = recipe.get("model_name_or_path") or recipe["base_model"]
    places = {"revision": recipe.get("model_revision") or recipe.get("revision_of_model"), "cache_dir": recipe.get("cache_dir"),
              "trust_remote_code": recipe.get("trust_remote_code")}
    places = {key: value for key, value in places.items() if value is not None}
    tokenizer = _tokenizer(recipe, name, places, plan.notices)
    train, evaluation = load_rows(recipe, tokenizer, plan.dpo, plan.notices)
    _complete(plan, recipe, len(train))
    attention = _attention(recipe, plan.notices)
    nvme = {"device": "nvme", "nvme_path": os.path.join(recipe["output_dir"], "nvme")}
    deepspeed = recipe.get("deepspeed")
    if deepspeed is None:
        plan.notices.append(f"no deepspeed file: parameters and optimizer states are in {nvme['nvme_path']}")
        deepspeed = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    if plan.dpo and plan.lora is None:
        plan.notices.append("DPO of all weights: TRL keeps a reference model in memory, whole")
    if os.environ.get("RANK", "0") == "0":
        for notice in plan.notices:
            print(f"hoist: {notice}", file=sys.stderr)

    options = plan.arguments
    dtype = torch.bfloat16 if options["bf16"] else torch.float16 if options.get("fp16") else torch.float32
    model = from_pretrained(getattr(transformers, recipe.get("model_type", "AutoModelForCausalLM")), name, dtype=dtype,
                            **places, **({"attn_implementation": attention} if attention else {}))
    base, arguments = (trl.DPOTrainer, trl.DPOConfig) if plan.dpo else (trl.SFTTrainer, trl.SFTConfig)
    transformers.set_seed(options["seed"])  # of the adapters
    adapters = None if plan.lora is None else peft.LoraConfig(task_type="CAUSAL_LM", **plan.lora)
    trainer = cast(Any, type(f"Hoisted{base.__name__}", (Trainer, base), {}))(
        model=model, args=arguments(**options), train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer,
        peft_config=adapters, hoist_config=deepspeed)
    resume = options.get("resume_from_checkpoint")
    if resume is None and not recipe.get("overwrite_output_dir", "base_model" in recipe) or recipe.get(
            "auto_resume_from_checkpoints"):
        resume = newest_complete_checkpoint(recipe["output_dir"])
    metrics = trainer.train(resume_from_checkpoint=resume).metrics
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", metrics)
    if options["do_eval"]:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.engine.close()
    return trainer


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hoist.torch.finetune", description=(
        "Runs a YAML recipe of LLaMA-Factory or axolotl: SFT or DPO, all weights or LoRA, with parameters and optimizer states "
        "where the recipe's DeepSpeed file says (without one: on NVMe, in the output directory)."))
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file of `llamafactory-cli train` or `axolotl train`")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[],
                        help="another value for a key of the recipe; null leaves the key out. May be given several times")
    options = parser.parse_args(words)
    with open(options.recipe, encoding="utf-8") as file:
        recipe = yaml.safe_load(file)
    if not isinstance(recipe, dict):
        parser.error(f"{options.recipe} has no keys")
    for change in options.set:
        key, equals, value = change.partition("=")
        if not equals:
            parser.error(f"--set {change}: it takes KEY=VALUE")
        recipe[key] = yaml.safe_load(value)
    # YAML reads 2e-5, which has no point, as text.
    recipe = {key: float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value
              for key, value in recipe.items()}
    try:
        run(recipe, " ".join(["python -m hoist.torch.finetune", options.recipe, *(f"--set {change}" for change in options.set)]))
    except _hoist.UsageError as error:
        print(f"hoist: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
