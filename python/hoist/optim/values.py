# SPDX-License-Identifier: Apache-2.0
"""The parts of a parameter that hoist trains: its values, its fp32 master, and its state in a state_dict()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hoist import _hoist

DTYPES = {torch.float32: _hoist.DType.fp32, torch.bfloat16: _hoist.DType.bf16, torch.float16: _hoist.DType.fp16}

# The names that torch.optim's states have for the first and the second moment.
STATE_NAMES = {
    "AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("", "sum"), "Lion": ("exp_avg", ""),
    "SGD": ("momentum_buffer", ""),
}


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

    step: int | None  # of torch.optim.SGD, which counts none: None
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
        return SavedState(int(saved["step"]) if "step" in saved else None, moments, master, remainder)
