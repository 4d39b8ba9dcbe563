# SPDX-License-Identifier: Apache-2.0
"""Loops of accelerate's Accelerator, with hoist's engine and with its optimizers alone, against the same training in memory."""

import contextlib
import functools

import pytest
import torch

import hoist
import hoist.optim
import hoist.torch
from models import batches, loss_of
from training import make

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (pip install accelerate)")

pytestmark = pytest.mark.cpu_tensors("an Accelerator chooses its device itself")
STEPS = 6
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def in_memory(accumulation=1):
    model, losses = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    for number, (inputs, targets) in enumerate(batches(STEPS * accumulation)):
        loss = loss_of(model(inputs), targets)
        (loss / accumulation).backward()
        if (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(accelerator, model, optimizer, count=STEPS, within=contextlib.nullcontext):
    losses = []
    for inputs, targets in batches(count):
        with within():
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def make_accelerator():
    """All Accelerators of a process share their settings."""
    def forget():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    forget()
    yield functools.partial(accelerate.Accelerator, cpu=True)
    forget()


@pytest.fixture
def accelerator(make_accelerator):
    return make_accelerator()


def test_an_engine(settings, accelerator):
    with hoist.torch.wrap(make(), settings()) as engine:
        optimizer = accelerator.prepare(engine.optimizer)
        assert train(accelerator, engine, optimizer) == pytest.approx(in_memory(), abs=1e-4)
        assert engine.step_count == STEPS and not optimizer.step_was_skipped


def test_an_engine_is_unwrapped_and_saved_as_its_model(settings, accelerator, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="accelerate saves models with safetensors")
    with hoist.torch.wrap(make(), settings()) as engine:
        train(accelerator, engine, accelerator.prepare(engine.optimizer), count=1)
        expected = engine.module.state_dict()
        accelerator.save_model(engine, tmp_path / "saved")
        for found in (accelerator.unwrap_model(engine).state_dict(), accelerator.get_state_dict(engine),
                      safetensors.load_file(tmp_path / "saved" / "model.safetensors") | {"head.weight": expected["head.weight"]}):
            assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_engine_whose_configuration_accumulates(settings, accelerator):
    with hoist.torch.wrap(make(), settings(gradient_accumulation_steps=2)) as engine:
        optimizer = accelerator.prepare(engine.optimizer)
        losses = []
        for inputs, targets in batches(2 * STEPS):
            loss = loss_of(engine(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == pytest.approx(in_memory(2), abs=1e-4)
        assert engine.step_count == STEPS


def test_an_accelerator_that_divides_the_losses_of_an_engine_is_refused(settings, make_accelerator):
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    with hoist.torch.wrap(make(), settings(gradient_accumulation_steps=2)) as engine:
        optimizer = accelerator.prepare(engine.optimizer)
        with pytest.raises(hoist.UsageError, match="looks as if it divided its losses by 2"):
            train(accelerator, engine, optimizer, within=lambda: accelerator.accumulate(engine.module))


def test_an_optimizer_alone(tmp_path, accelerator):
    model = make()
    with hoist.optim.AdamW(model.parameters(), **SETTINGS, offload="nvme", directory=tmp_path / "nvme", pinned_memory="32MiB",
                           device_memory="16MiB") as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        prepared_model, prepared, _ = accelerator.prepare(model, optimizer, schedule)
        assert train(accelerator, prepared_model, prepared) == pytest.approx(in_memory(), abs=1e-4)
        accelerator.save_state(tmp_path / "state")
        accelerator.load_state(tmp_path / "state")
        train(accelerator, prepared_model, prepared, count=1)
        assert optimizer.step_count == STEPS + 1
