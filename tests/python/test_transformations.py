# SPDX-License-Identifier: Apache-2.0
"""Modules that are called inside of torch.func's transformations, against the same in memory."""


import pytest
import torch
import torch.nn.functional as F
from loops import Block, batches, close_to, engines, model_of, reference_of, run, trained
from torch import nn
from torch.func import functional_call, grad, vmap


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
    fetched = []
    for memory in ("40KiB", "1MiB"):
        with wrapped(Transformed(TRANSFORMATIONS["vmap"], count=6), memory=memory) as engine:
            close_to(run(engine), expected)
            fetched.append(engine.statistics()["links"]["host_to_device"])
    assert fetched[0] > fetched[1]


def other_weight(x):
    return 0.1 * torch.eye(x.shape[-1], device=x.device) * (1 + x.mean())


def with_another_weight(model, x):
    return functional_call(model, {"2.weight": other_weight(x)}, (x,))


def with_one_that_has_a_gradient(model, x):
    return functional_call(model, {"2.weight": other_weight(x).requires_grad_()}, (x,))


def with_gradients_of_each_sample(model, x):
    gradients = vmap(grad(lambda weight, row: functional_call(model, {"2.weight": weight}, (row,)).sum()), in_dims=(None, 0))
    return model(x + gradients(other_weight(x), x).detach().mean())


@pytest.mark.parametrize("call", [with_another_weight, with_one_that_has_a_gradient, with_gradients_of_each_sample],
                         ids=lambda call: call.__name__)
def test_a_pass_may_begin_with_other_parameters(wrapped, call):
    """torch.func.functional_call() gives the model other parameters for the time of a call, which is a pass's first one."""
    ends, plain = [], model_of()
    optimizer = reference_of(plain)
    with wrapped() as engine:
        for model, backward, step in ((plain, torch.Tensor.backward, optimizer), (engine.module, engine.backward, engine)):
            losses = []
            for inputs, targets in batches():
                loss = F.mse_loss(call(model, inputs), targets)
                backward(loss)
                step.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            ends.append(losses)
    close_to(ends[1], ends[0])
