# SPDX-License-Identifier: Apache-2.0
"""Hooks of a module that say when its weights are needed and no longer needed, and when its backward pass begins."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hoist import _hoist
from hoist.torch.model.graphs import outside_of_graphs
from hoist.torch.model.units import reads_weights_in_backward, tensors_in
from hoist.torch.model.wrapped import keep_hooks
from hoist.torch.passes.passes import Passes
from hoist.torch.passes.turns import FORWARD, modules_on_stack


@dataclass
class Call:
    """One call of a module that has hooks, under way."""

    hook: ModuleHook
    entered: list[int] = field(default_factory=list)  # units
    input_hooks: list[tuple[int, torch.Tensor, Any]] = field(default_factory=list)  # unit, input, handle of the hook on it
    made_before: set[Any] = field(default_factory=set)  # the graph's nodes that made what it was given
    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])  # around it: the call is in an except block


def _nodes_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The graph's nodes that made these tensors and, for views, the tensors that they show. After a program has changed a view
    in place, the graph leads to the latter, and the node that made the view is not in it."""
    views_and_bases = ((t, t._base) for t in tensors if t.grad_fn is not None)
    return {t.grad_fn for both in views_and_bases for t in both if t is not None} - {None}


def _begins_graph(tensor: torch.Tensor) -> bool:
    """Whether the tensor's gradient may come before others of the call that it is given to are done: nothing made the tensor,
    or another thread did, whose nodes autograd numbers apart."""
    return tensor.grad_fn is None or tensor.grad_fn._sequence_nr() >= torch.autograd._get_sequence_nr()


def _is_nested(module: nn.Module) -> bool:
    """Whether the module calls itself."""
    return sum(each is module for each in modules_on_stack(sys._getframe())) > 1


class ModuleHook:
    """The hooks of one module, and the units that its calls need.

    torch.compile does not look into them: a graph ends before a hook and another begins after it.
    """

    def __init__(self, passes: Passes, unit_manager: _hoist.UnitManager, module: nn.Module, units: list[int], is_root: bool):
        self.passes = passes
        self.unit_manager = unit_manager
        self.units = list(units)
        self.reference_units: list[int] = []  # of calls without gradients, besides
        self.is_root = is_root
        self.module = module
        self.reads_in_backward = reads_weights_in_backward(module)
        self.was_called = False
        # Before the program's hooks, which may read weights, as those of torch.nn.utils.weight_norm do.
        keep_hooks(module, module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True),
                   module.register_forward_hook(self.after, with_kwargs=True, always_call=True))
        passes.own_forwards.add(module)

    def __reduce_ex__(self, _: Any) -> Any:
        if not self.unit_manager.is_open:
            raise _hoist.UsageError("a model whose engine was closed is not copied or pickled: it has no values. Load another "
                                    "one; or give this one values by load_state_dict(state, assign=True), and call it, or its "
                                    "state_dict(), before it is copied")
        raise _hoist.UsageError("a wrapped model cannot be copied or pickled: its weights are in the engine's memory. Save or "
                                "copy engine.state_dict(), or call engine.export(directory)")

    def joins_call(self, unit: int) -> None:
        """The module's call is under way already, and its hooks are new: from now on it counts as announced."""
        self.unit_manager.enter(unit)
        self.passes.calls.append(Call(self, [unit]))

    @outside_of_graphs
    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passes, unit_manager = self.passes, self.unit_manager
        if not unit_manager.is_open:
            if passes.parameters.release_closed():
                return
            unit_manager.require_awake()
        passes.turns.require(FORWARD)
        self.was_called = True
        if passes.forward_of_all is not None:
            if self.units and not self.is_root:
                passes.forward_of_all.reaches(self.units)
        else:
            if passes.without_history:
                passes.refuse_reentrant(self.units)
            if not passes.calls or (self.is_root and not _is_nested(module)):
                passes.enter_outermost(module)
        call = Call(self)
        passes.calls.append(call)
        task = torch._C._current_graph_task_id()  # -1: none, so that this is no recomputation
        if task != -1:
            unit_manager.end_recomputations()
        for unit in self.units if torch.is_grad_enabled() else self.units + self.reference_units:
            unit_manager.enter(unit)
            call.entered.append(unit)
        if not torch.is_grad_enabled():
            return
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        call.made_before = _nodes_of(inputs)
        begins_graph = bool(inputs) and (_begins_graph(inputs[0]) if task == -1 else inputs[0].grad_fn is None)
        # A recomputation may need weights between the gradients of its inputs: the last of them ends it.
        watched = [t for t in inputs if t.grad_fn is None] if begins_graph and task != -1 else inputs[:1]
        for unit in call.entered if watched else ():
            hook = unit_manager.input_hook(unit, begins_graph, task, len(watched))
            for tensor in watched:
                handle = tensor.register_hook(hook)
                call.input_hooks.append((unit, tensor, handle))
                if begins_graph:  # it may be the program's, and used again
                    passes.input_hooks.setdefault(tensor, set()).add(handle)

    @outside_of_graphs
    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        passes, unit_manager = self.passes, self.unit_manager
        if not passes.calls or not passes.turns.is_free_or_mine:
            return None  # this call was refused
        forward_of_all = passes.forward_of_all
        call = passes.calls.pop() if passes.calls[-1].hook is self else Call(self, handled=None)
        entered = call.entered
        outermost = not passes.calls and forward_of_all is None
        replaced = None
        failed = output is None and sys.exc_info()[1] not in (None, call.handled)
        counted: set[int] = set()  # units for which this is a call with a backward pass to come
        if torch.is_grad_enabled() and not failed:
            tensors = list(tensors_in(output))
            # An input that the module returns unchanged gets its gradient long after the call's own backward pass.
            nodes = _nodes_of(tensors) - call.made_before
            if not tensors and not self.is_root:
                passes.uses.keep(entered, type(module).__name__)
            for unit in entered if nodes else ():
                if unit_manager.backward_of_call(unit):
                    counted.add(unit)
                if not self.reads_in_backward:
                    continue
                hook = unit_manager.backward_hook(unit)
                for node in nodes:
                    node.register_prehook(hook)
            if outermost:
                for node in nodes:
                    node.register_prehook(passes.backward_begins)
            if forward_of_all is not None and entered and not self.is_root:
                replaced = forward_of_all.cut(entered, output)
        # The gradient of what a call was given is its end, and must not be taken for that of another call: a module may return
        # its input, and a recomputation (use_reentrant=False) is given the tensor that the call before it was given.
        for unit, given, handle in call.input_hooks:
            if unit not in counted:
                handle.remove()
                passes.input_hooks.get(given, set()).discard(handle)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # copies of these weights, which the step will change, beyond every budget
        if forward_of_all is not None:
            forward_of_all.leave(entered)
            return replaced
        for unit in entered:
            unit_manager.leave(unit)
        if outermost:
            passes.leave_outermost(failed)
        return None
