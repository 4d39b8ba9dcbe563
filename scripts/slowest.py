#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the ten translation units of a build, and the ten entries of its last ctest run, that took longest.

    scripts/slowest.py [PRESET]     dev without an argument
"""

import pathlib
import sys

COUNT = 10


def compiled(log: pathlib.Path) -> dict[str, float]:
    """Seconds of the last compilation of each object, from ninja's log."""
    seconds = {}
    for line in log.read_text().splitlines():
        if line.startswith("#"):
            continue
        begin, end, _, output, _ = line.split("\t")
        if output.endswith((".o", ".gch")):
            seconds[output] = (int(end) - int(begin)) / 1000
    return seconds


def tested(costs: pathlib.Path) -> dict[str, float]:
    """Seconds of each ctest entry, the mean of its runs in this build tree."""
    seconds = {}
    for line in costs.read_text().splitlines():
        if line == "---":
            break
        name, _, cost = line.rsplit(" ", 2)
        seconds[name] = float(cost)
    return seconds


def show(title: str, seconds: dict[str, float]) -> None:
    print(f"{title}: {len(seconds)}, {sum(seconds.values()):.0f} s in all")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:COUNT]:
        print(f"{seconds[name]:8.1f} s  {name}")


def main() -> None:
    build = pathlib.Path(__file__).resolve().parent.parent / "build" / (sys.argv[1] if len(sys.argv) > 1 else "dev")
    show("translation units", compiled(build / ".ninja_log"))
    costs = build / "Testing" / "Temporary" / "CTestCostData.txt"
    if costs.exists():
        show("ctest entries", tested(costs))


main()
