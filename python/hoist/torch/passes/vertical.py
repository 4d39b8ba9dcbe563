# SPDX-License-Identifier: Apache-2.0
"""Vertical order: each unit works through all micro-batches of a step before the next unit does.

Forward, each micro-batch has a thread, and one thread runs at a time. A thread hands over where its micro-batch reaches
the next unit, so that a unit is loaded once for all of them. Every unit's output is cut from autograd's graph there: what
follows sees a tensor without history. Backward, the pieces between the cuts are differentiated from the last one to the
first, each for all micro-batches, with the gradient that the later pieces left at the cut.

Attributes of modules are those of the micro-batch whose turn it is (attributes.py).

A tensor that leaves a unit beside its output (kept in an attribute, say) is not cut. Its gradient would need the memory of
that unit's gradients while another unit's are not complete, and is refused. So are gradients of micro-batches that use different
layers, because the pieces from the last one on are then not of the same unit.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hoist import _hoist
from hoist.torch.devices import carried_state
from hoist.torch.passes.attributes import Attributes
from hoist.torch.passes.passes import Passes

if TYPE_CHECKING:
    from hoist.torch.passes.hooks import Call, ModuleHook

_Batch = TypeVar("_Batch")


def train(passes: Passes, unit_manager: _hoist.UnitManager, module: nn.Module, device: torch.device,
          micro_batches: Sequence[_Batch], loss_of: Callable[[_Batch], torch.Tensor]) -> list[torch.Tensor]:
    """Forward and backward pass of all micro-batches of a step. Returns their losses, without history."""
    attributes = Attributes(module, len(micro_batches))
    forward = passes.forward_of_all = Forward(passes, unit_manager, attributes, len(micro_batches))
    try:
        with passes.of_all_micro_batches():
            losses = forward.run(micro_batches, loss_of, device)
            passes.forward_of_all = None
            attributes.require_final()
            for loss in losses:
                passes.note_division(loss)
            detached = [loss.detach() for loss in losses]
            scaled = [passes.scale(loss) for loss in losses]
            del losses
            with passes.backward_of_all(forward.only_without_history):
                _differentiate(unit_manager, forward, scaled)
        attributes.end()
    except BaseException:
        attributes.undo()
        raise
    finally:
        passes.forward_of_all = None
        attributes.clear()  # an error's traceback holds it
    return detached


class _Cut(torch.autograd.Function):
    """A tensor of a piece, as later pieces see it. `graph` only makes autograd record the call."""

    @staticmethod
    def forward(ctx: Any, graph: torch.Tensor, piece: Piece, index: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.piece, ctx.index = piece, index
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.piece.add(ctx.index, gradient)
        return None, None, None, None


class Piece:
    """The results of one micro-batch between two cuts: the outputs of a unit's call, and their gradients so far."""

    def __init__(self, units: Sequence[int], require_own: Callable[..., None]):
        self.units = list(units)
        self._require_own = require_own
        self._outputs: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []

    def cut(self, value: Any) -> Any:
        """The value with every tensor that has a history replaced by one without."""
        return tree_map(functools.partial(self._cut_leaf, {}), value)

    def _cut_leaf(self, cuts: dict[int, torch.Tensor], leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.grad_fn is None:
                return leaf
            if id(leaf) not in cuts:
                leaf.grad_fn.register_prehook(self._require_own)  # a hook of the program's may have kept it
                self._outputs.append(leaf)
                self._gradients.append(None)
                graph = torch.empty(0, requires_grad=True, device="cpu")
                cuts[id(leaf)] = _Cut.apply(graph, self, len(self._outputs) - 1, leaf.detach())
            return cuts[id(leaf)]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            replaced = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                if hasattr(leaf, field.name):  # one with init=False may have no value yet
                    value = tree_map(functools.partial(self._cut_leaf, cuts), getattr(leaf, field.name))
                    object.__setattr__(replaced, field.name, value)
            return replaced
        return leaf

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def add(self, index: int, gradient: torch.Tensor) -> None:
        self._require_own()
        before = self._gradients[index]
        self._gradients[index] = gradient if before is None else before + gradient

    def differentiate(self) -> None:
        """The graph is freed with this piece's outputs, and not before: other pieces may share a part of it."""
        both = [(o, g) for o, g in zip(self._outputs, self._gradients, strict=True) if g is not None]
        self._outputs, self._gradients = [], []
        if both:
            outputs, gradients = zip(*both, strict=True)
            torch.autograd.backward(outputs, gradients, retain_graph=True)


def _require_own(unit: str, micro_batch: int, differentiated: list[int], *_: object) -> None:
    """Errors: UsageError where the gradient of another micro-batch's loss reaches what a unit has made for this one."""
    if differentiated[0] == micro_batch:
        return
    if differentiated[0] < 0:
        raise _hoist.UsageError("a backward pass inside of train_batch(): loss_of returns the loss, and its backward pass comes "
                                "after the forward passes of all micro-batches")
    raise _hoist.UsageError(
        f"the loss of micro-batch {differentiated[0]} depends on a tensor that unit '{unit}' has made for micro-batch "
        f"{micro_batch}. In vertical order micro-batches take turns within forward(), and share everything that is not an "
        "attribute of a module: a list, a dictionary or an object of the program's, such as one that a hook of a module fills. "
        "Keep the tensor in an attribute of a module, or return it from forward()")


class _Stopped(BaseException):
    """Ends the thread of a micro-batch after another one has failed."""


class Forward:
    """The forward passes of all micro-batches.

    Threading: one thread a micro-batch; all but the one whose turn it is wait in _hand_over().
    """

    def __init__(self, passes: Passes, unit_manager: _hoist.UnitManager, attributes: Attributes, count: int):
        self._passes = passes
        self._unit_manager = unit_manager
        self.attributes = attributes
        self.pieces: list[list[Piece]] = [[] for _ in range(count)]  # of each micro-batch, in the order of the calls
        self.differentiated = [-1]  # the micro-batch whose gradients are computed
        self.uncut: list[list[int]] = [[] for _ in range(count)]  # units of each that the next piece includes
        self._with_history: set[int] = set()  # units called with gradients recorded
        self._without_history: set[int] = set()  # under torch.no_grad()
        self._calls: list[list[Call]] = [[] for _ in range(count)]
        self._losses: list[torch.Tensor] = [torch.empty(0, device="cpu")] * count
        self._held: list[int] = []  # units that the round's first micro-batches have left, and its last one has not
        self._changed = threading.Condition()
        self._alive = list(range(count))
        self._turn = 0
        self._error: BaseException | None = None
        self._is_stopped = False

    def run(self, micro_batches: Sequence[_Batch], loss_of: Callable[[_Batch], torch.Tensor], device: torch.device,
            ) -> list[torch.Tensor]:
        carried = carried_state(device)

        def run_one(index: int) -> None:
            try:
                self._await_turn(index)
                with carried(), self._passes.uses.of_first_forward() if index == 0 else contextlib.nullcontext():
                    loss = loss_of(micro_batches[index])
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise _hoist.UsageError("train_batch(micro_batches, loss_of): loss_of returns the loss of a micro-batch, a "
                                            "tensor with one element and a history")
                self._losses[index] = loss
            except _Stopped:
                pass
            except BaseException as error:
                self._stop(error)
            finally:
                self._end(index)

        threads = [threading.Thread(target=contextvars.copy_context().run, args=(run_one, index), daemon=True,
                                    name=f"micro-batch {index}") for index in range(len(micro_batches))]
        self._run_all(threads)
        self._passes.turns.take_over()
        self._passes.calls = []
        error, self._error = self._error, None
        if error is not None:
            self.pieces.clear()  # the error's traceback holds this object
            self._losses.clear()
            try:
                raise error
            finally:
                del error
        self._leave_held()
        losses, self._losses = self._losses, []
        return losses

    def _run_all(self, threads: list[threading.Thread]) -> None:
        """Returns when all have ended. An interruption, or a thread that cannot be started, ends them at their next turns."""
        started = 0
        while True:
            try:
                while started < len(threads) and not self._is_stopped:
                    threads[started].start()
                    started += 1
                with self._changed:
                    if started < len(threads):  # nobody waits for the others
                        self._alive = [index for index in self._alive if index < started]
                        if self._turn >= started:
                            self._turn = self._alive[0] if self._alive else -1
                        self._changed.notify_all()
                for thread in threads[:started]:
                    thread.join()
                return
            except BaseException as error:
                self._stop(error)

    @property
    def only_without_history(self) -> set[int]:
        return self._without_history - self._with_history

    # --- called by hooks ---------------------------------------------------------------------------------------------

    def reaches(self, units: list[int]) -> None:
        """A micro-batch reaches a call of units: the others catch up first."""
        (self._with_history if torch.is_grad_enabled() else self._without_history).update(units)
        self._hand_over()

    def leave(self, units: list[int]) -> None:
        """A call of a unit has ended. Its weights stay for the micro-batches that come after in this round."""
        self._held += units
        if self._turn == self._alive[-1]:
            self._leave_held()

    def cut(self, units: list[int], output: Any) -> Any:
        name = self._passes.name_of_unit(units[0])
        piece = Piece(units, functools.partial(_require_own, name, self._turn, self.differentiated))
        cut = piece.cut(output)
        uncut = self.uncut[self._turn]
        if piece.is_empty:
            uncut += units
        else:
            piece.units += uncut
            uncut.clear()
            self.pieces[self._turn].append(piece)
        return cut

    def has_left(self, unit: int) -> bool:
        """Whether the unit is gathered only because other micro-batches come to the call that has ended."""
        return unit in self._held and not any(unit in call.entered for call in self._passes.calls)

    def other_calls_of(self, hook: ModuleHook) -> list[Call]:
        """The hook's calls that other micro-batches have begun and not ended."""
        others = [calls for index, calls in enumerate(self._calls) if index != self._turn]
        return [call for calls in others for call in calls if call.hook is hook]

    # --- turns -------------------------------------------------------------------------------------------------------

    def _leave_held(self) -> None:
        held, self._held = self._held, []
        for unit in held:
            self._unit_manager.leave(unit)

    def _hand_over(self) -> None:
        mine = self._turn
        self.attributes.end_turn(mine)
        self._pass_on()
        self._await_turn(mine)

    def _pass_on(self) -> None:
        with self._changed:
            later = [index for index in self._alive if index > self._turn]
            self._turn = later[0] if later else (self._alive[0] if self._alive else -1)
            self._changed.notify_all()

    def _await_turn(self, mine: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == mine)
        self._passes.calls = self._calls[mine]
        self._passes.turns.take_over()
        if self._is_stopped:
            raise _Stopped
        self.attributes.begin_turn(mine)

    def _end(self, mine: int) -> None:
        try:
            self.attributes.end_turn(mine)
        except BaseException as error:
            self._stop(error)
        with self._changed:
            self._alive.remove(mine)
        self._pass_on()

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        self._is_stopped = True


def _differentiate(unit_manager: _hoist.UnitManager, forward: Forward, losses: list[torch.Tensor]) -> None:
    """Clears what it is given, so that memory is given back as the backward pass goes on."""
    pieces, uncut = forward.pieces, forward.uncut

    @contextlib.contextmanager
    def turn_of(micro_batch: int) -> Iterator[None]:
        forward.differentiated[0] = micro_batch
        forward.attributes.show(micro_batch)  # a recomputation reads them
        yield
        unit_manager.end_part()
        forward.attributes.end_turn(micro_batch, in_backward=True)

    to_come = Counter(unit for of_one in pieces for piece in of_one for unit in piece.units)
    for index in range(len(losses)):
        with turn_of(index):
            losses[index].backward(retain_graph=True)
            losses[index] = torch.empty(0, device="cpu")
    _end_units(unit_manager, {unit for units in uncut for unit in units}, to_come)
    while any(pieces):
        units: set[int] = set()
        for index, of_one in enumerate(pieces):
            if of_one:
                piece = of_one.pop()
                with turn_of(index):
                    piece.differentiate()
                if not of_one:
                    forward.attributes.forget(index)
                units.update(piece.units)
                to_come.subtract(piece.units)
        _end_units(unit_manager, units, to_come)


def _end_units(unit_manager: _hoist.UnitManager, units: set[int], to_come: Counter[int]) -> None:
    for unit in units:
        unit_manager.end_unit(unit, to_come[unit] == 0)

