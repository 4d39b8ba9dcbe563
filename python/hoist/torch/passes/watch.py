# SPDX-License-Identifier: Apache-2.0
"""Finds uses of weights that no hook announces, in the first pass of each kind.

A model may use a parameter outside of the module that holds it: `F.linear(x, self.embedding.weight)`. Nothing calls the
holder then, and its weights would not be gathered. So the first passes run under a dispatch mode that sees the storage of every
operator's tensors; what it finds is gathered there and then, and known from then on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hoist import _hoist
from hoist.torch.model import unit_tensors
from hoist.torch.model.graphs import outside_of_graphs
from hoist.torch.model.units import Model, called_parts

if TYPE_CHECKING:
    from hoist.torch.model.parameters import Parameters
    from hoist.torch.passes.hooks import ModuleHook
    from hoist.torch.passes.passes import Passes

_log = logging.getLogger("hoist")
_BACKWARD = "backward"  # a kind of pass, beside those of the engine
_LOST_IN_FORWARD = ("in forward() (as nn.Embedding does with max_norm), and the change would be lost with the weight's memory: "
                    "leave it out, or make it between steps, by engine.write() or in engine.gathered(names, modify=True)")
# Gemma 3n clamps weights in each pass, to bounds that they are within. The operators that write, and those that return the same.
_CLAMPS = {getattr(getattr(torch.ops.aten, f"{name}_"), of): getattr(getattr(torch.ops.aten, name), of)
           for name in ("clamp", "clamp_min", "clamp_max") for of in ("default", "Tensor")}
_LOST_IN_BACKWARD = ("in the backward pass, as a hook does that steps an optimizer (register_post_accumulate_grad_hook): "
                     "engine.step() updates the weights. Remove the hook")


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _captured_by(values: list[Any]) -> Iterator[torch.Tensor]:
    """The tensors in the closures of functions, and the parameters of modules there that the functions name."""
    found = list(values)  # grows by what the closures hold
    seen = set(map(id, found))
    for function in found:
        for cell in getattr(function, "__closure__", None) or ():
            try:
                contents = [each for each in tree_leaves(cell.cell_contents) if id(each) not in seen]
            except ValueError:  # an empty cell
                continue
            found += contents
            seen.update(map(id, contents))
            yield from (content for content in contents if isinstance(content, torch.Tensor))
            for module in contents:
                if isinstance(module, nn.Module):
                    yield from (p for name, p in module.named_parameters()
                                if not module._modules or name.split(".")[0] in function.__code__.co_names)


class Watch(TorchDispatchMode):
    """Calls `missing(unit)` before an operator gets a tensor of a unit that is not gathered. `calls` are then the modules whose
    calls are under way, innermost last. Units that operators use are added to `seen`."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, parameters: Parameters, is_up: Callable[[int], bool], missing: Callable[[int], None],
                 calls: list[nn.Module], in_backward: bool = False, thread: int | None = None):
        TorchDispatchMode.__init__(self)
        self._parameters = parameters
        self._unit_of = parameters.tensors.unit_of
        self._is_up = is_up
        self._missing = missing
        self._calls = calls
        self._thread = thread  # whose calls they are; None: of any
        self._in_backward = in_backward
        self._hooks: list[Any] = []
        self._eager: Any = None
        self._is_recorded = False  # whether a backward pass will follow

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
        self._is_recorded = torch.is_grad_enabled()
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
        values = tree_leaves((args, kwargs))
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator: its functions use tensors, too, which Watch does not see inside of them
            captured = list(_captured_by(values))
            if any(each.requires_grad for each in captured) and (self._is_recorded or any(map(_requires_grad, values))):
                raise _hoist.UsageError(f"a function that {func} calls uses tensors that need gradients, and PyTorch gives them "
                                        "none while hoist watches the first passes: add what it computes to the scores of an "
                                        "ordinary attention (attn_mask=...), or freeze those parameters")
            values += captured
        units = [unit for value in values if isinstance(value, torch.Tensor)
                 and (unit := self._unit_shown_by(value)) is not None]
        self._parameters.watched_units.update(units)
        for unit in units:
            if not self._is_up(unit):
                self._missing(unit)
        written = self._weights_written_by(func, args, kwargs) if units and schema is not None and schema.is_mutable else []
        if not all(self._is_up(unit) for unit in units):  # one has given way to another
            raise _hoist.BudgetError(f"{func} uses the weights of {len(set(units))} units at once, and the memory for gathered "
                                     "weights is too small for them: raise stage3_max_live_parameters, or hoist.device_memory")
        if written and func is torch.ops.aten.set_.source_Tensor:
            # torch.nn.utils.parametrize calls it in each pass, with the memory that a weight has already.
            self._parameters.set_in_passes.add(id(written[0]))
        elif written:
            if func not in _CLAMPS or not torch.equal(_bytes(_CLAMPS[func](*args, **kwargs)), _bytes(written[0])):
                self._refuse_write(func, written[0])
            self._parameters.say_clamped(written[0])
            return written[0]
        return func(*args, **kwargs)

    def _weights_written_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        changed = [value for index, argument in enumerate(func._schema.arguments) if argument.is_write
                   # torch._foreach_add_() takes lists, as optimizers do on accelerators
                   for value in tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))]
        return [value for value in changed if isinstance(value, torch.Tensor) and self._unit_shown_by(value) is not None]

    def _refuse_write(self, func: Any, weight: torch.Tensor) -> NoReturn:
        raise _hoist.UsageError(f"{func} changes parameter '{self._parameters.name_of(weight)}' "
                                + (_LOST_IN_BACKWARD if self._in_backward else _LOST_IN_FORWARD))

    def _unit_shown_by(self, tensor: torch.Tensor) -> int | None:
        try:
            return self._unit_of(tensor)
        except (RuntimeError, NotImplementedError):  # tensors without memory
            return None


class UnannouncedUses:
    """Finds the units that are used where no hook announces it, in the first pass of each kind, and gathers them then and in
    later passes. `add_hook` gives a module whose calls use a unit a hook; once."""

    def __init__(self, passes: Passes, unit_manager: _hoist.UnitManager, cut: Model, parameters: Parameters,
                 add_hook: Callable[[nn.Module, int], ModuleHook]):
        self._passes = passes
        self._unit_manager = unit_manager
        self._cut = cut
        self._parameters = parameters
        self._add_hook = add_hook
        # Which calls have been watched: the kind of their pass, the outermost module (None: all calls of the pass), and whether
        # gradients were recorded. A training pass may contain a reference model's calls, which use other weights.
        self._known: set[tuple[Any, nn.Module | None, bool]] = set()
        self._outermost: nn.Module | None = None  # of the call under way, or the last one
        self._with_gradients = True  # that call
        self._watch: Watch | None = None
        self._calls: list[nn.Module] = []  # modules under way, innermost last
        self._kept: set[str] = set()  # units whose modules return no tensors
        self._found: list[tuple[int, ModuleHook | None]] = []  # in this call; used by calls of a module, or of the unit's parts
        self._always: list[int] = []  # units that something outside of any module uses
        self._always_before = 0  # how many of them the pass under way began with

    # --- passes ------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._always_before = len(self._always)
        for unit in self._always:
            self._unit_manager.enter(unit)

    def forget_pass(self) -> None:
        """Forgets the units that the pass under way has found to be used outside of any module."""
        del self._always[self._always_before:]

    @property
    def is_watched(self) -> bool:
        """Whether the call under way is one of those that are watched."""
        return self._watch is not None or self._key_of_call not in self._known

    @property
    def _key_of_call(self) -> tuple[Any, nn.Module | None, bool]:
        return self._unit_manager.current_pass, self._outermost, self._with_gradients

    def watch_next(self) -> None:
        """A pass of this kind has failed, perhaps for a use of weights that none before had."""
        self._forget(self._unit_manager.current_pass)

    def _forget(self, kind: Any) -> None:
        self._known = {known for known in self._known if known[0] != kind}

    def step_skipped(self) -> None:
        """Perhaps for a use of weights that no pass before had: before PyTorch 2.13 they are NaN, and no error."""
        if not unit_tensors.CAN_REFUSE:
            self._known.clear()

    def begin_call(self, module: nn.Module) -> None:
        """An outermost call begins. A program may call parts of the model one after the other in a pass."""
        self._outermost, self._with_gradients = module, torch.is_grad_enabled()
        if self._watch is None and self.is_watched and not torch.compiler.is_compiling():
            self._watch = self._watch_for(self._use)
            self._watch.__enter__()

    def end_call(self, failed: bool) -> None:
        if self._watch is not None:
            self._end_watch()
            if not failed:
                self._known.add(self._key_of_call)
                self._announce_likes()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def give_up(self) -> None:
        """Leaves a call behind that was interrupted."""
        with contextlib.suppress(Exception):  # a mode of the program's own may lie above it
            self._end_watch()
        self._watch = None

    def of_first_forward(self) -> contextlib.AbstractContextManager[None]:
        """Around the first micro-batch's loss, in vertical order."""
        return self._once(_hoist.Pass.train, self._use)

    @contextlib.contextmanager
    def of_backward(self) -> Iterator[None]:
        """Around a backward pass. Where units give way to each other for want of memory, later passes are watched, too."""
        with self._once(_BACKWARD, self._use_in_backward):
            self._unit_manager.watch_backward((_BACKWARD, None, True) not in self._known)
            try:
                yield
            except BaseException:  # as in watch_next()
                self._forget(_BACKWARD)
                raise
            finally:
                self._unit_manager.watch_backward(False)
        if self._unit_manager.gave_way():
            self._forget(_BACKWARD)

    @contextlib.contextmanager
    def _once(self, kind: Any, missing: Callable[[int], None]) -> Iterator[None]:
        """Watches the first pass of a kind, as far as it ends without an error."""
        if (kind, None, True) in self._known:
            yield
            return
        with self._watch_for(missing):
            yield
        self._known.add((kind, None, True))
        self._with_gradients = True
        self._announce_likes()

    def _watch_for(self, missing: Callable[[int], None]) -> Watch:
        """Until its end, `missing` is told of units that operators use and nothing has gathered for that use. In forward() a unit
        may still be there after its own call, as memory allows; in the backward pass gradients are what uses it last."""
        self._calls.clear()
        in_backward = missing == self._use_in_backward
        has_it = self._unit_manager.is_up if in_backward else self._unit_manager.is_held

        def is_announced(unit: int) -> bool:
            return has_it(unit) and self._unit_manager.is_up(unit) and not self._is_left_over(unit)

        # In vertical order other micro-batches' calls are under way in their threads.
        thread = None if self._passes.forward_of_all is None else threading.get_ident()
        return Watch(self._parameters, is_announced, missing, self._calls, in_backward, thread)

    # --- uses --------------------------------------------------------------------------------------------------------

    def _is_left_over(self, unit: int) -> bool:
        forward_of_all = self._passes.forward_of_all
        return forward_of_all is not None and forward_of_all.has_left(unit)

    def _use(self, unit: int) -> None:
        """An operator uses weights that no hook has gathered."""
        if self._unit_manager.is_held(unit) and not self._is_left_over(unit):
            self._unit_manager.bring_back(unit)
            return
        name = self._cut.units[unit].name
        if (part := self._part_under_way(unit)) is not None:
            _log.info("unit '%s' is used by calls of its parts, such as its %s", name, type(part).__name__)
            hooks = {id(each): self._add_hook(each, unit) for each in (*called_parts(self._cut.units[unit].module), part)}
            hooks[id(part)].joins_call(unit)
            self._found.append((unit, None))
            return
        self._unit_manager.share(unit)
        if self._passes.calls:
            call = self._passes.calls[-1]
            call.hook.units.append(unit)
            call.entered.append(unit)
            self._found.append((unit, call.hook))
            forward_of_all = self._passes.forward_of_all
            for other in forward_of_all.other_calls_of(call.hook) if forward_of_all is not None else ():
                self._unit_manager.enter(unit)
                other.entered.append(unit)
            _log.info("unit '%s' is also used in %s", name,
                      "the model's own forward()" if call.hook.is_root else "another module")
        else:
            self._always.append(unit)
            _log.warning("unit '%s' is used outside of every module's forward(): it stays gathered for whole passes", name)
        self._unit_manager.enter(unit)

    def _announce_likes(self) -> None:
        """Units were used although nothing calls their modules. Announces units like them that were never called: a later pass
        may use these in the same way, such as experts that got no token yet. After a call without gradients it also announces
        the unit that PEFT uses in such a unit's place for a reference model."""
        def is_called(unit: int) -> bool:
            return self._add_hook(self._cut.units[unit].module, unit).was_called

        for unit, user in self._found:
            likes = [] if is_called(unit) else [other for other in self._cut.like(unit) if not is_called(other)]
            replaced = [] if self._with_gradients else self._cut.in_its_place(unit)
            for other in likes + replaced:
                if user is None:
                    for part in called_parts(self._cut.units[other].module):
                        self._add_hook(part, other)
                elif other not in user.units + user.reference_units:
                    self._unit_manager.share(other)
                    (user.units if other in likes else user.reference_units).append(other)
        self._found.clear()

    def _part_under_way(self, unit: int) -> nn.Module | None:
        """The outermost module of the unit that is being called, where the call is not inside of one that has hooks."""
        parts = {id(part) for part in self._cut.units[unit].modules}
        hooked = {id(call.hook.module) for call in self._passes.calls}
        outermost = None
        for module in reversed(self._calls):
            if id(module) in hooked:
                break
            if id(module) in parts:
                outermost = module
        return outermost

    def _use_in_backward(self, unit: int) -> None:
        if self._unit_manager.is_held(unit):
            self._unit_manager.bring_back(unit)
            return
        if self._unit_manager.current_pass is None:
            raise _hoist.UsageError("a second backward pass through a graph whose pass has ended with its first one, as of a "
                                    "gradient penalty: call torch.autograd.grad() before backward(), and for inputs only")
        self._unit_manager.share(unit)
        self._unit_manager.enter(unit)
        self._always.append(unit)
        _log.warning("unit '%s' is used by a backward pass that its output does not lead to: it stays gathered for whole passes",
                     self._cut.units[unit].name)

    def keep(self, units: list[int], module: str) -> None:
        """A call returned no tensor that shows when its backward pass begins: its units stay gathered until the pass ends."""
        for unit in units:
            name = self._cut.units[unit].name
            if name not in self._kept and any(p.requires_grad for p in self._cut.units[unit].parameters.values()):
                self._kept.add(name)
                _log.warning("%s returns no tensors, so nothing shows when its backward pass begins: unit '%s' stays gathered "
                             "for whole passes", module, name)
            if name in self._kept:
                self._unit_manager.enter(unit)
