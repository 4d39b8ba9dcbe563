# SPDX-License-Identifier: Apache-2.0
"""The store that torch.distributed was initialized with, for ranks that may be cut off from the process that holds it.

PyTorch's calls wait for its answer without a limit. A thread of its own makes them here, and a caller waits some seconds for it.
A thread whose call gets no answer is left behind, also at the program's end. Until it has one, calls fail at once.
So do calls in a process that was forked later, which has no such thread.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
ANSWER_SECONDS = 3.0
_SLICE = 0.1


class StoreLost(RuntimeError):
    pass


def _silent(why: str) -> StoreLost:
    return StoreLost("the process that holds torch.distributed's store (rank 0, or torchrun's agent at MASTER_ADDR) has ended or "
                     f"cannot be reached; its log has the reason ({why})")


def _answer(questions: queue.SimpleQueue[Any]) -> None:
    while (entry := questions.get()) is not None:
        question, answer = entry
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)
        del entry, question, answer  # they hold the store


def _is_done_within(seconds: float, answer: concurrent.futures.Future[Any]) -> bool:
    """Waits in slices: a pause of this process (SIGSTOP, an extension holding the GIL) uses up one slice, not the whole time."""
    return any(concurrent.futures.wait([answer], _SLICE).done for _ in range(math.ceil(seconds / _SLICE)))


class _Thread:
    """Started with the first engine, because Python starts no thread at the program's end, when ranks still report errors."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._late: concurrent.futures.Future[Any] | None = None
        self._process = os.getpid()
        threading.Thread(target=_answer, args=(self._questions,), name="hoist-store", daemon=True).start()
        weakref.finalize(self, self._questions.put, None).atexit = False

    def ask(self, question: Callable[[], _T], seconds: float) -> _T:
        if os.getpid() != self._process:
            raise StoreLost("torch.distributed's store cannot be asked in a process that was forked after hoist began to use it")
        if self._late is not None and not self._late.done():
            raise _silent("it did not answer before")
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._questions.put((question, answer))
        if not _is_done_within(seconds, answer):
            self._late = answer
            raise _silent(f"no answer within {seconds:g} s")
        try:
            return answer.result()
        except dist.DistNetworkError as error:
            raise _silent(str(error)) from None
        except RuntimeError as error:
            raise StoreLost(f"torch.distributed's store failed: {error}") from None


_threads: weakref.WeakKeyDictionary[dist.Store, _Thread] = weakref.WeakKeyDictionary()


class JobStore:
    """A part of the store. `plain`: the same part, as a torch.distributed store."""

    def __init__(self, plain: dist.Store, thread: _Thread):
        self.plain, self._thread = plain, thread

    def part(self, name: str) -> JobStore:
        return JobStore(dist.PrefixStore(name, self.plain), self._thread)

    def ask(self, question: Callable[[dist.Store], _T], seconds: float = ANSWER_SECONDS) -> _T:
        """Returns the answer of `question`, which is given the store. Errors: StoreLost."""
        return self._thread.ask(lambda: question(self.plain), seconds)


def job_store() -> JobStore:
    store = dist.distributed_c10d._get_default_store()
    whole = JobStore(store, _threads.get(store) or _threads.setdefault(store, _Thread()))
    return whole.part(f"start-{_start()}")


def _start() -> str:
    """Which start of the ranks this is. torchrun keeps one store over restarts, which still holds the failure reasons of the
    earlier ranks. On several machines each agent counts its own restarts, so that the numbers differ and cannot be used."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine else "0"
