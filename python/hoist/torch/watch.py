# SPDX-License-Identifier: Apache-2.0
"""Finds uses of weights that no hook announces, in the first pass of each kind.

A model may use a parameter outside of the module that holds it: `F.linear(x, self.embedding.weight)`. Nothing calls the
holder then, and its weights would not be gathered. So the first passes run under a dispatch mode that sees the storage of every
operator's tensors; what it finds is gathered there and then, and known from then on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hoist import _hoist
from hoist.torch.graphs import outside_of_graphs


class Watch(TorchDispatchMode):
    """Calls `missing(unit)` before an operator gets a tensor of a unit that is not gathered. `calls` are then the modules whose
    calls are under way, innermost last. Units that operators use are added to `seen`."""

    def __init__(self, unit_of: Callable[[torch.Tensor], int | None], is_up: Callable[[int], bool],
                 missing: Callable[[int], None], calls: list[nn.Module], seen: set[int], thread: int | None = None):
        TorchDispatchMode.__init__(self)
        self._unit_of = unit_of
        self._is_up = is_up
        self._missing = missing
        self._calls = calls
        self._thread = thread  # whose calls they are; None: of any
        self._seen = seen
        self._hooks: list[Any] = []
        self._eager: Any = None

    def __enter__(self) -> Watch:
        def is_watched() -> bool:
            return self._thread is None or self._thread == threading.get_ident()

        def push(module: nn.Module, _: Any) -> None:
            if is_watched():
                self._calls.append(module)

        def pop(module: nn.Module, _: Any, __: Any) -> None:
            if is_watched() and self._calls and self._calls[-1] is module:
                self._calls.pop()

        self._hooks = [register_module_forward_pre_hook(push), register_module_forward_hook(pop, always_call=True)]
        # torch.compile does not compile under a dispatch mode; PyTorch 2.11 would not compile what it saw there later, either.
        if "torch._dynamo" in sys.modules:
            self._eager = torch.compiler.set_stance("force_eager")
            self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._eager is not None:
            self._eager.__exit__(*error)
            self._eager = None
        for hook in self._hooks:
            hook.remove()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's own way would import torch._dynamo

    @outside_of_graphs
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        units = [unit for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
                 and (unit := self._unit_shown_by(value)) is not None]
        self._seen.update(units)
        for unit in units:
            if not self._is_up(unit):
                self._missing(unit)
        if units and func._schema.is_mutable and func is not torch.ops.aten.set_.source_Tensor:
            self._refuse_writes(func, args)
        if not all(self._is_up(unit) for unit in units):  # one has given way to another
            raise _hoist.BudgetError(f"{func} uses the weights of {len(set(units))} units at once, and the memory for gathered "
                                     "weights is too small for them: raise stage3_max_live_parameters, or hoist.device_memory")
        return func(*args, **kwargs)

    def _refuse_writes(self, func: Any, args: tuple[Any, ...]) -> None:
        """torch.nn.utils.parametrize calls set_() with the memory that a weight has already."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, torch.Tensor) and self._unit_shown_by(value) is not None:
                raise _hoist.UsageError(f"{func} changes a weight of shape {list(value.shape)} in forward(), and the change "
                                        "would be lost with the weight's memory. nn.Embedding does that with max_norm: leave it "
                                        "out")

    def _unit_shown_by(self, tensor: torch.Tensor) -> int | None:
        try:
            return self._unit_of(tensor)
        except (RuntimeError, NotImplementedError):  # tensors without memory
            return None
