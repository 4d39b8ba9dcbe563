#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks hoist's claims about its disk engine: `hoist bench io` measures it against fio and a libaio loop.

    bench/storage_claims.py --hoist build/release/bin/hoist --path /local_nvme [--json FILE] [--only CELL ...] [--smoke]

Each cell is one call of `hoist bench io --compare`: alternating pairs of legs on the same bytes of the same files, the
drain included, with hoist against itself as the control. A claim of at least L is contradicted when the whole 95 %
interval of the median ratio, widened by half the width of the control's interval, lies below L; it is shown when the whole
interval lies above.
With two paths the files are half as large. --only runs some cells; results of other cells already in FILE are kept.
Needs fio, and a hoist that was built with libaio-dev for the last cells. Exit code 1: a claim is contradicted.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

from pairs import write_json

# name: op, paths, rival, least ratio
CELLS = {f"fio-{op}-{paths}": (op, paths, "fio", 1.0 if paths == 1 else 0.97)
         for paths in (1, 2) for op in ("read", "write", "mixed")}
CELLS |= {f"libaio-{op}": (op, 1, "libaio", 1.0) for op in ("read", "write")}
CPU_SECONDS_PER_GB_MAX = 0.005
FULL_FILE_MIB, SMOKE_FILE_MIB = 4096, 16
SKIPPED = 77  # as CTest is told


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hoist", default="build/release/bin/hoist", help="the program")
    parser.add_argument("--path", default=".", help="a directory on the drive")
    parser.add_argument("--json", help="write (and add to) this file")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--smoke", action="store_true", help="a second for each cell; proves that it runs, nothing else")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs must be at least 2: the control runs after every second pair")
    return args


def measure(args, cell, directory):
    op, path_count, rival, limit = CELLS[cell]
    paths = [os.path.join(directory, f"drive{i}") for i in range(path_count)]
    for path in paths:
        os.makedirs(path, exist_ok=True)
    report = os.path.join(directory, "report.json")
    mib = (SMOKE_FILE_MIB if args.smoke else FULL_FILE_MIB) // path_count
    command = [args.hoist, "bench", "io", "--size", f"{mib}MiB", "--op", op, "--compare", rival,
               "--pairs", "2" if args.smoke else str(args.pairs), "--json", report]
    for path in paths:
        command += ["--path", path]
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if "this build has no libaio" in run.stderr:
        print(f"{cell}: skipped, this build has no libaio", file=sys.stderr)
        return None
    if run.returncode != 0:
        sys.exit(f"{cell}: {run.stderr}")
    with open(report) as file:
        result = json.load(file)
    result["least_ratio"] = limit
    return result


def verdict(result):
    compare, limit = result["compare"], result["least_ratio"]
    low, high = compare["ratio_interval"]
    if low >= limit:
        return "shown"
    control_low, control_high = compare["control_interval"]
    return "holds" if high + (control_high - control_low) / 2 >= limit else "CONTRADICTED"  # as measure/statistics.cpp has it


def print_table(results):
    print(f"{'cell':<14} {'least':>5}  {'median [95 %]':<22} {'control [95 %]':<22} {'hoist':>5} {'rival':>5} GB/s "
          f"{'hoist':>7} {'rival':>7} CPU s/GB  verdict")
    for cell, result in results.items():
        compare = result["compare"]
        interval = "{:.3f} [{:.3f}, {:.3f}]".format(compare["ratio_median"], *compare["ratio_interval"])
        control = "{:.3f} [{:.3f}, {:.3f}]".format(compare["control_median"], *compare["control_interval"])
        print(f"{cell:<14} {result['least_ratio']:>5}  {interval:<22} {control:<22} {compare['gb_per_s']:5.2f} "
              f"{compare['tool_gb_per_s']:5.2f}      {compare['cpu_seconds_per_gb']:7.4f} "
              f"{compare['tool_cpu_seconds_per_gb']:7.4f}           {verdict(result)}")


def main():
    args = arguments()
    if shutil.which("fio") is None:
        print("skipped: fio is not installed (apt install fio)")
        return SKIPPED
    results = {}
    if args.json and os.path.exists(args.json):
        with open(args.json) as file:
            results = json.load(file)
    with tempfile.TemporaryDirectory(prefix="hoist-claims-", dir=args.path) as directory:
        for cell in args.only:
            result = measure(args, cell, directory)
            if result is None:
                continue
            results[cell] = result
            write_json(args.json, results)
    results = {cell: results[cell] for cell in CELLS if cell in results}
    if not results:
        print("skipped: no cell could be measured")
        return SKIPPED
    print_table(results)
    if args.smoke:
        return 0
    worst_cpu = max(result["compare"]["cpu_seconds_per_gb"] for result in results.values())
    print(f"processor time: at most {worst_cpu:.4f} s per GB; claimed {CPU_SECONDS_PER_GB_MAX}"
          f"{'' if worst_cpu <= CPU_SECONDS_PER_GB_MAX else ': CONTRADICTED'}")
    contradicted = any(verdict(result) == "CONTRADICTED" for result in results.values())
    return 1 if contradicted or worst_cpu > CPU_SECONDS_PER_GB_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
