# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed started: what the engine exchanges with the others goes through groups of gloo.

Weights and gradients pass as CPU memory, so the groups are gloo's, whatever the program's own group is made of. They are not
the program's: each channel has connections of its own, made through the store that torch.distributed was initialized with,
so that the engine's threads do not take turns, and so that a rank can hang up.

A rank that fails writes why into that store, and closes its connections: the waits of the others end at once, and they look
there for the reason. They hang up in their turn; so whoever waits for one of them, and not for the rank that failed, hears
of it too.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hoist import _hoist

# Every rank of a group makes the same engines over it in the same order, and so gives them the same names.
_numbers: dict[tuple[int, ...], itertools.count[int]] = {}
_gave_reasons: list[Ranks] = []


class Ranks:
    """Those of one engine: where they find each other, and why they do not go on.

    `members`: their ranks in the job, in the order that the engine counts them in.

    Threading: any.
    """

    def __init__(self, timeout: timedelta, members: Sequence[int]):
        self.members = tuple(members)
        self.rank_of_job = dist.get_rank()
        self.rank = self.members.index(self.rank_of_job)
        self.timeout = timeout
        name = hashlib.sha256(repr(self.members).encode()).hexdigest()[:16]
        number = next(_numbers.setdefault(self.members, itertools.count()))
        self.store = dist.PrefixStore(f"hoist/{name}/{number}", dist.distributed_c10d._get_default_store())
        self.failed = False
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._why: str | None = None

    def add(self, channel: Channel) -> None:
        with self._lock:
            self._channels.add(channel)

    def fail(self, why: str) -> str:
        """Tells the others why this rank does not go on, and hangs up. Returns the reason that was given first, whoever gave
        it."""
        with self._lock:
            if self._why is None:
                self._why = self._reason_in_store() or why
                with contextlib.suppress(RuntimeError):  # whoever held the store has ended
                    if self._why == why:
                        self.store.set("why", why)
                        _gave_reasons.append(self)
                    self.store.add("heard", 1)
            self.failed = True
            channels = list(self._channels)
        for channel in channels:
            channel.hang_up()
        return self._why

    def lost(self, problem: str) -> str:
        """Returns the message of a failed call: another rank's reason, if there is one."""
        mine = f"rank {self.rank_of_job} gave up: {problem}"
        why = self.fail(mine)
        return problem if why == mine else why

    def why(self) -> str | None:
        """Why nothing goes on, as far as this rank can know without waiting."""
        return self._why or self._reason_in_store()

    def all_have_heard(self) -> bool:
        try:
            return self.store.add("heard", 0) >= len(self.members)
        except RuntimeError:
            return True  # nobody can any more

    def _reason_in_store(self) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self.store.check(["why"]):
                return self.store.get("why").decode()
        return None


class Channel:
    """The methods that the extension expects of a channel. Messages between two ranks arrive in the order sent.

    Threading: one call at a time; abort() and why() meanwhile, from any thread.
    """

    def __init__(self, ranks: Ranks, name: str, members: range):
        self._ranks = ranks
        self._name = name
        self._members = members
        self._made = 0  # channels out of this one
        self._lock = threading.Lock()
        self._in_use = False
        self.rank, self.size = ranks.rank - members.start, len(members)
        try:
            self._group: Any = dist.distributed_c10d.ProcessGroupGloo(
                dist.PrefixStore(name, ranks.store), self.rank, self.size, ranks.timeout)
        except RuntimeError as error:
            raise RuntimeError(f"not all ranks were met: {ranks.lost(str(error))}") from None
        ranks.add(self)

    def exchange(self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
        def start(group: Any) -> list[tuple[str, Any]]:
            # Receives first: what comes early then finds its place.
            work = [(f" (from rank {self._name_of(rank)})", group.recv([tensor], rank, 0)) for rank, tensor in receives]
            return work + [(f" (to rank {self._name_of(rank)})", group.send([tensor], rank, 0)) for rank, tensor in sends]
        self._call(start)

    def _name_of(self, rank: int) -> int:
        return self._ranks.members[self._members[rank]]

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._call(lambda group: [("", group.broadcast(tensor, root))])

    def barrier(self) -> None:
        self._call(lambda group: [("", group.barrier())])

    def duplicate(self) -> Channel:
        self._made += 1
        return Channel(self._ranks, f"{self._name}/{self._made}", self._members)

    def split(self, count: int) -> Channel:
        """Over this rank's group of so many consecutive ranks."""
        self._made += 1
        first = self._members.start + self.rank - self.rank % count
        return Channel(self._ranks, f"{self._name}/{self._made}/from-{first}", range(first, first + count))

    def abort(self, why: str) -> None:
        self._ranks.fail(f"rank {self._ranks.rank_of_job} failed: {why}")

    def why(self) -> str | None:
        return self._ranks.why()

    def close(self) -> None:
        self._group = None

    def hang_up(self) -> None:
        """Closes the connections. A call under way keeps them until it ends, or fails since others hung up."""
        with self._lock:
            if self._in_use:
                return
            group, self._group = self._group, None
        del group  # not under the lock: it waits for gloo's threads

    def _call(self, start: Callable[[Any], list[tuple[str, Any]]]) -> None:
        with self._lock:
            group = self._group
            self._in_use = group is not None
        if group is None:
            raise RuntimeError(self._ranks.why() or "the channel was closed")
        problem, peer, work = None, "", []
        try:
            work = start(group)
            while work:
                peer, each = work.pop(0)
                each.wait(self._ranks.timeout)
        except RuntimeError as error:
            problem = f"{error}{peer}"
        each = group = None  # connections live for as long as these do
        work.clear()
        with self._lock:
            self._in_use = False
        if problem is not None:
            raise RuntimeError(self._ranks.lost(problem))
        if self._ranks.failed:
            self.hang_up()


@atexit.register
def _stay_for_a_moment() -> None:
    """Rank 0's process often holds the store: until the others have read there why it ended."""
    until = time.monotonic() + 3
    for ranks in _gave_reasons:
        while ranks.rank_of_job == 0 and not ranks.all_have_heard() and time.monotonic() < until:
            time.sleep(0.05)


def launched_size() -> int:
    """Processes that torchrun (or a launcher like it) started, 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def initialize_as_launched() -> None:
    """Joins the ranks that the launcher started, unless the program has, as deepspeed.initialize does."""
    if launched_size() > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo")


def channels_of(config: _hoist.Config) -> tuple[Callable[[], Channel] | None, int]:
    """How to make a channel over all ranks, and how many there are; (None, 0) where PyTorch has no group."""
    if not config.joins_launched_ranks:
        return None, 0
    if not (dist.is_available() and dist.is_initialized()):
        if launched_size() > 1:
            raise _hoist.UsageError(
                f"{launched_size()} processes were launched, and each would train alone: call "
                'torch.distributed.init_process_group() first, or set "hoist": {"communicator": "self"} and give each '
                "a store of its own")
        return None, 0
    return channels_over(range(dist.get_world_size()), config)


@dataclasses.dataclass(frozen=True)
class ShardingGroup:
    """The ranks that divide one state between them (data parallel), in a job whose other ranks hold other parameters."""

    members: tuple[int, ...]
    job_size: int
    counts_replicas: bool  # in the norm: parameters that tensor-parallel ranks have copies of

    @property
    def is_whole_job(self) -> bool:
        return len(self.members) == self.job_size

    @property
    def name(self) -> str:
        """The name of the group's directory within the job's store."""
        return f"group-{self.members[0]}"

    @property
    def is_first_of_job(self) -> bool:
        return dist.get_rank() == 0

    def counts(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this group counts the parameter in the gradient's norm. Slices are marked as Megatron and DeepSpeed do."""
        is_slice = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
        return self.counts_replicas or bool(is_slice)


def _members_of(group: Any, what: str) -> tuple[int, ...]:
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            raise _hoist.UsageError(f"{what} is a mesh of {group.ndim} dimensions: pass one, such as mesh[\"dp\"]; several that "
                                    "divide the state together are made one by mesh[\"a\", \"b\"]._flatten()")
        return tuple(group.mesh.tolist())
    return tuple(dist.get_process_group_ranks(group))


def sharding_group_of(mesh: Any, tensor_parallel: Any) -> ShardingGroup | None:
    """[C] Of the job. `mesh`: a DeviceMesh of one dimension, or a process group; None: all ranks."""
    if mesh is None:
        if tensor_parallel is not None:
            raise _hoist.UsageError("tensor_parallel=... needs mesh=..., the ranks that divide the state")
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise _hoist.UsageError("mesh=... needs torch.distributed.init_process_group() first")
    members = _members_of(mesh, "mesh")
    slices = (dist.get_rank(),) if tensor_parallel is None else _members_of(tensor_parallel, "tensor_parallel")
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, members)
    for rank, theirs in enumerate(everyones):
        if rank not in theirs or any(everyones[other] != theirs for other in theirs):
            raise _hoist.UsageError(f"rank {rank} passes the ranks {list(theirs)} as its mesh, and they do not all pass the same")
    return ShardingGroup(members, dist.get_world_size(), counts_replicas=slices[0] == dist.get_rank())


def channels_of_job(group: ShardingGroup | None, config: _hoist.Config) -> tuple[Any, ...]:
    """(maker, size) of the channels over the ranks that divide the state, and over the whole job if that is more."""
    if group is None or group.is_whole_job:
        return channels_of(config)
    return (*channels_over(group.members, config), *channels_over(range(group.job_size), config))


def channels_over(members: Sequence[int], config: _hoist.Config) -> tuple[Callable[[], Channel] | None, int]:
    """The same over some ranks of the job, this one among them; (None, 0) where it is the only one."""
    size = len(members)
    if size == 1:
        return None, 0
    timeout = timedelta(seconds=config.comm_timeout_seconds)

    def make() -> Channel:
        ranks = Ranks(timeout, members)
        try:
            return Channel(ranks, "ranks", range(size))
        except RuntimeError as error:
            raise _hoist.CommError(f"torch.distributed: on rank {ranks.rank} of {size} {error}") from None
    return make, size
