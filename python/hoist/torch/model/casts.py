# SPDX-License-Identifier: Apache-2.0
"""Casts to a model's 16-bit type: its buffers, floating arguments of its forward() (for fp16.auto_cast of DeepSpeed's file, and
for Trainer), and the weights of a model that is compared with an engine's."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hoist.torch.model.wrapped import engine_of, keep_hooks, open_engines

_casts_of_inputs: weakref.WeakKeyDictionary[torch.nn.Module, torch.utils.hooks.RemovableHandle] = weakref.WeakKeyDictionary()


def as_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.bfloat16:
        return values.to(dtype)
    # The engine's rule, halves away from zero: what the forward pass computes with.
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether a module itself has quantized weights: parameters or saved buffers of 1 byte, or of 16 or 32 bits with packed
    codes. Its scales then have the type that its kernels take. Bools are masks, int64 has positions, and a counter has no
    dimensions."""
    values = [*module._parameters.values(), *(buffer for name, buffer in module._buffers.items()
                                              if name not in module._non_persistent_buffers_set)]
    return any(v is not None and v.dim() > 0 and v.dtype not in (torch.bool, torch.int64)
               and (v.dtype.itemsize == 1 or not (v.is_floating_point() or v.is_complex())) for v in values)


def cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Gives a model the weights that an engine would compute with, except where an engine has them. Quantized ones stay; some
    of them are a subclass of Parameter that stores codes in a floating-point type. Returns how many had another type."""
    owned = {number for engine in open_engines() for number in engine._parameters.by_id}
    others = {id(p): p for module in model.modules() if engine_of(module) is None and not is_quantized(module)
              for p in module._parameters.values()
              if type(p) is torch.nn.Parameter and type(p.data) is torch.Tensor and p.is_floating_point() and p.dtype != dtype
              and id(p) not in owned and not hasattr(p, "initial_values")}
    for parameter in others.values():
        parameter.data = as_type(parameter.data.float(), dtype)
    return len(others)


def place_buffers(model: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None,
                  keeps_types: Callable[[torch.nn.Module], bool] = lambda _: False) -> None:
    """Moves buffers to `device`, if there is one, in their type if the configuration says one. Rotary frequencies keep theirs:
    rounded to 16 bits they would be other positions. So do those that a model of transformers names, and those of modules for
    which `keeps_types` is true."""
    kept = {"inv_freq", "original_inv_freq"}
    for module in model.modules():
        kept |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    for module in model.modules():
        keeps_all = dtype is None or keeps_types(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                keeps_type = keeps_all or not buffer.is_floating_point() or name in kept
                module._buffers[name] = buffer.to(device or buffer.device, buffer.dtype if keeps_type else dtype)


def has_own_weights(model: torch.nn.Module) -> bool:
    """Whether any module with parameters belongs to no engine."""
    return any(engine_of(module) is None for module in model.modules() if module._parameters)


def restore_forward(model: torch.nn.Module) -> None:
    """Takes away what accelerate has put around forward(): autocast, and results in fp32. Its unwrap_model() would also take
    away a forward() that the program has given the model, as TRL does."""
    from accelerate.utils.operations import ConvertOutputsToFp32  # type: ignore[import-untyped]

    own = vars(model).pop("_original_forward", None)
    if own is None:
        return
    # Before accelerate 1.12, a second accelerator wraps the first one's forward() and takes it for the model's own.
    function = getattr(own, "__func__", own)
    while isinstance(converts := getattr(function, "__wrapped__", None), ConvertOutputsToFp32):
        function = getattr(converts.model_forward, "__wrapped__", converts.model_forward)  # below autocast
    vars(model)["forward"] = types.MethodType(function, model) if hasattr(own, "__func__") else function


def cast_inputs(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Replaces an earlier cast."""
    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(cast(value, dtype) for value in args), {name: cast(value, dtype) for name, value in kwargs.items()}

    if model in _casts_of_inputs:
        _casts_of_inputs.pop(model).remove()
    _casts_of_inputs[model] = model.register_forward_pre_hook(before, with_kwargs=True)
    keep_hooks(model, _casts_of_inputs[model])


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, tuple):
        return type(value)(*(cast(item, dtype) for item in value))
    return {key: cast(item, dtype) for key, item in value.items()} if type(value) is dict else value
