# SPDX-License-Identifier: Apache-2.0
"""A PyTorch module whose parameters, gradients and optimizer states are lifted by hoist.

Hooks on the modules say when weights are needed; gradients leave as soon as autograd has them. Between its uses a
parameter shows NaN: what is up, and when, is decided here and in the extension, not by the model.

A pass opens with the first call of a module and ends with the backward pass. Calls without gradients are passes of their
own, or take part in the one that is open.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hoist import _hoist
from hoist.optim import options_of
from hoist.torch import checkpoints, distributed, initial, program_state
from hoist.torch.hooks import ModuleHook
from hoist.torch.optimizer import Optimizer
from hoist.torch.parameters import Parameters
from hoist.torch.units import reads_weights_in_backward, units_of
from hoist.torch.watch import Watch

_log = logging.getLogger("hoist")


class Engine:
    """What `wrap` and `initialize` return: the model, and its training state on three tiers."""

    def __init__(self, model: nn.Module, config: _hoist.Config, *, groups=None, unit_classes=(), weights=None,
                 initialize=None, optimizer: str | None = None, seed: int = 0, resume: bool = False, scheduler=None,
                 load_later: bool = False):
        self.module = model
        self.config = config
        self._calls: list[ModuleHook] = []
        self._micro_batch = 0
        self._due = False
        self._backward_seen = False
        self._broken = False
        self._last_report: _hoist.StepReport | None = None
        self._boundary: bool | None = None
        self._lr_scheduler = scheduler
        self._saved: dict[str, Any] = {}  # what the commit that was restored says of a schedule
        self.state: dict[str, Any] = {}
        self.restored = False
        for warning in config.warnings:
            _log.warning("%s", warning)
        if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
            _log.warning("PyTorch's threads wait for each other awake, and take the processors from the optimizer and from "
                         "transfers: set OMP_WAIT_POLICY=PASSIVE before Python starts (or import hoist.torch before "
                         "torch), and steps may be several times faster")
        self._refuse_compiled(model)

        cut = units_of(model, unit_classes)
        if not cut.units:
            raise _hoist.UsageError("the model has no parameters")
        self._cut = cut
        dtype = torch.bfloat16 if config.setting("bf16.enabled") is True else None
        self._parameters = Parameters(model, cut, dtype, self._between_passes)
        param_groups, group_of = self._groups(groups)
        self._optimizer_groups_offset = 0 if groups is None else 1
        units = self._parameters.declare(group_of)
        defaults = config.optimizer if optimizer is None else _hoist.OptimizerOptions.defaults_of(optimizer)
        options = [] if groups is None else [options_of(group, defaults) for group in param_groups]
        training = config.training
        self._micro_batches = int(training.gradient_accumulation_steps or 1)
        config.micro_batches_max = max(config.micro_batches_max, self._micro_batches)
        self._lift = _hoist.Lift(config, options, units, *distributed.channels_of(config))
        self._lift.know_types(torch.float32, torch.bfloat16, torch.float16)
        settled = config.check_world_size(self._lift.world_size)
        self._training = settled

        sources = self._parameters.move(self._lift)
        initial.materialize_buffers(model, initialize)
        if dtype is not None:
            self._parameters.cast_buffers()
        self._bring_to_life(sources, weights, initialize, seed, resume, load_later)
        del sources

        self._units_without_backward = {
            i for i, unit in enumerate(cut.units) if not reads_weights_in_backward(unit)
        }
        self._watched: set[Any] = set()
        self._watch: Watch | None = None
        self._always_up: list[int] = []  # units that something outside of any module uses
        self._up_in_backward: list[int] = []
        users = dict(cut.users)
        self._root = ModuleHook(self, model, users.pop(model, []), is_root=True)
        self._hooks = [ModuleHook(self, module, units, is_root=False) for module, units in users.items()]
        self._parameters.keep_state_dicts_true()
        self.optimizer = Optimizer(self, param_groups)
        self._push_all_rates = groups is not None
        self._continue_schedule()
        atexit.register(_close_quietly, weakref.ref(self._lift))

    # --- construction ------------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse_compiled(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl is not None:
                raise _hoist.UsageError(
                    f"module '{name or type(module).__name__}' was compiled before it was wrapped: its graphs know nothing of "
                    "the hooks that bring weights up. Wrap the model first, and compile it then (torch.compile(model), "
                    "model.compile(), or compile_units() of the engine)"
                )

    def _groups(self, groups):
        every = [p for unit in self._cut.units for p in unit.parameters.values()]
        trainable = [p for p in every if p.requires_grad]
        defaults = self.config.optimizer
        if groups is None:
            return [{"params": trainable, "lr": defaults.learning_rate}], {}
        groups = list(groups)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [{**g, "params": [g["params"]] if isinstance(g["params"], nn.Parameter) else list(g["params"])}
                  for g in groups]
        group_of: dict[int, int] = {}
        for index, group in enumerate(groups):
            group.setdefault("lr", defaults.learning_rate)
            for parameter in group["params"]:
                group_of[id(parameter)] = index
        names = {id(p): n for unit in self._cut.units for n, p in unit.parameters.items()}
        for parameter in trainable:
            if id(parameter) not in group_of:
                raise _hoist.UsageError(f"parameter '{names[id(parameter)]}' requires gradients and is in no group")
        return groups, group_of

    def _bring_to_life(self, sources, weights, initialize, seed: int, resume: bool, load_later: bool) -> None:
        if (resume or load_later) and self._lift.find_commit() is not None:
            if resume:
                step, state = self._lift.restore()
                self.restored = True
                self._load_commit_state(bytes(state))
                _log.info("resuming at step %d", step)
        elif weights is not None:
            found = initial.tensor_names(weights)
            names = {}
            for alias, name in self._cut.aliases.items():
                if name not in found and alias in found:
                    names[name] = alias
            extra = any(alias in found for alias, name in self._cut.aliases.items() if names.get(name) != alias)
            self._lift.initialize_from(weights, names, extra)
        else:
            self._lift.initialize(initial.InitialValues(
                self._cut.units, sources, self._parameters.places, initialize or initial.default_initialize, seed))

    # --- calls -------------------------------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("_") or "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["module"], name)

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def _enter_outermost(self) -> None:
        lift = self._lift
        training = torch.is_grad_enabled() and bool(self._parameters.trainable)
        if lift.pass_ is not None:
            if self._backward_seen or self._broken:
                if torch._C._current_graph_task_id() != -1:
                    return  # a part is computed once more, for the backward pass under way
                lift.discard()
                self._broken = self._backward_seen = False
            elif training and lift.pass_ != _hoist.Pass.train:
                lift.end()
            else:
                return
        if lift.pass_ is None:
            self._begin(_hoist.Pass.train if training else _hoist.Pass.evaluate)
        kind = lift.pass_
        if kind not in self._watched and not torch.compiler.is_compiling():
            self._watch = Watch(self._parameters.unit_at, lift.is_up, self._use_unannounced)
            self._watch.__enter__()

    def _begin(self, kind: _hoist.Pass) -> None:
        self._require_life()
        if kind == _hoist.Pass.train:
            if self._due:
                raise _hoist.UsageError(
                    f"{self._micro_batches} backward pass{'es' if self._micro_batches > 1 else ''} make a step, and "
                    "they are done: call step() (gradient_accumulation_steps in the configuration asks for more)")
            self._lift.begin(kind, self._micro_batch, self._micro_batches)
        else:
            self._lift.begin(kind)
        for unit in self._always_up:
            self._lift.enter(unit)

    def _leave_outermost(self, failed: bool) -> None:
        lift = self._lift
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            if not failed:
                self._watched.add(lift.pass_)
        if torch._C._current_graph_task_id() != -1:
            return
        if failed:
            if lift.pass_ is not None:
                lift.discard()
        elif lift.pass_ == _hoist.Pass.evaluate and not lift.all_still_up():
            lift.end()

    def _use_unannounced(self, unit: int) -> None:
        """An operator uses weights that no hook has brought up."""
        self._lift.share(unit)
        name = self._cut.units[unit].name
        if self._calls:
            hook = self._calls[-1]
            hook.units.append(unit)
            hook.entered[-1].append(unit)
            _log.info("unit '%s' is also used in %s", name, "the model's own forward()" if hook.is_root else "another module")
        else:
            self._always_up.append(unit)
            _log.warning("unit '%s' is used outside of every module's forward(): it stays up through whole passes", name)
        self._lift.enter(unit)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward_begins(self, *_) -> None:
        if self._backward_seen:
            return
        self._backward_seen = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if not self._backward_seen or self._lift.pass_ != _hoist.Pass.train:
            return
        self._backward_seen = False
        self._lift.end_backward()
        self._micro_batch += 1
        self._due = self._micro_batch == self._micro_batches

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_) -> torch.Tensor:
        """`loss.backward()`: gradients of one micro-batch. A step takes the mean over its micro-batches.

        With scale_wrt_gas=False the program has divided the loss itself, and the step takes the sum.
        """
        scaled = loss if scale_wrt_gas or self._micro_batches == 1 else loss * self._micro_batches
        first = "backward" not in self._watched
        watch = Watch(self._parameters.unit_at, self._lift.is_up, self._use_unannounced_in_backward) if first else None
        try:
            with watch if watch is not None else contextlib.nullcontext():
                scaled.backward(retain_graph=retain_graph)
        except BaseException:
            self._lift.discard()
            self._backward_seen = False
            raise
        self._watched.add("backward")
        if self._lift.pass_ == _hoist.Pass.train:  # a loss that no part of the model has made
            self._backward_seen = True
            self._backward_ends()
        return loss

    def _use_unannounced_in_backward(self, unit: int) -> None:
        self._lift.share(unit)
        self._lift.enter(unit)
        self._always_up.append(unit)
        _log.warning("unit '%s' is used by a backward pass that its output does not lead to: it stays up through whole "
                     "passes", self._cut.units[unit].name)

    # --- steps -------------------------------------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._due if self._boundary is None else self._boundary

    def step(self, *_, **__) -> _hoist.StepReport | None:
        """One optimizer step when all its micro-batches are done; None, and nothing, before that."""
        lift = self._lift
        if lift.pass_ == _hoist.Pass.train:
            if self._backward_seen or lift.has_gradients():
                lift.discard()
                self._backward_seen = False
                raise _hoist.UsageError("step() after a backward pass that did not end; its gradients were dropped")
            lift.discard()  # a forward pass whose result was not used
        elif lift.pass_ is not None:
            lift.end()
        if self._boundary and 0 < self._micro_batch < self._micro_batches:
            # Fewer micro-batches than usual, at the end of the data: the rest counts as zeros, as in DeepSpeed.
            while self._micro_batch < self._micro_batches:
                lift.begin(_hoist.Pass.train, self._micro_batch, self._micro_batches)
                lift.end_backward()
                self._micro_batch += 1
            self._due = True
        if not self._due:
            if self._micro_batch == 0:
                raise _hoist.UsageError("step() needs a backward pass before it")
            return None
        if self._push_all_rates or not self.config.has_schedule:
            self.optimizer.push_rates()
        report = lift.step(self._commit_state(schedule_lags=True))
        self._due = False
        self._micro_batch = 0
        self._last_report = report
        if report.applied:
            # A graph that was kept from before must not be used with the new weights: autograd checks for it.
            torch.autograd.graph.increment_version(self._parameters.trainable)
            if self._lr_scheduler is not None:
                driven = getattr(self._lr_scheduler, "optimizer", None)
                if driven is not None:
                    driven._opt_called = True  # by which PyTorch's schedulers know that a step came first
                self._lr_scheduler.step()
        return report

    def _drop_gradients(self) -> None:
        if self._lift.pass_ == _hoist.Pass.train or self._due or self._micro_batch > 0:
            self._lift.discard()
        self._due = self._backward_seen = False
        self._micro_batch = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._drop_gradients()

    @property
    def lr_scheduler(self) -> Any:
        """Stepped after every step that was applied. One that is set after a restore goes on where the saved one was."""
        return self._lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._lr_scheduler = scheduler
        self._continue_schedule()

    def _continue_schedule(self) -> None:
        if self._saved and self._lr_scheduler is not None:
            program_state.continue_schedule(self._saved, self._lr_scheduler, self.optimizer.param_groups)
            self._saved = {}

    def _set_rate(self, group: int, rate: float) -> None:
        self._lift.set_learning_rate(group + self._optimizer_groups_offset, rate)

    def get_lr(self) -> list[float]:
        return [self._lift.learning_rate(i + self._optimizer_groups_offset)
                for i in range(len(self.optimizer.param_groups))]

    def get_global_grad_norm(self) -> float | None:
        return None if self._last_report is None else self._last_report.gradient_norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied: a gradient was not finite."""
        return self._last_report is not None and not self._last_report.applied

    def gradient_accumulation_steps(self) -> int:
        return self._micro_batches

    def train_batch_size(self) -> int | None:
        return self._training.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._training.train_micro_batch_size_per_gpu

    @property
    def rank(self) -> int:
        return self._lift.rank

    @property
    def world_size(self) -> int:
        return self._lift.world_size

    @property
    def global_steps(self) -> int:
        return self._lift.step_count

    @property
    def step_count(self) -> int:
        """Steps applied."""
        return self._lift.step_count

    @property
    def committed_step(self) -> int | None:
        """The newest step that is durable."""
        return self._lift.committed_step

    # --- state -------------------------------------------------------------------------------------------------------

    def _commit_state(self, schedule_lags: bool) -> bytes:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return program_state.pack(self.state, self._lr_scheduler, rates, dict(self._parameters.persistent_buffers()),
                                  schedule_lags=schedule_lags)

    def _load_commit_state(self, data: bytes) -> None:
        self._saved = program_state.unpack(data)
        self.state = self._saved.get("program", {})
        program_state.fill_buffers(self._saved.get("buffers", {}), dict(self._parameters.persistent_buffers()))

    def save(self, name: str = "", state: dict[str, Any] | None = None) -> _hoist.Completion:
        """[C] Commits the present state; the returned completion is done when it is durable.

        With hoist.keep_steps and a name the step is kept: the last ones stay beside the newest commit, and restore(name)
        goes back to one. A step of the same name is replaced.
        """
        self._between_passes()
        if state is not None:
            self.state = state
        return self._lift.save(name, self._commit_state(schedule_lags=False))

    def kept(self) -> dict[str, int]:
        """[C] Steps that are kept, by name, oldest first."""
        return dict(self._lift.find_kept())

    def restore(self, name: str = "") -> int:
        """[C] Continues from a step that was kept, or from the newest commit; what came after it is given up. Learning rates
        come back as well. Returns the step. Also after an error that ended the engine."""
        if name and self._lift.is_alive:
            checkpoints.refuse_unknown(self, name)
        step, state = self._lift.restore(name)
        self.restored = True
        self._due = self._backward_seen = self._broken = False
        self._micro_batch = 0
        self._last_report = None
        torch.autograd.graph.increment_version(self._parameters.trainable)
        self.optimizer.forget_rates()
        self._load_commit_state(bytes(state))
        for group, rate in zip(self.optimizer.param_groups, self._saved.get("rates", ())):
            group["lr"] = rate
        self._continue_schedule()
        return step

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None,
                        save_latest: bool = True, **_) -> bool:
        """[C] As DeepSpeed's: keeps this step in the store under the tag, and writes the client state below `save_dir`."""
        checkpoints.save(self, os.fspath(save_dir), tag, client_state or {}, save_latest)
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn=None) -> tuple[str | None, dict[str, Any] | None]:
        """[C] As DeepSpeed's: goes back to the step that save_checkpoint() kept. (path, client state)."""
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise _hoist.UsageError("a kept step comes back whole: for its weights alone, `hoist export` it, and begin a "
                                    "run with weights=...")
        before = self._lr_scheduler
        if not load_lr_scheduler_states:
            self._lr_scheduler = None
        try:
            return checkpoints.load(self, os.fspath(load_dir), tag)
        finally:
            if not load_lr_scheduler_states:
                self._lr_scheduler, self._saved = before, {}

    def settle(self) -> None:
        """Returns when every update and commit under way is done."""
        self._between_passes()
        self._lift.settle()

    def _require_life(self) -> None:
        if not self._lift.is_alive and self._lift.is_open:
            raise _hoist.StoreError(
                f"{self.config.store_directory} holds a run already: load_checkpoint() or restore() continues it, as "
                "resume=True does from the start; to begin anew, choose another directory or remove it")

    def _between_passes(self) -> None:
        self._require_life()
        if self._backward_seen:
            raise _hoist.UsageError("state is read and written between passes, not in the middle of one")
        if self._lift.pass_ == _hoist.Pass.train:
            self._lift.discard()
        elif self._lift.pass_ is not None:
            self._lift.end()

    def read(self, name: str, state: _hoist.State = _hoist.State.master) -> torch.Tensor:
        """One parameter's master (or moment, or gradient before step()) in fp32, from whatever tier."""
        return self._parameters.read(name, state)

    def write(self, name: str, values: torch.Tensor, state: _hoist.State = _hoist.State.master) -> None:
        """Replaces a parameter's master or moment."""
        self._parameters.write(name, values, state)

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers under PyTorch's names, in memory of their own.

        Parameters have their own type, or `dtype`: torch.float32 gives the masters, bit by bit.
        """
        return self._parameters.state_dict(dtype)

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> None:
        """Replaces masters and buffers; moments stay."""
        self._parameters.load_state_dict(state, strict)

    def export(self, directory: str, dtype: torch.dtype = torch.float32, shard_bytes_max: int = 5_000_000_000) -> list[str]:
        """Writes the present weights as safetensors, without holding them in memory. Returns the files."""
        return self._parameters.export(directory, dtype, shard_bytes_max)

    @contextlib.contextmanager
    def gathered(self, names: Iterable[str] | None = None):
        """Brings whole units up for reading outside of forward(): `with engine.gathered(["lm_head.weight"]): ...`"""
        self._between_passes()
        units = {self._parameters.unit_of(n) for n in (self._parameters.names() if names is None else names)}
        self._begin(_hoist.Pass.evaluate)
        try:
            for unit in units:
                self._lift.enter(unit)
            yield
        finally:
            self._lift.end()

    def close(self) -> None:
        """Commits the last step and gives everything back. The module's parameters stay, without values."""
        self._lift.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def compile_units(self, **options) -> None:
        """torch.compile for what runs inside of each unit; weights come up and go down around it."""
        for module, _ in self._cut.users:
            if module is not self.module:
                module.forward = torch.compile(module.forward, **options)

    # --- what happened -----------------------------------------------------------------------------------------------

    def books(self) -> dict[str, Any]:
        """Bytes of each link, what was waited for, and each tier's budget and peak."""
        return self._lift.books()

    def formula_bytes(self) -> _hoist.StepBytes:
        """What one step must move by the byte formula."""
        return self._lift.formula_bytes()

    def describe(self) -> list[str]:
        lines = [f"{len(self._cut.units)} units: " + ", ".join(u.name for u in self._cut.units[:6]) +
                 (", ..." if len(self._cut.units) > 6 else "")]
        return lines + self._lift.describe()

    def digest(self, state: _hoist.State = _hoist.State.master) -> str:
        self._between_passes()
        return self._lift.digest(state)


def _close_quietly(lift: weakref.ref) -> None:
    """At the end of the program: what the last step decided is carried out and committed."""
    if (alive := lift()) is None:
        return
    try:
        alive.close()
    except _hoist.Error as error:
        _log.error("the last step was not committed: %s", error)
