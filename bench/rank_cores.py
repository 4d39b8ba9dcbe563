#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of sharing the cores of update threads between the ranks of a machine, instead of dividing them.

    bench/rank_cores.py --gpt build/release/bin/hoist-gpt [--pairs N] [--steps N] [--json FILE]

Two ranks train one model with its optimizer state in pinned memory and few tokens a step, so that updates take most of
it. `divided` is the default: each rank's update threads are on cores of its own. `shared` starts a thread for each
processor in each rank and binds none (`"numa_placement": false`), as programs do that know nothing of each other. A
pair is one run of each, in alternating order; its ratio is that of the mean times of steps 3 to N. After every second
pair `divided` runs against itself: the control. All runs must end in the same bits.
"""
import functools
import os
import tempfile

import gpt
from pairs import write_json

SETTINGS = {"divided": {}, "shared": {"numa_placement": False, "update_threads": os.cpu_count()}}


def run(args, cores, directory):
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "hoist": {"device": "host", "device_memory": "1GiB", "pinned_memory": "2GiB", **SETTINGS[cores]},
    }
    return gpt.run(args, config, directory, "--layers", 4, "--width", 768, "--heads", 6, "--context", 16, "--batch", 1,
                   "--threads", 1, ranks=2)


def main():
    args = gpt.parser(__doc__, mpirun="mpirun", pairs=31, steps=8).parse_args()
    with tempfile.TemporaryDirectory(prefix="hoist-rank-cores-") as directory:
        pairs = gpt.compare(args.pairs, *(functools.partial(run, args, cores, directory) for cores in ("shared", "divided")))
    print(f"shared / divided {pairs}")
    write_json(args.json, pairs.json())


if __name__ == "__main__":
    main()
