# SPDX-License-Identifier: Apache-2.0
"""The engine in the place of its model: a program may call it, read and set attributes through it, and ask where it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hoist import _hoist
from hoist.torch.deepspeed.engine_names import ELSEWHERE

if TYPE_CHECKING:
    from hoist.torch.passes.passes import Passes

# PyTorch's error names the object by its __qualname__ where a program makes it a child of a module, as DeepSpeed's engine can be.
_NO_CHILD = ("Engine (wrap() has changed the model in place: leave the model where it is, and keep the engine beside it, or as "
             "object.__setattr__(parent, 'model', engine))")
_Self = TypeVar("_Self", bound="StandsForModel")


class StandsForModel:
    """Mixed into Engine."""

    module: nn.Module
    device: torch.device
    _passes: Passes
    _is_made = False  # until then all attributes that are set are the engine's

    @property
    def _modules(self) -> dict[str, nn.Module | None]:
        """accelerate's unwrap_model() looks through these."""
        return self.module._modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._passes.own_forwards.follow_classes()  # before PyTorch looks for the forward() of this call
        return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A call, with the hooks that gather weights: the model's own forward() would pass them by."""
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if name in ELSEWHERE and not hasattr(module, name):
            raise AttributeError(f"hoist's engine has no {name}: {ELSEWHERE[name]}")
        if name == "__qualname__" and sys._getframe(1).f_code.co_name == "typename":  # PyTorch makes its error
            return _NO_CHILD
        if name.startswith("_") or module is None:
            raise AttributeError(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute in the model if only the model has it, as it is read from there."""
        of_engine = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if of_engine or not self._is_made or not hasattr(self.module, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def train(self: _Self, mode: bool = True) -> _Self:
        self.module.train(mode)
        return self

    def eval(self: _Self) -> _Self:
        return self.train(False)

    def to(self: _Self, *args: Any, **kwargs: Any) -> _Self:
        """For `model.to(device)` in loops that were written for PyTorch. Errors: UsageError for another device or type than the
        weights have."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and not self._is_on(device):
            raise _hoist.UsageError(f"the engine computes on {self.device}, and its weights lie in its memory there: device=... "
                                    f"of wrap() chooses another, such as {device}")
        if dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in self.module.parameters()):
            raise _hoist.UsageError(f"the type of the weights is chosen when the model is wrapped: build it in {dtype}, or set "
                                    "bf16.enabled or fp16.enabled")
        return self

    def cuda(self: _Self, device: torch.device | int | None = None) -> _Self:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self: _Self) -> _Self:
        return self.to("cpu")

    def float(self: _Self) -> _Self:
        return self.to(torch.float32)

    def half(self: _Self) -> _Self:
        return self.to(torch.float16)

    def bfloat16(self: _Self) -> _Self:
        return self.to(torch.bfloat16)

    def _is_on(self, device: torch.device) -> bool:
        return device.type == self.device.type and device.index in (None, self.device.index or 0)
