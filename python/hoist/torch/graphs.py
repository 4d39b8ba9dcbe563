# SPDX-License-Identifier: Apache-2.0
"""torch.compile and what must not be compiled, without importing torch._dynamo: with what that imports it takes 150 MB beside a
model in memory, which a program that compiles nothing can do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_of_graphs(function: _Function) -> _Function:
    """What torch.compiler.disable() makes of a function: graphs end before it, and what it calls is not compiled either."""
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
