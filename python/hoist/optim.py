# SPDX-License-Identifier: Apache-2.0
"""hoist's optimizers as torch.optim optimizers, for any training loop.

By default parameters are CPU tensors and the optimizer's states stay beside them in memory. bf16 parameters are trained with
an exact fp32 master: a 16-bit remainder beside each weight, 2 bytes instead of the 4 of a copy. `master` gives the fp32 values.

With offload="cpu" or "nvme" parameters may be on a GPU. Masters and moments are in pinned memory or on NVMe, whole or divided
among the ranks of a process group, and are updated by the CPU (optim_offload.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim.optimizer import ParamsT

from hoist import _hoist

_log = logging.getLogger("hoist")

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from hoist.optim_offload import OffloadArguments, Offloaded

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

DTYPES = {torch.float32: _hoist.DType.fp32, torch.bfloat16: _hoist.DType.bf16, torch.float16: _hoist.DType.fp16}

# The names that torch.optim's states have for the first and the second moment.
STATE_NAMES = {
    "AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("", "sum"), "Lion": ("exp_avg", ""),
    "SGD": ("momentum_buffer", ""),
}


# optim_offload.OffloadArguments for offloaded states, and their defaults.
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
            from hoist.optim_offload import Offloaded  # needs hoist.torch

            self._offloaded = Offloaded(self.param_groups, self._kind, threads, **offload)
            return
        for name, value in offload.items():
            if value and value != _OFFLOAD_DEFAULTS[name]:
                raise _hoist.UsageError(f'{name}=... is for offloaded states: pass offload="cpu" or offload="nvme"')
        self._pool = _hoist.UpdatePool(threads)

    def _offload_arguments(self, settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """Without the arguments of torch.optim's optimizers. Errors: UsageError for those that would change results."""
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
            self._offloaded.step(self.param_groups)
            return loss
        updates = [self._checked(index, group) for index, group in enumerate(self.param_groups)]  # before anything changes
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
                name = f"'{group['param_names'][place]}'" if "param_names" in group else f"parameter {place} of group {index}"
                raise _hoist.UsageError(f"{name} {problem}")
            ready.append((parameter, gradient))
        options = options_of(group, self._default_options())
        self._pool.update(options, 1, 1.0, [])  # checks the settings
        return options, ready

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
        self._pool.update(options, step, 1.0, arrays)
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
            return self._offloaded.load(self.param_groups, state_dict)
        for saved_group in state_dict["param_groups"]:
            options_of(saved_group, self._default_options())  # refuses other formulas
        # All that can be refused is, before anything changes.
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
            state["step"] = saved.step
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
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        return self._state_of(parameter, options_of(group, self._default_options()))

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """[C] The fp32 value that is trained.

        In memory, a bf16 parameter that the program changes keeps its remainder: the master is the new value up to half a step
        of bf16. set_master() writes it exactly.
        """
        if self._offloaded is not None:
            return self._offloaded.read(parameter, _hoist.State.master)
        if parameter.dtype == torch.float32 or parameter not in self.state:
            return parameter.detach().float().clone()
        return join_master(parameter, self.state[parameter]["remainder"])

    def set_master(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """[C] Makes `values` the fp32 master, and its rounding the parameter."""
        values = values.detach().float().cpu().contiguous()
        if values.shape != parameter.shape:
            raise _hoist.UsageError(f"the parameter is {tuple(parameter.shape)}, the values {tuple(values.shape)}")
        if self._offloaded is not None:
            return self._offloaded.write_master(parameter, values)
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
        return self._offloaded

    @property
    def restored(self) -> bool:
        """Whether states and parameters come from a commit."""
        return self._require_offload("restored").restored

    @property
    def step_count(self) -> int:
        """Steps applied."""
        return self._require_offload("step_count").step_count

    @property
    def committed_step(self) -> int | None:
        """The newest step that is durable."""
        return self._require_offload("committed_step").committed_step

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
        return self._require_offload("lr_scheduler").schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        driven = getattr(schedule, "optimizer", None)
        if isinstance(driven, torch.optim.Optimizer) and driven.param_groups is not self.param_groups:
            raise _hoist.UsageError(f"{type(schedule).__name__} sets the rates of another optimizer: make it for this one")
        self._require_offload("lr_scheduler").follow(self.param_groups, schedule)

    def save(self, name: str = "") -> _hoist.Completion:
        """[C] Commits the present state; what it returns is done when that is durable. With keep_steps and a name the commit
        is a named checkpoint."""
        return self._require_offload("save()").save(self.param_groups, name)

    def checkpoints(self) -> dict[str, int]:
        """[C] Named checkpoints and their steps, oldest first."""
        return self._require_offload("checkpoints()").checkpoints()

    def restore(self, name: str = "") -> int:
        """[C] Goes back to a named checkpoint, or to the newest commit, parameters and learning rates included. Returns the
        step. Also after an error that ended the optimizer."""
        return self._require_offload("restore()").restore(self.param_groups, name)

    def adopt_parameters(self) -> None:
        """[C] Makes the parameters' present values the masters, where they are not the masters' roundings already. step() does
        so itself when it sees by their version counters that the program changed parameters in place."""
        self._require_offload("adopt_parameters()").adopt()

    def settle(self) -> None:
        """Returns when every commit under way is done."""
        self._require_offload("settle()").settle()

    def describe(self) -> list[str]:
        """Where states are, and what was chosen."""
        return self._require_offload("describe()").describe()

    def close(self) -> None:
        """Ends commits under way and gives memory and store back. Parameters stay as they are. So does a normal end of the
        program, or of the last reference."""
        if self._offloaded is not None:
            self._offloaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._offloaded is not None and error is not None:
            self._offloaded.abandon(error)
        self.close()


def join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """bf16 weights and their remainders, both in CPU memory, as fp32 masters."""
    parameter, remainder = parameter.contiguous(), remainder.contiguous()
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    _hoist.join_master(parameter.data_ptr(), remainder.data_ptr(), values.data_ptr(), parameter.numel())
    return values


def split_master(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous fp32 values in CPU memory as bf16 weights and remainders."""
    weight, remainder = (torch.empty(values.shape, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.int16))
    _hoist.split_master(values.data_ptr(), weight.data_ptr(), remainder.data_ptr(), values.numel())
    return weight, remainder


def in_order_of(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` with its elements in memory as those of the parameter (channels_last weights): a copy where it is otherwise."""
    if parameter.is_contiguous():
        return values.contiguous()
    if values.stride() == parameter.stride():
        return values
    return torch.empty_like(parameter, dtype=values.dtype).copy_(values)


def problem_of_parameter(parameter: torch.Tensor) -> str:
    """Why hoist does not train a parameter, of whatever type and device, and what to do about it; "" if it does."""
    if type(parameter) is not torch.nn.Parameter and type(parameter.data) is not torch.Tensor:
        return f"is a {type(parameter.data).__name__}, and hoist trains only plain tensors: pass its local tensor"
    if parameter.data_ptr() == 0 and parameter.numel() and not parameter.is_meta:
        return "has no memory: gather it first (FullyShardedDataParallel and DTensor divide parameters)"
    if not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return (f"has gaps or overlaps in memory (shape {tuple(parameter.shape)}, strides {parameter.stride()}): "
                "set parameter.data = parameter.data.contiguous() before you make the optimizer")
    return ""


def problem_of_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> str:
    """Why hoist does not accept a parameter's gradient, and what to do about it; "" if it does."""
    if gradient.layout is not torch.strided:
        return f"has a gradient of layout {gradient.layout}; hoist accepts only dense ones (nn.Embedding: sparse=False)"
    if gradient.dtype not in DTYPES or gradient.device != parameter.device:
        return (f"is on {parameter.device}, and its gradient is {gradient.dtype} on {gradient.device}: hoist accepts only "
                "gradients of float32, bfloat16 or float16 on the parameter's device")
    if gradient.shape != parameter.shape:
        return (f"has the shape {tuple(parameter.shape)}, and its gradient {tuple(gradient.shape)}: make a new optimizer after "
                "you change shapes")
    if gradient.data_ptr() == 0 and gradient.numel():
        return f"has a gradient without memory, a {type(gradient).__name__}: hoist accepts only plain tensors"
    return ""


@dataclass
class SavedState:
    """The state of one parameter in a state_dict(), in CPU memory."""

    step: int
    moments: tuple[torch.Tensor | None, torch.Tensor | None]  # fp32
    master: torch.Tensor | None  # fp32
    remainder: torch.Tensor | None  # of a bf16 parameter. Without both, the parameter is its own master

    def master_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The fp32 master. From the remainder, it is that of the parameter's present value."""
        if self.master is not None or self.remainder is None:
            return self.master
        return join_master(parameter.detach().to("cpu"), self.remainder)

    @staticmethod
    def of(kind: str, parameter: torch.nn.Parameter, saved: dict[str, Any]) -> SavedState | None:
        """None where nothing was saved. Errors: UsageError for a state of another shape."""
        if not saved:
            return None

        def values(key: str, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            value = saved.get(key) if key else None
            if value is None:
                return None
            if value.shape != parameter.shape:
                raise _hoist.UsageError(f"'{key}' of a parameter of {tuple(parameter.shape)} has the shape "
                                        f"{tuple(value.shape)} in the state_dict: it is of another model")
            return torch.as_tensor(value).detach().to("cpu", dtype).contiguous()

        first, second = STATE_NAMES[kind]
        moments = values(first), values(second)
        master = values("master")
        remainder = None
        if parameter.dtype == torch.bfloat16:
            remainder = split_master(master)[1] if master is not None else values("remainder", torch.int16)
        # torch.optim.SGD counts no steps: its momentum begins with the first.
        step = int(saved["step"]) if "step" in saved else int(any(moment is not None for moment in moments))
        return SavedState(step, moments, master, remainder)


# Names in torch.optim's parameter groups -> the engine's.
_SETTINGS = {
    "lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay", "bias_correction": "bias_correction",
    "momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "lr_decay": "learning_rate_decay",
    "initial_accumulator_value": "initial_accumulator",
}


# Arguments of torch.optim's optimizers that change no result here, or are refused by options_of().
TORCH_ARGUMENTS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "maximize", "decoupled_weight_decay")


def options_of(group: dict[str, Any], defaults: _hoist.OptimizerOptions) -> _hoist.OptimizerOptions:
    """A parameter group's settings over others. Errors: UsageError for a formula that is not among them."""
    options = _hoist.OptimizerOptions(defaults)
    for key, name in _SETTINGS.items():
        if key in group:
            setattr(options, name, type(getattr(options, name))(group[key]))
    if "betas" in group:
        options.beta1, options.beta2 = (float(beta) for beta in group["betas"])
    for key in ("amsgrad", "maximize", "differentiable"):
        if group.get(key):
            raise _hoist.UsageError(f"{key}=True is not among the settings of hoist's optimizers")
    is_decoupled = options.kind == "AdamW"
    if options.weight_decay and bool(group.get("decoupled_weight_decay", is_decoupled)) != is_decoupled:
        raise _hoist.UsageError(f"decoupled_weight_decay={group['decoupled_weight_decay']} is not {options.kind}'s: AdamW "
                                "decouples weight decay, and Adam adds it to the gradient")
    return options


# The options of a group, besides its learning rate, that change results. An engine takes them when it is made.
_SETTLED = ("betas", "momentum", "dampening", "nesterov", "eps", "weight_decay", "bias_correction", "amsgrad",
            "maximize", "lr_decay")


def settled_of(group: dict[str, Any]) -> dict[str, Any]:
    settled = {key: tuple(group[key]) if key == "betas" else group[key] for key in _SETTLED if key in group}
    return settled | {"params": {id(parameter) for parameter in group["params"]}}


def is_setting(key: str) -> bool:
    """Whether an entry of a parameter group, besides its learning rate, says how steps are computed."""
    return key in _SETTLED or key in TORCH_ARGUMENTS or key == "initial_accumulator_value"


def warn_of_other_rates(resumed: list[float] | None, rates: list[float], name: str) -> None:
    """Before the first step of a run that was resumed, and whose schedule was not continued."""
    if resumed not in (None, rates):
        _log.warning("learning rates: the run that is resumed had come to %s, and the program has set %s. A schedule continues "
                     "if %s.lr_scheduler is set to it in both runs", resumed, rates, name)


def refuse_changes(groups: list[dict[str, Any]], settled: list[dict[str, Any]]) -> None:
    """Errors: UsageError where the program, or a schedule of it, has changed more than learning rates."""
    if len(groups) != len(settled):
        raise _hoist.UsageError(f"there were {len(settled)} parameter groups when the optimizer was made, and there are "
                                f"{len(groups)}: groups are fixed then. Set lr=0 for one that is not to be trained for a while")
    for index, (group, before) in enumerate(zip(groups, settled, strict=True)):
        now = settled_of(group)
        if now["params"] != before["params"]:
            raise _hoist.UsageError(f"the parameters of group {index} were changed: groups are fixed when the optimizer is made. "
                                    "Set lr=0 for one that is not to be trained for a while")
        for key in _SETTLED:
            if before.get(key) != now.get(key):
                raise _hoist.UsageError(
                    f"'{key}' of parameter group {index} was changed from {before.get(key)} to {now.get(key)}; only learning "
                    "rates can change during a run (OneCycleLR and CyclicLR need cycle_momentum=False)")


class AdamW(_Optimizer):
    """Adam with decoupled weight decay. [C] marks collective calls: every rank makes them, in the same order."""

    _kind = "AdamW"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, bias_correction: bool = True, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                           "bias_correction": bias_correction}, offload)


class Adam(AdamW):
    """Adam, with weight decay added to the gradient (L2). [C] marks collective calls, as for AdamW."""

    _kind = "Adam"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, bias_correction: bool = True, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, threads, **offload)


class Adagrad(_Optimizer):
    _kind = "Adagrad"

    def __init__(self, params: ParamsT, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
                                           "initial_accumulator_value": initial_accumulator_value, "eps": eps}, offload)


class Lion(_Optimizer):
    """Chen et al., arXiv 2302.06675. [C] marks collective calls, as for AdamW."""

    _kind = "Lion"

    def __init__(self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
                 threads: int = 0, **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, offload)


class SGD(_Optimizer):
    _kind = "SGD"

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, threads: int = 0,
                 **offload: Unpack[OffloadArguments]):
        super().__init__(params, threads, {"lr": lr, "momentum": momentum, "dampening": dampening,
                                           "weight_decay": weight_decay, "nesterov": nesterov}, offload)
