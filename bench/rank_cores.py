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
import argparse
import json
import os
import statistics
import sys
import tempfile

import gpt
from median_interval import interval

SETTINGS = {"divided": {}, "shared": {"numa_placement": False, "update_threads": os.cpu_count()}}


def run(args, cores, directory):
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "hoist": {"device": "host", "device_memory": "1GiB", "pinned_memory": "2GiB", **SETTINGS[cores]},
    }
    report = gpt.run(args, config, directory, "--layers", 4, "--width", 768, "--heads", 6, "--context", 16, "--batch", 1,
                     "--threads", 1, ranks=2)
    return statistics.fmean(step["seconds"] for step in report["steps"][2:]), json.dumps(report["digest"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", default="build/release/bin/hoist-gpt", help="the program")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="what to learn")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    ratios, control, digests = [], [], set()
    with tempfile.TemporaryDirectory(prefix="hoist-rank-cores-") as directory:
        for pair in range(args.pairs):
            seconds = {}
            for cores in list(SETTINGS)[:: 1 if pair % 2 == 0 else -1]:
                seconds[cores], digest = run(args, cores, directory)
                digests.add(digest)
            ratios.append(seconds["shared"] / seconds["divided"])
            if pair % 2 == 1:
                first, second = (run(args, "divided", directory)[0] for _ in range(2))
                control.append(first / second)
    if len(digests) != 1:
        sys.exit("the settings ended in different bits")
    result = {"shared_to_divided_median": statistics.median(ratios), "interval": interval(ratios),
              "control_median": statistics.median(control) if control else None,
              "control_interval": interval(control) if control else None, "ratios": ratios}
    print("shared / divided {:.3f} [{:.3f}, {:.3f}]".format(result["shared_to_divided_median"], *result["interval"]))
    if control:
        print("control {:.3f} [{:.3f}, {:.3f}]".format(result["control_median"], *result["control_interval"]))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
