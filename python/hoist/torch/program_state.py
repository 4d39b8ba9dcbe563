# SPDX-License-Identifier: Apache-2.0
"""The state that a commit contains besides the model: the program's own, the schedule, persistent buffers. It is JSON, within the
room that a commit reserves for it (hoist.caller_state_max, enlarged for buffers)."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from hoist import _hoist

_BUFFER_BYTES_MAX = 16 << 20


def room_for(buffers: dict[str, torch.Tensor]) -> int:
    """Bytes that these buffers take in a commit. Errors: UsageError for more than 16 MiB: every step writes them."""
    held = sum(b.nbytes for b in buffers.values())
    if held > _BUFFER_BYTES_MAX:
        largest = max(buffers, key=lambda name: buffers[name].nbytes)
        raise _hoist.UsageError(
            f"the model's persistent buffers hold {held / 2**20:.1f} MiB, and every commit would write them: at most 16 MiB are "
            f"committed. The largest is '{largest}': register it with persistent=False if it can be computed anew, or "
            "make it a parameter with requires_grad=False")
    return sum(4 * (b.nbytes + 2) // 3 + len(name) + 200 for name, b in buffers.items())


def schedule_of(scheduler: Any) -> dict[str, Any] | None:
    """The state of a scheduler, as far as it has a state_dict()."""
    return scheduler.state_dict() if scheduler is not None and hasattr(scheduler, "state_dict") else None


def pack(program: dict[str, Any], schedule: dict[str, Any] | None, rates: list[float], buffers: dict[str, torch.Tensor], *,
         schedule_lags: bool, skipped_steps: int) -> bytes:
    """`schedule` has its plain numbers written down. `schedule_lags`: its scheduler will be stepped for this commit's step,
    but has not been yet."""
    state: dict[str, Any] = {"program": program, "rates": rates, "schedule_lags": schedule_lags}
    if skipped_steps > 0:
        state["skipped_steps"] = skipped_steps
    if schedule is not None:
        state["scheduler"] = {k: v for k, v in schedule.items() if is_plain(v)}
    if buffers:
        state["buffers"] = {name: _text_of(b) for name, b in buffers.items()}
    return json.dumps(state).encode()


def unpack(data: bytes) -> dict[str, Any]:
    """Returns what was packed, under the same names; nothing if the commit has none."""
    state: dict[str, Any] = json.loads(data) if data else {}
    return state


def continue_schedule(saved: dict[str, Any], scheduler: Any, param_groups: list[dict[str, Any]]) -> None:
    """Brings a scheduler, and the rates that it has set, to where they were after the commit's step."""
    if not hasattr(scheduler, "load_state_dict") or "scheduler" not in saved:
        return
    scheduler.load_state_dict({**scheduler.state_dict(), **saved["scheduler"]})  # what is not plain is as it was built
    for group, rate in zip(param_groups, saved["rates"], strict=True):
        group["lr"] = rate
    if saved.get("schedule_lags", True):
        driven = getattr(scheduler, "optimizer", None)
        if driven is not None:
            driven._opt_called = True
        scheduler.step()


def fill_buffers(saved: dict[str, list[Any]], buffers: dict[str, torch.Tensor]) -> None:
    for name, (dtype, shape, text) in saved.items():
        raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        buffers[name].copy_(raw.view(getattr(torch, dtype.removeprefix("torch."))).view(shape))


def _text_of(buffer: torch.Tensor) -> list[Any]:
    raw = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [str(buffer.dtype), list(buffer.shape), base64.b64encode(raw.numpy().tobytes()).decode()]


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return isinstance(value, (int, float, str, bool, type(None)))
