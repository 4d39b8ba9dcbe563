# SPDX-License-Identifier: Apache-2.0
"""A small model in memory and wrapped, and the loop that trains it, for tests of loops as people write them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoist.torch
from models import on_device_of_tests

WIDTH, STEPS, RATE = 16, 6, 1e-2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(5)
    drawn = on_device_of_tests(torch.randn(count, 2, 4, WIDTH, generator=generator, device="cpu"))
    return [tuple(pair) for pair in drawn]


def engines(settings):
    """Makes engines; each with a store of its own."""
    count = iter(range(100))

    def make(model=None, scheduler_section=None, memory="1MiB", **arguments):
        config = settings(f"store-{next(count)}", optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
                          hoist={"device_memory": memory, "pinned_memory": "32MiB"})
        if scheduler_section:
            config["scheduler"] = scheduler_section
        return hoist.torch.wrap(model or model_of(), config, **arguments)

    return make


def reference_of(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def close_to(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)


def trained(model, count=STEPS):
    """Trains the model with torch.optim. Returns the losses."""
    optimizer, losses = reference_of(model), []
    for inputs, targets in batches(count):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(engine, count=STEPS):
    losses = []
    for inputs, targets in batches(count):
        loss = F.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
