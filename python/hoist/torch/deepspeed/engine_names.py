# SPDX-License-Identifier: Apache-2.0
"""Methods and properties under the names that DeepSpeed's engine has for them, for programs that were written for it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hoist import _hoist
from hoist.optim.groups import rates_of
from hoist.torch.checkpoint import checkpoints
from hoist.torch.passes.turns import takes_turn
from hoist.torch.ranks.channels import is_joined

if TYPE_CHECKING:
    from hoist.torch.checkpoint.schedules import RunRates
    from hoist.torch.engine import Engine
    from hoist.torch.optimizer import Optimizer
    from hoist.torch.passes.passes import Passes
    from hoist.torch.steps import StepRecord


_SETTING = "engine.config.setting(key) says what the configuration has, such as {}"

# What DeepSpeed's engine has besides, and what a program does here.
ELSEWHERE = {
    "set_gradient_accumulation_steps": "gradient_accumulation_steps of the configuration is settled when the engine is made",
    "set_train_batch_size": "train_batch_size of the configuration is settled when the engine is made",
    "set_train_micro_batch_size": "train_micro_batch_size_per_gpu of the configuration is settled when the engine is made",
    "deepspeed_io": "initialize(training_data=...) returns a loader, and torch.utils.data.DataLoader makes others",
    "offload_states": "engine.sleep() gives all memory back",
    "reload_states": "engine.wake() takes memory again after engine.sleep()",
    "allreduce_gradients": "gradients of all ranks are averaged in the backward pass",
    "all_reduce_gradients": "gradients of all ranks are averaged in the backward pass",
    "enable_backward_allreduce": "gradients of all ranks are always averaged in the backward pass",
    "load_module_state_dict": "engine.load_state_dict(state_dict) replaces weights and buffers",
    "save_fp16_model": "save_16bit_model(DIR) writes the weights in their type",
    "_zero3_consolidated_16bit_state_dict": "engine.state_dict() collects the weights on each rank; save_16bit_model(DIR) writes "
                                            "them in pieces",
    "get_16bit_model": "engine.module is the model, and engine.state_dict() has its weights",
    "get_mom": "engine.optimizer.param_groups has betas or the momentum",
    "get_type": "engine.config.optimizer.kind names the optimizer",
    "optimizer_name": "engine.config.optimizer.kind names the optimizer",
    "optimizer_params": "engine.optimizer.param_groups has the optimizer's settings",
    "scheduler_name": _SETTING.format("scheduler.type"),
    "scheduler_params": _SETTING.format("scheduler.params.warmup_num_steps"),
    "steps_per_print": _SETTING.format("steps_per_print"),
    "zero_optimization": "engine.zero_optimization_stage() is the stage",
    "zero_offload_optimizer": _SETTING.format("zero_optimization.offload_optimizer.device"),
    "zero_offload_param": _SETTING.format("zero_optimization.offload_param.device"),
    "zero_cpu_offload": _SETTING.format("zero_optimization.offload_optimizer.device"),
    "client_optimizer": "engine.optimizer follows the groups of the optimizer that was passed",
    "basic_optimizer": "engine.optimizer is the optimizer",
    "client_lr_scheduler": "engine.lr_scheduler is the schedule",
    "training_dataloader": "initialize(training_data=...) returns the loader",
    "set_dataloader": "engine.train_batch(micro_batches, loss_of) takes the micro-batches of one step",
    "eval_batch": "call the engine under torch.no_grad()",
    "dp_world_size": "engine.world_size counts the ranks that divide the state",
    "mp_world_size": "engine.world_size counts the ranks that divide the state, and torch.distributed.get_world_size() all",
    "data_parallel_group": "wrap(mesh=...) was passed these ranks; without it they are all of torch.distributed's",
    "get_data_parallel_group": "wrap(mesh=...) was passed these ranks; without it they are all of torch.distributed's",
    "get_sequence_parallel_group": "hoist has no sequence parallelism",
    "timers": "engine.statistics() has waits and bytes",
    "tput_timer": "engine.statistics() has waits and bytes",
    "monitor": "hoist.metrics in the configuration names a file that each step adds a line to",
    "load_universal_checkpoint": "initialize(..., deepspeed=DIR) begins with a universal checkpoint",
}


class DeepSpeedNames:
    """Mixed into Engine. Each returns what DeepSpeed's of the same name returns."""

    config: _hoist.Config
    optimizer: Optimizer
    _unit_manager: _hoist.UnitManager
    _passes: Passes
    _training: _hoist.TrainingOptions
    _steps: StepRecord
    _optimizer_groups_offset: int
    _run_rates: RunRates

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._passes.boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._passes.at_boundary

    def get_lr(self) -> list[float]:
        """The rates of the next step."""
        if not self.config.has_schedule:
            return rates_of(self.optimizer.param_groups)
        return [self._unit_manager.learning_rate(i + self._optimizer_groups_offset)
                for i in range(len(self.optimizer.param_groups))]

    def get_global_grad_norm(self) -> float | None:
        report = self._steps.last_report
        return None if report is None else report.gradient_norm

    def was_step_applied(self) -> bool:
        """As DeepSpeed's: whether the last call of step() changed the model."""
        return self._steps.was_applied

    @property
    def skipped_steps(self) -> int:
        """Since the first step of the run, also where it was resumed."""
        return self._steps.skipped

    def fp16_enabled(self) -> bool:
        return self.config.setting("fp16.enabled") is True

    def bfloat16_enabled(self) -> bool:
        return self.config.setting("bf16.enabled") is True

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def loss_scale(self) -> float:
        """As DeepSpeed's: what the configuration says, 0 for a dynamic one. The present one is optimizer.loss_scale."""
        scale: Any = self.config.setting("fp16.loss_scale")
        return scale or 0

    def gradient_accumulation_steps(self) -> int:
        return self._passes.micro_batches

    def train_batch_size(self) -> int | None:
        return self._training.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._training.train_micro_batch_size_per_gpu

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        stage: Any = self.config.setting("zero_optimization.stage")
        return 3 if stage is None else stage

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return cast("Engine", self)._local_rank

    @property
    def global_rank(self) -> int:
        """In the job."""
        return dist.get_rank() if is_joined() else cast("Engine", self)._global_rank

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Without effect: the engine counts the micro-batches of a step itself."""
        return contextlib.nullcontext()

    def empty_partition_cache(self) -> None:
        """Without effect: weights leave the device between their uses."""

    def destroy(self) -> None:
        cast("Engine", self).close()

    @takes_turn
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """As state_dict()."""
        engine = cast("Engine", self)
        engine._between_passes()
        return engine._parameters.state_dict(exclude_frozen=exclude_frozen_parameters)

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors",
                         exclude_frozen_parameters: bool = False) -> bool:
        """[C] As export() in the weights' type: writes model.safetensors, or shards and an index."""
        if save_filename != "model.safetensors":
            raise _hoist.UsageError(f"save_16bit_model() writes model.safetensors, not {save_filename}: leave the name out")
        engine = cast("Engine", self)
        dtype = next(iter(engine._parameters.by_name.values())).dtype
        engine.export(save_dir, dtype, exclude_frozen=exclude_frozen_parameters)
        return True

    @property
    def micro_steps(self) -> int:
        """Micro-batches, as DeepSpeed counts them: each when its step() has been called."""
        passes = self._passes
        waits = passes.micro_batch > 0 and not passes._step_was_called
        left_out = self._steps.left_out + passes.left_out
        return self.global_steps * passes.micro_batches + passes.micro_batch - left_out - waits

    @property
    def global_samples(self) -> int:
        return self.global_steps * (self.train_batch_size() or 0)

    @property
    def global_steps(self) -> int:
        """Steps made, as DeepSpeed counts them: applied and skipped ones."""
        return self._unit_manager.step_count + self._steps.skipped

    @takes_turn
    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | None = None,
                        client_state: dict[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """[C] As DeepSpeed's: keeps this step in the store under the tag, and writes the client state below `save_dir`.
        Frozen parameters are in the store anyway, once for all steps."""
        checkpoints.save(cast("Engine", self), os.fspath(save_dir), tag, client_state or {}, save_latest)
        return True

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False,
                        custom_load_fn: Any = None) -> tuple[str | None, dict[str, Any] | None]:
        """[C] As DeepSpeed's: goes back to the step that save_checkpoint() saved. Returns (path, client state). Also after a call
        that was interrupted; after an error that ended the engine, restore(tag) goes back."""
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise _hoist.UsageError("a named checkpoint comes back whole: for its weights alone, `hoist export` it, and begin a "
                                    "run with weights=...")
        with self._passes.turns.outside("load_checkpoint()"):
            before = self._run_rates.schedule
            if not load_lr_scheduler_states:
                self._run_rates.schedule = None
            try:
                loaded = checkpoints.load(cast("Engine", self), os.fspath(load_dir), tag)
            finally:
                self._run_rates.schedule = before
            if not load_lr_scheduler_states:
                self._run_rates.forget()
            return loaded
