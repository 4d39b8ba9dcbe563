#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A whole training run on 1, 2 and 4 ranks of one machine: tokens a second, and what each link carried.

    bench/world_sizes.py --gpt build/release/bin/hoist-gpt --path DIR [--worlds 1,2,4] [--steps N] [--json FILE]

The same model and the same global batch, dealt out over the ranks (mpirun), everything on NVMe. Per world size: tokens a
second of all ranks together over steps 3 to N (the first records the pass). For each link: bytes per parameter and step on
rank 0, and the share of the time in which the link was busy. (hoist-gpt's own table compares the bytes with the formula.)
Links work at the same time, so shares do not add up; `between ranks` contains waiting for slower ranks.
communication/computation is defined in examples/gpt/README.md. Ranks share the machine's processors and drive, on the host
device: this shows what partitioning costs, not what more machines would gain, and no time is a GPU's.
"""
import os
import shutil
import statistics
import sys
import tempfile

import gpt
from pairs import write_json

LINKS = {"nvme_read": "NVMe read", "nvme_write": "NVMe write", "host_to_device": "up", "device_to_host": "down",
         "wire": "between ranks"}


def run(args, world, directory):
    config = gpt.on_nvme({
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "hoist": {"device": "host", "device_memory": "64MiB", "pinned_memory": "96MiB"},
    }, directory)
    return gpt.run(args, config, directory, "--layers", args.layers, "--width", args.width, "--heads", 6, "--context",
                   args.context, "--batch", args.batch // world, "--threads", max(1, (os.cpu_count() or 1) // world), ranks=world)


def figures(args, world, report):
    if report["world_size"] != world:
        sys.exit(f"asked for {world} ranks, got {report['world_size']}")
    seconds = sum(step["seconds"] for step in report["steps"])
    later = report["steps"][2:]
    parameter_steps = report["parameters"] * len(report["steps"])
    return {
        "world_size": world,
        "tokens_per_second": args.batch * args.context * len(later) / sum(step["seconds"] for step in later),
        "last_loss": statistics.fmean(step["loss"] for step in later[-3:]),
        "communication_to_computation": report["communication_to_computation"],
        "compute_share": report["compute_seconds"] / seconds,
        "links": {name: {"bytes_per_parameter": report["links"][name]["bytes"] / parameter_steps,
                         "busy_share": report["links"][name]["busy_seconds"] / seconds} for name in LINKS},
    }


def table(results):
    print("| ranks | tokens/s | kernels | comm/comp | " + " | ".join(LINKS.values()) + " | loss |")
    print("|---" * (len(LINKS) + 5) + "|")
    for r in results:
        links = " | ".join("{bytes_per_parameter:.2f} B, {0:.1f} %".format(100 * r["links"][name]["busy_share"],
                                                                          **r["links"][name]) for name in LINKS)
        print("| {world_size} | {tokens_per_second:.0f} | {0:.1f} % | {communication_to_computation:.3f} | {1} | "
              "{last_loss:.4f} |".format(100 * r["compute_share"], links, **r))


def main():
    parser = gpt.parser(__doc__, mpirun="mpirun", path=".", worlds="1,2,4", layers=6, width=384, context=64, steps=12)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--smoke", action="store_true", help="a small model and few steps: does it run")
    args = parser.parse_args()
    if args.smoke:
        args.layers, args.width, args.context, args.steps, args.worlds = 2, 48, 16, 4, "1,2"
    if not os.path.exists(args.text):
        print(f"skipped: there is no text {args.text}")
        sys.exit(77)
    worlds = [int(world) for world in args.worlds.split(",")]
    if max(worlds) > 1 and shutil.which(args.mpirun) is None:
        print("skipped: there is no mpirun")
        sys.exit(77)
    if any(args.batch % world for world in worlds):
        sys.exit(f"--batch {args.batch} cannot be dealt out over {args.worlds} ranks")
    results = []
    with tempfile.TemporaryDirectory(prefix="hoist-world-sizes-", dir=args.path) as directory:
        for world in worlds:
            results.append(figures(args, world, run(args, world, directory)))
    table(results)
    write_json(args.json, results)
    losses = [r["last_loss"] for r in results]
    if max(losses) - min(losses) > 0.05 * losses[0]:
        sys.exit(f"the losses of the last steps differ by more than 5 %: {losses}")


if __name__ == "__main__":
    main()
