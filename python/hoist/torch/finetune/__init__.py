# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe of LLaMA-Factory or axolotl with TRL's trainers, state where its DeepSpeed file says: SFT, DPO, KTO,
reward models, pretraining.

    python -m hoist.torch.finetune llama3_lora_sft.yaml
    python -m hoist.torch.finetune lora-1b.yml --set num_epochs=2
    torchrun --nproc-per-node 2 -m hoist.torch.finetune recipe.yaml

Without `deepspeed:` in the recipe, parameters and optimizer states are on NVMe, in the output directory. A key that hoist does
not know, or cannot do, stops the run before it begins. docs/trainers.md has the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, cast

import peft
import torch
import transformers
import trl
import yaml
from transformers.trainer import TRAINER_STATE_NAME

from hoist import _hoist, signal_handlers
from hoist.torch.commands import run_command
from hoist.torch.finetune.data import from_the_hub, load_rows
from hoist.torch.finetune.methods import PRETRAINING, REWARD, Method, method_of
from hoist.torch.pretrained.loading import IS_TRANSFORMERS_4
from hoist.torch.transformers import OPTIMS, Trainer, from_pretrained, newest_complete_checkpoint

__all__ = ["main", "run"]

# Recipes' names for fields of the trainers' settings. Equal names need no line here.
_ARGUMENTS = {
    "cutoff_len": "max_length", "sequence_len": "max_length", "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size", "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim", "wandb_name": "run_name", "pref_beta": "beta", "rl_beta": "beta", "pref_loss": "loss_type",
    "dpo_loss_type": "loss_type", "dpo_loss_weights": "loss_weights", "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting", "dataset_processes": "dataset_num_proc", "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight", "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight"}
_LORA = {
    "lora_rank": "r", "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target": "target_modules",
    "lora_target_modules": "target_modules", "additional_target": "modules_to_save", "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora", "peft_use_rslora": "use_rslora", "use_dora": "use_dora", "peft_use_dora": "use_dora",
    "lora_fan_in_fan_out": "fan_in_fan_out", "lora_rank_pattern": "rank_pattern", "lora_alpha_pattern": "alpha_pattern",
    "peft_layers_to_transform": "layers_to_transform"}
_PLACES = {"cache_dir": "cache_dir", "trust_remote_code": "trust_remote_code", "model_revision": "revision",
           "revision_of_model": "revision"}
# Keys of which hoist takes one value or a few, and why. The error proposes the first one; None leaves the key out.
_VALUES = {key: (values, why) for keys, values, why in (
    ("stage", ("sft", "dpo", "kto", "rm", "pt"), "hoist runs SFT, DPO, KTO, reward models (rm) and continued pretraining (pt)"),
    ("rl", ("dpo", "ipo", "kto"), "hoist runs SFT, DPO, IPO, KTO and reward models"),
    ("reward_model", (None, True, False), "hoist trains one, and uses none"),
    ("num_labels", (1,), "a reward is one number"),
    ("do_train", (True,), "hoist trains, and evaluates on the way"),
    ("do_predict predict_with_generate", (False,), "hoist trains, and evaluates the loss on the way"),
    ("finetuning_type", ("lora", "full"), "hoist trains all weights, or LoRA adapters"),
    ("adapter", ("lora", "qlora"), "hoist trains all weights, or LoRA adapters"),
    ("optim optimizer", OPTIMS, "hoist updates with its own optimizers"),
    ("pref_loss", ("sigmoid", "hinge", "ipo"), "the other losses are not DPO's"),
    ("pref_ftx pref_bco_weight", (0,), "TRL averages this loss differently"),
    ("pure_bf16", (False,), "hoist updates fp32 masters"),
    ("bf16", (True, False, "auto"), "evaluation uses the weights that are trained"),
    ("gradient_checkpointing", (True, False), "activations are kept, or computed again"),
    ("streaming", (False,), "rows are read from files"),
    ("mix_strategy", ("concat",), "data sets are concatenated"),
    ("mask_history", (False,), "all answers of a conversation are trained"),
    ("enable_thinking", (True,), "the tokenizer's chat template is used as it is"),
    ("precompute_ref_log_probs", (False,), "weights are not there before training begins"),
    ("use_unsloth use_galore use_apollo use_badam use_muon use_adam_mini pissa_init "
     "resize_vocab train_from_scratch shift_attn curriculum_sampling shuffle_before_merging_datasets auto_find_batch_size",
     (False,), "hoist does not have it"),
    ("adapter_name_or_path lora_model_dir tokenized_path ref_model plugins loraplus_lr_ratio rope_scaling unfrozen_parameters",
     (None,), "hoist does not have it"),
    ) for key in keys.split()}
_UNQUANTIZED = "the base weights are not quantized: they keep their 16 or 32 bits, and are offloaded instead"
# Keys that hoist honours in a way of its own, which is said. False, and null, ask for nothing.
_OTHERWISE = {key: said for keys, said in (
    ("load_in_8bit load_in_4bit quantization_bit", _UNQUANTIZED),
    ("fsdp fsdp_config dp_shard_size", "state is partitioned over the ranks by hoist, and where the deepspeed file says"),
    ("activation_offloading", "activations stay in memory (gradient_checkpointing computes them again)"),
    ) for key in keys.split()}
# Keys that this module or data.py reads, by the key that names the format.
_READ = {key: set(keys.split()) | set("cache_dir trust_remote_code deepspeed warmup_ratio tf32".split()) for key, keys in {
    "model_name_or_path": """model_name_or_path model_revision flash_attn stage finetuning_type dataset eval_dataset dataset_dir
        max_samples val_size template train_on_prompt disable_gradient_checkpointing overwrite_output_dir packing neat_packing
        early_stopping_steps""",
    "base_model": """base_model model_type tokenizer_type revision_of_model attn_implementation flash_attention sdp_attention
        eager_attention rl adapter lora_target_linear datasets test_datasets val_set_size chat_template chat_template_jinja
        train_on_inputs special_tokens shuffle_merged_datasets min_sample_len evals_per_epoch saves_per_epoch group_by_length
        wandb_project wandb_entity auto_resume_from_checkpoints sample_packing eval_sample_packing early_stopping_patience
        eot_tokens"""}.items()}
# Keys that change no result, or only its rounding: Liger's and axolotl's kernels compute what transformers computes.
_WITHOUT_EFFECT = set("""plot_loss overwrite_cache preprocessing_num_workers preprocessing_batch_size data_shared_file_system
    print_param_status use_fast_tokenizer low_cpu_mem_usage use_reentrant_gc ray_num_workers media_dir buffer_size
    gradient_checkpointing_kwargs dataset_prepared_path dataset_keep_in_memory pad_to_sequence_len wandb_watch wandb_log_model
    strict save_safetensors is_llama_derived_model is_mistral_derived_model is_qwen_derived_model local_rank ddp include_tkps
    loss_watchdog_threshold loss_watchdog_patience save_first_step enable_liger_kernel use_liger_kernel liger_rope
    liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy
    lora_mlp_kernel lora_qkv_kernel lora_o_kernel cut_cross_entropy flash_attn_cross_entropy flash_attn_rms_norm
    flash_attn_fuse_qkv flash_attn_fuse_mlp fused_attn_kernel use_kernels use_v1_kernels use_scattermoe use_sonicmoe
    experts_implementation quantize_moe_experts quantization_method quantization_type double_quantization fsdp_version
    fsdp_final_state_dict_type flex_attn_compile_kwargs experimental_skip_move_to_device""".split())
_KERNEL_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
# Numbers without which there are no rows, tokens or steps.
_POSITIVE = set("""cutoff_len sequence_len max_samples micro_batch_size eval_batch_size per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps""".split())
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"), str: ((str,), "text"), bool: ((bool,), "true or false")}
# Fields of TRL that say how to make tokens, which data.py does instead.
_NOT_TAKEN = set("""max_length truncation_mode packing_strategy eval_packing padding_free dataset_kwargs dataset_text_field
    eos_token pad_token chat_template_path assistant_only_loss completion_only_loss shuffle_dataset model_init_kwargs""".split())


@dataclasses.dataclass
class _Plan:
    """The settings that the keys of a recipe ask for."""

    llama_factory: bool
    method: Method
    config: Any                  # the class of TRL that holds the trainer's settings
    arguments: dict[str, Any]    # of it
    lora: dict[str, Any] | None  # of LoraConfig
    notices: list[str]


def _as_meant(key: str, value: Any) -> Any:
    """YAML reads 2e-5, which has no point, as text, and `no` as False."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    if isinstance(value, float) and value.is_integer() and key in _POSITIVE:
        return int(value)
    return "no" if key.endswith("_strategy") and value is False else value


def _wanted(value: Any, hint: Any) -> str:
    """Names what a field's type wants instead of the value; "" if they agree, or the type says little."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        wanted = [_wanted(value, each) for each in typing.get_args(hint) if each is not type(None)]
        return "" if "" in wanted else " or ".join(wanted)
    kinds, name = _KINDS.get(hint, ((object,), ""))
    if hint is int and isinstance(value, float) and value.is_integer():
        return ""
    return name if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool) else ""


def _problem_of(key: str, value: Any, hint: Any) -> str:
    if key in _POSITIVE:
        wanted = "a whole number of 1 or more" if _wanted(value, int) or value < 1 else ""
    elif key == "warmup_ratio":
        wanted = "a share of the steps, from 0 to 1" if _wanted(value, float) or not 0 <= value <= 1 else ""
    elif key in ("datasets", "test_datasets"):
        is_list = isinstance(value, list) and all(isinstance(entry, dict) and "path" in entry for entry in value)
        wanted = "" if is_list else "a list of entries with a path"
    else:
        wanted = "" if key in _VALUES or key == "resume_from_checkpoint" else _wanted(value, hint)  # which may be true
    return f"{key}: {value}: {wanted} is needed here" if wanted else ""


@contextlib.contextmanager
def _refusals_said() -> Iterator[None]:
    """Around the making of TRL's and PEFT's settings. Errors: UsageError for a value that they refuse."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise _hoist.UsageError(f"the recipe's values are refused by the libraries that take them: {error}") from error


def _plan(recipe: dict[str, Any], command: str) -> _Plan:
    """Every key goes to its place, or into one error. Errors: UsageError."""
    formats = [key for key in _READ if key in recipe]
    if len(formats) != 1:
        raise _hoist.UsageError("a recipe of LLaMA-Factory has the key model_name_or_path, and one of axolotl has base_model: "
                                f"this one has {'both' if formats else 'neither'}")
    read, llama_factory = _READ[formats[0]], formats[0] == "model_name_or_path"
    method = method_of(recipe)
    if not hasattr(trl, method.trainer):
        raise _hoist.UsageError(f"{method.name}: trl {trl.__version__} has no {method.trainer}; install trl 0.24 or 1.16")
    config = getattr(trl, method.trainer.replace("Trainer", "Config"))
    hints, lora_hints = typing.get_type_hints(config), typing.get_type_hints(peft.LoraConfig)
    fields = {field.name for field in dataclasses.fields(config)} - _NOT_TAKEN - method.not_taken
    adapters = (recipe.get("finetuning_type", "lora") if llama_factory else recipe.get("adapter")) in ("lora", "qlora")
    plan = _Plan(llama_factory, method, config, {}, {} if adapters else None, [])
    needed = ("output_dir", "dataset") if llama_factory else ("output_dir", "datasets", "learning_rate")
    problems = [f"{key}: the recipe lacks it" for key in needed if key not in recipe]
    overrides, without_effect = [f"--set {key}=..." for key in needed if key not in recipe], []
    otherwise: dict[str, list[str]] = {}
    for key, value in recipe.items():
        accepted, why = _VALUES.get(key, ((value,), ""))
        if key in _WITHOUT_EFFECT or key == "plugins" and isinstance(value, list) and all(
                str(plugin).endswith(_KERNEL_PLUGINS) for plugin in value):
            without_effect.append(key)
        elif key in _OTHERWISE:
            otherwise |= {_OTHERWISE[key]: [*otherwise.get(_OTHERWISE[key], []), key]} if value else {}
        elif value not in accepted:
            problems.append(f"{key}: {value}: {why}")
            overrides.append(f"--set {key}={'null' if accepted[0] is None else str(accepted[0]).lower()}")
        elif problem := _problem_of(key, value, lora_hints[_LORA[key]] if key in _LORA else
                                    hints.get(_ARGUMENTS.get(key, key), object)):
            problems.append(problem)
            overrides.append(f"--set {key}=...")
        elif key in _LORA and plan.lora is not None:
            plan.lora[_LORA[key]] = value
        elif key in _ARGUMENTS and _ARGUMENTS[key] in fields | {"max_length"}:
            plan.arguments[_ARGUMENTS[key]] = value
        elif key in fields - read:
            plan.arguments[key] = value
        elif key in _LORA or key in _ARGUMENTS:
            without_effect.append(key)
        elif key not in read and key not in _VALUES:
            problems.append(f"{key}: hoist does not know this key; leave it out if the run does not need it")
            overrides.append(f"--set {key}=null")
    if problems:
        raise _hoist.UsageError("hoist cannot run the recipe as it is:\n  " + "\n  ".join(problems) + "\nWith these changes it "
                                f"runs:\n  {command} {' '.join(overrides)}")
    if recipe.get("adapter") == "qlora":
        otherwise[_UNQUANTIZED] = ["adapter: qlora", *otherwise.get(_UNQUANTIZED, [])]
    plan.notices += [f"{', '.join(keys)}: {said}" for said, keys in otherwise.items()]
    if without_effect:
        plan.notices.append("keys without effect on this run: " + ", ".join(without_effect))
    return plan


def _complete(plan: _Plan, recipe: dict[str, Any], rows: int) -> None:
    """Derived arguments, and the defaults of the recipe's own project where TRL has others."""
    defaults: dict[str, Any] = {"bf16": False, "seed": 42, "use_cpu": not torch.cuda.is_available()}
    defaults |= (_of_llama_factory if plan.llama_factory else _of_axolotl)(recipe, plan.arguments, rows)
    arguments = defaults | plan.arguments
    if recipe.get("tf32") is True:
        arguments["tf32"] = True
    if arguments["bf16"] == "auto":
        arguments["bf16"] = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        arguments["fp16"] = torch.cuda.is_available() and not arguments["bf16"]
        plan.notices.append(f"bf16: auto means {'bf16' if arguments['bf16'] else 'fp16' if arguments['fp16'] else 'fp32'} here")
    if plan.method.is_tokenized:
        arguments["max_length"] = None  # rows have been cut
    if plan.method.in_order and arguments["per_device_train_batch_size"] == 1:
        _pair_rows(plan, arguments)
    arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    plan.arguments = arguments
    if plan.lora is None:
        return
    lora = plan.lora
    if plan.llama_factory:
        lora |= {"r": lora.get("r", 8), "lora_alpha": lora.get("lora_alpha", 2 * lora.get("r", 8))}
        for key in ("target_modules", "modules_to_save"):
            if isinstance(lora.get(key), str):
                lora[key] = [name.strip() for name in lora[key].split(",")]
    if recipe.get("lora_target_linear") or plan.llama_factory and lora.get("target_modules", ["all"]) == ["all"]:
        lora["target_modules"] = "all-linear"
    if not {"r", "lora_alpha", "target_modules"} <= lora.keys():
        raise _hoist.UsageError("adapter: lora needs lora_r, lora_alpha, and lora_target_linear or lora_target_modules")


def _pair_rows(plan: _Plan, arguments: dict[str, Any]) -> None:
    """TRL compares each answer of KTO with those of its micro-batch. LLaMA-Factory's examples have one row in it."""
    rows = arguments.get("gradient_accumulation_steps", 1)
    if rows % 2:
        key = "per_device_train_batch_size" if plan.llama_factory else "micro_batch_size"
        raise _hoist.UsageError(f"{plan.method.name} compares an answer with the others of its micro-batch, which has one row "
                                f"here: set {key} to 2 or more")
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": rows // 2}
    plan.notices.append(f"{plan.method.name}: micro-batches have 2 rows, not 1, and a step has {rows // 2} of them: TRL compares "
                        "an answer with the others of its micro-batch")


def _of_llama_factory(recipe: dict[str, Any], given: dict[str, Any], rows: int) -> dict[str, Any]:
    if given.get("warmup_steps") == 0:  # warmup_ratio counts then
        del given["warmup_steps"]
    warmup = min(recipe.get("warmup_ratio", 0), math.nextafter(1, 0))  # transformers takes 1 for a number of steps
    return {"learning_rate": 5e-5, "logging_steps": 500, "warmup_steps": warmup, "max_length": 2048,
            "gradient_checkpointing": not recipe.get("disable_gradient_checkpointing", False)}


def _of_axolotl(recipe: dict[str, Any], given: dict[str, Any], rows: int) -> dict[str, Any]:
    epochs, batch = recipe.get("num_epochs", 1), recipe.get("micro_batch_size", 1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps = given.get("max_steps") or math.ceil(rows * epochs / (batch * recipe.get("gradient_accumulation_steps", 1) * ranks))
    warmup = int(recipe["warmup_ratio"] * steps) if "warmup_ratio" in recipe else min(int(0.03 * steps), 100)
    warmup = given.get("warmup_steps", warmup)
    given |= {"max_steps": steps, "warmup_steps": 2 if warmup == 1 else warmup}
    evaluates = recipe.get("val_set_size") or recipe.get("test_datasets")
    for kind in ("save", "eval") if evaluates else ("save",):
        times = recipe.get(f"{kind}s_per_epoch", 0) * epochs
        if times > 1:  # transformers takes a number of 1 or more for a number of steps
            given[f"{kind}_steps"] = 1 / times
        if given.get(f"{kind}_steps"):
            given[f"{kind}_strategy"] = "steps"
        given.setdefault(f"{kind}_strategy", "epoch")
    if not evaluates:
        given["eval_strategy"] = "no"
    if recipe.get("rl") == "ipo":
        given["loss_type"] = ["ipo"]
    if recipe.get("group_by_length"):
        given["train_sampling_strategy"] = "group_by_length"
    if recipe.get("wandb_project"):
        given["report_to"] = "wandb"
        os.environ.update({key.upper(): str(recipe[key]) for key in ("wandb_project", "wandb_entity") if key in recipe})
    return {"logging_steps": max(min(int(0.005 * steps), 10), 1), "lr_scheduler_type": "cosine", "num_train_epochs": 1,
            "gradient_checkpointing": False, "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch,
            "save_total_limit": 4, "max_length": 512,
            "eval_on_start": given.get("eval_strategy", "no") != "no"}


def _tokenizer(recipe: dict[str, Any], name: str, places: dict[str, Any], notices: list[str]) -> Any:
    tokenizer = getattr(transformers, recipe.get("tokenizer_type", "AutoTokenizer")).from_pretrained(name, **places)
    for token, text in (recipe.get("special_tokens") or {}).items():
        if not isinstance(text, str) or text not in tokenizer.get_vocab():
            raise _hoist.UsageError(f"special_tokens: {token}: {text} is not in the vocabulary, and hoist adds no rows to "
                                    "embeddings: name a token that the model has")
        setattr(tokenizer, token, text)
    if "chat_template_jinja" in recipe:
        tokenizer.chat_template = recipe["chat_template_jinja"]
    elif named := recipe.get("template") or recipe.get("chat_template"):
        notices.append(f"template {named}: hoist uses the chat template of the model's tokenizer instead")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _pack(plan: _Plan, recipe: dict[str, Any], rows: Any, evaluation: bool, limit: int) -> Any:
    """Several rows in one of up to `limit` tokens, where the recipe says so. None of them sees another."""
    if plan.llama_factory:
        asked = bool(recipe.get("packing") or recipe.get("neat_packing")) and plan.method is not PRETRAINING
    else:
        asked = recipe.get("sample_packing", False)
        asked = recipe.get("eval_sample_packing", asked) if evaluation else asked
    if not asked or rows is None:
        return rows
    if not plan.method.is_tokenized:
        plan.notices.append(f"packing: it has no effect on {plan.method.name}")
        return rows
    plan.arguments["padding_free"] = True  # TRL's collator then gives each row positions of its own, which attention goes by
    packed = trl.pack_dataset(rows, limit, "bfd")
    plan.notices.append(f"packing: {len(rows)} rows of the {'evaluation' if evaluation else 'training'} data are in "
                        f"{len(packed)} of up to {limit} tokens, best fit first, and do not see each other")
    return packed


def _stops_early(plan: _Plan, recipe: dict[str, Any]) -> list[transformers.TrainerCallback]:
    key = "early_stopping_steps" if plan.llama_factory else "early_stopping_patience"
    if not recipe.get(key):
        return []
    arguments = plan.arguments
    if arguments.get("eval_strategy", "no") == "no":
        raise _hoist.UsageError(f"{key}: nothing is evaluated, so nothing stops the run: set eval_strategy and evaluation data")
    arguments.setdefault("metric_for_best_model", "loss")
    saves, evaluates = (float(arguments.get(f"{kind}_steps") or 0) for kind in ("save", "eval"))
    same = arguments["eval_strategy"] == arguments.get("save_strategy") and (
        arguments["eval_strategy"] != "steps" or saves * evaluates > 0 and round(saves / evaluates, 6) % 1 == 0)
    if not plan.llama_factory and same:  # axolotl loads the best weights where they have been saved
        arguments.setdefault("load_best_model_at_end", True)
    return [transformers.EarlyStoppingCallback(recipe[key])]


def _attention(recipe: dict[str, Any], notices: list[str]) -> dict[str, str]:
    """Kernels compute the same attention up to rounding."""
    kernels = {"fa2": "flash_attention_2", "flash_attention": "flash_attention_2", "sdpa": "sdpa", "sdp_attention": "sdpa",
               "disabled": "eager", "eager_attention": "eager"}
    named = recipe.get("attn_implementation") or kernels.get(recipe.get("flash_attn", "")) or next(
        (kernels[key] for key in kernels if recipe.get(key) is True), None)
    if named == "flash_attention_2" and not transformers.utils.is_flash_attn_2_available():
        notices.append("flash_attention_2 cannot be used here, and sdpa computes the same attention")
        named = "sdpa"
    return {"attn_implementation": named} if named else {}


def _checkpoint(plan: _Plan, recipe: dict[str, Any]) -> str | None:
    """The directory to continue from."""
    asked = plan.arguments.get("resume_from_checkpoint")
    if isinstance(asked, str):
        if not os.path.isfile(os.path.join(asked, TRAINER_STATE_NAME)):
            raise _hoist.UsageError(f"resume_from_checkpoint: {asked} is not a directory that a Trainer saved")
        return asked
    by_default = (not recipe.get("overwrite_output_dir", False) if plan.llama_factory
                  else recipe.get("auto_resume_from_checkpoints", False))
    found = newest_complete_checkpoint(recipe["output_dir"]) if asked or asked is None and by_default else None
    if asked and found is None:
        raise _hoist.UsageError(f"resume_from_checkpoint: {recipe['output_dir']} has no complete checkpoint to continue from")
    return found


def run(recipe: dict[str, Any], command: str = "python -m hoist.torch.finetune RECIPE") -> Any:
    """Trains what the recipe says, and saves it to its output_dir. Returns the trainer, whose engine is closed.

    Errors: UsageError, before anything is read, with all keys that hoist cannot honour.
    """
    recipe = {key: _as_meant(key, value) for key, value in recipe.items() if value is not None}
    plan = _plan(recipe, command)
    method = plan.method
    if (named := recipe.get("model_type", method.model)).endswith("ForSequenceClassification") != (method is REWARD):
        raise _hoist.UsageError(f"model_type: {named} is not for {method.name}: leave it out, or name {method.model}")
    if isinstance(file := recipe.get("deepspeed"), str) and not os.path.isfile(file):
        raise _hoist.UsageError(f"deepspeed: there is no file {file}")
    resume = _checkpoint(plan, recipe)
    name = recipe.get("model_name_or_path") or recipe["base_model"]
    places = {argument: recipe[key] for key, argument in _PLACES.items() if key in recipe}
    with from_the_hub(f"the model {name}", name):
        tokenizer = _tokenizer(recipe, name, places, plan.notices)
    train, evaluation = load_rows(recipe, tokenizer, method, plan.notices)
    limit = recipe.get("cutoff_len", 2048) if plan.llama_factory else recipe.get("sequence_len", 512)
    train, evaluation = (_pack(plan, recipe, rows, rows is evaluation, limit) for rows in (train, evaluation))
    _complete(plan, recipe, len(train))
    callbacks = _stops_early(plan, recipe)
    arguments = plan.arguments
    if IS_TRANSFORMERS_4 and 0 < arguments["warmup_steps"] < 1:
        arguments["warmup_ratio"] = arguments.pop("warmup_steps")
    nvme = {"device": "nvme", "nvme_path": os.path.join(recipe["output_dir"], "nvme")}
    default = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    if "deepspeed" not in recipe:
        plan.notices.append(f"no deepspeed file: parameters and optimizer states are in {nvme['nvme_path']}")
    if method.has_reference and plan.lora is None:
        plan.notices.append(f"{method.name} of all weights: TRL keeps a whole reference model in memory")
    if method.in_order:
        plan.notices.append(f"{method.name}: rows are read in one order, the same in each epoch"
                            + ("; it is shuffled once" if plan.llama_factory else ""))
    if method is REWARD and plan.llama_factory:
        plan.notices.append("stage: rm: the reward is the head `score` of a model for sequence classification, and is saved as "
                            "such, not as a causal model's value head")
    kernel = _attention(recipe, plan.notices)
    for notice in plan.notices if os.environ.get("RANK", "0") == "0" else []:
        print(f"hoist: {notice}", file=sys.stderr)

    dtype = torch.bfloat16 if arguments["bf16"] else torch.float16 if arguments.get("fp16") else torch.float32
    with from_the_hub(f"the model {name}", name):
        transformers.set_seed(arguments["seed"])  # of a head that the files lack
        model = from_pretrained(getattr(transformers, named), name, dtype=dtype, **places, **kernel,
                                **({"num_labels": 1} if method is REWARD else {}))
    base = getattr(trl, method.trainer)
    transformers.set_seed(arguments["seed"])  # of the adapters
    with _refusals_said():
        trainer = cast(Any, type(f"Hoisted{base.__name__}", (Trainer, base), {}))(
            model=model, args=plan.config(**arguments), train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer,
            peft_config=None if plan.lora is None else peft.LoraConfig(task_type=method.task, **plan.lora),
            hoist_config=recipe.get("deepspeed", default), callbacks=callbacks)
    trainer.save_metrics("train", trainer.train(resume_from_checkpoint=resume).metrics)
    trainer.save_model()
    trainer.save_state()
    if trainer.args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())
    trainer.engine.close()
    return trainer


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hoist.torch.finetune", description=(
        "Runs a YAML recipe of LLaMA-Factory or axolotl: SFT, DPO, KTO, a reward model or continued pretraining, all weights or "
        "LoRA, with parameters and optimizer states where the recipe's DeepSpeed file says (without one: on NVMe, in the output "
        "directory)."))
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file of `llamafactory-cli train` or `axolotl train`")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[],
                        help="another value for a key of the recipe; null leaves the key out. May be given several times")
    options = parser.parse_args(words)
    signal_handlers.note()
    try:
        with open(options.recipe, encoding="utf-8") as file:
            recipe = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        if signal_handlers.raised(error):
            raise
        parser.error(f"{options.recipe} cannot be read: {error}")
    if not isinstance(recipe, dict):
        parser.error(f"{options.recipe} has no keys")
    for change in options.set:
        key, equals, value = change.partition("=")
        if not equals:
            parser.error(f"--set {change}: it takes KEY=VALUE")
        try:
            recipe[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            parser.error(f"--set {change} cannot be read: {error}")

    settings = [word for change in options.set for word in ("--set", change)]
    command = shlex.join(["python", "-m", "hoist.torch.finetune", options.recipe, *settings])

    def work() -> None:
        try:
            run(recipe, command)
        except _hoist.StoreError as error:  # above all: an earlier run is there
            raise type(error)(f"{error}\n--set resume_from_checkpoint=true continues an earlier run of this recipe") from error
    return run_command("hoist", work)
