# SPDX-License-Identifier: Apache-2.0
"""How an engine ends with its program: what the last step decided is committed, and other ranks hear of an exception, because
they would wait for this one."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing.util
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from hoist import _hoist

_log = logging.getLogger("hoist")
_store_of: weakref.WeakKeyDictionary[_hoist.UnitManager, str] = weakref.WeakKeyDictionary()  # of all that are alive


def text_of(error: BaseException | None) -> str:
    """As the last line of a traceback; nothing of no error."""
    return "" if error is None else "".join(traceback.format_exception_only(error)).strip()


def is_orderly(error: BaseException) -> bool:
    """Whether a program that ends with it has done what it was to do."""
    return isinstance(error, SystemExit) and not error.code


def handled_error() -> BaseException | None:
    """In an `except` or `finally` block: what the block is entered by, unless a program or a generator ends in order with it."""
    error = sys.exc_info()[1]
    return None if error is None or is_orderly(error) or isinstance(error, GeneratorExit) else error


def mark_of(error: BaseException | None) -> object:
    """Is the same object for the same error, and another for a later one at its address. Does not keep the error."""
    return None if error is None else vars(error).setdefault("_hoist_mark", object())


def reason_of(error: BaseException | None) -> str:
    """What other ranks are told of an error by which the program leaves a `with` block; nothing of an orderly one."""
    return "" if error is None or is_orderly(error) else text_of(error)


def release_dropped(store: str, opener: _hoist.UnitManager | None = None) -> None:
    """Before a store is opened, by `opener` once more: what the program has dropped without closing it may still hold
    it. A schedule and its optimizer refer to each other, and live until Python collects them."""
    others = [held for manager, held in list(_store_of.items()) if held and manager is not opener and manager.is_open]
    if store and os.path.realpath(store) in map(os.path.realpath, others):
        gc.collect()


def refuse_second_use(store: str) -> None:
    """Errors: StoreError if another engine of this process works on the store. Call release_dropped() before."""
    if any(held and manager.is_alive and os.path.realpath(held) == os.path.realpath(store)
           for manager, held in list(_store_of.items())):
        raise _hoist.StoreError(
            f"the store in {store} is in use by another engine of this process, which has not been closed: give each engine an "
            "nvme_path (or hoist.checkpoint_path) of its own, as for an actor and a critic that have one configuration; or call "
            "close() of the first one before")


def _no_turn(call: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class AtExit:
    """Calls `call` when this process ends, perhaps twice; not in processes that are forked later. One that multiprocessing has
    started may end without the handlers of atexit, and only its finalizers see the exception that ends it."""

    def __init__(self, call: Callable[[], None]):
        process = os.getpid()

        def call_here() -> None:
            if os.getpid() == process:
                call()

        self.call = call_here
        self._finalizer = multiprocessing.util.Finalize(None, call_here, exitpriority=100)  # torch has imported that module
        atexit.register(call_here)

    def cancel(self) -> None:
        atexit.unregister(self.call)
        self._finalizer.cancel()


def _ending_error(mark_at_start: object) -> BaseException | None:
    """The exception that ends the program. Finalizers of multiprocessing run while it is handled; torch.multiprocessing has made
    it a SystemExit by then."""
    error = handled_error()
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    if error is not None and mark_of(error) is not mark_at_start:
        return error
    return getattr(sys, "last_value", None)


def close_at_exit(unit_manager: _hoist.UnitManager, store: str, pass_error: Callable[[], str] = str,
                  turn: Callable[[str], AbstractContextManager[None]] = _no_turn) -> AtExit:
    """Closes what is still there when the program ends. `pass_error`: the error that a pass was left by, or nothing.
    `turn(call)`: a context in which no call of another thread is under way. Cancel it after an earlier end."""
    alive = weakref.ref(unit_manager)
    _store_of[unit_manager] = store
    mark_at_start = mark_of(handled_error())

    def close() -> None:
        if (ending := alive()) is None:
            return
        try:
            with turn("close()"):
                if why := pass_error() or text_of(_ending_error(mark_at_start)):
                    ending.abandon(why)
                ending.close()
        except _hoist.Error as error:
            _log.error("the last step was not committed: %s", error)

    return AtExit(close)
