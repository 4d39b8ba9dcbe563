# SPDX-License-Identifier: Apache-2.0
"""Small models of blocks, and the same steps taken with torch.optim in memory and by an engine."""

import pytest
import torch
from torch import nn

from models import on_device_of_tests

WIDTH, RATE = 8, 1e-2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model_of():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH))


def batch(seed, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return on_device_of_tests(torch.randn(4, width, generator=generator, device="cpu"))


def seeded(make):
    torch.manual_seed(0)
    return make()


def mean_square(model, x):
    return model(x).pow(2).mean()


def losses_in_memory(model, inputs, loss_of=mean_square, micro_batches=1, others=()):
    optimizer, losses = torch.optim.AdamW([*model.parameters()], lr=RATE, weight_decay=0.1), []
    for index, x in enumerate(inputs):
        loss = loss_of(model, x)
        (loss / micro_batches).backward()
        losses.append(loss.item())
        if (index + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
        for other in others:
            other.grad = None
    return losses


def step_of(engine, x, loss_of=mean_square, plain=False):
    loss = loss_of(engine, x)
    loss.backward() if plain else engine.backward(loss)
    engine.step()
    return loss.item()


def close_to(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
