# SPDX-License-Identifier: Apache-2.0
"""Tensors to files and back, many at once, past the page cache.

    engine = hoist.aio.Engine(queue_depth=32)
    transfer = engine.write(tensor, "/local_nvme/t")      # a future: done(), wait()
    transfer.wait()
    engine.read(tensor, "/local_nvme/t").wait()

Memory from `aligned_empty` goes to the drive without a copy; any other is copied through small buffers. A tensor on a GPU passes
through CPU memory of its size, in the order of the current stream. `aio_handle` is the same engine under the names of DeepSpeed's
class.

Drives write whole blocks of 4096 bytes. A process orders its writes that share such a block, of whatever engine: those to a file
that is being written go through the queue of the engine whose write began first. Several processes that write parts of one file
at once must divide it at multiples of 4096.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from hoist import _hoist
from hoist._hoist import Transfer

__all__ = ["Engine", "ReadToDevice", "Transfer", "aio_handle", "aligned_empty"]


def aligned_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialized CPU tensor fit for direct transfers."""
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    if any(length < 0 for length in size):
        raise _hoist.UsageError(f"aligned_empty({shape}): a tensor has no negative lengths")
    memory = torch.from_dlpack(_hoist.aligned_memory(max(1, size.numel() * dtype.itemsize)))
    return memory[: size.numel() * dtype.itemsize].view(dtype).view(size)


class Engine:
    """Many direct reads and writes in flight. Any thread may start them and wait."""

    def __init__(self, block_size: int = 1 << 20, queue_depth: int = 16, threads: int = 4, backend: str = "automatic"):
        self._engine = _hoist.AioEngine(block_size, queue_depth, threads, backend)

    def read(self, target: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Transfer | ReadToDevice:
        """Starts filling a dense tensor from a file."""
        if target.device.type == "cpu":
            return self._engine.read(_memory(target), os.fspath(path), offset)
        _refuse_views(target)
        staged = aligned_empty(target.shape, target.dtype)
        return ReadToDevice(self._engine.read(_memory(staged), os.fspath(path), offset), staged, target)

    def write(self, source: torch.Tensor, path: str | os.PathLike[str], offset: int = 0) -> Transfer:
        """Starts writing a dense tensor to a file, which is made when it does not exist."""
        return self._engine.write(_memory(source), os.fspath(path), offset)

    @property
    def description(self) -> str:
        return self._engine.description


class ReadToDevice:
    """A read into a tensor that is not in CPU memory. The tensor is filled by wait(); done() says whether that would block."""

    def __init__(self, transfer: Transfer, staged: torch.Tensor, target: torch.Tensor):
        self._transfer = transfer
        self._both: tuple[torch.Tensor, torch.Tensor] | None = (staged, target)

    def done(self) -> bool:
        return self._transfer.done()

    def wait(self) -> None:
        self._transfer.wait()
        both, self._both = self._both, None
        if both is not None:
            staged, target = both
            target.detach().copy_(staged)


def _refuse_views(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise _hoist.UsageError("transfers need a dense tensor: its elements do not stand one after the other")
    if tensor.is_conj() or tensor.is_neg():
        raise _hoist.UsageError("transfers need a tensor whose memory has its values: resolve_conj() and resolve_neg() make one")


def _memory(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, or of a copy in CPU memory. The extension takes every array that speaks DLPack; its stubs name
    NumPy's alone."""
    _refuse_views(tensor)
    if tensor.device.type != "cpu":
        tensor = aligned_empty(tensor.shape, tensor.dtype).copy_(tensor.detach())
    return tensor.detach().view(-1).view(torch.uint8)


class aio_handle:
    """The methods of DeepSpeed's aio_handle.

    `single_submit` and `overlap_events` describe how libaio is driven and have no counterpart; they are kept for the
    getters. One engine serves all transfers, so `intra_op_parallelism` only matters where io_uring is forbidden.
    """

    def __init__(self, block_size: int = 1 << 20, queue_depth: int = 128, single_submit: bool = False,
                 overlap_events: bool = False, intra_op_parallelism: int = 1):
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._engine = Engine(block_size, queue_depth, max(1, intra_op_parallelism))
        self._pending: list[tuple[Transfer | ReadToDevice, torch.Tensor | None, str, int]] = []
        self._failed: _hoist.Error | None = None  # the first failure of those that wait() has seen
        self._locked: dict[int, torch.Tensor] = {}

    def get_block_size(self) -> int:
        return self._settings[0]

    def get_queue_depth(self) -> int:
        return self._settings[1]

    def get_single_submit(self) -> bool:
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        return self._settings[4]

    def get_alignment(self) -> int:
        return 4096

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool = False, async_: bool = False,
              file_offset: int = 0, **other: bool) -> int:
        return self._start(self._engine.read(buffer, filename, file_offset), None, filename, file_offset,
                           other.get("async", async_))

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool = False, async_: bool = False,
               file_offset: int = 0, **other: bool) -> int:
        return self._start(self._engine.write(buffer, filename, file_offset), buffer if validate else None, filename,
                           file_offset, other.get("async", async_))

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, validate, False, file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, True, file_offset)

    def wait(self) -> int:
        """Returns when everything started asynchronously is done: how many transfers that were."""
        count = len(self._pending)
        while self._pending:
            try:
                self._end(*self._pending[0])
            except _hoist.Error as error:
                self._failed = self._failed or error
            del self._pending[0]  # one whose wait is interrupted stays
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        return count

    def _start(self, transfer: Transfer | ReadToDevice, validate: torch.Tensor | None, filename: str, offset: int,
               later: bool) -> int:
        if later:
            self._pending.append((transfer, validate, filename, offset))
            return 0
        self._end(transfer, validate, filename, offset)
        return 1

    def _end(self, transfer: Transfer | ReadToDevice, written: torch.Tensor | None, filename: str, offset: int) -> None:
        transfer.wait()
        if written is None:
            return
        back = aligned_empty(written.nbytes, torch.uint8)
        self._engine.read(back, filename, offset).wait()
        if not torch.equal(back, _memory(written)):
            raise _hoist.IoError(f"{filename} holds other bytes at offset {offset} than were written")

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Aligned memory in huge pages; it is not locked, since io_uring pins what is in flight."""
        tensor = aligned_empty(num_elem, example_tensor.dtype)
        self._locked[tensor.data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return self._locked.pop(tensor.data_ptr(), None) is not None
