# SPDX-License-Identifier: Apache-2.0
"""Floating arguments of a model's forward() become its 16-bit type: for fp16.auto_cast of DeepSpeed's file, and for Trainer."""

from __future__ import annotations

from typing import Any

import torch

from hoist.torch.model.wrapped import keep_hooks


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
