# SPDX-License-Identifier: Apache-2.0
"""The store that torch.distributed was initialized with, for ranks that may be cut off from the process that holds it.

PyTorch's calls wait for its answer without a limit. A thread of its own makes them here, and a caller waits some seconds for it.
A thread whose call gets no answer is left behind, also at the program's end. Until it has one, calls fail at once.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
ANSWER_SECONDS = 3.0


class StoreLost(RuntimeError):
    def __init__(self, why: str):
        super().__init__("the process that holds torch.distributed's store (rank 0, or torchrun's agent at MASTER_ADDR) has "
                         f"ended or cannot be reached; its log has the reason ({why})")


def _answer(questions: queue.SimpleQueue[Any]) -> None:
    while (entry := questions.get()) is not None:
        question, answer = entry
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)
        del entry, question, answer  # they hold the store


class _Thread:
    """It begins with the first engine: at the program's end, when ranks still tell each other why, Python starts none."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._late: concurrent.futures.Future[Any] | None = None
        threading.Thread(target=_answer, args=(self._questions,), name="hoist-store", daemon=True).start()
        weakref.finalize(self, self._questions.put, None).atexit = False

    def ask(self, question: Callable[[], _T], seconds: float) -> _T:
        if self._late is not None and not self._late.done():
            raise StoreLost("it did not answer before")
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._questions.put((question, answer))
        if not concurrent.futures.wait([answer], seconds).done:
            self._late = answer
            raise StoreLost(f"no answer within {seconds:g} s")
        try:
            return answer.result()
        except RuntimeError as error:
            raise StoreLost(str(error)) from None


_threads: weakref.WeakKeyDictionary[dist.Store, _Thread] = weakref.WeakKeyDictionary()


class JobStore:
    """A part of the store. `plain`: the same for PyTorch."""

    def __init__(self, plain: dist.Store, thread: _Thread):
        self.plain, self._thread = plain, thread

    def part(self, name: str) -> JobStore:
        return JobStore(dist.PrefixStore(name, self.plain), self._thread)

    def ask(self, question: Callable[[dist.Store], _T], seconds: float = ANSWER_SECONDS) -> _T:
        """What `question` returns of the store. Errors: StoreLost."""
        return self._thread.ask(lambda: question(self.plain), seconds)


def job_store() -> JobStore:
    store = dist.distributed_c10d._get_default_store()
    return JobStore(store, _threads.get(store) or _threads.setdefault(store, _Thread()))
