#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `hoist.metrics` and `hoist.trace` cost: processor time of a step of hoist-gpt with each, less the time without.

    bench/observation_cost.py [--gpt build/release/bin/hoist-gpt] [--rounds N] [--steps N] [--json FILE]

The model is tiny, so that the cost is not lost in the step. The cost of metrics does not depend on the model; that of a
trace grows with the number of transfers.
"""
import os
import resource
import statistics
import tempfile

import gpt
from pairs import write_json

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "hoist": {"device": "host", "device_memory": "8MiB", "pinned_memory": "32MiB"},
}
SHAPE = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--threads", "1"]


def cpu_seconds(args, directory, extra):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    gpt.run(args, CONFIG | {"hoist": CONFIG["hoist"] | extra}, directory, *SHAPE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    args = gpt.parser(__doc__, rounds=5, steps=1200).parse_args()
    costs = {"metrics": [], "trace": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(args.rounds):
            plain = cpu_seconds(args, directory, {})
            for kind, values in costs.items():
                values.append(cpu_seconds(args, directory, {kind: os.path.join(directory, kind)}) - plain)
    write_json(args.json, costs)
    for kind, values in costs.items():
        each = [round(1e6 * value / args.steps) for value in values]
        print(f"{kind}: {statistics.median(each):.0f} us of processor time a step; rounds: {each}")


if __name__ == "__main__":
    main()
