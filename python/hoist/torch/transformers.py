# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, whose model, gradients and optimizer states hoist keeps and moves.

    from hoist.torch.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, hoist_config="ds_config.json")
    trainer.train()

`deepspeed=` of TrainingArguments is not used: it imports the package deepspeed and starts it. The JSON is the same, "auto"
included, and what contradicts the arguments is refused as Hugging Face's integration does.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import os
import sys
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hoist.torch
from hoist import _hoist, signal_handlers
from hoist.torch.config_files import as_json, read_config, with_first_names
from hoist.torch.model.casts import (
    as_type,
    cast_inputs,
    cast_weights,
    has_own_weights,
    is_quantized,
    place_buffers,
    restore_forward,
)
from hoist.torch.model.parameters import dtype_of
from hoist.torch.model.wrapped import engine_of
from hoist.torch.pretrained.export import refuse_adapters, save_pretrained, write_model, write_weights
from hoist.torch.pretrained.loading import from_pretrained
from hoist.torch.ranks.channels import is_joined

__all__ = ["Trainer", "fill_in", "from_pretrained", "newest_complete_checkpoint", "save_pretrained"]

_log = logging.getLogger("hoist")
_T = TypeVar("_T")

# What `optim` of TrainingArguments means in the configuration.
DEFAULT_OPTIMS = ("adamw_torch", "adamw_torch_fused")
# Other libraries' AdamW and Lion, whose states are small or in host memory. hoist has its own ways to both.
_SMALL = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "lion_8bit",
          "paged_lion_8bit")
OTHER_OPTIMS = (*_SMALL, "paged_adamw_32bit", "lion_32bit", "paged_lion_32bit")
_KIND_OF = {"sgd": "SGD", "adagrad": "Adagrad"} | {optim: "Lion" if "lion" in optim else "AdamW" for optim in OTHER_OPTIMS}
OPTIMS = (*DEFAULT_OPTIMS, *_KIND_OF)


def fill_in(config: dict[str, Any], args: TrainingArguments, steps: int) -> dict[str, Any]:
    """A configuration with its "auto" values taken from the arguments. Errors: UsageError with all contradictions, and
    ConfigError for what the configuration cannot say.

    Batches, clipping and the weights' type come from the arguments even if the file does not mention them.
    """
    text = as_json(config, "hoist_config")
    _hoist.Config.parse(text, "hoist_config", trains=False)
    config = with_first_names(json.loads(text))
    problems: list[str] = []

    def match(path: str, value: Any, argument: str, also_absent: bool = False, always: bool = True) -> None:
        *sections, key = path.split(".")
        section = config
        for name in sections:
            if name not in section and not also_absent:
                return
            section = section.setdefault(name, {})
        said = section.get(key)
        if said == "auto" or (said is None and also_absent):
            section[key] = value
        elif said is not None and always and said != value:
            problems.append(f"{path} is {said}, and {argument} is {value}")

    rate, warmup = args.learning_rate, args.get_warmup_steps(steps)
    accumulation, batch = args.gradient_accumulation_steps, args.per_device_train_batch_size
    match("train_micro_batch_size_per_gpu", batch, "per_device_train_batch_size", also_absent=True)
    match("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps", also_absent=True)
    match("train_batch_size", args.world_size * batch * accumulation, "processes x per_device_train_batch_size x "
          "gradient_accumulation_steps")
    match("gradient_clipping", args.max_grad_norm or 0.0, "max_grad_norm", also_absent=True)
    match("bf16.enabled", args.bf16, "bf16", also_absent=args.bf16)
    match("fp16.enabled", args.fp16, "fp16", also_absent=args.fp16)
    match("optimizer.params.lr", rate, "learning_rate")
    match("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2")
    match("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
    match("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
    match("scheduler.params.warmup_min_lr", 0, "", always=False)
    match("scheduler.params.warmup_max_lr", rate, "learning_rate")
    match("scheduler.params.warmup_num_steps", warmup, "warmup_steps")
    match("scheduler.params.total_num_steps", steps, "the number of steps")
    # The default of `optim` asks for nothing: the file says which optimizer.
    optim = optim_of(args)
    if "optimizer" in config and optim not in DEFAULT_OPTIMS:
        kind = config["optimizer"].get("type")
        if str(kind).lower() != _KIND_OF.get(optim, "").lower():
            problems.append(f"optimizer.type is {kind}, and optim is {optim} (leave one of them out)")
    if problems:
        raise _hoist.UsageError("the configuration and the arguments contradict each other (\"auto\" takes the argument's "
                                "value): " + "; ".join(problems))
    for section in ("bf16", "fp16"):
        if config.get(section, {}).get("enabled") is False:
            del config[section]  # the model's own types count then
    return config


def saves_checkpoints(args: TrainingArguments) -> bool:
    return args.save_strategy != "no" and not args.save_only_model


def with_store(config: dict[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """A configuration without a store, in which all state is in memory, gets one where Trainer's other files go, if Trainer
    saves."""
    own = config.get("hoist") or {}
    if not saves_checkpoints(args) or not isinstance(own, dict):
        return config
    others = {key: value for key, value in own.items() if key not in ("keep_steps", "mirror")}  # they need a store
    try:
        if _hoist.Config.parse(as_json({**config, "hoist": others}, "hoist_config"), trains=False).store_directory:
            return config
    except _hoist.ConfigError:
        return config  # fill_in() says all that is wrong
    return {**config, "hoist": {**own, "checkpoint_path": args.output_dir}}


def optim_of(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def choose_states(config: dict[str, Any], args: TrainingArguments, offloaded: bool) -> None:
    """Puts what another library's optimizer asks for into a configuration without an optimizer, and says so."""
    optim = optim_of(args)
    small = optim in _SMALL and "moments_dtype" not in config.get("hoist", {})
    if small and offloaded:
        config.setdefault("hoist", {})["moments_dtype"] = "fp8"
    if _KIND_OF[optim] == "Lion":
        config["optimizer"] = {"type": "Lion", "params": {
            "lr": args.learning_rate, "betas": [args.adam_beta1, args.adam_beta2], "weight_decay": args.weight_decay}}
    _log.warning("optim %s is hoist's %s, with its states where the configuration says%s", optim, _KIND_OF[optim],
                 "" if not small else ': moments of 8 bits in blocks ("hoist": {"moments_dtype": "fp8"}; "fp32" turns it off)'
                 if offloaded else ", in fp32: there are no states of 8 bits in a GPU's memory")


class Trainer(transformers.Trainer):
    """transformers.Trainer with two arguments more.

    hoist_config   a DeepSpeed JSON, as a file or a dictionary; or the YAML file of `accelerate config` with DeepSpeed
    hoist_options  further arguments of hoist.torch.wrap: weights, initialize, unit_classes, seed

    `engine` is there once train() has begun. Until then the model is in memory, as it was built.
    """

    def __init__(self, *positional: Any, hoist_config: str | os.PathLike[str] | dict[str, Any],
                 hoist_options: dict[str, Any] | None = None, **arguments: Any):
        self.engine: hoist.torch.Engine | None = None
        self._steps_of_run = 0  # as far as transformers has said
        self._hoist_config = read_config(hoist_config)
        self._hoist_options = hoist_options or {}
        if unknown := self._hoist_options.keys() - {"weights", "initialize", "unit_classes", "seed"}:
            raise _hoist.UsageError(f"hoist_options has {sorted(unknown)}: it may have weights, initialize, unit_classes and "
                                    "seed (train(resume_from_checkpoint=...) continues a run)")
        self._is_resumed: bool | None = None  # as far as train() has said
        self._weights_alone: str | None = None  # the checkpoint to continue from, if it has no more than weights
        super().__init__(*positional, **arguments)
        if self.args.n_gpu > 1:  # transformers would copy the model to all of them (DataParallel)
            _log.warning("this process trains on %s, one of %d GPUs: start one for each (torchrun --nproc-per-node %d)",
                         self.args.device, self.args.n_gpu, self.args.n_gpu)
            self.args._n_gpu = 1
            self._train_batch_size = self.args.train_batch_size
        for given, name, why in (
                (self.args.deepspeed is not None, "deepspeed", "it would start DeepSpeed; hoist_config is the file"),
                (self.is_deepspeed_enabled, "the plugin for DeepSpeed (deepspeed_plugin)", "`accelerate launch` has started "
                 "DeepSpeed; start the program with torchrun, and pass the YAML file as hoist_config"),
                (self.is_fsdp_enabled, "fsdp", "it moves weights itself"),
                (self.args.auto_find_batch_size, "auto_find_batch_size", "the number of micro-batches is settled when the "
                 "engine is made"),
                (self.args.bf16_full_eval, "bf16_full_eval", types := "weights have the type that they are trained in"),
                (self.args.fp16_full_eval, "fp16_full_eval", types)):
            if given:
                raise _hoist.UsageError(f"{name} of TrainingArguments is not supported here: {why}")
        self._warn_of_precomputed_reference()
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "sync_target_model"):  # TRL's, for sync_ref_model; it would read parameters
                cast(Any, callback).sync_target_model = self._move_reference

    def _warn_of_precomputed_reference(self) -> None:
        """TRL computes before the engine is made, with the weights as they were loaded."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        if dtype is None or not getattr(self.args, "precompute_ref_log_probs", False) or not self.is_world_process_zero():
            return
        reference = cast(torch.nn.Module, getattr(self, "ref_model", None) or self.model)
        with_adapters = hasattr(reference, "peft_config")  # which are turned off
        loaded = {p.dtype for p in reference.parameters() if p.is_floating_point() and p.dtype.itemsize > 1
                  and not (with_adapters and p.requires_grad)}
        if loaded - {dtype}:
            _log.warning("precompute_ref_log_probs computes with weights in %s, and training with weights in %s, so the log "
                         "probabilities differ from the first step on: load the model with dtype=%s",
                         " and ".join(sorted(map(str, loaded))), dtype, dtype)

    def _move_reference(self, model: torch.nn.Module, reference: torch.nn.Module, alpha: float) -> None:
        """Mixes the trained weights into a reference model's, one parameter after the other."""
        for (name, _), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            mixed = theirs.data.float().mul_(1.0 - alpha).add_(self._made.read(name).to(theirs.device), alpha=alpha)
            theirs.data.copy_(as_type(mixed, theirs.dtype))

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **arguments: Any) -> Any:
        """As transformers' own, but True takes the newest checkpoint that is complete: one whose saving was interrupted has
        no trainer_state.json that can be read."""
        path = (newest_complete_checkpoint(cast(str, self.args.output_dir)) if resume_from_checkpoint is True
                else resume_from_checkpoint or None)
        newest, is_alone, is_of_another = _of_first_rank((
            path, path is not None and has_weights_alone(path),
            path is not None and os.path.exists(os.path.join(path, OPTIMIZER_NAME))))
        if resume_from_checkpoint is True and (path := newest) is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        if is_of_another:
            raise _hoist.UsageError(f"{path} was saved by a Trainer without hoist: begin a run with weights={path!r} in "
                                    "hoist_options, and without resume_from_checkpoint; moments begin at zero then")
        self._is_resumed = path is not None
        self._weights_alone = path if is_alone else None
        return super().train(path, *positional, **arguments)

    def evaluation_loop(self, *positional: Any, **arguments: Any) -> Any:
        self._require_weights("evaluate")
        return super().evaluation_loop(*positional, **arguments)

    def _require_weights(self, call: str) -> None:
        if self.engine is None and any(hasattr(p, "initial_values") for p in cast(torch.nn.Module, self.model).parameters()):
            raise _hoist.UsageError(f"the model's weights are still in their files, and are read when train() begins: {call} "
                                    "after that, or load the model with transformers' own from_pretrained")

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The engine brings weights to where they are used."""

    def _wrap_model(self, model: Any, training: bool = True, *positional: Any, **arguments: Any) -> Any:
        if training and self.engine is None:  # create_optimizer() of a subclass has not called this class's
            Trainer.create_optimizer(self)
        return super()._wrap_model(model, training, *positional, **arguments)

    # --- making the engine -------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._steps_of_run = num_training_steps  # transformers 4 sets state.max_steps later
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.engine is None:
            self._make_engine(model)
            self._prepare_for_accelerate()
        else:
            self._refuse_other_run(self.engine)
            self.optimizer = self.engine.optimizer
        return cast(torch.optim.Optimizer, self.optimizer)

    def _refuse_other_run(self, engine: hoist.torch.Engine) -> None:
        if not engine._unit_manager.is_open:
            raise _hoist.UsageError("this Trainer's engine was closed, and the model's weights with it: make a new Trainer, "
                                    "whose train(resume_from_checkpoint=True) continues the run")
        if self._weights_alone is not None:
            raise _hoist.UsageError(f"{self._weights_alone} has weights alone (save_only_model), and this Trainer's engine has "
                                    f"moments of step {engine.step_count}: make a new Trainer, which begins with new ones")
        if engine.module is not self.model:
            raise _hoist.UsageError("a run with another model needs another store: make a Trainer for it")
        if engine.config.has_schedule and engine.step_count > 0 and self._is_resumed is False:
            raise _hoist.UsageError("the configuration's scheduler has come to its end with the first train(): leave the "
                                    "section out, so that Trainer's begins anew, or make a Trainer for the second run")

    def _config_of_run(self, filled: dict[str, Any], own_groups: bool) -> _hoist.Config:
        """The configuration, whose `filled` form gets what this Trainer's arguments decide."""
        config = hoist.torch.load_config(filled)
        if own_groups and self.optimizer_cls_and_kwargs is None and optim_of(self.args) not in OPTIMS:
            raise _hoist.UsageError(f"optim={optim_of(self.args)!r} of TrainingArguments is not among hoist's optimizers: choose "
                                    f"one of {', '.join(OPTIMS)}")
        if own_groups and optim_of(self.args) in OTHER_OPTIMS:
            device = config.setting("zero_optimization.offload_optimizer.device")
            choose_states(filled, self.args, device in ("cpu", "nvme") or self.args.device.type == "cpu")
            config = hoist.torch.load_config(filled)
        if config.is_vertical:
            raise _hoist.UsageError('Trainer computes one micro-batch after the other: set "hoist": {"micro_batch_order": '
                                    '"horizontal"}, or write the loop with engine.train_batch()')
        if config.setting("hoist.keep_steps") is None and config.can_keep_steps:
            config.keep_steps = self._checkpoints_that_stay()
        if saves_checkpoints(self.args) and config.keep_steps == 0:
            raise _hoist.UsageError(
                f"save_strategy is '{self.args.save_strategy}', and what is saved are checkpoints in the store, of which this "
                'configuration keeps none: it needs "hoist": {"keep_steps": N} with N above 0 (or none set) and, with state on '
                "NVMe, a durability other than \"none\"; or set save_strategy='no', or save_only_model=True")
        return config

    def _make_engine(self, model: Any) -> None:
        filled = fill_in(with_store(self._hoist_config, self.args), self.args, self.state.max_steps or self._steps_of_run)
        own_groups = self.optimizer is None and "optimizer" not in filled
        config = self._config_of_run(filled, own_groups)
        refuse_adapters(self.model)
        restore_forward(cast(torch.nn.Module, self.model))  # evaluate() may have been called before
        # Trainer's own optimizer is made for its groups and settings, where the file does not say. It never steps.
        client = self.optimizer
        if own_groups:
            client = self._groups_in_an_optimizer(*(() if model is None else (model,)))  # transformers 4 takes none
        options: dict[str, Any] = {"optimizer": client}
        if own_groups and "optimizer" in filled:  # one that PyTorch does not have
            options = {"model_parameters": [{key: group[key] for key in ("params", "lr", "weight_decay")}
                                            for group in cast(torch.optim.Optimizer, client).param_groups]}
        if config.device is None:
            options["device"] = self.args.device.type
        options |= self._hoist_options
        if self._weights_alone is not None and not hasattr(self.model, "peft_config"):
            options["weights"] = self._weights_alone
        self.engine, self.optimizer, _, schedule = hoist.torch.initialize(model=self.model, config=config, **options)
        if self.engine.device.type != self.args.device.type:
            raise _hoist.UsageError(f"TrainingArguments' device is {self.args.device}, and hoist's is {self.engine.device}: pass "
                                    "use_cpu=True, or set \"hoist\": {\"device\": \"cuda\"}")
        if not self.engine._unit_manager.is_alive and (self._is_resumed is False or self._weights_alone is not None):
            engine, self.engine, self.optimizer = self.engine, None, None if own_groups else client
            with engine:
                kept = engine.checkpoints()
            raise _hoist.StoreError(f"{config.store_directory} holds a run{self._how_to_use_run(kept)}")
        self._cast_inputs_of(cast(Any, self.model))
        self._treat_reference_alike()
        if config.has_schedule:
            self.lr_scheduler = schedule
        if self.args.torch_compile:  # only now: graphs end at the hooks
            cast(torch.nn.Module, self.model).compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)

    def _how_to_use_run(self, kept: dict[str, int]) -> str:
        """The end of a sentence that says that the store holds a run. `kept`: the names of its checkpoints."""
        newest = newest_complete_checkpoint(cast(str, self.args.output_dir))
        weights = self._weights_alone or (newest if newest is not None and has_weights_alone(newest) else None)
        alone = "" if weights is None else f", and {weights} has weights alone (save_only_model)"
        if kept:
            is_newest = newest is not None and any(os.path.isdir(os.path.join(newest, name)) for name in kept)
            return (f"{alone}. It keeps {', '.join(map(repr, kept))}: train(resume_from_checkpoint="
                    f"{'True), or' if is_newest else 'DIRECTORY),'} with the directory of a checkpoint that Trainer saved "
                    "together with one of these, continues it. To begin anew, choose another directory for the store")
        if weights is None:
            return (" without a checkpoint that Trainer could continue from. hoist.store.open() reads its newest step, and "
                    "hoist.torch.wrap(..., resume=True) continues from it in a loop of your own; remove it to begin anew")
        return (f"{alone}. Remove the store, or choose another directory for it: then train(resume_from_checkpoint="
                f"{True if weights == newest else repr(weights)}) continues from these weights with new moments, and train() "
                "begins anew")

    def _prepare_for_accelerate(self) -> None:
        # By this accelerate knows objects that need no wrapping.
        for prepared in (self.model, self.optimizer):
            cast(Any, prepared)._is_accelerate_prepared = True
        own = self.accelerator.prepare_model  # which asks for that attribute itself only since accelerate 1.12

        def prepare_model(model: Any, *positional: Any, **arguments: Any) -> Any:
            if not getattr(model, "_is_accelerate_prepared", False):
                return own(model, *positional, **arguments)
            if model not in self.accelerator._models:  # else evaluate() would prepare it again, and log how long that took
                self.accelerator._models.append(model)
            return model

        self.accelerator.prepare_model = prepare_model
        self.accelerator.backward = self._backward

    def _cast_inputs_of(self, model: Any) -> None:
        """Images and sounds get the weights' type in forward(). The rest of a batch keeps its own: losses read it."""
        config = self._made.config
        dtype = dtype_of(config)
        if dtype is None:
            return
        if not (dtype is torch.float16 and config.setting("fp16.auto_cast") is True):  # the engine casts then
            cast_inputs(model, dtype)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
            cast_inputs(model.get_encoder(), dtype)  # generate() calls it without the model's forward()

    def _treat_reference_alike(self) -> None:
        """Casts the model that TRL compares the trained one with, so that two equal models compute the same."""
        dtype, reference = dtype_of(self._made.config), getattr(self, "ref_model", None)
        if not isinstance(reference, torch.nn.Module):
            return
        reference = cast(Any, self.accelerator.unwrap_model(reference, keep_torch_compile=False))
        before = getattr(reference, "_rounded_by_hoist", None)
        weights = cast(torch.nn.Module, self.model).parameters()
        trained = dtype or next((p.dtype for p in weights if p.is_floating_point()), before)
        if before is not None and before != trained:
            _log.warning("an earlier trainer rounded this ref_model to %s, and this one trains in %s: equal models no longer "
                         "begin alike. Give each trainer a ref_model of its own", before, trained)
        if dtype is None or engine_of(reference) is not None or not has_own_weights(reference):
            return
        if getattr(reference, "is_quantized", False) or getattr(reference, "hf_quantizer", None) is not None:
            _log.info("ref_model is quantized and stays as it was loaded")
            return
        restore_forward(reference)
        place_buffers(reference, None, dtype, lambda m: engine_of(m) is not None or is_quantized(m))
        cast_inputs(reference, dtype)
        if cast_weights(reference, dtype) > 0:
            reference._rounded_by_hoist = dtype
            _log.info("ref_model gets weights of %s, rounded as the trained model's, so that both begin alike", dtype)
        alpha = getattr(self.args, "ref_model_mixup_alpha", 1.0)
        if getattr(self.args, "sync_ref_model", False) and 0 < alpha < 0.5:  # a change below half a step is lost
            _log.warning("ref_model_mixup_alpha=%g is small for a reference of %s: each of its weights may stay up to %.2g steps "
                         "of that type away from the trained one, because a mix that moves it by less than half a step is lost",
                         alpha, dtype, 0.5 / alpha)

    def _groups_in_an_optimizer(self, *model: Any) -> torch.optim.Optimizer:
        optim = self.args.optim
        try:
            if optim_of(self.args) in OTHER_OPTIMS:
                self.args.optim = transformers.training_args.OptimizerNames.ADAMW_TORCH
            return super().create_optimizer(*model)
        finally:
            self.args.optim = optim

    def _checkpoints_that_stay(self) -> int:
        if self.args.save_strategy == "no":
            return 0
        # One more than directories: a checkpoint is durable before its directory is complete, and a program that is killed
        # between the two continues from the previous directory.
        return (self.args.save_total_limit or 1) + 1 + (1 if self.args.load_best_model_at_end else 0)

    @property
    def _made(self) -> hoist.torch.Engine:
        assert self.engine is not None, "create_optimizer() comes first"
        return self.engine

    # --- a step ------------------------------------------------------------------------------------------------------

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        # Trainer has divided the loss by what the step's micro-batches have together.
        self._made.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self._made.backward(loss, scale_wrt_gas=False)

    def _clip_grad_norm(self, model: Any) -> None:
        """The engine clips, as part of the step."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Known after the step."""

    def _get_learning_rate(self) -> float:
        """The rate of the step that was just made. The configuration's schedule shows the next step's by then."""
        used = self._made._run_rates.used
        return used[0] if used else super()._get_learning_rate()

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *positional: Any, **arguments: Any) -> Any:
        norm = self._made.get_global_grad_norm()
        self._drop_pending("the epoch ended in the middle of a step")
        return super()._maybe_log_save_evaluate(tr_loss, norm, *positional, **arguments)

    def _drop_pending(self, why: str) -> None:
        """Drops the gradients of an unfinished step. Trainer would add them to the next step, which already has all its
        micro-batches."""
        if (pending := self._made._passes.micro_batch) > 0:
            _log.warning("%s: the gradients of %d micro-batches are dropped", why, pending)
            self._made.drop_gradients()

    # --- checkpoints: the state is in the store, the directory has what is Trainer's own ---------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.control.should_training_stop:  # before a step, where a job is about to be taken from its machine
            self._drop_pending("a last checkpoint in the middle of a step")
        self._made.save_checkpoint(output_dir)
        if self.args.should_save:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come back with the optimizer's states. If there are none, adapters are loaded here, and whole models from
        their files when the engine is made."""
        if self._weights_alone is not None and self.engine is None and hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._weights_alone is not None:
            _log.warning("%s has weights alone (save_only_model): moments and the schedule of learning rates begin anew, and "
                         "masters have the precision of these weights", checkpoint)
            return
        try:
            found = self._made.load_checkpoint(checkpoint)[0]
        except _hoist.StoreError as error:
            weights = ("" if hasattr(self.model, "peft_config") else
                       ". To begin with this checkpoint's weights, and new moments, call train() with another directory for the "
                       f"store and hoist_options={{'weights': {checkpoint!r}}}")
            raise type(error)(f"{error}. A larger hoist.keep_steps keeps more checkpoints{weights}") from error
        if found is None:
            raise _hoist.StoreError(f"{checkpoint} has no checkpoint to continue from: its file `latest` is missing")
        cast(Any, self.lr_scheduler).load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.engine is None or state_dict is not None:
            self._require_weights("save")
            return super()._save(output_dir, state_dict)
        output_dir = output_dir if output_dir is not None else cast(str, self.args.output_dir)
        if self.args.should_save and not self.engine._is_first_of_job:
            self._save_settings(output_dir)  # save_on_each_node: all but the weights
        if isinstance(self.model, transformers.PreTrainedModel) or hasattr(self.model, "peft_config"):
            return save_pretrained(self.engine, output_dir, write_settings=self._save_settings)
        # A plain module: model.safetensors under its own names.
        write_model(self.engine, output_dir, self._save_settings,
                    functools.partial(write_weights, self.engine, max_shard_size=sys.maxsize))

    def _save_settings(self, folder: str) -> None:
        """Writes what Trainer saves beside the weights."""
        model: Any = self.model
        if isinstance(model, transformers.PreTrainedModel):
            return super()._save(folder, {})
        if not hasattr(model, "peft_config"):  # Trainer's own _save would write a file without tensors
            os.makedirs(folder, exist_ok=True)
            processing: Any = self.processing_class
            if processing is None:
                processing = getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
            return
        model.save_pretrained = lambda *_, **__: None  # PEFT's asks for weights, and is called with them later
        try:
            super()._save(folder, {})
        finally:
            model.__dict__.pop("save_pretrained", None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.engine is None or self.args.should_save:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir)  # reading weights is collective


def has_weights_alone(checkpoint: str) -> bool:
    """Whether there are weights, of a model or of adapters, and nobody's optimizer states: hoist's, DeepSpeed's, FSDP's or
    Trainer's own."""
    def has(*names: str) -> bool:
        return any(glob.glob(os.path.join(glob.escape(checkpoint), name)) for name in names)

    return (has("model*.safetensors", "pytorch_model*.bin", "adapter_model.*", "*/adapter_model.*")
            and not has("latest", "latest_universal", "optimizer*", "global_step*"))


def _of_first_rank(value: _T) -> _T:
    """[C] Rank 0's. The drives of ranks may differ, and what they do next must not."""
    values = [value]
    if is_joined() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def newest_complete_checkpoint(folder: str) -> str | None:
    """Returns the newest checkpoint in `folder` that was saved completely; None without one. Trainer writes trainer_state.json
    last."""
    signal_handlers.note()
    saved = {}
    for path in glob.glob(os.path.join(glob.escape(folder), f"{PREFIX_CHECKPOINT_DIR}-*")):
        step = os.path.basename(path).removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal():
            saved[int(step)] = path
    for _, path in sorted(saved.items(), reverse=True):
        try:
            TrainerState.load_from_json(os.path.join(path, TRAINER_STATE_NAME))
            return path
        except (OSError, ValueError, TypeError) as error:
            if signal_handlers.raised(error):
                raise
            _log.warning("%s is incomplete, the checkpoint before it is taken: %s", path, error)
    return None
