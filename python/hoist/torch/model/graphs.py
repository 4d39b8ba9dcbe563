# SPDX-License-Identifier: Apache-2.0
"""torch.compile and what must not be compiled, without importing torch._dynamo: with what that imports it takes 150 MB beside a
model in memory, which a program that compiles nothing can do without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hoist import _hoist

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_of_graphs(function: _Function) -> _Function:
    """Like torch.compiler.disable(): graphs end before the function, and functions that it calls are not compiled."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):  # PyTorch before 2.7
        disabled: _Function = torch.compiler.disable(function)
        return disabled
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it is about what is in memory"
    return function


def refuse_graphs(model: nn.Module) -> None:
    """Modules that torch.compile or torch.jit made already: they would run without the hooks that gather weights."""
    compiled: Any = () if "torch._dynamo" not in sys.modules else torch._dynamo.eval_frame.OptimizedModule
    for name, module in model.named_modules():
        name = name or type(module).__name__
        if isinstance(module, compiled) or module._compiled_call_impl is not None:
            raise _hoist.UsageError(
                f"module '{name}' was compiled before it was wrapped: its graphs know nothing of the hooks that "
                "gather weights. Wrap the model first, and compile it then (torch.compile(model), model.compile(), or "
                "compile_units() of the engine)")
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise _hoist.UsageError(f"module '{name}' was made by torch.jit, and has no hooks that could gather weights: wrap "
                                    "the module as it is in Python")
