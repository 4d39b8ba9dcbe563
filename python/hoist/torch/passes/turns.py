# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine take turns: one at a time, and none after one that was interrupted."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.utils import stateless

from hoist import _hoist, signal_handlers

if TYPE_CHECKING:
    from hoist.torch.passes.passes import Passes

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_log = logging.getLogger("hoist")

FORWARD, BACKWARD = "forward()", "backward()"
_LAST_TURN_SECONDS_MAX = 600  # a step of a large model takes minutes
_CALL = nn.Module._call_impl.__code__
_FUNCTIONAL_CALL = stateless._functional_call.__code__  # of torch.func.functional_call()


def modules_on_stack(frame: FrameType | None) -> Iterator[nn.Module]:
    """Modules whose calls are under way in a thread whose innermost frame this is, and were not interrupted; innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_in_functional_call(frame: FrameType | None) -> bool:
    """Whether torch.func.functional_call() has replaced parameters for the time of a call that is under way."""
    while frame is not None and frame.f_code is not _FUNCTIONAL_CALL:
        frame = frame.f_back
    return frame is not None


class Turns:
    """Who has the turn: the calls under way, all of one thread, outermost first.

    On an accelerator autograd runs a backward pass, hooks included, on a thread of its own while the thread that began it
    waits: it has the turn of that thread, in backward() and where forward() calls torch.autograd.grad(). `require_process`
    raises in a process that was forked from the engine's.
    """

    def __init__(self, require_process: Callable[[], None]) -> None:
        self._require_process = require_process
        self._lock = threading.RLock()  # of what follows; a signal handler may call the engine while its thread holds it
        self._thread: threading.Thread | None = None
        self._calls: list[str] = []
        self._interrupted = ""
        self._outside: set[str] = set()  # calls of outside()

    @property
    def is_of_this_process(self) -> bool:
        """Elsewhere the lock may be held by a thread that does not exist."""
        try:
            self._require_process()
        except _hoist.UsageError:
            return False
        return True

    @property
    def is_free_or_mine(self) -> bool:
        return not self._calls or self._thread is threading.current_thread() or self._is_autograd_thread_of_call

    @property
    def _is_in_forward(self) -> bool:
        """Whether the innermost call is forward()."""
        return self._calls[-1:] == [FORWARD]

    @property
    def _is_autograd_thread_of_call(self) -> bool:
        """Whether this thread is autograd's, at work for the call under way."""
        return (BACKWARD in self._calls or self._is_in_forward) and torch._C._current_graph_task_id() != -1

    @property
    def under_way(self) -> str:
        """The outermost call."""
        return next(iter(self._calls), "")

    def begin(self, call: str) -> None:
        """Errors: UsageError while another thread has the turn, after a call that was interrupted, and in a forked process."""
        self._require_process()
        if self._interrupted:
            self._refuse_interrupted(call)
        with self._lock:
            may_begin = self.is_free_or_mine
            if may_begin and not self._is_in_forward:
                if not self._calls:
                    self._thread = threading.current_thread()
                    signal_handlers.note()
                self._calls.append(call)
                return
        if not may_begin:
            self._refuse_concurrent(call)
        self._refuse_inside(call)
        self.interrupt(f"{FORWARD} was interrupted")  # its end was never seen
        raise _hoist.UsageError(f"{call} after {FORWARD} was interrupted. {_REMEDY}")

    def end(self) -> None:
        with self._lock:
            if self._calls:
                self._calls.pop()

    def require(self, call: str) -> None:
        """Errors: UsageError while another thread has the turn, and in a forked process."""
        self._require_process()
        is_of_another = call == BACKWARD and self._is_in_forward and self._thread is not threading.current_thread()
        if not self.is_free_or_mine or is_of_another:
            self._refuse_concurrent(call)

    def require_outside(self, call: str) -> None:
        """For a call that leaves interrupted ones behind. Errors: as require(), and UsageError inside of forward()."""
        self.require(call)
        if self._is_in_forward:
            self._refuse_inside(call)

    @contextlib.contextmanager
    def outside(self, call: str) -> Iterator[None]:
        """A turn of such a call. Errors: as require_outside()."""
        self.require_outside(call)
        with self._lock:
            may_begin = self.is_free_or_mine
            if may_begin:
                self._thread = threading.current_thread()
                signal_handlers.note(is_outermost=not self._calls)
                self._calls.append(call)
                self._outside.add(call)
        if not may_begin:
            self._refuse_concurrent(call)
        with self._watched(call):
            yield

    @contextlib.contextmanager
    def last(self, call: str) -> Iterator[None]:
        """The engine's last turn, when a call of another thread has ended. Calls that were interrupted are left behind. Errors:
        UsageError if that other call takes too long. A UsageError of the block ends nothing."""
        if not self.is_of_this_process:
            yield
            return
        begin, is_said = time.monotonic(), False
        while not self._take_over_for(call):
            waited = time.monotonic() - begin
            if waited > _LAST_TURN_SECONDS_MAX:
                self._refuse_concurrent(call)
            if waited > 1 and not is_said:
                is_said = True
                _log.info("%s waits for %s in thread '%s'", call, self.under_way, getattr(self._thread, "name", "?"))
            time.sleep(0.01)
        try:
            yield
        except _hoist.UsageError:
            self.end()
            raise
        except BaseException:
            self._clear()
            raise
        self._clear()

    def _take_over_for(self, call: str) -> bool:
        with self._lock:
            may_begin = self.is_free_or_mine or self._was_left
            if may_begin:
                mine = self._calls if self._thread is threading.current_thread() else []
                self._thread, self._calls = threading.current_thread(), [*mine, call]
        return may_begin

    @property
    def _was_left(self) -> bool:
        """Whether the thread of the call under way is out of it: it has ended, or was interrupted in forward(), whose end is not
        seen then."""
        if self._thread is None or not self._thread.is_alive():
            return True
        frame = sys._current_frames().get(self._thread.ident or 0)
        return self._is_in_forward and not any(True for _ in modules_on_stack(frame))

    def _clear(self) -> None:
        with self._lock:
            self._thread, self._calls, self._interrupted = None, [], ""

    def _refuse_inside(self, call: str) -> None:
        if call != FORWARD and any(True for _ in modules_on_stack(sys._getframe())):
            raise _hoist.UsageError(f"{call} inside of {FORWARD}: call it when {FORWARD} has returned")

    def take_over(self) -> None:
        """For another thread that works on the same call while the first one waits for it."""
        self._thread = threading.current_thread()

    def failed(self, call: str, error: BaseException) -> None:
        """Notes whether `call` was interrupted by `error`: by KeyboardInterrupt, or by what one of the program's signal handlers
        raised. These may come between any two lines; other errors come where the engine is ready for them."""
        if signal_handlers.raised(error):
            self.interrupt(f"{call} was interrupted by {type(error).__name__}")

    def interrupt(self, what: str) -> None:
        self._interrupted = self._interrupted or what

    def leave_interrupted(self) -> None:
        """For an engine that begins again: calls that were interrupted are left behind."""
        with self._lock:
            self._calls = [call for call in self._calls if call in self._outside]
            self._interrupted = ""

    @contextlib.contextmanager
    def of(self, call: str) -> Iterator[None]:
        self.begin(call)
        with self._watched(call):
            yield

    @contextlib.contextmanager
    def _watched(self, call: str) -> Iterator[None]:
        """Notes whether a call that has begun is interrupted, and ends it."""
        try:
            yield
        except BaseException as error:
            self.failed(call, error)
            raise
        finally:
            self.end()

    def _refuse_interrupted(self, call: str) -> NoReturn:
        raise _hoist.UsageError(f"{call} after {self._interrupted}: it is unknown what that call has done. {_REMEDY}")

    def _refuse_concurrent(self, call: str) -> NoReturn:
        thread, under_way = self._thread, self._calls[-1:]
        if thread is not None and self._was_left:
            self.interrupt(f"the end of thread '{thread.name}' in the middle of {''.join(under_way)}" if not thread.is_alive()
                           else f"{FORWARD} was interrupted in thread '{thread.name}'")
            self._refuse_interrupted(call)
        raise _hoist.UsageError(
            f"{call} in thread '{threading.current_thread().name}' while {''.join(under_way) or 'another call'} is under way in "
            f"thread '{getattr(thread, 'name', '?')}': an engine works for one thread at a time. Nothing has changed; call it "
            "again when the other call has returned")


_REMEDY = ("Close the engine (a `with` block does) and make a new one with resume=True, or call restore(): either continues from "
           "the newest commit; or load_checkpoint(), from a saved one (after restore() if the engine sleeps). Without a commit, "
           "the run begins anew")


class _HasPasses(Protocol):
    _passes: Passes


_Engine = TypeVar("_Engine", bound=_HasPasses)


def takes_turn(
    method: Callable[Concatenate[_Engine, _Arguments], _Result],
) -> Callable[Concatenate[_Engine, _Arguments], _Result]:
    """For methods of Engine."""
    call = f"{method.__name__}()"

    @functools.wraps(method)
    def in_turn(self: _Engine, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self._passes.turns.of(call):
            return method(self, *args, **kwargs)

    return in_turn
