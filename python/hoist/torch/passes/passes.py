# SPDX-License-Identifier: Apache-2.0
"""When passes begin and end, and which micro-batch they are: what hooks say of calls and autograd of backward passes.

A pass opens with the first call of a module and ends with the backward pass. Calls without gradients are passes of their
own, which end where the next one begins; between their calls only small weights can be read, for a loss. Or they take part in
the pass that is open.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hoist import _hoist
from hoist.program_end import text_of
from hoist.torch.model.units import Model
from hoist.torch.model.wrapped import OwnForwards
from hoist.torch.passes.turns import BACKWARD, FORWARD, Turns, is_in_functional_call
from hoist.torch.passes.watch import UnannouncedUses

if TYPE_CHECKING:
    from hoist.torch.model.parameters import Parameters, WatchedBlock
    from hoist.torch.passes.hooks import Call, ModuleHook
    from hoist.torch.passes.vertical import Forward

_log = logging.getLogger("hoist")
_NO_DROP = ('With "update_mode": "backward" the backward pass has updated weights already; restore() gives those of the last '
            "commit back. Where another model's loss passes through this engine, as in a GAN, set this engine's "
            'hoist.update_mode to "forward", which can drop gradients')


def _is_divided(loss: torch.Tensor, by: int) -> bool:
    """Whether a division by this number is the last thing that made the loss. Python's numbers are CPU tensors in the graph; a
    tensor on a GPU is not looked at, because the program would wait for the whole forward pass."""
    node = loss.grad_fn
    kind = "" if node is None else node.name()
    if kind not in ("DivBackward0", "MulBackward0"):
        return False
    other = getattr(node, "_saved_other", None)
    if other is None or other.numel() != 1 or other.requires_grad or other.device.type != "cpu":
        return False
    return math.isclose(float(other), by if kind == "DivBackward0" else 1 / by, rel_tol=1e-6)


class Passes:
    """`require_run` raises where the engine has no state yet; called before a pass begins, `begin_training_pass` before one with
    gradients does, and `before_backward` before a backward pass changes anything."""

    def __init__(self, unit_manager: _hoist.UnitManager, cut: Model, parameters: Parameters, micro_batches: int,
                 scales_losses: bool, is_vertical: bool, require_run: Callable[[], None],
                 begin_training_pass: Callable[[], None], before_backward: Callable[[], None],
                 add_hook: Callable[[nn.Module, int], ModuleHook]):
        self._unit_manager = unit_manager
        self._cut = cut
        self.parameters = parameters
        self._require_run = require_run
        self._begin_training_pass = begin_training_pass
        self._before_backward = before_backward
        self._scales_losses = scales_losses
        self._is_vertical = is_vertical
        self._is_scaled = False  # the loss whose backward pass comes next
        self._backward_seen = False
        self._backward_callback: weakref.ref[Callable[[], None]] | None = None  # autograd has it until the pass ends or fails
        self.micro_batches = micro_batches
        self.micro_batch = 0
        self.boundary: bool | None = None  # whether the program calls this micro-batch the last one of a step; None: it does not
        self.left_out = 0  # micro-batches of this step that the program has left out, before its end
        self.due = False  # as many backward passes are done as make a step
        self.gradient_norm_max = math.inf  # of the step that is due
        self._block: WatchedBlock | None = None  # of gathered(), while its weights are there
        self.gathered_blocks = 0  # that the program is in: their weights may have gone, for a call that asked for state
        self._step_was_called = False  # since the last backward pass
        self._may_be_divided = False  # a loss of this step, by the number of its micro-batches; nobody would see it
        self._may_be_divided_before = False  # as it was when the pass under way began
        self._is_called = False  # backward() of the engine is under way
        self._says_divided = True
        self._says_kept = True
        self.pass_error = ""  # what ended the last pass before its time
        self.calls: list[Call] = []  # under way, innermost last
        self.input_hooks = WeakTensorKeyDictionary()  # handles of those on tensors that may outlive the pass
        self.forward_of_all: Forward | None = None  # under way, in vertical order
        self.without_history: set[int] = set()  # units that it called under torch.no_grad(), during the backward pass
        self.own_forwards = OwnForwards()
        self.turns = Turns(unit_manager.require_process)
        self.uses = UnannouncedUses(self, unit_manager, cut, parameters, add_hook)

    # --- calls -------------------------------------------------------------------------------------------------------

    def enter_outermost(self, module: nn.Module) -> None:
        """A call that is not inside of another one begins. Takes the turn, which leave_outermost() ends."""
        if module in self.own_forwards.follow_classes():
            raise _hoist.UsageError(f"forward() of {type(module).__name__} was replaced after the model was wrapped, and this "
                                    "call began with the former one. The new one counts from now on: repeat the call")
        self.turns.begin(FORWARD)
        try:
            if self._open_pass():
                self.uses.begin_call(module)
        except BaseException as error:
            self.turns.end()
            self.turns.failed(FORWARD, error)
            raise

    def _open_pass(self) -> bool:
        """Begins a pass, or goes on with the one that is open. False for a recomputation, which is part of a backward pass."""
        unit_manager = self._unit_manager
        training = torch.is_grad_enabled() and bool(self.parameters.trainable)
        if training and self.gathered_blocks:
            raise _hoist.UsageError("a module of the wrapped model is called for training inside of gathered(): call it under "
                                    "torch.no_grad(), or after the block")
        if self._block is not None:
            if not self.calls:
                self._block.look()
        elif unit_manager.current_pass is not None:
            if self._backward_seen:
                if torch._C._current_graph_task_id() != -1:
                    return False  # a part is computed once more, for the backward pass under way
                self._drop_pass()  # its backward pass failed
            elif not self.calls and unit_manager.current_pass != _hoist.Pass.train and (
                    training or not unit_manager.keeps_all_up()):
                unit_manager.end()
            else:
                if not self.calls:
                    # Since the last call; the end of a watched call would take what the program has changed for the call's own.
                    self._refuse_edits_of_pass()
                    if training:
                        self._is_scaled = False  # the loss that was scaled is another one
                unit_manager.open()
                return True
        if unit_manager.current_pass is None:
            if training and torch._C._current_graph_task_id() != -1:
                raise _hoist.UsageError("a part of the model is computed once more (use_reentrant=True) that was called by "
                                        "itself: call the module that was wrapped, or use torch.utils.checkpoint with "
                                        "use_reentrant=False")
            self.begin(_hoist.Pass.train if training else _hoist.Pass.evaluate)
        return True

    def begin(self, kind: _hoist.Pass) -> None:
        self._require_run()
        self.parameters.refuse_edits()
        for handle in itertools.chain.from_iterable(self.input_hooks.values()):
            handle.remove()
        self.input_hooks.clear()
        self._is_scaled = False
        self.pass_error = ""
        if kind == _hoist.Pass.train:
            self.parameters.refuse_gradients()
            if not is_in_functional_call(sys._getframe()):
                self.parameters.refuse_replaced_before_pass()
            if self._is_vertical and self.forward_of_all is None:
                raise _hoist.UsageError(
                    'in vertical order ("hoist": {"micro_batch_order": "vertical"}) all micro-batches of a step pass through '
                    "each layer together: call engine.train_batch(micro_batches, loss_of)")
            if self.due:
                raise _hoist.UsageError(
                    ("1 backward pass makes a step, and it is done" if self.micro_batches == 1 else
                     f"{self.micro_batches} backward passes make a step, and they are done") +
                    ": call engine.step()" + ("" if self._unit_manager.has_begun_step else ", or engine.drop_gradients()") +
                    " (gradient_accumulation_steps in the configuration asks for more passes)" +
                    (f". {_NO_DROP}" if self._unit_manager.has_begun_step else ""))
            if self._may_be_divided and self.micro_batch > 0 and not self._step_was_called:
                raise _hoist.UsageError(
                    f"a step takes the mean of {self.micro_batches} micro-batches (gradient_accumulation_steps), and this loop "
                    f"looks as if it divided its losses by {self.micro_batches} itself. Call backward() on undivided losses and "
                    "engine.step() after each of them, as for DeepSpeed; or engine.backward(loss, scale_wrt_gas=False), which "
                    "takes the sum. If these were backward passes of another model's loss through this one, as in a GAN, freeze "
                    "this one for them (requires_grad_(False)), or call engine.drop_gradients() after each of them")
            self._begin_training_pass()
            self._unit_manager.begin(kind, self.micro_batch, self.micro_batches)
        else:
            self._unit_manager.begin(kind)
        self._may_be_divided_before = self._may_be_divided
        try:
            self.uses.begin_pass()
        except BaseException:
            self._unit_manager.discard_pass()
            raise

    def _drop_pass(self) -> None:
        """Ends the pass under way without its gradients. Earlier micro-batches of the step stay, unless gradients of this one
        are among theirs already."""
        self.uses.forget_pass()
        if self._unit_manager.current_pass is None:
            return
        trains = self._unit_manager.current_pass == _hoist.Pass.train
        stay = self._unit_manager.discard_pass()
        self._backward_seen = self._is_scaled = False
        self._may_be_divided = self._may_be_divided_before
        if trains and not stay:
            if self.micro_batch > 0:
                _log.warning("the pass that was given up had gradients already, so that those of %d earlier micro-batches of the "
                             "step are dropped, too: the next pass is the first of a step", self.micro_batch)
            self.forget()

    @property
    def in_gathered_block(self) -> bool:
        """A block of gathered() has its weights. Calls without gradients take part in its pass."""
        return self._block is not None

    def gather(self, units: set[int], watch: Callable[[], WatchedBlock]) -> None:
        """Gathers units until end_gathered(), or until their state is asked for. `watch` is called when they are there."""
        self.begin(_hoist.Pass.evaluate)
        try:
            for unit in sorted(units):  # all ranks in one order, however each has named them
                self._unit_manager.enter(unit)
            self._block = watch()
        except BaseException:
            self._unit_manager.end()
            raise

    def end_gathered(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return  # it has ended before
        try:
            block.note()
        finally:
            self._unit_manager.end()

    def leave_outermost(self, failed: bool) -> None:
        was_watched = self.uses.is_watched
        try:
            self._leave_pass(failed)
            if torch._C._current_graph_task_id() != -1:
                return
            if was_watched:
                self.parameters.note_versions_of_watched_pass()
            elif not failed and not self.in_gathered_block:
                self._refuse_edits_of_pass()
            if self._unit_manager.current_pass == _hoist.Pass.evaluate and not self.in_gathered_block:
                self._unit_manager.close_unheld()
        finally:
            self.turns.end()

    def _refuse_edits_of_pass(self) -> None:
        """Pre: a pass is under way."""
        try:
            self.parameters.refuse_edits()
        except _hoist.UsageError:
            self._drop_pass()
            raise

    def _leave_pass(self, failed: bool) -> None:
        unit_manager = self._unit_manager
        self.uses.end_call(failed)
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation, which also ends by an exception when it has made what is asked for
        unit_manager.walks_again()
        if failed:
            self.uses.watch_next()
        if failed and unit_manager.current_pass is not None and not self.in_gathered_block:
            self.pass_error = text_of(sys.exc_info()[1])
            self._drop_pass()

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch that is under way, or comes next, is the last one of a step: as the program says, or else as
        DeepSpeed counts, until its step() is called."""
        if self.boundary is not None:
            return self.boundary
        called = self.micro_batch == 0 or self._step_was_called or self._unit_manager.current_pass == _hoist.Pass.train
        return self.micro_batch + (1 if called else 0) == self.micro_batches

    # --- backward ----------------------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The tensor that the backward pass begins with. In fp32, since most scaled losses are beyond fp16."""
        self._is_scaled = True
        return loss.float() * self._unit_manager.loss_scale() if self._scales_losses else loss

    def note_division(self, loss: torch.Tensor) -> None:
        """Losses are not to be divided: the step takes the mean."""
        if self.micro_batches == 1 or not _is_divided(loss, self.micro_batches):
            return
        self._may_be_divided = True
        if self._says_divided:
            self._says_divided = False
            _log.warning("the loss looks as if the program had divided it by %d, and the step takes the mean of that many "
                         "micro-batches: leave the division out, or call engine.backward(loss, scale_wrt_gas=False), which "
                         "takes the sum", self.micro_batches)

    def backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        self._before_backward()
        scaled = self.scale(loss)
        self._is_called = True
        try:
            with self.uses.of_backward():
                scaled.backward(retain_graph=retain_graph)
        except BaseException as error:
            self.pass_error = text_of(error)
            self._drop_pass()
            raise
        finally:
            self._is_called = False
        if self._unit_manager.current_pass == _hoist.Pass.train:  # a loss that no part of the model has made
            self._end_backward()

    def backward_begins(self, *_: object) -> None:
        self.turns.require(BACKWARD)
        if self._backward_seen:
            return
        if torch.is_grad_enabled():  # create_graph=True
            self._unit_manager.walk_is_recorded()
        if self._scales_losses and not self._is_scaled:
            self._drop_pass()
            raise _hoist.UsageError("a loss that the loss scale of fp16 is missing from: use engine.backward(loss), or "
                                    "engine.scale(loss).backward()")
        self._before_backward()
        self._backward_seen = True
        callback = self._backward_ends
        self._backward_callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _backward_ends(self) -> None:
        if not self._backward_seen or self._unit_manager.current_pass != _hoist.Pass.train:
            return
        if not self._is_called and not self._unit_manager.has_gradients():
            self._backward_seen = False  # torch.autograd.grad(), for the gradients of something else: the pass goes on
            self._unit_manager.walks_again()
            return
        self._may_be_divided |= not self._is_called
        self._end_backward()

    def _is_backward_under_way(self) -> bool:
        """Pre: a backward pass has begun, and its end was not seen. In this thread or another one: autograd gives its callback
        back when the pass has ended or failed; for an accelerator a thread of its own does so, a moment after the error."""
        if torch._C._current_graph_task_id() != -1:
            return True
        callback, deadline = self._backward_callback, time.monotonic() + 1
        while callback is not None and callback() is not None:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.001)
        return False

    def _end_backward(self, micro_batches: int = 1) -> None:
        self._refuse_edits_of_pass()
        self._backward_seen = self._is_scaled = self._step_was_called = False
        self._unit_manager.end_backward()
        self.parameters.note_versions()
        self.micro_batch += micro_batches
        self.due = self.micro_batch == self.micro_batches

    # --- vertical order ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def of_all_micro_batches(self) -> Iterator[None]:
        """The one training pass of a step in vertical order. An error drops its gradients."""
        if self._unit_manager.current_pass is not None:
            self._unit_manager.end()  # an evaluation
        self.begin(_hoist.Pass.train)
        try:
            yield
        except BaseException as error:
            self.pass_error = text_of(error)
            self._drop_pass()
            raise
        self._end_backward(self.micro_batches)

    @contextlib.contextmanager
    def backward_of_all(self, without_history: set[int]) -> Iterator[None]:
        with self.turns.of(BACKWARD), self.uses.of_backward():
            self._before_backward()
            self._backward_seen = True
            self.without_history = without_history
            try:
                yield
            finally:
                self._backward_seen = False
                self.without_history = set()

    def refuse_reentrant(self, units: list[int]) -> None:
        if not self.without_history.isdisjoint(units):
            raise _hoist.UsageError("recomputation with use_reentrant=True has no graph between the layers, so that vertical "
                                    "order cannot take them one by one: use torch.utils.checkpoint with use_reentrant=False")

    def name_of_unit(self, unit: int) -> str:
        return self._cut.units[unit].name

    # --- between passes ----------------------------------------------------------------------------------------------

    def end_for_step(self, call: str) -> bool:
        """Whether a step is to be made, by `call` or after it; if the program says that this is its end, also of fewer
        micro-batches than usual: the rest counts as zeros, as in DeepSpeed. Errors: UsageError without any backward pass, or one
        that did not end, inside of gathered(), or if all are done and the program holds the step back."""
        unit_manager = self._unit_manager
        unit_manager.require_awake()
        if self.gathered_blocks:
            raise _hoist.UsageError(f"{call} inside of gathered(), whose weights it would release: leave the block first")
        self._step_was_called = True
        if unit_manager.current_pass == _hoist.Pass.train:
            if self._backward_seen or unit_manager.has_gradients():
                self._drop_pass()
                raise _hoist.UsageError(f"{call} after a backward pass that did not end, or of a loss that forward() does not "
                                        "return (engine.backward(loss) takes one); its gradients were dropped")
            self._drop_pass()  # a forward pass whose result was not used
        elif unit_manager.current_pass is not None:
            unit_manager.end()
        if self.boundary and 0 < self.micro_batch < self.micro_batches:
            self._before_backward()
            while self.micro_batch < self.micro_batches:
                unit_manager.begin(_hoist.Pass.train, self.micro_batch, self.micro_batches)
                unit_manager.end_backward()
                self.micro_batch += 1
                self.left_out += 1
            self.due = True
        if not self.due and self.micro_batch == 0:
            self.parameters.refuse_gradients()
            raise _hoist.UsageError(f"{call} needs a backward pass before it")
        if self.due and self.boundary is False:
            self._refuse_held_back(call, f"and the {self.micro_batches} backward passes of a step are done",
                                   ". The gradients stay for the next step()")
        return self.due

    def refuse_held_back_update(self) -> None:
        """For update mode "backward". Errors: UsageError if the next backward pass completes a step that the program holds
        back."""
        if self.boundary is False and self.micro_batch + 1 == self.micro_batches:
            self._refuse_held_back("a backward pass", 'and in update mode "backward" it would begin the update')

    def _refuse_held_back(self, call: str, when: str, then: str = "") -> NoReturn:
        raise _hoist.UsageError(
            f"{call} after set_gradient_accumulation_boundary(False), {when}: set gradient_accumulation_steps (now "
            f"{self.micro_batches}) to the most micro-batches that a step has, and call "
            f"set_gradient_accumulation_boundary(True) before the last one of a step{then}")

    def end_for_state(self) -> None:
        """Errors: UsageError in the middle of a backward pass."""
        if self._backward_seen:
            if self._is_backward_under_way():
                raise _hoist.UsageError("state is read and written between passes, not in the middle of one: call it when the "
                                        "backward pass has ended")
            self._drop_pass()  # its backward pass failed
        self.end_gathered()
        if self._unit_manager.current_pass == _hoist.Pass.train:
            self._drop_pass()
        elif self._unit_manager.current_pass is not None:
            self._unit_manager.end()

    def refuse_part_of_step(self, call: str) -> None:
        """Errors: UsageError where gradients wait for a step."""
        if self.micro_batch > 0:
            raise _hoist.UsageError(f"{call} after the backward pass of micro-batch {self.micro_batch} of {self.micro_batches}: "
                                    "call it after the step() that updates the weights, which returns a report" +
                                    ("" if self._unit_manager.has_begun_step else ", or call engine.drop_gradients() first"))

    @property
    def _keeps_gradients(self) -> bool:
        return self._step_was_called and 0 < self.micro_batch < self.micro_batches and not self._backward_seen

    @property
    def has_gradients_to_drop(self) -> bool:
        """Whether zero_grad() would drop gradients."""
        # A backward pass of a loss that forward() does not return, such as one of features that a hook took, is not seen.
        return self._unit_manager.has_gradients() or (
            not self._keeps_gradients and (self._backward_seen or self.due or self.micro_batch > 0))

    def _refuse_begun_step(self, call: str) -> None:
        """Errors: UsageError in update mode "backward" once weights are updated."""
        if self._unit_manager.has_begun_step:
            raise _hoist.UsageError(f"{call} between backward() and step(): call step() first. {_NO_DROP}")

    def zero_grad(self) -> None:
        """Drops gradients that wait for a step. Without any, a forward pass stays open: zero_grad() may stand between a loss and
        its backward(). After a step() that waits for more micro-batches, it keeps gradients: the program calls both for each."""
        self._refuse_begun_step("zero_grad()")
        self.parameters.drop_gradients()
        if self._keeps_gradients:
            if self._says_kept:
                self._says_kept = False
                _log.warning("zero_grad() keeps the gradients of micro-batch %d of %d (gradient_accumulation_steps, or "
                             "train_batch_size): step() has not updated the weights yet. engine.drop_gradients() drops them",
                             self.micro_batch, self.micro_batches)
            if self._unit_manager.has_gradients():
                self._drop_pass()
            return
        if self.has_gradients_to_drop:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        self._refuse_begun_step("drop_gradients()")
        self.parameters.drop_gradients()
        if self._unit_manager.current_pass == _hoist.Pass.train or self.due or self.micro_batch > 0:
            if self._unit_manager.current_pass == _hoist.Pass.evaluate:
                self._unit_manager.discard()  # ends the evaluation alone
            self._unit_manager.discard()
        self.forget()

    def give_up(self) -> None:
        """Calls that were under way, or were interrupted, are left behind."""
        self.calls.clear()
        self.uses.give_up()
        self.turns.leave_interrupted()

    def forget(self) -> None:
        """The next pass is the first one of a step."""
        self.due = self._backward_seen = self._is_scaled = self._may_be_divided = False
        self.gradient_norm_max = math.inf
        self.micro_batch = self.left_out = 0
