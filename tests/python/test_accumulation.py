# SPDX-License-Identifier: Apache-2.0
"""Steps of several micro-batches, in loops that call step() and zero_grad() for each of them."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoist
import hoist.torch
from models import on_device_of_tests

WIDTH, STEPS, COUNT = 8, 3, 2


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def batches():
    drawn = torch.randn(STEPS * COUNT, 2, 4, WIDTH, generator=torch.Generator().manual_seed(5), device="cpu")
    return [tuple(pair) for pair in on_device_of_tests(drawn)]


def reference():
    """The weights that PyTorch ends with."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for index, (inputs, targets) in enumerate(batches()):
        (F.mse_loss(model(inputs), targets) / COUNT).backward()
        if index % COUNT == COUNT - 1:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.fixture
def wrapped(settings):
    def make(**changes):
        adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
        config = settings(train_batch_size=4 * COUNT, optimizer=adamw, **changes)  # of micro-batches of 4
        return hoist.torch.initialize(model=model_of(), config=config)[0]

    return make


def after_step(engine, loss, zero_grad):
    loss.backward()
    engine.optimizer.step()
    zero_grad()


def before_backward(engine, loss, zero_grad):
    zero_grad()
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("loop", [after_step, before_backward])
@pytest.mark.parametrize("whose", ["engine", "optimizer", "module"])
def test_zero_grad_between_micro_batches_keeps_their_gradients(wrapped, caplog, loop, whose):
    with wrapped() as engine, caplog.at_level(logging.WARNING, logger="hoist"):
        assert engine.gradient_accumulation_steps() == COUNT
        for inputs, targets in batches():
            owner = engine if whose == "engine" else getattr(engine, whose)
            loop(engine, F.mse_loss(engine(inputs), targets), owner.zero_grad)
        assert engine.step_count == STEPS
        for name, expected in reference().items():
            assert torch.allclose(engine.read(name), expected, rtol=0, atol=2e-6), name
    assert sum("zero_grad() keeps the gradients of micro-batch 1 of 2" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("steps_after_each", [True, False])
def test_a_gradient_penalty_is_not_taken_for_a_divided_loss(wrapped, steps_after_each):
    with wrapped() as engine:
        for index, (inputs, _) in enumerate(batches()):
            inputs = inputs.clone().requires_grad_()
            result = engine(inputs)
            slope, = torch.autograd.grad(result.sum(), inputs, create_graph=True)
            engine.backward(result.pow(2).mean() + slope.pow(2).mean())
            if steps_after_each or index % COUNT == COUNT - 1:
                engine.step()
        assert engine.step_count == STEPS


def test_zero_grad_between_micro_batches_with_fp16(wrapped):
    with wrapped(fp16={"enabled": True, "loss_scale": 64}) as engine:
        for inputs, targets in batches():
            before_backward(engine, F.mse_loss(engine(inputs.half()).float(), targets), engine.optimizer.zero_grad)
        assert engine.step_count == STEPS
        for name, expected in reference().items():
            assert torch.allclose(engine.read(name), expected, rtol=0, atol=2e-2), name


def test_gradients_of_a_step_in_its_middle_can_be_dropped(wrapped):
    with wrapped() as engine:
        inputs, targets = batches()[-1]
        # zero_grad() drops what no step() was called for
        for drop in (engine.drop_gradients, engine.zero_grad, engine.module.zero_grad):
            engine.backward(F.mse_loss(engine(targets), inputs))
            if drop == engine.drop_gradients:
                engine.step()
            with torch.no_grad():  # an evaluation, which ends where the next pass begins
                engine(inputs)
            drop()
        for inputs, targets in batches():
            after_step(engine, F.mse_loss(engine(inputs), targets), engine.zero_grad)
        assert engine.step_count == STEPS
        for name, expected in reference().items():
            assert torch.allclose(engine.read(name), expected, rtol=0, atol=2e-6), name


def test_saving_in_the_middle_of_a_step_is_refused_with_where_it_may_stand(wrapped, tmp_path):
    with wrapped() as engine:
        for index, (inputs, targets) in enumerate(batches()[:2]):
            before_backward(engine, F.mse_loss(engine(inputs), targets), engine.zero_grad)
            for save in (engine.save, engine.sleep, lambda: engine.save_checkpoint(tmp_path / "saved")) if index == 0 else ():
                with pytest.raises(hoist.UsageError, match=r"\(\) after the backward pass of micro-batch 1 of 2: call it after"):
                    save()
        assert not (tmp_path / "saved").exists()
        engine.save_checkpoint(tmp_path / "saved")


def of_two_models(generator, discriminator, step, divided_by=1, remedy=None, drop_gradients=lambda: None):
    """Losses of the steps of a GAN: in each the discriminator's micro-batches, then the generator's, which lead through it."""
    losses = []
    for index in range(STEPS):
        for trained in (discriminator, generator):
            for number, (noise, real) in enumerate(batches()[index * COUNT:(index + 1) * COUNT]):
                discriminator.requires_grad_(trained is discriminator or remedy != "freeze")
                fake = generator(noise)
                if trained is discriminator:
                    loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()
                else:
                    loss = F.softplus(-discriminator(fake)).mean()
                (loss / divided_by).backward()
                losses.append(loss.item())
                discriminator.requires_grad_(True)
                if trained is generator and remedy == "drop":
                    drop_gradients()
                step(trained, number)
    return losses


@pytest.mark.parametrize("remedy", [None, "freeze", "drop"])
def test_backward_passes_of_another_models_loss(settings, remedy):
    """Backward passes through a model are its own micro-batches, unless the program says that they are not."""
    models = [model_of(), model_of()]
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in models}

    def plain_step(model, number):
        if number == COUNT - 1:
            optimizers[model].step()
            for each in models:
                each.zero_grad()

    expected = of_two_models(*models, plain_step, divided_by=COUNT)
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    generator, discriminator = (hoist.torch.wrap(model_of(), settings(name, train_batch_size=4 * COUNT, optimizer=adamw))
                                for name in ("generator", "discriminator"))
    engines = {engine.module: engine for engine in (generator, discriminator)}
    with generator, discriminator:
        def losses():
            return of_two_models(*engines, lambda model, number: engines[model].step(), remedy=remedy,
                                 drop_gradients=discriminator.drop_gradients)

        if remedy is None:
            with pytest.raises(hoist.UsageError, match=r"another model's loss .* as in a GAN, freeze .*drop_gradients\(\)"):
                losses()
        else:
            assert losses() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("configured, sizes", [(1, [2]), (2, [2, 3])])
def test_a_step_that_the_program_holds_back_is_not_taken_early(settings, configured, sizes):
    """set_gradient_accumulation_boundary(False) before a micro-batch that would make a step by the configuration."""
    config = settings(gradient_accumulation_steps=configured)
    with hoist.torch.initialize(model=model_of(), config=config)[0] as engine:
        data = iter(batches())
        for number, size in enumerate(sizes):
            for index in range(size):
                engine.set_gradient_accumulation_boundary(index == size - 1)
                inputs, targets = next(data)
                engine.backward(F.mse_loss(engine(inputs), targets))
                if number == len(sizes) - 1 and index == configured - 1:
                    break
                engine.step()
        with pytest.raises(hoist.UsageError, match=rf"boundary\(False\).*gradient_accumulation_steps \(now {configured}\)"):
            engine.step()
        assert engine.step_count == number and not engine.was_step_applied()
        engine.set_gradient_accumulation_boundary(True)
        assert engine.step().step == number + 1


def test_a_step_that_the_program_holds_back_is_not_begun_by_a_backward_pass(wrapped):
    """In update mode "backward" the weights would have changed already when step() refuses."""
    with wrapped(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"}) as engine:
        before = engine.state_dict()
        engine.set_gradient_accumulation_boundary(False)
        for inputs, targets in batches()[:COUNT - 1]:
            engine.backward(F.mse_loss(engine(inputs), targets))
            engine.step()
        inputs, targets = batches()[COUNT - 1]
        loss = F.mse_loss(engine(inputs), targets)
        with pytest.raises(hoist.UsageError, match="a backward pass after set_gradient_accumulation_boundary"):
            engine.backward(loss)
        engine.drop_gradients()
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_train_batch_makes_a_whole_step_whatever_a_loop_before_held_back(wrapped, order):
    with wrapped(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "micro_batch_order": order}) as engine:
        engine.set_gradient_accumulation_boundary(False)
        engine.train_batch(batches(), lambda pair: F.mse_loss(engine(pair[0]), pair[1]))
        assert engine.step_count == 1
