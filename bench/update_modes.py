#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the step times of two update modes: hoist-gpt trains the same model in both, run by run in turn.

    bench/update_modes.py --gpt build/release/bin/hoist-gpt --path /local_nvme [--modes step forward] [--pairs N]
        [--steps N] [--json FILE]

Two cells: `drive` (few tokens a step, so the drive is the limit) and `compute` (many). A pair is one run in each mode, in
alternating order; its ratio is that of the mean times of steps 3 to N (the first records the pass, the second is the
first that follows a plan). After every second pair the second mode runs against itself: the control. The last update of
a run in mode `forward` falls into settle(), beyond the last step, as the first one does not exist: each step timed here
carries exactly one update. Beside mode `backward`, which cannot clip, neither mode does. The device is the host device: no
time here is a GPU's.
"""
import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile

import gpt
from median_interval import interval

CELLS = {"drive": ["--batch", "1", "--context", "16"], "compute": ["--batch", "16", "--context", "64"]}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "sub_group_size": 500000},
}


def run(args, cell, mode, directory):
    store = os.path.join(directory, "store")
    shutil.rmtree(store, ignore_errors=True)
    config = json.loads(json.dumps(CONFIG))
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "nvme", "nvme_path": store}
    if "backward" in args.modes:
        config["gradient_clipping"] = 0
    config["hoist"] = {"device": "host", "device_memory": "64MiB", "pinned_memory": "96MiB", "update_mode": mode}
    result = gpt.run(args, config, directory, *CELLS[cell])
    return statistics.fmean(step["seconds"] for step in result["steps"][2:]), result["digest"]


def measure(args, cell, directory):
    ratios, control, digests = [], [], set()
    for pair in range(args.pairs):
        order = args.modes if pair % 2 == 0 else args.modes[::-1]
        seconds = {}
        for mode in order:
            seconds[mode], digest = run(args, cell, mode, directory)
            digests.add(json.dumps(digest))
        ratios.append(seconds[args.modes[0]] / seconds[args.modes[1]])
        if pair % 2 == 1:
            first, second = (run(args, cell, args.modes[1], directory)[0] for _ in range(2))
            control.append(first / second)
    if len(digests) != 1:
        sys.exit(f"{cell}: the modes ended in different bits")
    low, high = interval(ratios)
    return {"cell": cell, "modes": args.modes, "speedup_median": statistics.median(ratios), "speedup_interval": [low, high],
            "control": [min(control), max(control)] if control else None, "ratios": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", default="build/release/bin/hoist-gpt", help="the program")
    parser.add_argument("--path", default=".", help="a directory on the drive")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="what to learn")
    parser.add_argument("--modes", nargs=2, choices=["step", "forward", "backward"], default=["step", "forward"])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="hoist-update-modes-", dir=args.path) as directory:
        for cell in CELLS:
            result = measure(args, cell, directory)
            results.append(result)
            print("{}: {} / {} {:.3f} [{:.3f}, {:.3f}], control {}".format(
                cell, *args.modes, result["speedup_median"], *result["speedup_interval"],
                "none" if result["control"] is None else "[{:.3f}, {:.3f}]".format(*result["control"])), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
