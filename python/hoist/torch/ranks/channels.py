# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed started: the engine exchanges data with the others through groups of gloo.

Weights and gradients pass as CPU memory, so the groups are gloo's, whatever the program's own group is made of. They are not
the program's: each channel has connections of its own, made through the store that torch.distributed was initialized with,
so that the engine's threads do not take turns, and so that a rank can hang up.

A rank that fails writes why into that store, and closes its connections: the waits of the others end at once, and they look
there for the reason. They close their connections in turn, so that ranks which wait for one of them, and not for the rank that
failed, end their wait too.

Before each call on a channel, the ranks send each other a description of it. Without that, ranks that use different layers would
get each other's bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import multiprocessing.util
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hoist import program_end, signal_handlers
from hoist.torch.ranks.job_store import ANSWER_SECONDS, JobStore, StoreLost, job_store

_log = logging.getLogger("hoist")

# Every rank of a group makes the same engines over it in the same order, and so gives them the same names.
_numbers: dict[tuple[int, ...], int] = {}  # of the next one
_left_words: list[Ranks | Start] = []  # for the other ranks to read

_HEADER_BYTES = 256  # a description's hash, and as much of its text as fits
_LOOK_EVERY, _ASK_EVERY = 0.1, 1.0  # seconds
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")  # gloo's words


def _next_name(members: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> str:
    return f"hoist/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}/{numbers.get(members, 0)}"


def _text_at(store: dist.Store, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _reason_in(store: JobStore, seconds: float = ANSWER_SECONDS) -> str | None:
    with contextlib.suppress(StoreLost):
        return store.ask(lambda plain: _text_at(plain, "why"), seconds)
    return None


def _tell(speaker: Ranks | Start, store: JobStore, why: str) -> str:
    """Returns the reason that was given first, whoever gave it."""
    def first(plain: dist.Store) -> str:
        if (told := _text_at(plain, "why")) is None:
            plain.set("why", told := why)
        plain.add("heard", 1)
        return told
    try:
        told = store.ask(first)
    except StoreLost:
        return why
    if not _left_words:
        multiprocessing.util.Finalize(None, _stay_for_a_moment, exitpriority=0)  # after engines have ended
    _left_words.append(speaker)
    return told


def _all_have_heard(store: JobStore, members: Sequence[int]) -> bool:
    try:
        return store.ask(lambda plain: int(plain.add("heard", 0))) >= len(members)
    except StoreLost:
        return True  # no rank can read it


class Start:
    """One construction of an engine on all its ranks. They find each other below its store, so that whatever fails in it, the
    next one begins anew on all of them. A rank that fails before they meet says why there.

    `first`: that of the engine itself, for its later ones in restore() and wake(). They are counted apart: one rank may call
    these alone, and still finds the others in the next construction of an engine."""

    current: Start | None = None

    def __init__(self, members: Sequence[int], becomes_current: bool = False, first: Start | None = None):
        self.members = tuple(members)
        self.rank_of_job = dist.get_rank()
        numbers = _numbers if first is None else first._later_numbers
        self._name: str = ("" if first is None else first._name + "/later/") + _next_name(self.members, numbers)
        self._store = job_store().part(self._name)
        self._numbers: dict[tuple[int, ...], int] = {}
        self._later_numbers: dict[tuple[int, ...], int] = {}
        self.made: list[Ranks] = []
        # Both or neither, whenever a handler of a signal raises: the ranks would count differently from then on.
        numbers[self.members], Start.current = numbers.get(self.members, 0) + 1, self if becomes_current else Start.current

    def store_of(self, ranks: Ranks) -> JobStore:
        store = self._store.part(_next_name(ranks.members, self._numbers))
        self._numbers[ranks.members] = self._numbers.get(ranks.members, 0) + 1
        return store

    def why(self, seconds: float) -> str | None:
        why = _reason_in(self._store, seconds)
        if why is not None:
            with contextlib.suppress(StoreLost):
                self._store.ask(lambda plain: plain.add("heard", 1))
        return why

    def fail(self, why: str) -> None:
        why = f"rank {self.rank_of_job} failed: {why}"
        for ranks in self.made:
            ranks.fail(why)
        _tell(self, self._store, why)

    def all_have_heard(self) -> bool:
        return _all_have_heard(self._store, self.members)


def is_joined() -> bool:
    """Whether the program has joined PyTorch's ranks."""
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def before_start() -> Iterator[None]:
    """Around what a program does for start() on all ranks of the job."""
    try:
        yield
    except BaseException as error:
        if is_joined() and dist.get_world_size() > 1:
            Start(range(dist.get_world_size())).fail(program_end.text_of(error))
        raise


def _begins(outer: Start | None, members: Sequence[int]) -> bool:
    """Whether a construction begins that is not part of `outer`, and that has other ranks."""
    return len(members) > 1 and (outer is None or outer.members != tuple(members))


@contextlib.contextmanager
def start(members: Sequence[int], first: Start | None = None) -> Iterator[None]:
    """[C] Around the construction of an engine, or within it: an error in it ends the wait of the other ranks for this one.
    `first`: as of Start."""
    before = Start.current
    try:
        if _begins(before, members):
            Start(members, becomes_current=True, first=first)
        yield
    except BaseException as error:
        if _begins(before, members):
            begun = Start.current if Start.current is not before else None  # a handler of a signal may have raised before
            (begun or Start(members, first=first)).fail(program_end.text_of(error))
        raise
    finally:
        Start.current = before


class Ranks:
    """The ranks of one engine: where they find each other, and why they stop.

    `members`: their ranks in the job, in the order that the engine counts them in. `doing`: says what the program does here, such
    as "forward() after step 3", or nothing.

    Threading: any.
    """

    def __init__(self, timeout: timedelta, members: Sequence[int], doing: Callable[[], str]):
        self.members = tuple(members)
        self.rank_of_job = dist.get_rank()
        self.rank = self.members.index(self.rank_of_job)
        self.timeout = timeout
        self.doing = doing
        self._start = Start.current or Start(self.members)
        self.store = self._start.store_of(self)
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._lock = threading.RLock()  # a handler of a signal may close the engine while its thread holds it
        self._why: str | None = None
        self._asked = -math.inf
        self._start.made.append(self)  # last, since a handler of a signal may raise before

    def meet(self, word: str = "") -> None:
        """Returns when all ranks are here. Errors: RuntimeError if one of them fails before, or does not come in time.

        `word`: for words()."""
        until = time.monotonic() + self.timeout.total_seconds()

        def left() -> float:
            return max(until - time.monotonic(), 1.0)

        def first_reason() -> str | None:
            return _reason_in(self.store, left()) or self._start.why(left())

        def come(plain: dist.Store) -> None:
            plain.set(f"here-{self.rank}", word)
            if plain.add("here", 1) == len(self.members):
                plain.set("all-here", "")

        def absent(plain: dist.Store) -> list[str]:
            return [str(member) for rank, member in enumerate(self.members) if not plain.check([f"here-{rank}"])]

        if (why := first_reason()) is not None:  # of a rank that waited for this one, and left
            raise RuntimeError(why)
        self.store.ask(come, left())
        while not self.store.ask(lambda plain: plain.check(["all-here"]), left()):
            if (why := first_reason()) is None and time.monotonic() > until:
                why = f"rank {', '.join(self.store.ask(absent))} did not come {self._within()}"
            if why is not None:
                raise RuntimeError(why)
            time.sleep(_LOOK_EVERY)

    def words(self) -> list[str]:
        """The words that the ranks have brought to meet()."""
        keys = [f"here-{rank}" for rank in range(len(self.members))]
        return [word.decode() for word in self.store.ask(lambda plain: plain.multi_get(keys), self.timeout.total_seconds())]

    def _within(self) -> str:
        return f"within {self.timeout.total_seconds():g} s (hoist.comm_timeout_seconds)"

    def add(self, channel: Channel) -> None:
        with self._lock:
            self._channels.add(channel)

    def fail(self, why: str) -> str:
        """Tells the others why this rank stops, and closes its connections. Returns the reason that was given first, whoever gave
        it. Takes seconds where the store does not answer."""
        with self._lock:
            if self._why is None:
                self._why = _tell(self, self.store, why)  # first: the others look for it when the connections close
            channels = list(self._channels)
        for channel in channels:
            channel.hang_up()
        return self._why

    def leave(self, why: str) -> None:
        """Says for those that lose this rank why it ends, and disturbs no other."""
        with contextlib.suppress(StoreLost):
            self.store.ask(lambda plain: plain.set(f"left-{self.rank}", why))

    def lost(self, problem: str) -> str:
        """Returns the message of a failed call: another rank's reason, if there is one."""
        mine = f"rank {self.rank_of_job} gave up: {problem}"
        why = self.fail(mine)
        return problem if why == mine else why

    def explained(self, problem: str, what: str, peer: int | None) -> str:
        """The problem of a call, `what`, in which this rank waited for rank `peer` of the group. Where neither has failed, the
        other has closed its engine, or waits elsewhere, and says where, or is still on its way."""
        mine = f"rank {self.rank_of_job} was at {what}"
        timed_out, has_ended = "imed out" in problem, any(words in problem for words in _CLOSED)
        if has_ended and peer is not None and (why := self._why_of(peer)) is not None:
            return f"{mine}, and {why} ({problem})"
        theirs = ""
        if has_ended and peer is not None and not self._says_why_within(2):  # gloo closes connections at a time-out
            theirs = f", and rank {self.members[peer]} has closed its engine, or ended"
        if timed_out and peer is not None and (there := self._place_of(peer, mine)) is not None:
            theirs = f", and {there}"
        if timed_out and not theirs:
            late = "another rank" if peer is None else f"rank {self.members[peer]}"
            theirs = f", and {late} did not come {self._within()}: it is slower, hangs, or makes other calls"
        elif theirs:
            theirs += ". Every rank must make the same calls: none alone may evaluate, read the state, save, or stop early"
        return f"{mine}{theirs} ({problem})"

    def _why_of(self, peer: int) -> str | None:
        """Why rank `peer` ends its engine in order, if it has an error."""
        with contextlib.suppress(StoreLost):
            return self.store.ask(lambda plain: _text_at(plain, f"left-{peer}"))
        return None

    def _place_of(self, peer: int, mine: str) -> str | None:
        """Says where rank `peer` waits, if it has timed out as well: it then says so within a second. Else None."""
        until = time.monotonic() + 1
        with contextlib.suppress(StoreLost):
            self.store.ask(lambda plain: plain.set(f"at-{self.rank}", mine))
            while (there := self.store.ask(lambda plain: _text_at(plain, f"at-{peer}"))) is None and time.monotonic() < until:
                time.sleep(_LOOK_EVERY)
            return there
        return None

    def _says_why_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.why() is None and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        return self.why() is not None

    def why(self) -> str | None:
        """Why nothing goes on, as far as this rank can know without waiting."""
        return self._why or _reason_in(self.store)

    def why_lately(self) -> str | None:
        """The same for those who ask all the time: the store is one process's, and answers to all ranks."""
        if self._why is None and time.monotonic() - self._asked >= _ASK_EVERY:
            self._asked = time.monotonic()
            return _reason_in(self.store)
        return self._why

    def all_have_heard(self) -> bool:
        return _all_have_heard(self.store, self.members)


class Channel:
    """The methods that the extension expects of a channel. Messages between two ranks arrive in the order sent.

    Threading: one call at a time; abort() and why() meanwhile, from any thread.
    """

    def __init__(self, ranks: Ranks, name: str, members: range):
        self._ranks = ranks
        self._name = name
        self._members = members
        # Where it is known: ranks that divide this machine, which of them this is, and the local rank, which chooses the GPU.
        self.local_ranks, self.local_index, self.local_rank = 0, -1, -1
        self._made = 0  # channels out of this one
        self._heads = [torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu") for _ in members]  # of the others
        self.rank, self.size = ranks.rank - members.start, len(members)
        try:
            self._group: Any = dist.distributed_c10d.ProcessGroupGloo(
                dist.PrefixStore(name, ranks.store.plain), self.rank, self.size, ranks.timeout)
        except RuntimeError as error:
            if signal_handlers.raised(error):
                raise
            raise RuntimeError(f"not all ranks were met: {ranks.lost(str(error))}") from None
        ranks.add(self)

    def exchange(self, what: str, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
        self._call(what, lambda group: _start_exchange(group, sends, receives))

    def _name_of(self, rank: int) -> int:
        return self._ranks.members[self._members[rank]]

    def broadcast(self, what: str, tensor: torch.Tensor, root: int) -> None:
        self._call(what, lambda group: [(root, group.broadcast(tensor, root))])

    def barrier(self, what: str) -> None:
        self._call(what, lambda _: [])  # all ranks' descriptions have come

    def duplicate(self) -> Channel:
        self.barrier("duplicate")  # a rank that has ended is noticed here
        self._made += 1
        return Channel(self._ranks, f"{self._name}/{self._made}", self._members)

    def split(self, count: int) -> Channel:
        """Over this rank's group of so many consecutive ranks."""
        self.barrier(f"split into groups of {count}")
        self._made += 1
        first = self._members.start + self.rank - self.rank % count
        return Channel(self._ranks, f"{self._name}/{self._made}/from-{first}", range(first, first + count))

    def abort(self, why: str) -> None:
        self._ranks.fail(f"rank {self._ranks.rank_of_job} failed: {why}")

    def why(self) -> str | None:
        return self._ranks.why_lately()

    def close(self) -> None:
        self._group = None

    def hang_up(self) -> None:
        """Closes the connections. A call under way keeps them until it ends, or fails since others hung up."""
        self._group = None

    def interrupted(self, error: BaseException) -> None:
        """For the extension, after a call in which the program's handler of a signal raised `error`, such as KeyboardInterrupt.
        That comes at any line, and outside of a `try` block as well."""
        raised: BaseException | None = error
        while raised is not None:
            for frame, _ in traceback.walk_tb(raised.__traceback__):
                if frame.f_globals is globals():
                    with signal_handlers.suppressing(RuntimeError):  # a caller that is not done yet
                        frame.clear()  # its variables keep connections open for as long as the program keeps the error
            raised = raised.__context__
        self._ranks.fail(f"rank {self._ranks.rank_of_job} was interrupted: {program_end.text_of(error)}")

    def _call(self, what: str, start: Callable[[Any], list[tuple[int, Any]]] | None) -> None:
        if (group := self._group) is None:
            raise RuntimeError(self._ranks.why() or "the channel was closed")
        header = struct.pack("<Q", _hash_of(what)) + (what[:_HEADER_BYTES - 80] + self._doing()).encode()
        problem, peer, work = None, None, []
        try:
            work = self._start_headers(group, header[:_HEADER_BYTES])
            while work:
                peer, each = work.pop(0)
                each.wait(self._ranks.timeout)
                if not work and start is not None and (problem := self._difference(header)) is None:
                    work, start = start(group), None
        except RuntimeError as error:
            if signal_handlers.raised(error):
                raise
            peer = error.peer if isinstance(error, _LostBefore) else peer
            peer = None if peer == self.rank else peer  # the root of a broadcast waits for all
            problem = f"{error}" + ("" if peer is None else f" (waiting for rank {self._name_of(peer)})")
            problem = self._ranks.explained(problem, what + self._doing(), None if peer is None else self._members[peer])
        finally:
            each = group = None  # connections live for as long as these do
            work.clear()
        if problem is not None:
            raise RuntimeError(self._ranks.lost(problem))

    def _doing(self) -> str:
        doing = self._ranks.doing()
        return doing and f", {doing}"

    def _start_headers(self, group: Any, header: bytes) -> list[tuple[int, Any]]:
        mine = torch.frombuffer(bytearray(header.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        return _start_exchange(group, [(peer, mine) for peer in peers], [(peer, self._heads[peer]) for peer in peers])

    def _difference(self, mine: bytes) -> str | None:
        """Both ranks report the same text."""
        for peer, head in enumerate(self._heads):
            if peer == self.rank:
                continue
            theirs = head.numpy().tobytes()
            if theirs[:8] != mine[:8]:
                places = sorted([(self._name_of(self.rank), mine), (self._name_of(peer), theirs)])
                return ("the ranks have diverged: " +
                        ", and ".join(f"rank {rank} is at {_text_in(header)}" for rank, header in places) +
                        ". Every rank must use the same layers, have gradients of the same parameters and make the same calls, "
                        "in the same order")
        return None


def _text_in(header: bytes) -> str:
    return header[8:_HEADER_BYTES].rstrip(b"\0").decode(errors="ignore")


def _hash_of(what: str) -> int:
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


class _LostBefore(RuntimeError):
    """The connection to `peer` had ended before the call."""

    def __init__(self, peer: int, why: str):
        super().__init__(why)
        self.peer = peer


def _start_exchange(group: Any, sends: list[tuple[int, torch.Tensor]],
                    receives: list[tuple[int, torch.Tensor]]) -> list[tuple[int, Any]]:
    work: list[tuple[int, Any]] = []
    for begin, messages in ((group.recv, receives), (group.send, sends)):  # what comes early then finds its place
        for peer, tensor in messages:
            try:
                work.append((peer, begin([tensor], peer, 0)))
            except RuntimeError as error:
                if signal_handlers.raised(error):
                    raise
                raise _LostBefore(peer, str(error)) from None
    return work


def _stay_for_a_moment() -> None:
    """Rank 0's process often holds the store: until the others have read there why it ended, or have ended too."""
    until = time.monotonic() + 3
    for ranks in _left_words:
        while ranks.rank_of_job == 0 and not ranks.all_have_heard() and time.monotonic() < until:
            time.sleep(0.05)
