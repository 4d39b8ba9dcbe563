# SPDX-License-Identifier: Apache-2.0
"""Modules that are called inside of torch.func's transformations, against the same in memory."""


import pytest
import torch
from loops import Block, close_to, engines, run, trained
from torch import nn


@pytest.fixture
def wrapped(settings):
    return engines(settings)


class Transformed(nn.Module):
    """Calls its block inside of a transformation."""

    def __init__(self, transformation, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.transformation = transformation

    def forward(self, x):
        for block in self.blocks:
            x = x + self.transformation(block, x)
        return x


def jvp(block, x):
    value, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    return value + 0.1 * tangent


TRANSFORMATIONS = {
    "grad": lambda block, x: torch.func.grad(lambda y: block(y).pow(2).sum())(x),
    "vjp": lambda block, x: torch.func.vjp(block, x)[1](torch.ones_like(x))[0],
    "jvp": jvp,
    "jacrev": lambda block, x: torch.func.jacrev(lambda y: block(y).sum(0))(x).sum(0),
    "vmap": lambda block, x: torch.func.vmap(block)(x),
    "grad of each sample": lambda block, x: torch.func.vmap(torch.func.grad(lambda y: block(y).sum()))(x),
}


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_modules_may_be_called_inside_of_transformations(wrapped, name):
    expected = trained(Transformed(TRANSFORMATIONS[name]))
    with wrapped(Transformed(TRANSFORMATIONS[name])) as engine:
        close_to(run(engine), expected)


def test_units_inside_of_vmap_come_and_go(wrapped):
    """The device holds three of the six blocks at a time."""
    expected = trained(Transformed(TRANSFORMATIONS["vmap"], count=6))
    with wrapped(Transformed(TRANSFORMATIONS["vmap"], count=6), memory="40KiB") as engine:
        close_to(run(engine), expected)
