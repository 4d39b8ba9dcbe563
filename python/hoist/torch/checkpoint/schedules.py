# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules of the program: their steps, and as much of their state as a commit, which is JSON, can hold."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from typing import Any

from hoist.commit_values import INTEGER_KEYS

_log = logging.getLogger("hoist")

_NOT_PLAIN = object()


def schedule_of(scheduler: Any) -> dict[str, Any] | None:
    """The state of a scheduler, as far as it has a state_dict()."""
    return scheduler.state_dict() if scheduler is not None and hasattr(scheduler, "state_dict") else None


def plain_schedule(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What commits have of a schedule's state; None if nothing."""
    plain: Any = _NOT_PLAIN if state is None else _plain_part(state, "")
    return None if plain is _NOT_PLAIN else plain


def continue_schedule(saved: dict[str, Any], scheduler: Any, param_groups: list[dict[str, Any]]) -> None:
    """Brings a scheduler, and the rates that it has set, to where they were after the commit's step."""
    if not hasattr(scheduler, "load_state_dict") or "scheduler" not in saved:
        return
    built = scheduler.state_dict()
    scheduler.load_state_dict({**built, **_with_saved(built, saved["scheduler"])})
    for group, rate in zip(param_groups, saved["rates"], strict=True):
        group["lr"] = rate
    if saved.get("schedule_lags", True):
        if needs_arguments(scheduler):
            _log.warning("%s had not been told of the step that the run goes on from, and needs more than that step to be told "
                         "(its metrics): call its step() once, if the program did so after each step", type(scheduler).__name__)
            return
        step_schedule(scheduler)


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
    """What JSON can hold of a schedule's state, which may contain the states of other schedules; _NOT_PLAIN if nothing. What is
    left out of what is called `name` is said."""
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
