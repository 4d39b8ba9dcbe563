#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows the effect of smaller optimizer state on a training curve: hoist-gpt learns one text with state of fp32 and of each
smaller kind.

    bench/moments_curve.py --gpt build/release/bin/hoist-gpt [--text FILE] [--steps N] [--seeds N] [--kinds bf16,fp8+int8]
        [--beta2 B] [--json FILE]

A kind is hoist.moments_dtype, or that and hoist.remainder_dtype: "fp8+int8". Each seed gives other initial weights and
batches; a seed's runs differ in nothing but the state. The control is the largest difference between two seeds: a smaller
difference cannot be seen. State lives in pinned memory: where it lives changes no bit. Losses are means over windows of a
tenth of the steps, each with the mean over the seeds of its difference from fp32, and the largest of any seed.
"""
import json
import statistics
import tempfile

import gpt
from pairs import write_json

MODEL = ["--layers", "6", "--width", "192", "--heads", "6", "--context", "64", "--batch", "8", "--warmup", "20"]
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "hoist": {"device": "host", "device_memory": "256MiB", "pinned_memory": "256MiB"},
}
WINDOWS = 10


def losses(args, kind, seed, directory):
    config = json.loads(json.dumps(CONFIG))
    moments, _, remainder = kind.partition("+")
    config["hoist"] |= {"moments_dtype": moments, "remainder_dtype": remainder or "int16"}
    config["optimizer"]["params"]["betas"][1] = args.beta2
    steps = gpt.run(args, config, directory, "--seed", seed, *MODEL)["steps"]
    window_steps = len(steps) // WINDOWS
    return [statistics.fmean(step["loss"] for step in steps[w * window_steps:(w + 1) * window_steps]) for w in range(WINDOWS)]


def main():
    parser = gpt.parser(__doc__, steps=1000, seeds=3, beta2=0.95)
    parser.add_argument("--kinds", default="bf16,fp8,fp8+int8", help="what is compared with fp32 (bf16,fp8,fp8+int8)")
    args = parser.parse_args()
    if args.steps < WINDOWS or args.seeds < 2:
        parser.error(f"at least {WINDOWS} steps and 2 seeds")

    kinds = args.kinds.split(",")
    curves = {kind: [] for kind in ["fp32"] + kinds}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(1, args.seeds + 1):
            for kind, of_seeds in curves.items():
                of_seeds.append(losses(args, kind, seed, directory))

    rows = []
    print(f"{'steps':>12} {'fp32':>8}" + "".join(f" {kind:>10} {'at most':>8}" for kind in kinds) + f" {'between seeds':>14}")
    for w in range(WINDOWS):
        fp32 = [curve[w] for curve in curves["fp32"]]
        row = {"first_step": w * (args.steps // WINDOWS) + 1, "last_step": (w + 1) * (args.steps // WINDOWS),
               "fp32": statistics.fmean(fp32), "between_seeds": max(fp32) - min(fp32), "differences": {}}
        text = f"{row['first_step']:>5} - {row['last_step']:>4} {row['fp32']:>8.4f}"
        for kind in kinds:
            differences = [curve[w] - f for curve, f in zip(curves[kind], fp32, strict=True)]
            found = {"mean": statistics.fmean(differences), "largest": max(map(abs, differences))}
            row["differences"][kind] = found
            text += f" {found['mean']:>+10.4f} {found['largest']:>8.4f}"
        rows.append(row)
        print(text + f" {row['between_seeds']:>14.4f}")
    write_json(args.json, {"steps": args.steps, "seeds": args.seeds, "beta2": args.beta2, "windows": rows})


if __name__ == "__main__":
    main()
