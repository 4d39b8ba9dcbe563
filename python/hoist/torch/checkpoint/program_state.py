# SPDX-License-Identifier: Apache-2.0
"""The state that a commit contains besides the model: the program's own, the schedule, persistent buffers. It is JSON, within the
room that a commit reserves for it (hoist.caller_state_max, enlarged for buffers)."""

from __future__ import annotations

import base64
import json
from typing import Any, NoReturn

import torch
from torch import nn

from hoist import _hoist
from hoist.commit_values import from_json, read_state, to_json
from hoist.torch.checkpoint.schedules import plain_schedule

_BUFFER_BYTES_MAX = 16 << 20


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
    """Returns what was packed, under the same names; nothing if the commit has none, or another program's."""
    state = read_state(data)
    return state | {"program": from_json(state["program"])} if "program" in state else state


def fill_buffers(saved: dict[str, list[Any]], model: nn.Module, device: torch.device) -> None:
    """Fills buffers, also those that the program registers, or gives their size, when it runs. Errors: UsageError for one of no
    module."""
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
