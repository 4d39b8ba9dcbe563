# SPDX-License-Identifier: Apache-2.0
"""hoist's optimizers as torch.optim optimizers, for any training loop.

By default parameters are CPU tensors and the optimizer's states stay beside them in memory. bf16 parameters are trained with
an exact fp32 master: a 16-bit remainder beside each weight, 2 bytes instead of the 4 of a copy. `master` gives the fp32 values.

With offload="cpu" or "nvme" parameters may be on a GPU. Masters and moments are in pinned memory or on NVMe, whole or divided
among the ranks of a process group, and are updated by the CPU (offload.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim.optimizer import ParamsT

from hoist import _hoist
from hoist.optim.groups import TORCH_ARGUMENTS, options_of
from hoist.optim.values import (
    DTYPES,
    STATE_NAMES,
    SavedState,
    in_order_of,
    join_master,
    problem_of_gradient,
    problem_of_parameter,
    split_master,
)
from hoist.shared_memory import refuse_shared_memory

_log = logging.getLogger("hoist")

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from hoist.optim.offload import OffloadArguments, Offloaded

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

# offload.OffloadArguments for offloaded states, and their defaults.
_OFFLOAD_DEFAULTS = {
    "offload": None, "directory": None, "shard_over": None, "pinned_memory": None, "device_memory": None, "resume": False,
    "keep_steps": 0, "commit_every": None, "missing_gradients": "refuse", "settings": None,
}

_STATE_DTYPES = {kind: (("remainder", torch.int16), (first, torch.float32), (second, torch.float32))
                 for kind, (first, second) in STATE_NAMES.items()}

_Ready = tuple[Any, torch.Tensor, dict[str, Any]]  # a parameter, its gradient and its state


class _Optimizer(torch.optim.Optimizer):
    """An optimizer of torch.optim's form whose update hoist computes.

    With offload="cpu" or "nvme", step() is collective as well. [C] marks further collective calls: every rank of `shard_over`
    (with a directory, every rank of the job) makes them, in the same order.
    """

    _kind: str

    def __init__(self, params: ParamsT, threads: int, settings: dict[str, Any], arguments: OffloadArguments):
        self._offloaded: Offloaded | None = None
        self._threads = threads
        offload = self._offload_arguments(settings, dict(arguments))
        super().__init__(params, settings)
        if offload.get("offload") is not None:
            from hoist.optim.offload import Offloaded  # needs hoist.torch

            self._offloaded = Offloaded(self.param_groups, self._kind, threads, **offload)
            return
        for name, value in offload.items():
            if value and value != _OFFLOAD_DEFAULTS[name]:
                raise _hoist.UsageError(f'{name}=... is for offloaded states: pass offload="cpu" or offload="nvme"')
        self._pool = _hoist.UpdatePool(threads)
        self._places: list[tuple[int, int]] = []  # of the last step's parameters in memory: their addresses and elements

    def _offload_arguments(self, settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments for offloading, without torch.optim's. Errors: UsageError for those that would change results."""
        for name in arguments:
            if name not in _OFFLOAD_DEFAULTS and name not in TORCH_ARGUMENTS:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument '{name}'")
        options_of({**settings, **arguments}, self._default_options())
        return {name: value for name, value in arguments.items() if name in _OFFLOAD_DEFAULTS}

    def _default_options(self) -> _hoist.OptimizerOptions:
        return _hoist.OptimizerOptions.defaults_of(self._kind)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._offloaded is not None:
            raise _hoist.UsageError("add_param_group() after the optimizer was made: places of offloaded states are laid out "
                                    "once. Pass all groups to the constructor, with lr=0 for those that begin later")
        options_of({**self.defaults, **param_group}, self._default_options())
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        if self._offloaded is not None:
            raise _hoist.UsageError("an optimizer with offloaded states cannot be copied or pickled: save its state_dict()")
        return {**super().__getstate__(), "_threads": self._threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_pool" not in self.__dict__:  # a copy; PyTorch's load_state_dict() also calls this
            self._offloaded = None
            self._pool = _hoist.UpdatePool(self._threads)
            self._places = []

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._offloaded is not None:
            self._require_offload("step()").step(self.param_groups)
            return loss
        updates = [self._checked(index, group) for index, group in enumerate(self.param_groups)]  # before anything changes
        places = [(parameter.data_ptr(), parameter.numel()) for _, ready in updates for parameter, _ in ready]
        # Checked only if an address changed: parameters that shared no memory still share none.
        if places != self._places:
            refuse_shared_memory((self._name_of(index, place), parameter) for index, group in enumerate(self.param_groups)
                                 for place, parameter in enumerate(group["params"]) if parameter.grad is not None)
            self._places = places
        for options, ready in updates:
            by_step: dict[int, list[_Ready]] = {}
            for parameter, gradient in ready:
                state = self._state_of(parameter, options)
                by_step.setdefault(int(state["step"]) + 1, []).append((parameter, gradient, state))
            for step, each in by_step.items():
                self._update(options, step, each)
        return loss

    def _checked(self, index: int, group: dict[str, Any]) -> tuple[_hoist.OptimizerOptions, list[tuple[Any, torch.Tensor]]]:
        """A group's settings, and its parameters and their gradients. Errors: UsageError for what cannot be updated."""
        ready = []
        for place, parameter in enumerate(group["params"]):
            if (gradient := parameter.grad) is None:
                continue
            if problem := self._problem_of(parameter) or problem_of_gradient(parameter, gradient):
                name = self._name_of(index, place)
                raise _hoist.UsageError(f"'{name}' {problem}" if "param_names" in group else f"parameter {name} {problem}")
            ready.append((parameter, gradient))
        return options_of(group, self._default_options()), ready

    def _name_of(self, index: int, place: int) -> str:
        names = self.param_groups[index].get("param_names")
        return f"{place} of group {index}" if names is None else names[place]

    def _problem_of(self, parameter: torch.Tensor) -> str:
        """Why a parameter cannot be updated in memory, and what to do about it; "" if it can."""
        dtype, shape, state = parameter.dtype, parameter.shape, self.state.get(parameter)
        if problem := problem_of_parameter(parameter):
            return problem
        if not state:
            if not parameter.is_cpu:
                return (f'is {dtype} on {parameter.device}; with offload="cpu" or offload="nvme" parameters may be on a GPU, and '
                        "without it they are CPU tensors")
            if dtype is not torch.float32 and dtype is not torch.bfloat16:
                return (f'is {dtype}; hoist trains float32 and bfloat16, and float16 only with offload="cpu" or offload="nvme". '
                        "Convert the model before you make the optimizer")
        else:
            was = torch.bfloat16 if "remainder" in state else torch.float32
            if dtype is not was or not parameter.is_cpu:
                return (f"was {was} on cpu when its states were made, and is {dtype} on {parameter.device}: move and convert "
                        "the model before you make the optimizer, or make a new one")
            for key, expected in _STATE_DTYPES[self._kind]:
                if (value := state.get(key)) is None:
                    continue
                if value.shape != shape:
                    return (f"has the shape {tuple(shape)}, and its state '{key}' {tuple(value.shape)}: make a new optimizer "
                            "after you change shapes")
                if value.dtype is not expected or not value.is_cpu:
                    return (f"has a state '{key}' that is {value.dtype} on {value.device}: leave states as the optimizer made "
                            "them")
        return ""

    def _state_of(self, parameter: torch.Tensor, options: _hoist.OptimizerOptions) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        (has_first, has_second), (first, second) = options.moments, STATE_NAMES[self._kind]
        if has_first and first not in state:
            state[first] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] = 0  # SGD counts the steps of its momentum, which may begin later
        if has_second and second not in state:
            state[second] = torch.full_like(parameter, options.initial_accumulator, dtype=torch.float32)
        return state

    def _update(self, options: _hoist.OptimizerOptions, step: int, ready: list[_Ready]) -> None:
        alive, arrays = [], []  # alive: until the update is done
        for parameter, gradient, state in ready:
            alive.append(gradient := in_order_of(parameter, gradient.resolve_neg()))
            is_contiguous, addresses = parameter.is_contiguous(), []
            for key, _ in _STATE_DTYPES[self._kind]:
                if (value := state.get(key)) is not None and not (is_contiguous and value.is_contiguous()):
                    state[key] = value = in_order_of(parameter, value)
                addresses.append(0 if value is None else value.data_ptr())
            remainder, first, second = addresses
            arrays.append(_hoist.Arrays(parameter.data_ptr(), remainder, first, second, gradient.data_ptr(),
                                        DTYPES[parameter.dtype], DTYPES[gradient.dtype], parameter.numel()))
        self._pool.update(options, step, arrays)
        for _, _, state in ready:
            state["step"] = step
        torch.autograd.graph.increment_version([parameter for parameter, _, _ in ready])

    # --- states ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's. With states that are divided among ranks: after consolidate_state_dict(), on its rank."""
        if self._offloaded is None:
            return super().state_dict()
        with self._without_hooks("_optimizer_state_dict_post_hooks") as hooks:
            packed: dict[str, Any] = super().state_dict()
        packed["state"] = self._offloaded.states(self.param_groups)
        for hook in hooks:
            packed = hook(self, packed) or packed
        return packed

    @contextlib.contextmanager
    def _without_hooks(self, kind: str) -> Iterator[list[Any]]:
        """The program's hooks of torch.optim.Optimizer, which its methods do not call inside of the block."""
        hooks = getattr(self, kind)
        setattr(self, kind, OrderedDict())
        try:
            yield list(hooks.values())
        finally:
            setattr(self, kind, hooks)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """[C] As ZeroRedundancyOptimizer's: gathers all states on one rank of `shard_over`, in its memory, for state_dict()."""
        self._require_offload("consolidate_state_dict()").consolidate(self.param_groups, to)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """[C] Takes what state_dict() gave, also of an optimizer with states elsewhere, or of torch.optim's."""
        with (self._without_hooks("_optimizer_load_state_dict_pre_hooks") as before,
              self._without_hooks("_optimizer_load_state_dict_post_hooks") as after):
            state_dict = state_dict.copy()
            for hook in before:
                state_dict = hook(self, state_dict) or state_dict
            self._load_state_dict(state_dict)
        for hook in after:
            hook(self)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._offloaded is not None:
            return self._require_offload("load_state_dict()").load(self.param_groups, state_dict)
        for saved_group in state_dict["param_groups"]:
            options_of(saved_group, self._default_options())
        # Refuse whatever can be refused before anything changes.
        numbered = self._numbered(state_dict)
        saved_states = [SavedState.of(self._kind, p, state_dict["state"].get(number, {})) for number, p in numbered]
        for (_, parameter), saved in zip(numbered, saved_states, strict=True):
            if saved is not None:
                self._refuse_unfit(parameter)
        super().load_state_dict(state_dict)
        # PyTorch gives every state its parameter's type, which moments and remainders of bf16 parameters have not.
        for (_, parameter), saved in zip(numbered, saved_states, strict=True):
            self.state.pop(parameter, None)
            if saved is None:
                continue
            state = self._new_state_of(parameter)
            has_moments = any(moment is not None for moment in saved.moments)  # they begin with the first step
            state["step"] = int(has_moments) if saved.step is None else saved.step
            for name, moment in zip(STATE_NAMES[self._kind], saved.moments, strict=True):
                if name in state and moment is not None:
                    state[name] = moment.clone()
            if saved.remainder is not None and "remainder" in state:
                # Also beside a weight that it does not belong to: the program may load the weights later.
                state["remainder"] = saved.remainder.clone()

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[int, torch.nn.Parameter]]:
        """The parameters and their numbers in a state_dict(); none if it has other groups, which PyTorch refuses."""
        ours, theirs = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
            return []
        return [(number, parameter) for group, saved in zip(ours, theirs, strict=True)
                for number, parameter in zip(saved["params"], group["params"], strict=True)]

    def _refuse_unfit(self, parameter: torch.nn.Parameter) -> None:
        if problem := self._problem_of(parameter):
            raise _hoist.UsageError(f"a parameter of shape {tuple(parameter.shape)} {problem}")

    def _new_state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        self._refuse_unfit(parameter)
        return self._state_of(parameter, options_of(self._group_of(parameter), self._default_options()))

    def _group_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        for group in self.param_groups:
            if any(p is parameter for p in group["params"]):
                return group
        raise _hoist.UsageError("the parameter is not trained by this optimizer")

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """[C] The fp32 value that is trained.

        In memory, a bf16 parameter that the program changes keeps its remainder: the master is the new value up to half a step
        of bf16. set_master() writes it exactly.
        """
        self._group_of(parameter)
        if self._offloaded is not None:
            return self._require_offload("master()").master(parameter)
        if parameter.dtype == torch.float32 or parameter not in self.state:
            return parameter.detach().float().clone()
        return join_master(parameter, self.state[parameter]["remainder"])

    def set_master(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """[C] Makes `values` the fp32 master, and its rounding the parameter."""
        self._group_of(parameter)
        values = values.detach().float().cpu().contiguous()
        if values.shape != parameter.shape:
            raise _hoist.UsageError(f"the parameter is {tuple(parameter.shape)}, the values {tuple(values.shape)}")
        if self._offloaded is not None:
            return self._require_offload("set_master()").write_master(parameter, values)
        if parameter.dtype == torch.float32:
            with torch.no_grad():
                parameter.copy_(values)
            return
        state = self._new_state_of(parameter)
        rounded, state["remainder"] = split_master(values)
        with torch.no_grad():
            parameter.copy_(rounded)

    # --- offloaded states --------------------------------------------------------------------------------------------

    def _require_offload(self, what: str) -> Offloaded:
        if self._offloaded is None:
            raise _hoist.UsageError(f'{what} is for offloaded states: pass offload="cpu" or offload="nvme"')
        self._offloaded.call = what
        return self._offloaded

    @property
    def restored(self) -> bool:
        """Whether states and parameters come from a commit."""
        return self._require_offload("restored").restored

    @property
    def step_count(self) -> int:
        """Steps applied."""
        return self._require_offload("step_count").unit_manager.step_count

    @property
    def committed_step(self) -> int | None:
        """The newest step that is durable."""
        return self._require_offload("committed_step").unit_manager.committed_step

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return self._offloaded is not None and self._offloaded.step_was_skipped

    @property
    def commit_state(self) -> dict[str, Any]:
        """The program's own part of every commit: numbers, text, lists, tuples and dictionaries."""
        return self._require_offload("commit_state").program_state

    @commit_state.setter
    def commit_state(self, state: dict[str, Any]) -> None:
        self._require_offload("commit_state").program_state = state

    @property
    def lr_scheduler(self) -> Any:
        """A schedule whose state is part of every commit. The program steps it, once after every step(). One that is set after
        resume=True or restore() continues where the saved one was."""
        return self._require_offload("lr_scheduler").run_rates.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        driven = getattr(schedule, "optimizer", None)
        if isinstance(driven, torch.optim.Optimizer) and driven.param_groups is not self.param_groups:
            raise _hoist.UsageError(f"{type(schedule).__name__} sets the rates of another optimizer: make it for this one")
        self._require_offload("lr_scheduler").run_rates.follow(schedule, self.param_groups)

    def save(self, name: str = "") -> _hoist.Completion:
        """[C] Commits the present state; what it returns is done when that is durable. With keep_steps and a name the commit
        is a named checkpoint."""
        return self._require_offload("save()").save(self.param_groups, name)

    def checkpoints(self) -> dict[str, int]:
        """[C] Named checkpoints and their steps, oldest first."""
        return dict(self._require_offload("checkpoints()").unit_manager.find_checkpoints())

    def restore(self, name: str = "") -> int:
        """[C] Goes back to a named checkpoint, or to the newest commit, parameters and learning rates included. Returns the
        step. Also after an error that ended the optimizer."""
        return self._require_offload("restore()").restore(self.param_groups, name)

    def adopt_parameters(self) -> None:
        """[C] Makes the parameters' present values the masters, where they are not the masters' roundings already. step(), save()
        and master() do so themselves when they see by their version counters that the program changed parameters in place."""
        self._require_offload("adopt_parameters()").adopt()

    def settle(self) -> None:
        """Returns when every commit under way is done."""
        self._require_offload("settle()").unit_manager.settle()

    def describe(self) -> list[str]:
        """Says where states are, and what was chosen."""
        return self._require_offload("describe()").unit_manager.describe()

    def close(self) -> None:
        """Ends commits under way and gives memory and store back. Parameters stay as they are. So does a normal end of the
        program, or of the last reference."""
        if self._offloaded is not None:
            self._offloaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._offloaded is not None:
            self._offloaded.abandon(error)
        self.close()


class AdamW(_Optimizer):
    """Adam with decoupled weight decay. [C] marks collective calls: every rank makes them, in the same order."""

    _kind = "AdamW"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, bias_correction: bool = True, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                           "bias_correction": bias_correction}, offload)


class Adam(AdamW):
    """Adam, with weight decay added to the gradient (L2). [C] marks collective calls, as for AdamW."""

    _kind = "Adam"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, *, bias_correction: bool = True, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction, threads=threads, **offload)


class Adagrad(_Optimizer):
    _kind = "Adagrad"

    def __init__(self, params: ParamsT, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
                                           "initial_accumulator_value": initial_accumulator_value, "eps": eps}, offload)


class Lion(_Optimizer):
    """Chen et al., arXiv 2302.06675. [C] marks collective calls, as for AdamW."""

    _kind = "Lion"

    def __init__(self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
                 *, threads: int = 0, **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, offload)


class SGD(_Optimizer):
    _kind = "SGD"

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "momentum": momentum, "dampening": dampening,
                                           "weight_decay": weight_decay, "nesterov": nesterov}, offload)
