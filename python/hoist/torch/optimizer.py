# SPDX-License-Identifier: Apache-2.0
"""The engine's optimizer in the shape that PyTorch's schedulers and training loops expect."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from hoist import _hoist
from hoist.optim.groups import is_setting, options_of, rate_of, rates_of, refuse_changes, settings_of, settled_of
from hoist.torch.model.units import Unit

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

_log = logging.getLogger("hoist")

_CONTINUES = ("moments of an engine are in its store. wrap(..., resume=True) or engine.restore(name) continues with them; "
              "hoist.optim's optimizers take a state_dict")


def refuse_schedule(schedule: Any) -> None:
    """Errors: UsageError for one that changes more than learning rates."""
    if getattr(schedule, "cycle_momentum", False):
        raise _hoist.UsageError(
            f"{type(schedule).__name__} with cycle_momentum=True would change beta1 or the momentum, and only learning rates can "
            "change during a run: pass cycle_momentum=False, or choose OneCycle in the configuration, which changes beta1 as "
            "DeepSpeed does")


def refuse_useless_schedule(schedule: Any, groups: list[dict[str, Any]] | None, config: _hoist.Config) -> None:
    """Errors: UsageError for a schedule of PyTorch's that would set no rate here: that of another optimizer than the engine's,
    whose `groups` these are, or one beside the configuration's."""
    driven = getattr(schedule, "optimizer", None)
    if not isinstance(driven, torch.optim.Optimizer):
        return
    if driven.param_groups is not groups:
        raise _hoist.UsageError(
            f"{type(schedule).__name__} sets the rates of another optimizer than this engine's: make it for engine.optimizer, "
            "and set engine.lr_scheduler; or pass that optimizer and the schedule to hoist.torch.initialize()")
    if config.has_schedule:
        raise _hoist.UsageError(f"{type(schedule).__name__} beside the configuration's scheduler, which sets the rates: "
                                "leave one of them out")


def schedule_for(optimizer: Optimizer, schedule: Any) -> Any:
    """A schedule, or what a function makes for the engine's optimizer. Errors: as of the two above."""
    if callable(schedule) and not hasattr(schedule, "step"):
        schedule = schedule(optimizer)
    try:
        refuse_schedule(schedule)
    except _hoist.UsageError:
        optimizer.set_back()  # its constructor has set betas or the momentum
        raise
    refuse_useless_schedule(schedule, optimizer.param_groups, optimizer._engine.config)
    return schedule


def _refuse_rates_of_0(config: _hoist.Config, groups: list[dict[str, Any]]) -> None:
    """Errors: UsageError for a group that is to be frozen, and that the configuration's scheduler would train. WarmupCosineLR
    gives each group a share of its own rate."""
    kind = config.setting("scheduler.type")
    frozen = next((index for index, group in enumerate(groups) if group["lr"] == 0), None)
    if config.has_schedule and kind != "WarmupCosineLR" and frozen is not None:
        raise _hoist.UsageError(f"parameter group {frozen} has lr 0, and the configuration's {kind} gives every group the same "
                                "rate: freeze its parameters before wrap() (requires_grad_(False)), or use one of PyTorch's "
                                "schedules")


def refuse_moments(state_dict: dict[str, Any]) -> None:
    """Errors: UsageError for a state_dict with moments, which would be lost."""
    if state_dict.get("state"):
        raise _hoist.UsageError(f"a state_dict that has moments: {_CONTINUES}")


def without_names(parameters: Iterable[Any]) -> list[Any]:
    """The parameters of `named_parameters()`, which PyTorch's optimizers take as well."""
    return [each[1] if isinstance(each, tuple) else each for each in parameters]


@dataclass(frozen=True)
class Grouping:
    """The parameter groups of a run."""

    param_groups: list[dict[str, Any]]  # as torch.optim has them
    defaults: dict[str, Any]  # of an optimizer that has them
    options: list[_hoist.OptimizerOptions]  # of each; none if all parameters have the configuration's settings

    @property
    def group_of(self) -> dict[int, int]:
        """The index in `options` for a parameter, by the id that it has now: those on the meta device are replaced."""
        return {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]} if self.options else {}


def grouping_of(groups: ParamsT | None, units: list[Unit], config: _hoist.Config, kind: str | None,
                client: torch.optim.Optimizer | None) -> Grouping:
    """`kind`: the name given to wrap(optimizer=...), if any. `client`: the program's optimizer, whose groups these are.
    Errors: UsageError for groups that the engine cannot have."""
    defaults = config.optimizer if kind is None else config.optimizer.of_kind(kind)
    if client is not None:
        defaults.bias_correction = True  # as PyTorch's optimizers do, which have no such setting
    trainable = [p for unit in units for p in unit.parameters.values() if p.requires_grad]
    if groups is None and kind not in (None, config.optimizer.kind):
        groups = trainable or None
    if groups is None:
        return Grouping([{"params": trainable, "lr": config.optimizer.learning_rate}], settings_of(config.optimizer), [])
    param_groups = _grouped(groups, units, config.optimizer.learning_rate)
    _refuse_rates_of_0(config, param_groups)
    return Grouping(param_groups, settings_of(defaults), [options_of(group, defaults) for group in param_groups])


def _grouped(groups: ParamsT, units: list[Unit], learning_rate: float) -> list[dict[str, Any]]:
    """Parameter groups as torch.optim has them, each with a rate. Errors: UsageError."""
    given: list[Any] = list(groups)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    given = [{**g, "params": [g["params"]] if isinstance(g["params"], nn.Parameter) else without_names(g["params"])}
             for g in given]
    group_of: dict[int, int] = {}
    names = {id(p): n for unit in units for n, p in unit.parameters.items()}
    for index, group in enumerate(given):
        group.setdefault("lr", learning_rate)
        for parameter in group["params"]:
            if parameter.numel() > 0 and id(parameter) not in names:
                raise _hoist.UsageError(f"parameter group {index} has a parameter of shape {tuple(parameter.shape)} that is "
                                        "not the model's: it would not be trained")
            if group_of.setdefault(id(parameter), index) != index:
                known = names.get(id(parameter))
                which = f"'{known}'" if known else f"of shape {tuple(parameter.shape)}"
                raise _hoist.UsageError(f"parameter {which} is in the groups {group_of[id(parameter)]} and {index}: it can be "
                                        "in one")
    for unit in units:
        for name, parameter in unit.parameters.items():
            if parameter.requires_grad and id(parameter) not in group_of:
                raise _hoist.UsageError(f"parameter '{name}' requires gradients and is in no group")
    return given


def _copied(value: Any) -> Any:
    """An entry of a group: schedules change a rate that is a tensor in place."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _has_stepped(state: dict[str, Any]) -> bool:
    """Whether a parameter of this state was stepped. Adagrad makes its state before it steps; SGD's has no count."""
    step = state.get("step", 1)
    return bool(state) and not getattr(step, "is_meta", False) and float(step) > 0


class Optimizer(torch.optim.Optimizer):
    """Steps the engine. Its state is the engine's; `param_groups` carry learning rates to it."""

    def __init__(self, engine: Engine, param_groups: list[dict[str, Any]], defaults: dict[str, Any]):
        self._engine = engine
        self._is_made = False
        self._client: Any = None  # of adopt()
        self._opt_called = False  # PyTorch's: whether a step was made, which its schedulers want to see before theirs
        super().__init__(param_groups, defaults)
        self._rates: list[float | None] = list(rates_of(self.param_groups))
        self._rates_within_step: list[float] | None = None  # after the last micro-batch that did not end its step
        self._warns_of_rates = True
        self._settled = [settled_of(group) for group in self.param_groups]
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As PyTorch's, undecorated: the decorator imports torch._dynamo (graphs.py says why not)."""
        if self._is_made:
            raise _hoist.UsageError("add_param_group() after the model was wrapped: parameters get their places once. Pass all "
                                    "groups to wrap(groups=...), with lr=0 for those that begin later")
        inherited = torch.optim.Optimizer.add_param_group
        getattr(inherited, "__wrapped__", inherited)(self, param_group)

    def adopt(self, client: Any) -> None:
        """Follows the groups of another optimizer, whose schedulers then set the rates here."""
        for mine, theirs in zip(self.param_groups, client.param_groups, strict=True):
            if "initial_lr" in mine:  # a run continues, and this is the rate that it had come to
                theirs.setdefault("initial_lr", mine["initial_lr"])
                theirs["lr"] = mine["lr"]
        self._client = client
        self.param_groups, self.defaults = client.param_groups, client.defaults
        self._settled = [settled_of(group) for group in client.param_groups]
        if self._engine._unit_manager.is_alive:
            self.show_rates()
        if any(_has_stepped(state) for state in client.state.values()):
            _log.warning("the %s that was passed has moments, and they are not used: the engine's are in its store",
                         type(client).__name__)
        follower = weakref.ref(self)

        def refuse(_: Any, state: dict[str, Any]) -> None:
            if (mine := follower()) is not None and mine._engine._unit_manager.is_open:
                refuse_moments(state)

        def follow(loaded: Any) -> None:  # load_state_dict() gives it other groups
            if (mine := follower()) is not None:
                mine.param_groups = loaded.param_groups

        if hasattr(client, "register_load_state_dict_post_hook"):
            client.register_load_state_dict_pre_hook(refuse)
            client.register_load_state_dict_post_hook(follow)

    def forget_rates(self) -> None:
        """A new engine has the configuration's rates, and is told all of these with its first step."""
        self._rates = [None] * len(self.param_groups)
        self._rates_within_step = None

    def tell_rates_again(self) -> None:
        """Sets the rates of a new engine that continues where the last one ended to those of that one."""
        for index, rate in enumerate(self._rates):
            if rate is not None and not self._engine.config.has_schedule:
                self._engine._set_rate(index, rate)

    def refuse_changes(self) -> None:
        """Errors: UsageError where the program, or a schedule of it, has changed more than learning rates."""
        refuse_changes(self.param_groups, self._settled)
        if not self._engine.config.has_schedule:
            return
        for index, group in enumerate(self.param_groups):
            before, now = self._rates[index], rate_of(group)
            if before is not None and before != now:
                raise _hoist.UsageError(f"'lr' of parameter group {index} was changed from {before} to {now}, and the "
                                        "configuration's scheduler sets the rates: leave one of them out")
            self._rates[index] = now

    def set_back(self) -> None:
        """Gives groups the settings back that they had when the optimizer was made. Rates and parameters stay."""
        for group, settled in zip(self.param_groups, self._settled, strict=False):
            group.update({key: value for key, value in settled.items() if key != "params"})

    def show_rates(self) -> None:
        """If the configuration's scheduler sets the rates, groups show those of the next step, as with DeepSpeed."""
        if self._engine.config.has_schedule:
            self._rates = list(self._engine.get_lr())
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                group["lr"] = rate

    def watch_rates(self, step_ends: bool) -> None:
        """To be called after each micro-batch. Warns once of rates that change within a step: a schedule is stepped for each
        micro-batch then."""
        rates, before = rates_of(self.param_groups), self._rates_within_step
        if self._warns_of_rates and before is not None and before != rates:
            self._warns_of_rates = False
            _log.warning("learning rates were changed between two micro-batches of one step, from %s to %s. A schedule that is "
                         "stepped after each micro-batch comes to its end too early: set it as engine.lr_scheduler, or step it "
                         "only after an engine.step() that returned a report", before, rates)
        self._rates_within_step = None if step_ends else rates

    def note_step(self) -> None:
        """For schedules of the program's, which warn if no step was made before theirs."""
        self._opt_called = True
        if self._client is not None:
            self._client._opt_called = True

    def push_rates(self) -> None:
        if self._engine.config.has_schedule:
            return
        for index, group in enumerate(self.param_groups):
            rate = rate_of(group)
            if rate != self._rates[index]:
                self._engine._set_rate(index, rate)
                self._rates[index] = rate

    def refuse_late_rates(self) -> None:
        """Errors: UsageError where a rate was changed since push_rates()."""
        for index, group in enumerate(self.param_groups):
            used, now = self._rates[index], rate_of(group)
            if used != now and not self._engine.config.has_schedule:
                raise _hoist.UsageError(
                    f"'lr' of parameter group {index} was changed from {used} to {now} between backward() and step(), and with "
                    f"\"update_mode\": \"backward\" the backward pass has updated weights with the first one: set 'lr' to {used} "
                    "again, call step(), and change rates (or step the schedule) after that, and not in a hook of "
                    "register_step_pre_hook()")

    def _patch_step_function(self) -> None:
        """PyTorch would call the program's hooks around step(), which engine.step() does not call: update() calls them."""

    @torch.optim.Optimizer.profile_hook_step
    def update(self) -> _hoist.StepReport:
        """The engine's step, with what register_step_pre_hook() and register_step_post_hook() have registered around it."""
        return self._engine._update()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Returns the engine's StepReport, or None before the last micro-batch of a step."""
        if closure is not None:
            raise _hoist.UsageError("step() takes no closure: gradients are gone from the parameters by then")
        return self._engine.step()

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """GradScaler.step() asks for this first."""
        raise _hoist.UsageError("torch.amp.GradScaler finds no gradients, since hoist takes them as they are made. Leave it out: "
                                '"fp16": {"enabled": true} in the configuration scales the loss in engine.backward()')

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied, as accelerate's loops ask."""
        return self._engine.step_was_skipped

    @property
    def overflow(self) -> bool:
        """The same, by the name that it has in DeepSpeed."""
        return self._engine.step_was_skipped

    @property
    def loss_scale(self) -> float:
        """The factor of losses until the next step; 1 without fp16."""
        return self._engine._unit_manager.loss_scale()

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._engine.fp16_enabled() and self._engine.dynamic_loss_scale()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As engine.zero_grad()."""
        self._engine.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        raise _hoist.UsageError("the optimizer of a wrapped model cannot be copied or pickled: engine.save() saves its states")

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"step": self._engine.step_count, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """[C] Learning rates, and what schedules keep in groups. The other settings are the configuration's or those of
        wrap(groups=...). Moments are in the engine's store, and come back with resume=True or restore().

        Errors: UsageError for a state_dict of another step, or with moments, which would be lost.
        """
        refuse_moments(state)
        now = self._engine.step_count
        if (step := state.get("step", now)) != now:
            raise _hoist.UsageError(f"a state_dict of step {step}, and this engine is at {now}: {_CONTINUES}")
        if len(state["param_groups"]) != len(self.param_groups):
            raise _hoist.UsageError(f"the state_dict has {len(state['param_groups'])} parameter groups, and this optimizer has "
                                    f"{len(self.param_groups)}")
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({k: _copied(v) for k, v in saved.items() if k != "params" and not is_setting(k)})
