# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed started: which of them divide one state, and whether a store is of such ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hoist import _hoist, program_end, signal_handlers
from hoist.torch.ranks.channels import Channel, Ranks, is_joined

_log = logging.getLogger("hoist")


def launched_size() -> int:
    """Processes that torchrun (or a launcher like it) started, 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def initialize_as_launched() -> None:
    """Joins the ranks that the launcher started, unless the program has, as deepspeed.initialize does. The program's own calls of
    torch.distributed then take tensors of its GPU as well."""
    if launched_size() > 1 and dist.is_available() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")


_T = TypeVar("_T")


@contextlib.contextmanager
def work_of_one_rank(unit_manager: _hoist.UnitManager) -> Iterator[None]:
    """[C] Around work that one rank of the job does, such as writing a file, or each does with files of its own: if it fails on
    one, all ranks raise. What it does between collective calls is in a KeptError."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(_hoist.Error):  # of an engine that has ended: the other ranks know
            unit_manager.first_problem(program_end.text_of(error), of_job=True)
        raise
    if problem := unit_manager.first_problem("", of_job=True):
        raise _hoist.Error(problem)


class KeptError:
    """For work of one rank between collective calls: once it fails, the rest of it is left out, and the rank makes the calls that
    the others make."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def call(self, work: Callable[[], _T]) -> _T | None:
        if self._error is None:
            try:
                return work()
            except Exception as error:
                self._error = error
        return None

    def raise_it(self) -> None:
        if self._error is not None:
            raise self._error


def ranks_at_start(config: _hoist.Config) -> range:
    """The ranks that construct an engine of this configuration together."""
    return range(dist.get_world_size() if config.joins_launched_ranks and is_joined() else 1)


SHARD_OVER = "shard_over=..."


class MetRanks:
    """The ranks that an engine has met, of each of its groups. `arguments`: what this rank passes, such as "resume=True", of the
    arguments that all ranks pass or none."""

    def __init__(self, arguments: Iterable[str]) -> None:
        self.arguments = list(arguments)
        self._of: dict[tuple[int, ...], Ranks] = {}
        self._process = os.getpid()
        self._handled_at_start = program_end.mark_of(program_end.handled_error())  # not by what the engine does

    def add(self, ranks: Ranks) -> None:
        self._of[ranks.members] = ranks

    def refuse_other_arguments(self, ranks: Ranks, passed: Sequence[list[str]]) -> None:
        """`passed`: by each rank."""
        for first, arguments in zip(ranks.members, passed, strict=True):
            for argument in arguments:
                if without := [rank for rank, theirs in zip(ranks.members, passed, strict=True) if argument not in theirs]:
                    files = "" if argument == SHARD_OVER else ". Each looks for its files on its own drive, which may be empty"
                    raise _hoist.UsageError(f"rank {first} passes {argument}, and rank {without[0]} does not: pass it on every "
                                            f"rank, or on none{files}")

    @contextlib.contextmanager
    def told_of_error(self) -> Iterator[None]:
        """Around close(). If it is called in an `except` or `finally` block, the other ranks learn that block's error. Those that
        find this rank's connections closed can read it before close() has ended, since close() may last longer than they look
        for a reason. Afterwards all ranks can."""
        error = program_end.handled_error()
        is_told = error is not None and program_end.mark_of(error) is not self._handled_at_start
        met = list(self._of.values()) if is_told and os.getpid() == self._process else []
        why = f"failed: {program_end.text_of(error)}"
        for ranks in met:
            ranks.leave(f"rank {ranks.rank_of_job} {why}")
        try:
            yield
        finally:
            for ranks in met:
                ranks.fail(f"rank {ranks.rank_of_job} {why}")
        self._of.clear()


# How to make a channel over some ranks, how many they are, and (local_ranks, local_rank) where they cannot be counted.
Channels = tuple[Callable[[], Channel] | None, int, tuple[int, int]]
_UNKNOWN = (0, -1)


def channels_of(config: _hoist.Config, met: MetRanks, doing: Callable[[], str]) -> Channels:
    """Over all ranks; without a maker where PyTorch has no group."""
    if not config.joins_launched_ranks:
        return None, 0, _UNKNOWN
    if not is_joined():
        if launched_size() > 1:
            raise _hoist.UsageError(
                f"{launched_size()} processes were launched, and each would train alone: call "
                'torch.distributed.init_process_group() first, or set "hoist": {"communicator": "self"} and give each '
                "a store of its own")
        return None, 0, _UNKNOWN
    return channels_over(range(dist.get_world_size()), config, met, doing)


def refuse_ranks_that_train_alone() -> None:
    """For an engine that was made before the program joined PyTorch's ranks, if it has."""
    if is_joined() and dist.get_world_size() > 1:
        raise _hoist.UsageError(
            f"torch.distributed.init_process_group() came after wrap(), and this engine would share no gradients with the "
            f"other ranks ({dist.get_world_size()} in all): call it before wrap(), or, if this rank is to train alone, set "
            '"hoist": {"communicator": "self"} and give it a store of its own')


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


def sharding_group_of(mesh: Any, tensor_parallel: Any, config: _hoist.Config) -> ShardingGroup | None:
    """[C] Of the job. `mesh`: a DeviceMesh of one dimension, or a process group; None: all ranks."""
    if mesh is None:
        if tensor_parallel is not None:
            raise _hoist.UsageError("tensor_parallel=... needs mesh=..., the ranks that divide the state")
        return None
    if not is_joined():
        raise _hoist.UsageError("mesh=... needs torch.distributed.init_process_group() first")
    members = _members_of(mesh, "mesh")
    slices = (dist.get_rank(),) if tensor_parallel is None else _members_of(tensor_parallel, "tensor_parallel")
    ranks = Ranks(timedelta(seconds=config.comm_timeout_seconds), range(dist.get_world_size()), str)
    try:
        ranks.meet(json.dumps({"mesh": members}))
        everyones = [json.loads(word).get("mesh") for word in ranks.words()]
    except RuntimeError as error:
        if signal_handlers.raised(error):
            raise
        remedy, said = ". Every rank of the job passes mesh=...", str(error)
        if "did not come" not in said or remedy in said:  # another reason, or the one that another rank gave
            remedy = ""
        raise _hoist.CommError(f"on rank {dist.get_rank()} of the job: {error}{remedy}") from None
    if None in everyones:
        raise _hoist.UsageError(
            f"rank {everyones.index(None)} does not pass mesh=..., which every rank of the job passes, or none")
    for rank, theirs in enumerate(everyones):
        if rank not in theirs or any(everyones[other] != theirs for other in theirs):
            raise _hoist.UsageError(f"rank {rank} passes the ranks {list(theirs)} as its mesh, and they do not all pass the same")
    return ShardingGroup(members, dist.get_world_size(), counts_replicas=slices[0] == dist.get_rank())


def channels_of_job(group: ShardingGroup | None, config: _hoist.Config, met: MetRanks,
                    doing: Callable[[], str]) -> tuple[Any, ...]:
    """Channels over the ranks that divide the state, and the maker of the one over the whole job if that is more."""
    if group is None or group.is_whole_job:
        return channels_of(config, met, doing)
    return (*channels_over(group.members, config, met, doing), channels_over(range(group.job_size), config, met, doing)[0])


def _local_place(rank: int, words: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """(how many ranks divide this one's memory and processors, which of them it is, its local rank). The local rank chooses the
    GPU: it is the launcher's if every rank has one, else which of the ranks of one boot id this is."""
    def those_with(same: Callable[[str], str]) -> list[int]:
        return [other for other, word in enumerate(words) if same(word["memory"]) == same(words[rank]["memory"])]

    launched = [word["local_rank"] for word in words]
    here = those_with(lambda memory: memory)
    if len({launched[other] for other in here}) == len(here):  # else several launchers run here: in the order of the ranks
        here.sort(key=launched.__getitem__)
    of_host = those_with(lambda memory: memory.partition(":")[0])  # the boot id, without a container's limit
    return len(here), here.index(rank), launched[rank] if min(launched) >= 0 else of_host.index(rank)


def channels_over(members: Sequence[int], config: _hoist.Config, met: MetRanks,
                  doing: Callable[[], str]) -> Channels:
    """Over some ranks of the job, this one among them; without a maker where it is the only one."""
    if not is_joined():
        return None, 0, _UNKNOWN
    size, job_size = len(members), dist.get_world_size()
    launched_size, local_rank = _hoist.launched_ranks()
    if launched_size != job_size:  # the launcher started processes that started these ranks, if there is one
        local_rank = -1
    # Where not all meet, they may all be on this machine.
    place = (job_size, dist.get_rank()) if launched_size != job_size and size < job_size else _UNKNOWN
    if size == 1:
        return None, 0, place
    timeout = timedelta(seconds=config.comm_timeout_seconds)

    def make() -> Channel:
        ranks = Ranks(timeout, members, doing)
        try:
            ranks.meet(json.dumps({"arguments": met.arguments, "memory": _hoist.memory_id(), "local_rank": local_rank}))
            words = [json.loads(word) for word in ranks.words()]
            # Ranks that pass mesh=... are in sharding_group_of() at this time, and say so.
            if with_mesh := [member for member, word in zip(members, words, strict=True) if "mesh" in word]:
                raise _hoist.UsageError(f"rank {with_mesh[0]} passes mesh=..., which every rank of the job passes, or none")
            met.refuse_other_arguments(ranks, [word["arguments"] for word in words])
            channel = Channel(ranks, "ranks", range(size))
            if size == job_size:
                channel.local_ranks, channel.local_index, channel.local_rank = _local_place(ranks.rank, words)
            met.add(ranks)
            return channel
        except RuntimeError as error:
            if signal_handlers.raised(error):
                raise
            raise _hoist.CommError(f"torch.distributed: on rank {ranks.rank} of {size}: {error}") from None
    return make, size, place


def refuse_stores_of_others(store: str, is_of_group: bool) -> None:
    """For a run that is to be resumed, and has no commit in `store`, which ends with ".../hoist". `is_of_group`: hoist has put
    its directory below the one that the program named, one for each group of ranks.

    Errors: StoreError if another division of the ranks has trained in the program's directory.
    """
    own = pathlib.Path(store)
    base = own.parent.parent if is_of_group else own.parent
    for place in (base, *sorted(base.glob("rank-*")), *sorted(base.glob("group-*"))):
        directory = str(place / own.name)
        if place == own.parent or not _hoist.has_store(directory):
            continue
        step = max((step for step, _ in _hoist.steps_in_store(directory)[0]), default=0)
        if step > 0:
            raise _hoist.StoreError(
                f"resume=True finds no run in {own.parent}, but {place} holds one of step {step}: its ranks were divided "
                "otherwise, or had other rank numbers on these machines. Resume it with as many ranks, each on the machine with "
                "its drive, and with the same shard_over=... or mesh=..., or choose another directory to begin anew")


def warn_of_other_world_size(saved: dict[str, Any], size: int, what: str) -> None:
    """`saved`: a commit's state, with the number of ranks that made it."""
    before = saved.get("world_size", size)
    is_first = not is_joined() or dist.get_rank() == 0
    if before != size and is_first and (saved.get("program") or saved.get("buffers")):
        _log.warning("the run that is resumed had %d ranks, and this one has %d: if %s differed between those ranks, a rank now "
                     "has those of the old rank of its number, and ranks beyond them have rank 0's", before, size, what)
