#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the time of step() of hoist.optim.AdamW with offloaded states with that of PyTorch's optimizers, on CPU tensors.

    PYTHONPATH=build/release/python bench/offloaded_optimizer.py [--directory DIR] [--pairs N] [--millions N] [--json FILE]

fp32 parameters and gradients in tensors of 4 Mi elements. One process: offload="cpu" and offload="nvme" against
torch.optim.AdamW(fused=True), whose states are beside the parameters. Two processes over gloo, one thread each:
offload="cpu" with shard_over against ZeroRedundancyOptimizer over the same AdamW; the time of the slower rank. A pair is
one step of each, in alternating order; the ratio is that of their times. The control is PyTorch's optimizer against a
second one of its kind.
"""
import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pairs import Pairs, text_of, write_json
from torch.distributed.optim import ZeroRedundancyOptimizer

import hoist.optim

TENSOR = 4 << 20


def parameters(millions):
    generator = torch.Generator().manual_seed(0)
    count = max(1, millions * 1_000_000 // TENSOR)
    tensors = [torch.nn.Parameter(torch.randn(TENSOR, generator=generator)) for _ in range(count)]
    for tensor in tensors:
        tensor.grad = torch.randn(TENSOR, generator=generator)
    return tensors


def seconds(optimizer):
    """The time of one step on the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    optimizer.step()
    taken = torch.tensor([time.perf_counter() - begin])
    if dist.is_initialized():
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def compare(one, other, pairs):
    for _ in range(2):
        seconds(one), seconds(other)
    measured = Pairs(pairs, lambda: seconds(one), lambda: seconds(other))
    return measured.json() | {"text": text_of(measured.ratios),
                              "seconds_median": [statistics.median(each) for each in (measured.first, measured.second)]}


def alone(args, directory):
    def pytorchs():
        return torch.optim.AdamW(parameters(args.millions), lr=1e-3, fused=True)

    results = {}
    for name, offload in (("control", {}), ("cpu", {"offload": "cpu"}), ("nvme", {"offload": "nvme", "directory": directory})):
        one = hoist.optim.AdamW(parameters(args.millions), lr=1e-3, **offload) if offload else pytorchs()
        results[name] = compare(one, pytorchs(), args.pairs)
        if offload:
            one.close()
    return results


def on_a_rank(rank, args, directory, report):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2,
                            timeout=timedelta(minutes=10))

    def pytorchs():
        return ZeroRedundancyOptimizer(parameters(args.millions), torch.optim.AdamW, lr=1e-3, fused=True)

    results = {"control": compare(pytorchs(), pytorchs(), args.pairs)}
    with hoist.optim.AdamW(parameters(args.millions), lr=1e-3, threads=1, offload="cpu",
                           shard_over=dist.group.WORLD) as optimizer:
        results["cpu"] = compare(optimizer, pytorchs(), args.pairs)
    if rank == 0:
        write_json(report, results)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the drive for offload=\"nvme\"")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--millions", type=int, default=25, help="parameters")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hoist-offloaded-optimizer-", dir=args.directory) as directory:
        results = {"one process, / torch.optim.AdamW(fused=True)": alone(args, directory)}
        report = os.path.join(directory, "report.json")
        mp.spawn(on_a_rank, (args, directory, report), nprocs=2)
        with open(report) as file:
            results["two processes, / ZeroRedundancyOptimizer"] = json.load(file)
    for setting, each in results.items():
        for name, figures in each.items():
            print("{}: {} {} ({:.3f} s and {:.3f} s)".format(setting, name, figures["text"], *figures["seconds_median"]))
    write_json(args.json, results)


if __name__ == "__main__":
    main()
