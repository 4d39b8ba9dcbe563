# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed started: what the engine exchanges with the others goes through its process groups.

Weights and gradients pass as CPU memory, so the groups are gloo's, whatever the program's own group is made of. Every
channel is a group of its own: the engine's threads do not take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hoist import _hoist


class Channel:
    """What the extension expects of a channel; messages between two ranks arrive in the order sent."""

    def __init__(self, timeout: timedelta):
        self._timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def exchange(self, sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
        # Receives first: what comes early then finds its place.
        work = [dist.irecv(tensor, group_src=rank, group=self._group) for rank, tensor in receives]
        work += [dist.isend(tensor, group_dst=rank, group=self._group) for rank, tensor in sends]
        for each in work:
            each.wait(self._timeout)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        dist.broadcast(tensor, group_src=root, group=self._group)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def duplicate(self) -> Channel:
        return Channel(self._timeout)

    def close(self) -> None:
        if dist.is_initialized():  # else the program has ended all groups already
            dist.destroy_process_group(self._group)


def launched_size() -> int:
    """Processes that torchrun (or a launcher like it) started, 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def initialize_as_launched() -> None:
    """What deepspeed.initialize does: joins the ranks that the launcher started, unless the program has."""
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
    size = dist.get_world_size()
    if size == 1:
        return None, 0
    timeout = timedelta(seconds=config.comm_timeout_seconds)
    return lambda: Channel(timeout), size
