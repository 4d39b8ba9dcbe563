# SPDX-License-Identifier: Apache-2.0
"""A training loop with hoist.optim, whose bits are compared: for the tests of offloaded states."""

import accelerator
import pytest
import torch
from torch import nn

import hoist.optim
from models import Gpt, batches, loss_of

in_memory = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="states in memory are beside CPU tensors")
BUDGETS = {"pinned_memory": "32MiB", "device_memory": "16MiB"}
OPTIMIZERS = [
    ("AdamW", {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Lion", {"lr": 1e-3, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def place(offload, tmp_path, name="store"):
    return {"offload": offload, **BUDGETS} | ({"directory": str(tmp_path / name)} if offload == "nvme" else {})


def scheduler_of(optimizer, steps_done):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step), last_epoch=steps_done - 1)


class Program:
    """A training loop with made-up gradients: two micro-batches a step, clipped, and a schedule for each of two groups."""

    def __init__(self, optimizer, dtype=torch.float32, device=None, first=0, settings=None, **arguments):
        made = torch.Generator().manual_seed(1)
        shapes = [(70, 100), (33,), (40, 25), (), (4001,)]
        self.parameters = [nn.Parameter(torch.randn(shape, generator=made, device="cpu").to(device or "cpu", dtype))
                           for shape in shapes]
        groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 3e-3}]
        self.optimizer = getattr(hoist.optim, optimizer)(groups, **(settings or {}), **arguments)
        self.scheduler = scheduler_of(self.optimizer, first)

    def train(self, first, last):
        for step in range(first, last):
            # A GPU rounds in other places than the CPU, where `expected` comes from.
            values = [nn.Parameter(p.detach().cpu()) for p in self.parameters] if accelerator.ON_GPU else self.parameters
            for micro_batch in range(2):
                made = torch.Generator().manual_seed(2 * step + micro_batch)
                for value in values:
                    noise = torch.randn(value.shape, generator=made, device="cpu").to(value.device, value.dtype)
                    gradient = (noise + 0.1 * value.detach()) / 2
                    value.grad = gradient if value.grad is None else value.grad + gradient
            torch.nn.utils.clip_grad_norm_(values, 20.0)
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.grad = value.grad.to(parameter.device)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def bits(self):
        """Weights and masters."""
        return [p.detach().cpu().clone() for p in self.parameters] + [self.optimizer.master(p) for p in self.parameters]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def gpt(seed=0):
    torch.manual_seed(seed)
    return Gpt()


def train(model, optimizer, first, last):
    for index, (inputs, targets) in enumerate(batches(last)):
        if index >= first:
            loss_of(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [p.detach().cpu().clone() for p in model.parameters()]
