# SPDX-License-Identifier: Apache-2.0
"""Learning rates of a run that goes on, and schedules of the program: their steps, and as much of their state as a commit, which
is JSON, can hold."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from typing import Any

from hoist.commit_values import INTEGER_KEYS
from hoist.optim.groups import rates_of

_log = logging.getLogger("hoist")

_NOT_PLAIN = object()


class RunRates:
    """The learning rates of a run, and the schedule that is stepped with it.

    A resumed run goes on with the rates that it had come to, unless the program asks for others than the run began with: then
    these count. A schedule that was saved goes on from its own state once the program sets one, before the first step.
    """

    def __init__(self, groups: list[dict[str, Any]], setter: str):
        self.schedule: Any = None
        self.first = [float(group.get("initial_lr", group["lr"])) for group in groups]  # what the program asks for
        self.used: list[float] = []  # by the last step
        self._asked: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "initial_lr") if k in group} for group in groups]
        self._setter = setter  # of the schedule, in the program's words
        self._saved: dict[str, Any] = {}  # with the commit that was restored, until the first step after that
        self._came_to: list[float] | None = None  # by the run that was resumed, until then

    def restored(self, saved: dict[str, Any]) -> None:
        """`saved`: what unpack() returns. Then go_back() or resume()."""
        self._saved, self._came_to = saved, None

    def go_back(self, groups: list[dict[str, Any]]) -> None:
        """Gives groups the rates of the commit, and the schedule the state that it had."""
        if not self._is_saved_of(groups):
            return
        for group, rate in zip(groups, self._saved["rates"], strict=True):
            group["lr"] = rate
        self._continue(groups)

    def resume(self, groups: list[dict[str, Any]], step: int) -> None:
        """Gives groups the rates that a resumed run goes on with. A schedule is set after that."""
        if not self._is_saved_of(groups):
            return
        rates, began = self._saved["rates"], self._saved.get("first_rates", self.first)
        if step > 0:
            self._came_to = rates
        if began == self.first:
            for group, rate, first in zip(groups, rates, began, strict=True):
                group.setdefault("initial_lr", first)  # what a schedule that is made now begins with
                group["lr"] = rate
            return
        for group, asked, first in zip(groups, self._asked, self.first, strict=True):
            group.update({"initial_lr": first} | asked)
        if rates != self.first and "scheduler" not in self._saved:
            _log.warning("learning rates: the run that is resumed began with %s and had come to %s; this program asks for %s, "
                         "and these count", began, rates, self.first)
            self._came_to = None

    def follow(self, schedule: Any, groups: list[dict[str, Any]]) -> None:
        """Sets the schedule, which goes on where the saved one was."""
        self.schedule = schedule
        self._continue(groups)

    def before_step(self, rates: list[float]) -> None:
        if self._came_to not in (None, rates):
            _log.warning("learning rates: the run that is resumed had come to %s, and the program has set %s. A schedule "
                         "continues if %s is set to it in both runs", self._came_to, rates, self._setter)
        self.used = rates
        self.forget()

    def _is_saved_of(self, groups: list[dict[str, Any]]) -> bool:
        """Whether rates of these groups were saved. Those of others are said, and forgotten."""
        rates = self._saved.get("rates", [])
        if len(rates) == len(groups):
            return True
        if rates:
            _log.warning("learning rates: the run that goes on had %d parameter groups, and this program has %d: rates and "
                         "schedules are as the program makes them", len(rates), len(groups))
        self.forget()
        return False

    def forget(self) -> None:
        """Forgets what was saved: it belongs to an earlier step now."""
        self._saved, self._came_to = {}, None

    def _continue(self, groups: list[dict[str, Any]]) -> None:
        if self.schedule is None or not continue_schedule(self._saved, self.schedule, groups):
            return
        if self._saved["scheduler"] and self._saved.get("first_rates", self.first) != self.first:
            _log.warning("learning rates: the run that is resumed began with %s, and this program asks for %s. Its schedule goes "
                         "on from the state that was saved, with %s now. For other rates, step a new schedule in the program, "
                         "and do not set %s", self._saved["first_rates"], self.first, rates_of(groups), self._setter)
            self.first = self._saved["first_rates"]
        self.forget()


def schedule_of(scheduler: Any) -> dict[str, Any] | None:
    """The state of a scheduler, as far as it has a state_dict()."""
    return scheduler.state_dict() if scheduler is not None and hasattr(scheduler, "state_dict") else None


def plain_schedule(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """The part of a schedule's state that commits have; None if nothing."""
    plain: Any = _NOT_PLAIN if state is None else _plain_part(state, "")
    return None if plain is _NOT_PLAIN else plain


def continue_schedule(saved: dict[str, Any], scheduler: Any, param_groups: list[dict[str, Any]]) -> bool:
    """Brings a scheduler, and the rates that it has set, to where they were after the commit's step. False: nothing was saved."""
    if not hasattr(scheduler, "load_state_dict") or "scheduler" not in saved:
        return False
    built = scheduler.state_dict()
    scheduler.load_state_dict({**built, **_with_saved(built, saved["scheduler"])})
    for group, rate in zip(param_groups, saved["rates"], strict=True):
        group["lr"] = rate
    if saved.get("schedule_lags", True):
        if needs_arguments(scheduler):
            _log.warning("%s had not been told of the step that the run goes on from, and needs more than that step to be told "
                         "(its metrics): call its step() once, if the program did so after each step", type(scheduler).__name__)
        else:
            step_schedule(scheduler)
    return True


def step_schedule(scheduler: Any, **arguments: Any) -> None:
    """Its step(), for a step that the engine has made: PyTorch would warn that the optimizer's step() was not called."""
    driven = getattr(scheduler, "optimizer", None)
    if driven is not None:
        driven._opt_called = True
    scheduler.step(**arguments)


def needs_arguments(scheduler: Any) -> bool:
    """Whether its step() cannot be called without arguments, as PyTorch's ReduceLROnPlateau."""
    if scheduler is None:
        return False
    given = inspect.signature(scheduler.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)


def _plain_part(value: Any, name: str | None = None) -> Any:
    """The part of a schedule's state that JSON can hold; the state may contain those of other schedules. _NOT_PLAIN if nothing.
    With `name`, the name of the value, a warning says what is left out of it."""
    def inner(v: Any, key: Any) -> Any:
        return _plain_part(v, None if name is None else f"{name}.{key}".lstrip("."))

    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        parts = {k: inner(v, k) for k, v in value.items()}
        return {k: v for k, v in parts.items() if v is not _NOT_PLAIN}
    if isinstance(value, dict) and all(type(k) is int for k in value):
        pairs = _plain_part([[k, v] for k, v in value.items()], name)
        return pairs if pairs is _NOT_PLAIN else {INTEGER_KEYS: pairs}
    if isinstance(value, (list, tuple)):
        items = [inner(v, i) for i, v in enumerate(value)]
        return _NOT_PLAIN if any(v is _NOT_PLAIN for v in items) else items
    if is_plain(value):
        return value
    if name is not None and not callable(value):  # functions do not change
        _say_left_out(name, type(value).__name__)
    return _NOT_PLAIN


@functools.cache  # once in a process
def _say_left_out(name: str, kind: str) -> None:
    _log.warning("commits leave out '%s' of the schedule: it is a %s, and they hold numbers and text. A run that is resumed has "
                 "it as the program builds it", name, kind)


def _with_saved(built: Any, saved: Any) -> Any:
    """A schedule's state as it was saved. What was not plain is as it was built."""
    if isinstance(saved, dict):
        if saved.keys() == {INTEGER_KEYS}:
            pairs = {k: _with_saved(None, v) for k, v in saved[INTEGER_KEYS]}
            return Counter(pairs) if isinstance(built, Counter) else pairs
        built = built if isinstance(built, dict) else {}
        absent = {k: v for k, v in built.items() if _plain_part(v) is _NOT_PLAIN}
        return type(built)(absent | {k: _with_saved(built.get(k), v) for k, v in saved.items()})
    if isinstance(saved, list):
        others = built if isinstance(built, (list, tuple)) and len(built) == len(saved) else [None] * len(saved)
        return [_with_saved(b, s) for b, s in zip(others, saved, strict=True)]
    return saved


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return isinstance(value, (int, float, str, bool, type(None)))
