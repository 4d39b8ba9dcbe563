# SPDX-License-Identifier: Apache-2.0
"""How long the drive alone takes to move what a step moves: reads and writes at once, in blocks, with nothing to compute.

    python bench/deepspeed/drive.py --directory /local_nvme --read 350e6 --written 306e6 [--rounds 8]

Prints one line of JSON for every round. Before the first round it writes the whole file once, because space that was never
written is read at the speed of memory.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import tempfile
import time

import torch

import hoist.aio

PIECE = 4 << 20


def move(engine, path: str, buffers, reads: int, writes: int) -> float:
    """As many pieces are read from the first half of the file as are asked for, and written to the second, in turns."""
    order = sorted([((i + 0.5) / reads, True, i) for i in range(reads)] + [((i + 0.5) / writes, False, i) for i in range(writes)])
    free, moving = collections.deque(buffers), collections.deque()
    begin = time.perf_counter()
    for _, is_read, index in order:
        if not free:
            transfer, buffer = moving.popleft()
            transfer.wait()
            free.append(buffer)
        buffer = free.popleft()
        offset = (index if is_read else reads + index) * PIECE
        moving.append(((engine.read if is_read else engine.write)(buffer, path, offset), buffer))
    for transfer, _ in moving:
        transfer.wait()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--read", type=float, required=True, help="bytes")
    parser.add_argument("--written", type=float, required=True, help="bytes")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    reads, writes = (max(1, round(count / PIECE)) for count in (arguments.read, arguments.written))
    engine = hoist.aio.Engine(queue_depth=16, block_size=1 << 20)
    buffers = [hoist.aio.aligned_empty(PIECE, torch.uint8).random_() for _ in range(8)]
    scale = (arguments.read + arguments.written) / ((reads + writes) * PIECE)
    with tempfile.TemporaryDirectory(prefix="hoist-drive-", dir=arguments.directory) as directory:
        path = os.path.join(directory, "file")
        for index in range(reads + writes):
            engine.write(buffers[index % len(buffers)], path, index * PIECE).wait()
        for _ in range(arguments.rounds):
            print(json.dumps({"seconds": scale * move(engine, path, buffers, reads, writes)}), flush=True)


if __name__ == "__main__":
    main()
