#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What moments of bf16 do to a training curve: hoist-gpt learns one text with moments of fp32 and of bf16.

    bench/moments_curve.py --gpt build/release/bin/hoist-gpt [--text FILE] [--steps N] [--seeds N] [--json FILE]

Each seed gives other initial weights and batches; a seed's runs differ in nothing but the moments. How far apart two
seeds end is the control: what is smaller than that nobody would see. State lives in pinned memory: where it lives changes
no bit. Losses are means over windows of a tenth of the steps, each with the mean over the seeds of its difference from fp32.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

MODEL = ["--layers", "6", "--width", "192", "--heads", "6", "--context", "64", "--batch", "8", "--warmup", "20"]
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "hoist": {"device": "host", "device_memory": "256MiB", "pinned_memory": "256MiB"},
}
WINDOWS = 10


def losses(args, moments, seed, directory):
    config = json.loads(json.dumps(CONFIG))
    config["hoist"]["moments_dtype"] = moments
    config_path, report = os.path.join(directory, "config.json"), os.path.join(directory, "report.json")
    with open(config_path, "w") as file:
        json.dump(config, file)
    command = [args.gpt, "--config", config_path, "--text", args.text, "--steps", str(args.steps), "--seed", str(seed),
               "--report", report] + MODEL
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    with open(report) as file:
        steps = json.load(file)["steps"]
    size = len(steps) // WINDOWS
    return [statistics.fmean(step["loss"] for step in steps[w * size:(w + 1) * size]) for w in range(WINDOWS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt", required=True, help="the program hoist-gpt")
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.steps < WINDOWS or args.seeds < 2:
        parser.error(f"at least {WINDOWS} steps and 2 seeds")

    curves = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(1, args.seeds + 1):
            for moments, of_seeds in curves.items():
                of_seeds.append(losses(args, moments, seed, directory))

    rows = []
    print(f"{'steps':>12} {'fp32':>8} {'bf16':>8} {'difference':>11} {'of one seed, at most':>21} {'between seeds':>14}")
    for w in range(WINDOWS):
        fp32, bf16 = ([curve[w] for curve in curves[moments]] for moments in ("fp32", "bf16"))
        differences = [b - f for f, b in zip(fp32, bf16)]
        row = {"first_step": w * (args.steps // WINDOWS) + 1, "last_step": (w + 1) * (args.steps // WINDOWS),
               "fp32": statistics.fmean(fp32), "bf16": statistics.fmean(bf16),
               "difference": statistics.fmean(differences), "largest_difference": max(map(abs, differences)),
               "between_seeds": max(fp32) - min(fp32)}
        rows.append(row)
        print(f"{row['first_step']:>5} - {row['last_step']:>4} {row['fp32']:>8.4f} {row['bf16']:>8.4f} "
              f"{row['difference']:>+11.4f} {row['largest_difference']:>21.4f} {row['between_seeds']:>14.4f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"steps": args.steps, "seeds": args.seeds, "windows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
