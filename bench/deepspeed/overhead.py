# SPDX-License-Identifier: Apache-2.0
"""Measures what a wrapped model costs the program's thread: a step of a model so narrow that computing takes next to nothing.

    OMP_NUM_THREADS=1 python bench/deepspeed/overhead.py [--layers 8 --rounds 9]

Two programs, in turns: the module alone, and the module wrapped. It counts the processor time of the program's thread, to
which other programs add nothing. No Python runs on the engine's own threads. The difference is hoist's Python and the
engine's calls on that thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import hoist.torch
import torch
import torch.nn.functional as F
from train import VOCABULARY, build

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "hoist": {"device_memory": "64MiB", "pinned_memory": "64MiB"}}


def processor_seconds(step, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return statistics.median(times[count // 4:])


def training_step(model, finish):
    tokens = torch.arange(32)[None] % VOCABULARY

    def step():
        finish(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model = build(arguments.layers, 64, 32)
    plain = copy.deepcopy(model)

    def forget(loss):
        loss.backward()
        plain.zero_grad()

    engine = hoist.torch.wrap(model, CONFIG)

    def finish(loss):
        engine.backward(loss)
        engine.step()

    rounds = []
    for _ in range(arguments.rounds):
        module = processor_seconds(training_step(plain, forget), arguments.steps)
        wrapped = processor_seconds(training_step(engine, finish), arguments.steps)
        rounds.append((module, wrapped))
    module, wrapped = (statistics.median(values) for values in zip(*rounds, strict=True))
    parts = [w - m for m, w in rounds]
    part, units = statistics.median(parts), engine._cut.units
    print(f"{len(units)} units, {sum(len(unit.parameters) for unit in units)} parameters; processor time of the program's "
          f"thread, a step: module alone {module * 1e3:.2f} ms, wrapped {wrapped * 1e3:.2f} ms")
    print(f"hoist's part {part * 1e3:.2f} ms ({min(parts) * 1e3:.2f} to {max(parts) * 1e3:.2f}), "
          f"{part / len(units) * 1e6:.0f} us a unit")
    engine.close()


if __name__ == "__main__":
    main()
