# SPDX-License-Identifier: Apache-2.0
import copy
import os

import pytest
import torch

import hoist
import hoist.optim
from models import Gpt, batches, loss_of

ON_CPU = not os.environ.get("HOIST_TEST_ACCELERATOR")
# States of parameters that are not in CPU memory are in pinned memory.
PLACE = {} if ON_CPU else {"offload": "cpu", "pinned_memory": "32MiB", "device_memory": "16MiB"}


def train(model, optimizer, steps=20):
    for inputs, targets in batches(steps):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("name, settings", [
    ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-3, "betas": (0.9, 0.95)}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
])
def test_as_pytorchs(name, settings):
    torch.manual_seed(0)
    model = Gpt()
    reference = copy.deepcopy(model)
    ours = train(model, getattr(hoist.optim, name)(model.parameters(), **settings, **PLACE))
    theirs = train(reference, getattr(torch.optim, name)(reference.parameters(), **settings))
    assert ours == pytest.approx(theirs, rel=1e-6)
    for (key, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-7, msg=key)


def test_lion_takes_steps_of_one_size():
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = hoist.optim.Lion([parameter], lr=0.25, **PLACE)
    parameter.grad = torch.randn(100)
    optimizer.step()
    assert torch.equal(parameter.detach(), -0.25 * parameter.grad.sign())
    assert "exp_avg_sq" not in optimizer.state_dict()["state"][0]


def test_bf16_parameters_have_an_exact_master():
    """The fp32 master is trained; the parameter is its rounding. Tiny steps, which bf16 alone would lose, add up."""
    master = torch.randn(1000)
    reference = torch.nn.Parameter(master.clone())
    parameter = torch.nn.Parameter(master.to(torch.bfloat16))
    ours = hoist.optim.AdamW([parameter], lr=1e-5, weight_decay=0.0, **PLACE)
    ours.set_master(parameter, master)
    theirs = torch.optim.AdamW([reference], lr=1e-5, weight_decay=0.0)
    for step in range(50):
        drawn = torch.randn(1000, generator=torch.Generator().manual_seed(step), device="cpu")
        gradient = drawn.to(master.device, torch.bfloat16)
        parameter.grad, reference.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.master(parameter), reference.detach().cpu(), rtol=1e-6, atol=1e-8)
    assert not torch.equal(ours.master(parameter), master.cpu())
    torch.testing.assert_close(parameter.detach().float(), reference.detach(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_goes_on(dtype):
    torch.manual_seed(0)
    model = Gpt().to(dtype)
    optimizer = hoist.optim.AdamW(model.parameters(), **PLACE)
    train(model, optimizer, 5)
    other = copy.deepcopy(model)
    continued = hoist.optim.AdamW(other.parameters(), **PLACE)
    continued.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 5)
    train(other, continued, 5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_updated_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(hoist.UsageError, match="float64"):
        hoist.optim.AdamW([parameter], **PLACE).step()


@pytest.mark.skipif(ON_CPU, reason="CPU tensors are updated where they are")
def test_the_refusal_of_parameters_on_a_device_says_what_to_do():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    with pytest.raises(hoist.UsageError, match='float32 on .*offload="cpu" or offload="nvme"'):
        hoist.optim.AdamW([parameter]).step()
