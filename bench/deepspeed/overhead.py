# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of the Python side: a step of a model so narrow that computing and moving take next to nothing.

    OMP_NUM_THREADS=1 python bench/deepspeed/overhead.py [--layers 8 --rounds 9]

Three programs, in turns: the module alone; the module wrapped; and the engine alone, asked for what a C++ program without
any mathematics asks of it: gather, accumulate and finish every unit, and step. It counts the processor time of the
program's thread, to which other programs add nothing. No Python runs on the engine's own threads.

    Python's part = wrapped - module alone - engine alone
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import hoist.torch
import torch
import torch.nn.functional as F
from hoist import _hoist
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


class EngineAlone:
    """The wrapped model's units, gathered in its order, with gradients of ones."""

    def __init__(self, units):
        model = _hoist.Model()
        self.units = []
        for unit in units:
            specs = [_hoist.ParameterSpec(name, list(p.shape), _hoist.DType.fp32) for name, p in unit.parameters.items()]
            number = model.add_unit(unit.name, specs)
            gradients = [(model.parameter(name), torch.ones(p.shape).numpy()) for name, p in unit.parameters.items()]
            self.units.append((number, gradients))
        self.engine = _hoist.Engine.create(_hoist.Config.parse(json.dumps(CONFIG), "config"), model,
                                           lambda parameter, first, out: out.fill(0.01))

    def step(self):
        engine = self.engine
        engine.begin(_hoist.Pass.train)
        leases = [engine.gather(number) for number, _ in self.units]
        for (number, gradients), lease in zip(reversed(self.units), reversed(leases), strict=True):
            for parameter, gradient in gradients:
                engine.accumulate(parameter, gradient)
            engine.finish(number)
            lease.release()
        engine.end()
        engine.step()


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
    alone = EngineAlone(engine._cut.units)

    def finish(loss):
        engine.backward(loss)
        engine.step()

    rounds = []
    for _ in range(arguments.rounds):
        module = processor_seconds(training_step(plain, forget), arguments.steps)
        wrapped = processor_seconds(training_step(engine, finish), arguments.steps)
        rounds.append((module, wrapped, processor_seconds(alone.step, arguments.steps)))
    module, wrapped, engine_alone = (statistics.median(values) for values in zip(*rounds, strict=True))
    parts = [w - m - e for m, w, e in rounds]
    part, units = statistics.median(parts), len(alone.units)
    print(f"{units} units, {sum(len(g) for _, g in alone.units)} parameters; processor time of the program's thread, a step: "
          f"module alone {module * 1e3:.2f} ms, wrapped {wrapped * 1e3:.2f} ms, engine alone {engine_alone * 1e3:.2f} ms")
    print(f"Python's part {part * 1e3:.2f} ms ({min(parts) * 1e3:.2f} to {max(parts) * 1e3:.2f}), "
          f"{part / units * 1e6:.0f} us a unit")
    engine.close()


if __name__ == "__main__":
    main()
