# SPDX-License-Identifier: Apache-2.0
"""Lists the parts of the resident memory of compare.py's hoist run, as it grows.

    python bench/deepspeed/memory.py --directory /local_nvme [--keep-activations]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def resident() -> dict[str, float]:
    with open("/proc/self/status") as file:
        values = {line.split(":")[0]: line.split()[1] for line in file if line.startswith(("VmRSS", "VmHWM"))}
    return {key: int(value) / 1024 for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--keep-activations", action="store_true", help="without torch.utils.checkpoint")
    arguments = parser.parse_args()
    print("| | resident | more | peak |\n|---|---|---|---|")
    before = 0.0

    def row(name: str) -> None:
        nonlocal before
        now = resident()
        print(f"| {name} | {now['VmRSS']:.0f} MiB | {now['VmRSS'] - before:+.0f} | {now['VmHWM']:.0f} |", flush=True)
        before = now["VmRSS"]

    row("Python")
    import torch.nn.functional as F
    row("import torch")
    import hoist.torch
    row("import hoist.torch")
    from train import batch_of, build

    model = build(8, 512, 128, not arguments.keep_activations)
    row("the model, as it is built")
    with open(os.path.join(HERE, "ds_config.json")) as file:
        config = json.load(file)
    os.makedirs(arguments.directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hoist-memory-", dir=arguments.directory) as store:
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] = store
        engine = hoist.torch.wrap(model, config)
        row("wrapped")
        for step in range(8):
            inputs, targets = batch_of(step, 1, 128)
            engine.backward(F.cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten()))
            engine.step()
            if step in (0, 7):
                row(f"step {step + 1}")
        for name, tier in engine.statistics()["tiers"].items():
            print(f"{name} memory: {tier['peak_bytes'] / 2**20:.0f} of {tier['budget_bytes'] / 2**20:.0f} MiB")
        engine.close()

    print(f"torch._dynamo is {'there' if 'torch._dynamo' in sys.modules else 'not there'}")
    for program in ("import torch", "import torch, torch._dynamo"):
        text = f"from memory import resident; {program}; print(resident()['VmRSS'])"
        alone = subprocess.run([sys.executable, "-c", text], cwd=HERE, capture_output=True, text=True, check=True)
        print(f"a process that does nothing but `{program}`: {float(alone.stdout):.0f} MiB")


if __name__ == "__main__":
    main()
