# SPDX-License-Identifier: Apache-2.0
"""Methods and properties under the names that DeepSpeed's engine has for them, for programs that were written for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from hoist import _hoist
from hoist.torch import checkpoints
from hoist.torch.turns import takes_turn

if TYPE_CHECKING:
    from hoist.torch.engine import Engine
    from hoist.torch.optimizer import Optimizer
    from hoist.torch.passes import Passes


class DeepSpeedNames:
    """Mixed into Engine. Each returns what DeepSpeed's of the same name returns."""

    config: _hoist.Config
    optimizer: Optimizer
    _unit_manager: _hoist.UnitManager
    _passes: Passes
    _training: _hoist.TrainingOptions
    _boundary: bool | None
    _last_report: _hoist.StepReport | None
    _step_applied: bool
    _skipped_steps: int
    _optimizer_groups_offset: int
    _lr_scheduler: Any
    _saved: dict[str, Any]

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._passes.at_boundary if self._boundary is None else self._boundary

    def get_lr(self) -> list[float]:
        """The rates of the next step."""
        if not self.config.has_schedule:
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        return [self._unit_manager.learning_rate(i + self._optimizer_groups_offset)
                for i in range(len(self.optimizer.param_groups))]

    def get_global_grad_norm(self) -> float | None:
        return None if self._last_report is None else self._last_report.gradient_norm

    def was_step_applied(self) -> bool:
        """As DeepSpeed's: whether the last call of step() changed the model."""
        return self._step_applied

    @property
    def skipped_steps(self) -> int:
        """Since the first step of the run, also where it was resumed."""
        return self._skipped_steps

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

    @property
    def global_steps(self) -> int:
        """Steps made, as DeepSpeed counts them: applied and skipped ones."""
        return self._unit_manager.step_count + self._skipped_steps

    @takes_turn
    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | None = None,
                        client_state: dict[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """[C] As DeepSpeed's: keeps this step in the store under the tag, and writes the client state below `save_dir`.
        Frozen parameters are in the store anyway, once for all steps."""
        checkpoints.save(cast("Engine", self), os.fspath(save_dir), tag, client_state or {}, save_latest)
        return True

    @takes_turn
    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False,
                        custom_load_fn: Any = None) -> tuple[str | None, dict[str, Any] | None]:
        """[C] As DeepSpeed's: goes back to the step that save_checkpoint() saved. (path, client state)."""
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise _hoist.UsageError("a named checkpoint comes back whole: for its weights alone, `hoist export` it, and begin a "
                                    "run with weights=...")
        before = self._lr_scheduler
        if not load_lr_scheduler_states:
            self._lr_scheduler = None
        try:
            return checkpoints.load(cast("Engine", self), os.fspath(load_dir), tag)
        finally:
            if not load_lr_scheduler_states:
                self._lr_scheduler, self._saved = before, {}
