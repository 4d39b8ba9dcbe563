# SPDX-License-Identifier: Apache-2.0
"""What travels with a commit beside the model: the program's own state, the schedule, small buffers. JSON, within the 64 KiB
that a commit reserves for it."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

_BUFFER_BYTES_MAX = 32 * 1024


def pack(program: dict[str, Any], scheduler: Any, rates: list[float], buffers: dict[str, torch.Tensor]) -> bytes:
    """`scheduler` has its plain numbers written down, as far as it has a state_dict()."""
    state: dict[str, Any] = {"program": program, "rates": rates}
    if scheduler is not None and hasattr(scheduler, "state_dict"):
        state["scheduler"] = {k: v for k, v in scheduler.state_dict().items() if _is_plain(v)}
    if buffers and sum(b.nbytes for b in buffers.values()) <= _BUFFER_BYTES_MAX:
        state["buffers"] = {name: _text_of(b) for name, b in buffers.items()}
    return json.dumps(state).encode()


def unpack(data: bytes) -> dict[str, Any]:
    """What was packed, under the same names; nothing of a commit without."""
    return json.loads(data) if data else {}


def fill_buffers(saved: dict[str, list], buffers: dict[str, torch.Tensor]) -> None:
    for name, (dtype, shape, text) in saved.items():
        raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        buffers[name].copy_(raw.view(getattr(torch, dtype.removeprefix("torch."))).view(shape))


def _text_of(buffer: torch.Tensor) -> list:
    raw = buffer.detach().contiguous().view(-1).view(torch.uint8)
    return [str(buffer.dtype), list(buffer.shape), base64.b64encode(raw.numpy().tobytes()).decode()]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, (int, float, str, bool, type(None)))
