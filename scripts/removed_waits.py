#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Removes the waits of the data path, one at a time, and shows that a test notices each.

    scripts/removed_waits.py [--list] [--only N[,N...]] [--parallel N]

Streams, drives and the update hand memory to each other, and wait for each other's events. This takes a copy of the tree,
makes each wait depend on a number in the environment, builds once, and runs the tests below once for each number, until one
of them fails. A wait that no test misses is printed, and the exit code is 1. Takes some two minutes for each wait.

The copy is kept in build/removed-waits, and its log in build/removed-waits/log. Python's environment is that of
scripts/python-env.sh.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "removed-waits"
TREE, BUILD = WORK / "tree", WORK / "tree" / "build" / "dev"
# Where data moves. Commits have tests of their own (tests/crash), and so have threads that wait for a condition. The waits of
# python/src/tensor_steps.cpp are left out because the objects that wait there do so in their destructors, too.
FILES = ["comm/host_communicator.cpp", "python/src/unit_manager.cpp",
         "python/src/unit_manager_life.cpp",
         "python/src/unit_manager_gradients.cpp", "tiers/activation_offload.cpp", "zero/memory/gradient_spill.cpp",
         "zero/memory/record_io.cpp", "zero/passes/accumulator.cpp", "zero/passes/gatherer.cpp", "zero/passes/gradient_ring.cpp",
         "zero/passes/gradients.cpp", "zero/passes/waits.cpp", "zero/passes/weight_reader.cpp", "zero/step/state_calls.cpp",
         "zero/step/update_policy.cpp", "zero/update/tile_pipeline.cpp"]
# These waits, or the lines they are in, order nothing.
NO_ORDER = {
    'engine().save("", caller_state).wait()': "delivers errors; the engine ends after its commits",
    "held_.front().used.wait_quietly()": "sleeps instead of asking again and again",
    "abandoned.wait_quietly()": "sleeps instead of asking again and again",
    "buffer.idle.wait();  // rethrows a failed write": "is of a write that is done",
    "if (submitted.done()) return submitted.wait();  // rethrows": "is of a fetch that is submitted",
    "adding_.back().added.wait()": "bounds how much memory of PyTorch's is kept",
    "last_made_.wait()": "tells the time of the program's kernels from waits; the streams are synchronized after it",
    "arrival.arrived.wait()": "delivers errors; the streams have been synchronized",
}
VARIABLE = "HOIST_REMOVED_WAIT"
HEADER = f"""#pragma once
#include <cstdlib>
namespace removed {{
// Whether the wait with this number is left out.
inline bool wait(int number) {{
  static const int removed = [] {{
    const char* text = std::getenv("{VARIABLE}");
    return text == nullptr ? 0 : std::atoi(text);
  }}();
  return number == removed;
}}
}}  // namespace removed
"""


@dataclasses.dataclass(frozen=True)
class Test:
    name: str
    command: list[str]
    environment: dict[str, str]
    of: tuple[str, ...]  # the folders whose waits it looks for


def program(of: tuple[str, ...], name: str, pattern: str = "*", **environment: str) -> Test:
    return Test(f"{name} {pattern}", [str(BUILD / "bin" / f"{name}_test"), f"--gtest_filter={pattern}"], environment, of)


def python(name: str, **environment: str) -> Test:
    tests = TREE / "tests" / "python"
    command = [sys.executable, str(tests / "run.py"), str(tests / f"test_{name}.py")]
    return Test(" ".join([name, *environment]), command, environment | {
        "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, ("python", "zero"))


# The first test that fails ends a wait's turn, so what finds most comes first.
TESTS = [program(("zero",), "random_program", HOIST_TEST_SECONDS="20"),
         program(("zero",), "zero",
                 "*DeviceState*:*OffloadRatio*:*Spill*:*Accumulation*:*ReadAhead*:BackwardModeO*:BackwardModeN*"),
         program(("zero",), "zero_state", "*Lifetime*:Engine.*"),
         program(("tiers",), "tiers_memory", "*Activation*"), program(("comm",), "comm"),
         program(("comm", "zero"), "secondary_shard"),
         python("streams", HOIST_TEST_ACCELERATOR="1"), python("host_waits"), python("host_waits", HOIST_TEST_ACCELERATOR="1"),
         python("optim_offload"), python("optim_values"), python("vertical", HOIST_TEST_ACCELERATOR="1"), python("sleep")]
PROGRAMS = sorted({pathlib.Path(test.command[0]).name for test in TESTS if "run.py" not in test.command[1]})


@dataclasses.dataclass(frozen=True)
class Wait:
    number: int
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.number:3}  {self.file}:{self.line}  {self.text}"


def begin_of_operand(text: str, end: int) -> int:
    """Where the postfix expression begins that ends before `end`: `a->b(c)[d].e`."""
    at = end
    while at > 0:
        before = text[at - 1]
        if before in ")]":
            depth = 0
            while True:
                at -= 1
                depth += (text[at] in ")]") - (text[at] in "([")
                if depth == 0:
                    break
        elif before.isalnum() or before in "_.:":
            at -= 1
        elif text[at - 2:at] == "->":
            at -= 2
        elif before.isspace() and text[at:at + 1] in (".", "-"):
            at -= 1
        else:
            break
    return at


def end_of_call(text: str, begin: int) -> int:
    depth, at = 0, text.index("(", begin)
    while True:
        depth += (text[at] == "(") - (text[at] == ")")
        at += 1
        if depth == 0:
            return at


def conditional(file: str, first: int) -> tuple[str, list[Wait]]:
    """The file's text in which each wait depends on its number, from `first` on."""
    text = (ROOT / file).read_text()
    waits: list[Wait] = []
    parts: list[str] = []
    done = 0
    for found in re.finditer(r"(->|\.)wait(?:_quietly)?\((?!lock)", text):
        line_begin = text.rfind("\n", 0, found.start()) + 1
        if "//" in text[line_begin:found.start()] or text[line_begin:text.index("\n", found.start())].strip() in NO_ORDER:
            continue
        begin, end = begin_of_operand(text, found.start()), end_of_call(text, found.start())
        if text[begin:end] in NO_ORDER:
            continue
        operand, call = text[begin:found.start()].rstrip(), text[begin:end]
        number = first + len(waits)
        waits.append(Wait(number, file, text.count("\n", 0, found.start()) + 1, " ".join(call.split())))
        parts += [text[done:begin], f"(removed::wait({number}) ? void({operand}) : {call})"]
        done = end
    return f'#include "{WORK}/removed_wait.hpp"\n#line 1\n' + "".join(parts) + text[done:], waits


def all_waits() -> tuple[dict[str, str], list[Wait]]:
    texts: dict[str, str] = {}
    waits: list[Wait] = []
    for file in FILES:
        texts[file], found = conditional(file, len(waits) + 1)
        waits += found
    return texts, waits


def build(texts: dict[str, str]) -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    (WORK / "removed_wait.hpp").write_text(HEADER)
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    for file in filter(None, listed.split("\0")):
        wanted = texts[file].encode() if file in texts else (ROOT / file).read_bytes()
        target = TREE / file
        if not target.exists() or target.read_bytes() != wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wanted)
            target.chmod((ROOT / file).stat().st_mode)
    subprocess.run(["cmake", "--preset", "dev", "-DHOIST_WITH_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}"],
                   cwd=TREE, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", "--preset", "dev", "--target", *PROGRAMS, "hoist_python"], cwd=TREE, check=True)


def run(test: Test, number: int, seconds: float, log: pathlib.Path) -> str:
    """What the test said: 'passed', 'failed' or 'hung'."""
    environment = os.environ | test.environment | {VARIABLE: str(number)}
    with log.open("a") as out:
        print(f"=== {test.name}", file=out, flush=True)
        with subprocess.Popen(test.command, env=environment, stdout=out, stderr=out, cwd=TREE, start_new_session=True) as process:
            try:
                return "passed" if process.wait(seconds) == 0 else "failed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return "hung"


def noticed(wait: Wait, seconds: dict[str, float]) -> bool:
    log = WORK / "log" / f"{wait.number}.txt"
    log.unlink(missing_ok=True)
    for test in TESTS:
        if wait.file.split("/")[0] not in test.of:
            continue
        result = run(test, wait.number, seconds[test.name], log)
        if result != "passed":
            print(f"{wait}\n       {test.name}: {result}", flush=True)
            return True
    print(f"{wait}\n       NO TEST NOTICES", flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the waits and end")
    parser.add_argument("--only", help="numbers, separated by commas; the tests are not run first with every wait in place")
    parser.add_argument("--parallel", type=int, default=os.cpu_count(), help="how many at once")
    options = parser.parse_args()
    texts, waits = all_waits()
    if options.list:
        print(*waits, sep="\n")
        return 0
    if options.only:
        chosen = set(options.only.split(","))
        if unknown := chosen - {str(wait.number) for wait in waits}:
            parser.error(f"--only {options.only}: --list has no number {', '.join(sorted(unknown))}")
        waits = [wait for wait in waits if str(wait.number) in chosen]
    build(texts)

    (WORK / "log").mkdir(exist_ok=True)
    seconds = {test.name: 300.0 for test in TESTS}
    for test in [] if options.only else TESTS:
        begin = time.monotonic()
        if run(test, 0, 600, WORK / "log" / "0.txt") != "passed":
            print(f"{test.name} fails with every wait in place: {WORK / 'log' / '0.txt'}", file=sys.stderr)
            return 2
        seconds[test.name] = 60 + 4 * (time.monotonic() - begin)
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(lambda wait: noticed(wait, seconds), waits))
    print(f"{sum(results)} of {len(waits)} removed waits are noticed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
