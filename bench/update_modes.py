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
import functools
import tempfile

import gpt
from pairs import write_json

CELLS = {"drive": ["--batch", "1", "--context", "16"], "compute": ["--batch", "16", "--context", "64"]}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "sub_group_size": 500000},
}


def run(args, cell, mode, directory):
    config = gpt.on_nvme(CONFIG, directory)
    if "backward" in args.modes:
        config["gradient_clipping"] = 0
    config["hoist"] = {"device": "host", "device_memory": "64MiB", "pinned_memory": "96MiB", "update_mode": mode}
    return gpt.run(args, config, directory, *CELLS[cell])


def main():
    parser = gpt.parser(__doc__, path=".", pairs=8, steps=14)
    parser.add_argument("--modes", nargs=2, choices=["step", "forward", "backward"], default=["step", "forward"])
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="hoist-update-modes-", dir=args.path) as directory:
        for cell in CELLS:
            pairs = gpt.compare(args.pairs, *(functools.partial(run, args, cell, mode, directory) for mode in args.modes))
            print("{}: {} / {} {}".format(cell, *args.modes, pairs), flush=True)
            results.append({"cell": cell, "modes": args.modes} | pairs.json())
    write_json(args.json, results)


if __name__ == "__main__":
    main()
