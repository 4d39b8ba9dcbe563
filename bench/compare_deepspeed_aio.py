#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""hoist's engine against DeepSpeed's own aio handle, leg by leg.

    bench/compare_deepspeed_aio.py --hoist build/release/bin/hoist --path /local_nvme [--op read|write] [--json FILE]

DeepSpeed moves one tensor to or from one file in a single call (1 MiB blocks, 32 deep, overlap_events, one thread: its
tuned setting); hoist moves as many bytes of its own file with the same block size and depth. Both files are of the same
size, on the same drive, and made and written in full before each leg. Legs alternate (A B, B A); each time is that of the
transfer alone, as each side measures it. Needs a Python with torch and deepspeed whose async_io operator builds
(libaio-dev); where it does not, the script says why and ends with 77, which CTest shows as skipped.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from pairs import Pairs, write_json

BLOCK_BYTES, QUEUE_DEPTH = 1 << 20, 32
SKIPPED = 77


def load_handle():
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder
        handle = AsyncIOBuilder().load(verbose=False).aio_handle(BLOCK_BYTES, QUEUE_DEPTH, False, True, 1)
    except Exception as error:  # whatever keeps it from building is the reason to print
        print(f"skipped: DeepSpeed's aio handle cannot be built here: {error}")
        sys.exit(SKIPPED)
    return torch, handle


class DeepSpeed:
    def __init__(self, directory, bytes_count):
        self.torch, self.handle = load_handle()
        self.path = os.path.join(directory, "tensor")
        self.bytes = bytes_count
        self.tensor = self.handle.new_cpu_locked_tensor(bytes_count, self.torch.empty(0, dtype=self.torch.uint8))
        self.tensor.random_(0, 256)

    def run(self, op):
        # `hoist bench io` makes its file anew for each leg, too.
        if os.path.exists(self.path):
            os.remove(self.path)
        self.transfer("write")
        os.sync()
        return self.transfer(op)

    def transfer(self, op):
        transfer = self.handle.sync_pread if op == "read" else self.handle.sync_pwrite
        begin = time.perf_counter()
        done = transfer(self.tensor, self.path, 0)
        seconds = time.perf_counter() - begin
        if done < 0:
            raise RuntimeError(f"DeepSpeed's {op} failed")
        return self.bytes / seconds


class Hoist:
    def __init__(self, program, directory, bytes_count):
        self.command = [program, "bench", "io", "--path", directory, "--size", str(bytes_count), "--block-size",
                        str(BLOCK_BYTES), "--queue-depth", str(QUEUE_DEPTH), "--quiet"]
        self.report = os.path.join(directory, "report.json")

    def run(self, op):
        subprocess.run(self.command + ["--op", op, "--json", self.report], check=True, stdout=subprocess.DEVNULL)
        with open(self.report) as file:
            return json.load(file)["gb_per_s"] * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hoist", default="build/release/bin/hoist")
    parser.add_argument("--path", default=".")
    parser.add_argument("--op", choices=("read", "write"), default="read")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of one leg")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hoist-deepspeed-", dir=args.path) as directory:
        theirs = DeepSpeed(directory, args.mib << 20)
        ours = Hoist(args.hoist, directory, args.mib << 20)
        pairs = Pairs(args.pairs, lambda: ours.run(args.op), lambda: theirs.run(args.op), control=lambda: ours.run(args.op))
    speeds = [statistics.median(each) / 1e9 for each in (pairs.first, pairs.second)]
    print(f"{args.op}: hoist / DeepSpeed {pairs}, {args.pairs} pairs of {args.mib} MiB; "
          f"{speeds[0]:.2f} and {speeds[1]:.2f} GB/s")
    write_json(args.json, {"op": args.op, "gb_per_s": speeds} | pairs.json())


if __name__ == "__main__":
    main()
