#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `hoist.mirror` costs a step: hoist-gpt trains the same model with and without it, run by run in turn.

    bench/mirror_cost.py --gpt build/release/bin/hoist-gpt --path /local_nvme [--mirror /network] [--rate 50MB] [--pairs N]
        [--steps N]

A pair is one run each, in alternating order; its ratio is that of the mean times of steps 6 to N, with the mirror over without.
(By then each place of the store has been written once; the first time takes longer, and a mirror has one place more.)
After every second pair two runs without it are compared: the control. Copies follow each other without a pause, so at any
step one is under way. The lag is how many steps the mirror was behind, at the end of each step.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time

from median_interval import text_of
from update_modes import CELLS, CONFIG


def run(args, cell, directory, mirror_parent, mirrored):
    """Seconds of a step, and how far behind the mirror was after each."""
    store, mirror = os.path.join(directory, "store"), os.path.join(mirror_parent, "mirror")
    for place in (store, mirror):
        shutil.rmtree(place, ignore_errors=True)
    config = json.loads(json.dumps(CONFIG))
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "nvme", "nvme_path": store}
    metrics = os.path.join(directory, "metrics")
    config["hoist"] = {"device": "host", "device_memory": "64MiB", "pinned_memory": "128MiB", "metrics": metrics}
    if mirrored:
        config["hoist"]["mirror"] = {"path": mirror, "bytes_per_second": args.rate}
    config_path = os.path.join(directory, "config.json")
    with open(config_path, "w") as file:
        json.dump(config, file)
    if os.path.exists(metrics):
        os.remove(metrics)
    program = subprocess.Popen([args.gpt, "--config", config_path, "--text", args.text, "--steps", str(args.steps + 1),
                                *CELLS[cell]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = []
    while len(lines) < args.steps:
        if program.poll() is not None:
            raise SystemExit(f"{args.gpt} ended with {program.returncode} after {len(lines)} steps")
        time.sleep(0.1)
        if os.path.exists(metrics):
            with open(metrics) as file:
                lines = file.read().splitlines()
    program.kill()  # without the copy of its last step, which nothing is timed by
    program.wait()
    steps = [json.loads(line) for line in lines[:args.steps]]
    lags = [step["step"] - step["mirrored_step"] for step in steps if step["mirrored_step"] is not None]
    return statistics.fmean(step["seconds"] for step in steps[5:]), lags


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", default="build/release/bin/hoist-gpt", help="the program")
    parser.add_argument("--path", default=".", help="a directory on the store's drive")
    parser.add_argument("--mirror", help="a directory in which the mirror's is made; by default that of --path")
    parser.add_argument("--rate", default="50MB", help="hoist.mirror.bytes_per_second")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="what to learn")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    prefix = "hoist-mirror-cost-"
    with (tempfile.TemporaryDirectory(prefix=prefix, dir=args.path) as directory,
          tempfile.TemporaryDirectory(prefix=prefix, dir=args.mirror or args.path) as mirror_parent):
        for cell in args.cells:
            ratios, control, lags = [], [], []
            for pair in range(args.pairs):
                seconds = {}
                for mirrored in (False, True) if pair % 2 == 0 else (True, False):
                    seconds[mirrored], lag = run(args, cell, directory, mirror_parent, mirrored)
                    lags += lag
                ratios.append(seconds[True] / seconds[False])
                if pair % 2 == 1:
                    first, second = (run(args, cell, directory, mirror_parent, mirrored=False)[0] for _ in range(2))
                    control.append(first / second)
            print("{}: with / without {}, control {}; lag {} steps, at most {}".format(
                cell, text_of(ratios), text_of(control) if control else "none",
                statistics.median(lags) if lags else "-", max(lags, default="-")), flush=True)


if __name__ == "__main__":
    main()
