#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `hoist.mirror` costs a step: hoist-gpt trains the same model with and without it, run by run in turn.

    bench/mirror_cost.py --gpt build/release/bin/hoist-gpt --path /local_nvme [--mirror /network] [--rate 50MB] [--pairs N]
        [--steps N] [--json FILE]

A pair is one run each, in alternating order; its ratio is that of the mean times of steps 6 to N, with the mirror over without.
(By then each place of the store has been written once; the first time takes longer, and a mirror has one place more.)
After every second pair two runs without it are compared: the control. Copies follow each other without a pause, so at any
step one is under way. The lag is how many steps the mirror was behind, at the end of each step.
"""
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time

import gpt
from pairs import Pairs, write_json
from update_modes import CELLS, CONFIG


def run(args, cell, directory, mirror_parent, mirrored):
    """Seconds of a step, and how far behind the mirror was after each."""
    mirror, metrics = os.path.join(mirror_parent, "mirror"), os.path.join(directory, "metrics")
    shutil.rmtree(mirror, ignore_errors=True)
    config = gpt.on_nvme(CONFIG, directory)
    config["hoist"] = {"device": "host", "device_memory": "64MiB", "pinned_memory": "128MiB", "metrics": metrics}
    if mirrored:
        config["hoist"]["mirror"] = {"path": mirror, "bytes_per_second": args.rate}
    if os.path.exists(metrics):
        os.remove(metrics)
    program = subprocess.Popen(gpt.command(args, config, directory, *CELLS[cell], steps=args.steps + 1),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = []
    while len(lines) < args.steps:
        time.sleep(0.1)
        ended = program.poll()
        if os.path.exists(metrics):
            with open(metrics) as file:
                lines = file.read().splitlines()
        if ended is not None and len(lines) < args.steps:
            raise SystemExit(f"{args.gpt} ended with {ended} after {len(lines)} steps")
    program.kill()  # without the copy of its last step, which nothing is timed by
    program.wait()
    steps = [json.loads(line) for line in lines[:args.steps]]
    lags = [step["step"] - step["mirrored_step"] for step in steps if step["mirrored_step"] is not None]
    return statistics.fmean(step["seconds"] for step in steps[5:]), lags


def measure(args, cell, directory, mirror_parent):
    lags = []

    def seconds(mirrored):
        taken, lag = run(args, cell, directory, mirror_parent, mirrored)
        lags.extend(lag)
        return taken

    pairs = Pairs(args.pairs, lambda: seconds(True), lambda: seconds(False), control=lambda: seconds(False))
    print("{}: with / without {}; lag {} steps, at most {}".format(
        cell, pairs, statistics.median(lags) if lags else "-", max(lags, default="-")), flush=True)
    return {"cell": cell, "lags": lags} | pairs.json()


def main():
    parser = gpt.parser(__doc__, path=".", pairs=31, steps=20)
    parser.add_argument("--mirror", help="a directory in which the mirror's is made; by default that of --path")
    parser.add_argument("--rate", default="50MB", help="hoist.mirror.bytes_per_second")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    args = parser.parse_args()
    prefix = "hoist-mirror-cost-"
    with (tempfile.TemporaryDirectory(prefix=prefix, dir=args.path) as directory,
          tempfile.TemporaryDirectory(prefix=prefix, dir=args.mirror or args.path) as mirror_parent):
        write_json(args.json, [measure(args, cell, directory, mirror_parent) for cell in args.cells])


if __name__ == "__main__":
    main()
