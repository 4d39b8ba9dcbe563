# SPDX-License-Identifier: Apache-2.0
"""What a module's calls tell the engine: its weights are needed, are no longer needed, and when its backward pass begins."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hoist.torch.units import tensors_in

if TYPE_CHECKING:
    from hoist.torch.engine import Engine


class ModuleHook:
    """The hooks of one module, and the units that its calls need.

    torch.compile does not look into them: a graph ends before a hook and another begins after it.
    """

    def __init__(self, engine: Engine, module: nn.Module, units: list[int], is_root: bool):
        self.engine = engine
        self.units = list(units)
        self.entered: list[list[int]] = []  # of calls under way, innermost last
        self.is_root = is_root
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    @torch.compiler.disable
    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        engine, lift = self.engine, self.engine._lift
        if not engine._calls:
            engine._enter_outermost()
        engine._calls.append(self)
        entered: list[int] = []
        self.entered.append(entered)
        for unit in self.units:
            lift.enter(unit)
            entered.append(unit)
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                for unit in entered:
                    tensor.register_hook(lift.input_hook(unit, tensor.grad_fn is None))
                return

    @torch.compiler.disable
    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        engine, lift = self.engine, self.engine._lift
        if engine._calls and engine._calls[-1] is self:
            engine._calls.pop()
        outermost = not engine._calls
        entered = self.entered.pop() if self.entered else []
        failed = output is None and sys.exc_info()[0] is not None
        if torch.is_grad_enabled() and not failed:
            nodes = {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None}
            for unit in entered if nodes else ():
                lift.backward_of_call(unit)
                if unit in engine._units_without_backward:
                    continue
                hook = lift.backward_hook(unit)
                for node in nodes:
                    node.register_prehook(hook)
            if outermost:
                for node in nodes:
                    node.register_prehook(engine._backward_begins)
        for unit in entered:
            lift.leave(unit)
        if outermost:
            engine._leave_outermost(failed)
