# SPDX-License-Identifier: Apache-2.0
"""The state that a commit contains besides the model: the program's own, the schedule, persistent buffers. It is JSON, within the
room that a commit reserves for it (hoist.caller_state_max, enlarged for buffers)."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import logging
from collections import Counter
from typing import Any, NoReturn

import torch
from torch import nn

from hoist import _hoist
from hoist.commit_values import INTEGER_KEYS, from_json, to_json

_log = logging.getLogger("hoist")

_BUFFER_BYTES_MAX = 16 << 20
_NOT_PLAIN = object()


def room_for(buffers: dict[str, torch.Tensor]) -> int:
    """Bytes that these buffers take in a commit. Errors: UsageError for more than 16 MiB: every step writes them; and for those
    that are not dense."""
    for name, b in buffers.items():
        if b.layout is not torch.strided:
            raise _hoist.UsageError(f"buffer '{name}' is {b.layout}, and commits hold dense tensors: register it with "
                                    "persistent=False if it can be computed anew, or keep it dense")
    held = sum(b.nbytes for b in buffers.values())
    if held > _BUFFER_BYTES_MAX:
        largest = max(buffers, key=lambda name: buffers[name].nbytes)
        raise _hoist.UsageError(
            f"the model's persistent buffers hold {held / 2**20:.1f} MiB, and every commit would write them: at most 16 MiB are "
            f"committed. The largest is '{largest}': register it with persistent=False if it can be computed anew, or "
            "make it a parameter with requires_grad=False")
    return sum(4 * (b.nbytes + 2) // 3 + len(name) + 200 for name, b in buffers.items())


def refuse_size(held: int, most: int, buffers: dict[str, torch.Tensor]) -> NoReturn:
    """Errors: UsageError, naming what has grown since the model was wrapped."""
    largest = max(buffers, key=lambda name: buffers[name].nbytes, default=None)
    raise _hoist.UsageError(
        f"a commit's state of the program has {held} bytes, and room for {most} was made when the model was wrapped. "
        "engine.state, or the schedule's state, may have grown"
        + ("" if largest is None else f"; or a buffer, of which the largest is '{largest}' with {buffers[largest].nbytes} bytes: "
           "give it its size before wrap(), or register it with persistent=False")
        + ". \"hoist\": {\"caller_state_max\": ...} makes more room")


def schedule_of(scheduler: Any) -> dict[str, Any] | None:
    """The state of a scheduler, as far as it has a state_dict()."""
    return scheduler.state_dict() if scheduler is not None and hasattr(scheduler, "state_dict") else None


def plain_schedule(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What commits have of a schedule's state; None if nothing."""
    plain: Any = _NOT_PLAIN if state is None else _plain_part(state, "")
    return None if plain is _NOT_PLAIN else plain


def pack(program: dict[str, Any], schedule: dict[str, Any] | None, rates: list[float], buffers: dict[str, torch.Tensor], *,
         schedule_lags: bool, skipped_steps: int, world_size: int, first_rates: list[float] | None = None) -> bytes:
    """`schedule` has what JSON can hold written down. `schedule_lags`: its scheduler will be stepped for this commit's step,
    but has not been yet. `first_rates`: what the program asked for when the run began, or was resumed."""
    state: dict[str, Any] = {"program": to_json(program, "engine.state"), "rates": rates, "schedule_lags": schedule_lags,
                             "world_size": world_size}
    if first_rates is not None:
        state["first_rates"] = first_rates
    if skipped_steps > 0:
        state["skipped_steps"] = skipped_steps
    if (plain := plain_schedule(schedule)) is not None:
        state["scheduler"] = plain
    if buffers:
        state["buffers"] = {name: _text_of(b) for name, b in buffers.items()}
    return json.dumps(state).encode()


def unpack(data: bytes) -> dict[str, Any]:
    """Returns what was packed, under the same names; nothing if the commit has none."""
    state: dict[str, Any] = json.loads(data) if data else {}
    return state | {"program": from_json(state["program"])} if "program" in state else state


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


def fill_buffers(saved: dict[str, list[Any]], model: nn.Module, device: torch.device) -> None:
    """Also those that the program registers, or gives their size, when it runs. Errors: UsageError for one of no module."""
    for name, (dtype, shape, text) in saved.items():
        data = bytearray(base64.b64decode(text))
        raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        values = raw.view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
        path, _, own_name = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise _hoist.UsageError(f"the commit has a buffer '{name}', and the model has no module '{path}': it is of another "
                                    "model") from None
        buffer = module._buffers.get(own_name)
        if buffer is not None and buffer.shape == values.shape and buffer.is_contiguous():  # not one that is expanded
            buffer.copy_(values)
        else:
            module.register_buffer(own_name, values.to(device if buffer is None else buffer.device))


def _text_of(buffer: torch.Tensor) -> list[Any]:
    raw = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return [str(buffer.dtype), list(buffer.shape), base64.b64encode(raw.numpy().tobytes()).decode()]


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
