# SPDX-License-Identifier: Apache-2.0
"""What becomes a model's 16-bit type: buffers, floating arguments of its forward() (for fp16.auto_cast of DeepSpeed's file, and
for Trainer), and the weights of a model that is compared with an engine's."""

from __future__ import annotations

from typing import Any

import torch

from hoist.torch.model.wrapped import keep_hooks


def as_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.bfloat16:
        return values.to(dtype)
    # The engine's rule, halves away from zero: what the forward pass computes with.
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Gives a model without an engine the weights that an engine would compute with. Quantized ones stay. Returns how many had
    another type."""
    others = [p for p in model.parameters() if type(p.data) is torch.Tensor and p.is_floating_point() and p.dtype.itemsize > 1
              and p.dtype != dtype and not hasattr(p, "initial_values")]
    for parameter in others:
        parameter.data = as_type(parameter.data.float(), dtype)
    return len(others)


def place_buffers(model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Moves buffers to where the weights are, in their type if the configuration says one. Rotary frequencies keep theirs:
    rounded to 16 bits they would be other positions. So do those that a model of transformers names."""
    kept = {"inv_freq", "original_inv_freq"}
    for module in model.modules():
        kept |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                keeps_type = dtype is None or not buffer.is_floating_point() or name in kept
                module._buffers[name] = buffer.to(device, buffer.dtype if keeps_type else dtype)


def restore_forward(model: torch.nn.Module) -> None:
    """Takes away what accelerate has put around forward(): autocast, and results in fp32. Its unwrap_model() would also take
    away a forward() that the program has given the model, as TRL does."""
    own = vars(model).pop("_original_forward", None)
    if own is not None:
        vars(model)["forward"] = own


def cast_inputs(model: torch.nn.Module, dtype: torch.dtype) -> None:
    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(cast(value, dtype) for value in args), {name: cast(value, dtype) for name, value in kwargs.items()}

    keep_hooks(model, model.register_forward_pre_hook(before, with_kwargs=True))


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, tuple):
        return type(value)(*(cast(item, dtype) for item in value))
    return {key: cast(item, dtype) for key, item in value.items()} if type(value) is dict else value
