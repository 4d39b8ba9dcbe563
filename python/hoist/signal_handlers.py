# SPDX-License-Identifier: Apache-2.0
"""Tells exceptions that the program's signal handlers raise from other errors. Such an exception comes at any line and may have
any type: a watchdog's TimeoutError, for instance, is an OSError, although nothing is wrong with the file that is being
written."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

# A handler of one of these may replace itself when it runs, so that it is noted before. Asking for all 64 takes 0.1 ms.
_ONCE = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_noted: set[CodeType] = set()


def _handlers_of(signals: Iterable[int]) -> set[CodeType]:
    """The code of what the program has set for these signals."""
    codes: set[CodeType] = set()
    for number in signals:
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        called = handler if hasattr(handler, "__code__") or not callable(handler) else type(handler).__call__
        if (code := getattr(called, "__code__", None)) is not None:
            codes.add(code)
    return codes


def note(is_outermost: bool = True) -> None:
    """At the beginning of a call that a handler may interrupt. The handlers that an earlier outermost call noted are forgotten:
    the program may call these functions itself by now. Handlers run in the main thread only."""
    global _noted
    if threading.current_thread() is threading.main_thread():
        _noted = _handlers_of(_ONCE) | (set() if is_outermost else _noted)


def raised(error: BaseException) -> bool:
    """Whether a handler raised `error`: KeyboardInterrupt, or anything out of a handler of the program's own."""
    if not isinstance(error, Exception):
        return True
    handlers = _noted | _handlers_of(signal.valid_signals())
    # By identity: code that torch.compile has made may have constants that cannot be hashed.
    return any(frame.f_code is handler for frame, _ in traceback.walk_tb(error.__traceback__) for handler in handlers)


@contextlib.contextmanager
def suppressing(*kinds: type[Exception]) -> Iterator[None]:
    """contextlib.suppress(), but for what a handler raises."""
    try:
        yield
    except kinds as error:
        if raised(error):
            raise
