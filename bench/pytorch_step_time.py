#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of PyTorch's steps goes, on the tests' accelerator (tests/python/accelerator) and with layers of known time.

    PYTHONPATH=build/dev/python OMP_NUM_THREADS=1 bench/pytorch_step_time.py --directory DIR [--steps N] [--json FILE]

Each layer takes 10 ms in the forward pass and 20 ms in the backward pass. The link between pinned and device memory is modelled
(hoist.host_link_bytes_per_second) and takes 0.95 of the time of a layer's forward pass to copy its weights, or 1.5 where it is
called too slow. DIR holds what is on NVMe. For each cell, in shares of a step: computing; what the device waited for, by cause;
and when it had nothing to do, what the program waited for, and the program's own time (Python, PyTorch and hoist's hooks). The
rest is what nothing explains. The first cell is PyTorch with torch.optim. Figures are medians.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "python"))
import accelerator
import torch
from torch import nn

import hoist.torch

LAYERS, WIDTH, MILLISECONDS = 32, 512, 10
PARAMETERS = WIDTH * WIDTH
# name: where weights and optimizer states are, the update mode, the link's time for a layer over that of its forward pass
CELLS = {
    "PyTorch": None,
    "in device memory": ("none", "none", "step", 0.95),
    "pinned, step": ("cpu", "cpu", "step", 0.95),
    "pinned, forward": ("cpu", "cpu", "forward", 0.95),
    "pinned, link too slow": ("cpu", "cpu", "forward", 1.5),
    "NVMe, step": ("nvme", "nvme", "step", 0.95),
    "NVMe, forward": ("nvme", "nvme", "forward", 0.95),
}


class Takes(torch.autograd.Function):
    """Returns its input, after a known time."""

    @staticmethod
    def forward(ctx, value):
        accelerator.sleep(MILLISECONDS)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        accelerator.sleep(2 * MILLISECONDS)
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return Takes.apply(x + torch.tanh(self.linear(x)))


def configuration(cell, directory):
    parameters, optimizer, mode, ratio = CELLS[cell]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for key, device in (("offload_param", parameters), ("offload_optimizer", optimizer)):
        zero[key] = {"device": device} | ({"nvme_path": directory} if device == "nvme" else {})
    link = 2 * PARAMETERS / (ratio * MILLISECONDS * 1e-3)
    hoist_section = {"device_memory": "128MiB" if parameters == "none" else "12MiB", "pinned_memory": "256MiB",
                     "host_link_bytes_per_second": int(link)}
    if optimizer != "none":
        hoist_section["update_mode"] = mode
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "hoist": hoist_section,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.0}


class InMemory:
    """What PyTorch does by itself, called as an engine is."""

    def __init__(self, model):
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        self.backward, self.close = torch.Tensor.backward, lambda: None

    def __call__(self, x):
        return self._model(x)

    def step(self):
        self._optimizer.step()
        self._optimizer.zero_grad()

    def statistics(self):
        return {"wait_seconds": {}}


def measure(cell, directory, steps):
    device = torch.get_device_module(torch.get_default_device())
    stream = device.hoist_stream()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(torch.bfloat16)
    x = torch.randn(1, WIDTH).to(torch.bfloat16)

    def account(engine):
        """Seconds so far, by what they went to."""
        waits = {f"device waits: {cause}": value for cause, value in stream.waits().items()}
        waits |= {f"program waits: {cause}": value for cause, value in engine.statistics()["wait_seconds"].items()}
        return {"computing": device.extension.busy_seconds(), "hoist's kernels": stream.kernel_seconds, **waits,
                "step": time.perf_counter()}

    taken = []
    engine = InMemory(model) if CELLS[cell] is None else hoist.torch.wrap(model, configuration(cell, directory))
    for step in range(steps + 3):  # the first is recorded, the others planned
        before, idle = account(engine), stream.watch_idle()
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        after = account(engine)
        if step < 3:
            continue
        parts = {name: after[name] - before[name] for name in after}
        parts["program"] = idle() - sum(value for name, value in parts.items() if name.startswith("program waits"))
        taken.append(parts)
    engine.close()
    seconds = statistics.median(each["step"] for each in taken)
    shares = {name: statistics.median(each[name] / each["step"] for each in taken) for name in taken[0]}
    return seconds, {name: share for name, share in shares.items() if name != "step"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--json")
    options = parser.parse_args()
    accelerator.use()
    measured = {}
    for cell in options.cells:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            seconds, shares = measure(cell, directory, options.steps)
        measured[cell] = {"seconds": seconds, "shares": shares}
        parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items() if share >= 0.0005)
        print(f"{cell:22} {1e3 * seconds:6.0f} ms: {parts}; rest {100 * (1 - sum(shares.values())):.1f} %", flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
