# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping in ordinary loops: it limits the steps it limits in PyTorch, or is refused."""


import pytest
import torch
import torch.nn.functional as F
from loops import batches, close_to, engines, model_of, reference_of, trained
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils import clip_grad_norm_ as other_name

import hoist
import hoist.torch


@pytest.fixture
def wrapped(settings):
    return engines(settings)


@pytest.mark.parametrize("call", ["by its name", "by another name", "from torch", "of the engine"])
def test_a_loop_clips_by_itself(wrapped, call):
    reference = model_of()
    optimizer, expected, norms = reference_of(reference), [], []
    for inputs, targets in batches():
        loss = F.mse_loss(reference(inputs), targets)
        loss.backward()
        norms.append(clip_grad_norm_(reference.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with wrapped() as engine:
        losses = []
        clip = {"by its name": clip_grad_norm_, "by another name": other_name,
                "from torch": lambda parameters, most: torch.nn.utils.clip_grad_norm_(parameters, max_norm=most),
                "of the engine": lambda _, most: engine.clip_grad_norm_(most)}[call]
        for (inputs, targets), norm in zip(batches(), norms, strict=True):
            loss = F.mse_loss(engine(inputs), targets)
            loss.backward()
            found = clip(engine.module.parameters(), 0.05)
            assert found.item() == pytest.approx(norm, rel=1e-5) and norm > 0.05
            assert found.device == engine.device
            engine.optimizer.step()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
            losses.append(loss.item())
    close_to(losses, expected)
    assert expected[-1] != pytest.approx(trained(model_of())[-1], rel=1e-3)  # clipping made a difference


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="PyTorch before 2.6 has no get_total_norm")
def test_functions_that_clip_take_their_first_argument_by_name():
    """For parameters of any program, also one that wraps no model."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert torch.nn.utils.get_total_norm(tensors=[parameter.grad]) == 6
    assert torch.nn.utils.get_total_norm([parameter.grad]) == 6
    assert torch.nn.utils.clip_grad_norm_(parameters=[parameter], max_norm=3.0) == 6
    torch.nn.utils.clip_grads_with_norm_(parameters=parameter, max_norm=1.0, total_norm=torch.tensor(4.0))
    torch.nn.utils.clip_grad_value_(parameters=parameter, clip_value=0.25)
    assert torch.equal(parameter.grad, torch.full((4,), 0.25))
    with pytest.raises(TypeError):
        torch.nn.utils.clip_grad_norm_(max_norm=1.0)


def test_a_limit_is_that_steps_alone(wrapped):
    with wrapped() as engine:
        for index, (inputs, targets) in enumerate(batches(4)):
            engine.backward(F.mse_loss(engine(inputs), targets))
            if index % 2 == 0:
                clip_grad_norm_(engine.parameters(), 0.05)
            if index == 2:
                engine.zero_grad()
                engine.backward(F.mse_loss(engine(inputs), targets))
            assert (engine.step().clip_factor < 1) == (index == 0)


def test_clipping_that_cannot_be_done_is_refused(wrapped, settings):
    with wrapped() as engine:
        inputs, targets = batches(1)[0]
        with pytest.raises(hoist.UsageError, match=r"clip_grad_norm_\(\) needs a backward pass before it"):
            clip_grad_norm_(engine.module.parameters(), 1)
        engine.backward(F.mse_loss(engine(inputs), targets))
        every = list(engine.module.parameters())
        with pytest.raises(hoist.UsageError, match="of some parameters"):
            clip_grad_norm_(every[:-1], 1)
        with pytest.raises(hoist.UsageError, match="of order inf"):
            clip_grad_norm_(every, 1, norm_type=float("inf"))
        with pytest.raises(hoist.UsageError, match="to a norm of -1"):
            clip_grad_norm_(every, -1)
        with pytest.raises(hoist.UsageError, match=r"clip_grad_value_\(\).*to a norm only"):
            clip_grad_value_(every[0], 1)
        with pytest.raises(hoist.UsageError, match=r"clip_grads_with_norm_\(\)"):
            torch.nn.utils.clip_grads_with_norm_(every, 1, torch.tensor(2.0))
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        with pytest.raises(hoist.UsageError, match="together with others"):
            clip_grad_norm_([*every, other], 1)
        assert clip_grad_norm_(other, 1).item() == pytest.approx(2 ** 0.5)
        assert other.grad.norm().item() == pytest.approx(1, rel=1e-5)
        assert engine.step().clip_factor == 1  # none of these has clipped

        engine.backward(F.mse_loss(engine(inputs * float("inf")), targets))
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip_grad_norm_(every, 1, error_if_nonfinite=True)
        assert not torch.isfinite(clip_grad_norm_(every, 1))
        assert not engine.step().applied
    assert clip_grad_norm_(every, 1) == 0  # of a model without an engine, as PyTorch does


def test_clipping_of_no_parameters_is_refused(wrapped):
    """The common form leaves out parameters without a gradient, and hoist has taken all of them."""
    with wrapped() as engine:
        engine.backward(F.mse_loss(engine(batches()[0][0]), batches()[0][1]))
        with pytest.raises(hoist.UsageError, match="engine.clip_grad_norm_"):
            clip_grad_norm_([p for p in engine.parameters() if p.grad is not None], 1.0)
        assert clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0) == 0  # another model, which has no gradients yet
        if hasattr(torch.nn.utils, "get_total_norm"):
            with pytest.raises(hoist.UsageError, match=r"^get_total_norm\(\) of no tensors.*both return the norm"):
                torch.nn.utils.get_total_norm(p.grad for p in engine.parameters() if p.grad is not None)
            assert torch.nn.utils.get_total_norm([torch.full((4,), 1.5)]) == 3
        assert engine.step().applied
    assert clip_grad_norm_([], 1.0) == 0
    assert not hasattr(torch.nn.utils, "get_total_norm") or torch.nn.utils.get_total_norm([]) == 0


def test_clipping_waits_for_the_last_micro_batch_and_the_updates_of_mode_backward_cannot(settings):
    inputs, targets = batches(1)[0]
    with hoist.torch.wrap(model_of(), settings(gradient_accumulation_steps=2)) as engine:
        engine.backward(F.mse_loss(engine(inputs), targets))
        with pytest.raises(hoist.UsageError, match="after micro-batch 1 of 2"):
            clip_grad_norm_(engine.module.parameters(), 1)
        engine.backward(F.mse_loss(engine(inputs), targets))
        clip_grad_norm_(engine.module.parameters(), 1e-3)
        assert engine.step().clip_factor < 1
    backward = settings("second", gradient_clipping=0, hoist={
        "device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"})
    with hoist.torch.wrap(model_of(), backward) as engine:
        engine.backward(F.mse_loss(engine(inputs), targets))
        with pytest.raises(hoist.UsageError, match='update mode "backward"'):
            clip_grad_norm_(engine.module.parameters(), 1)
        assert engine.step().applied
