# SPDX-License-Identifier: Apache-2.0
"""What the Python side costs: a step of a model so narrow that computing and moving take next to nothing.

    python benchmarks/deepspeed/overhead.py [--layers 8]

Prints the time that hooks, gathers, gradients and the step add to forward and backward of the same module, per unit. It is
an upper bound of Python's part: it contains the engine's own work for each unit, which a C++ program has too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.nn.functional as F
from train import VOCABULARY, build

import hoist.torch


def steps(model, finish, count):
    times = []
    tokens = torch.arange(32)[None] % VOCABULARY
    for _ in range(count):
        begin = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        finish(loss)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[count // 4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    model = build(arguments.layers, 64, 32)
    plain = copy.deepcopy(model)

    def forget(loss):
        loss.backward()
        plain.zero_grad()

    engine = hoist.torch.wrap(model, {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
        "hoist": {"device_memory": "64MiB", "pinned_memory": "64MiB"}})

    def step(loss):
        engine.backward(loss)
        engine.step()

    rounds = []
    for _ in range(5):
        alone = steps(plain, forget, arguments.steps)
        rounds.append((steps(engine, step, arguments.steps) - alone, alone))
    added = statistics.median(a for a, _ in rounds)
    units = len(engine._cut.units)
    print(f"{units} units: {added * 1e3:.2f} ms a step, {added / units * 1e6:.0f} us a unit "
          f"(rounds {', '.join(f'{a * 1e3:.2f}' for a, _ in rounds)} ms; the module alone {rounds[0][1] * 1e3:.2f} ms)")
    engine.close()


if __name__ == "__main__":
    main()
