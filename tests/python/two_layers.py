# SPDX-License-Identifier: Apache-2.0
"""A model of two layers, its batch, and a step of an engine (the fixture `wrapped` makes the engine)."""

import torch
import torch.nn.functional as F
from torch import nn

from models import on_device_of_tests

WIDTH = 8


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch():
    generator = torch.Generator().manual_seed(1)
    return [on_device_of_tests(torch.randn(4, WIDTH, generator=generator, device="cpu")) for _ in range(2)]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    inputs, targets = (tensor.to(dtype) for tensor in batch())
    loss = F.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()
