# SPDX-License-Identifier: Apache-2.0
"""Weights whose use the first pass does not show, or shows too late: experts, references, parts that begin to be used."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_models import WIDTH, Block, batch, close_to, losses_in_memory, mean_square, seeded, step_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch


class WithAuxiliaryLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.has_loss = nn.Linear(32, 32), nn.Linear(32, 32), False

    def forward(self, x):
        y = torch.tanh(self.up(x)) + x
        self.loss = self.gate(torch.tanh(self.gate(x))).pow(2).mean() if self.has_loss else None  # its backward pass comes first
        return y


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
def test_an_auxiliary_loss_that_begins_later_fails_once_and_is_learned_then(wrap):
    """A backward pass uses weights that its first one did not, in memory for a few blocks."""
    def make():
        return nn.Sequential(*[WithAuxiliaryLoss() for _ in range(8)], nn.Linear(32, 1))

    def loss_of(model, x):
        loss = mean_square(model, x)
        return loss if blocks[2].loss is None else loss + blocks[2].loss

    def loss_in_memory(model, x):
        blocks[2].has_loss = next(steps) >= 2
        return loss_of(model, x) + 0 * sum(p.sum() for p in model.parameters())  # as the engine does without a gradient

    x, steps, blocks = batch(0, width=32), iter(range(5)), seeded(make)
    expected = losses_in_memory(blocks, [x] * 5, loss_in_memory)
    blocks = seeded(make)
    with wrap(blocks, "92KiB") as engine:
        losses = [step_of(engine, x, loss_of) for _ in range(2)]
        blocks[2].has_loss = True
        with pytest.raises(RuntimeError, match="of unit '2.*' are not loaded"):
            step_of(engine, x, loss_of)
        losses += [step_of(engine, x, loss_of) for _ in range(3)]
    close_to(losses, expected)


def test_recomputed_blocks_that_never_get_all_gradients_give_way(wrap):
    """Blocks of experts, most of which no token reaches, in memory for a few blocks."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return x + torch.tanh(self.used(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Experts() for _ in range(12)])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    inputs = [batch(i, 64).requires_grad_() for i in range(3)]
    with wrap(seeded(Model), memory="160KiB") as engine:
        losses = [step_of(engine, x) for x in inputs]
    close_to(losses[:1], [mean_square(seeded(Model), inputs[0]).item()])
    assert losses[2] < losses[0]


def test_a_use_of_weights_that_is_new_is_found_when_the_call_is_made_again(wrap):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.prompts = Block(), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
            self.late = False

        def forward(self, x):
            x = self.block(x)
            return F.linear(x, self.prompts[0].weight) if self.late else self.prompts[0](x)

    def late_from_the_second_on(model, x):
        loss = mean_square(model, x)
        model.late = True
        return loss

    expected = losses_in_memory(seeded(Late), [batch(0), batch(1), batch(1)], late_from_the_second_on)
    model, losses = seeded(Late), []
    with wrap(model) as engine:
        losses.append(step_of(engine, batch(0)))
        model.late = True
        for _ in range(2):
            try:
                losses.append(step_of(engine, batch(1)))
            except (RuntimeError, hoist.UsageError):
                pass
        losses = [loss for loss in losses if not math.isnan(loss)]  # where PyTorch cannot refuse, and the step is skipped
        assert len(losses) >= 2 and engine.step_count == len(losses)
        close_to(losses, expected[:len(losses)])


def test_a_reference_in_a_training_pass_may_use_weights_that_the_trained_calls_do_not(wrap):
    """Without gradients, between a forward pass and its backward pass: the first such call is looked at as well."""
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head, self.side = Block(), nn.Linear(WIDTH, 1), nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 1))
            self.is_reference = False

        def forward(self, x):
            return F.linear(self.block(x), (self.side[1] if self.is_reference else self.head).weight)

    def loss_of(model, x):
        y = model(x)
        own.is_reference = True
        with torch.no_grad():
            reference = model(x)
        own.is_reference = False
        return (y - reference).pow(2).mean()

    own = seeded(TwoHeads)
    expected = losses_in_memory(own, [batch(i) for i in range(3)], lambda model, x: loss_of(model, x) + 0 * sum(
        p.sum() for p in model.parameters()))
    own = seeded(TwoHeads)
    with wrap(own) as engine:
        close_to([step_of(engine, batch(i), loss_of) for i in range(3)], expected)


def test_what_is_in_the_place_of_a_trained_copy_may_be_used_in_evaluations(wrap):
    """As PEFT names them. Both calls are evaluations of the same module, and only the first one is looked at."""
    class WithCopy(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Module()
            self.head.original_module = nn.Linear(WIDTH, 1)
            self.head.modules_to_save = nn.ModuleDict({"default": nn.Linear(WIDTH, 1)})
            self.used = self.head.modules_to_save["default"]

        def forward(self, x):
            return F.linear(self.block(x), self.used.weight)

    own = seeded(WithCopy)
    heads = (own.head.modules_to_save["default"], own.head.original_module)

    def results_of(model):
        with torch.no_grad():
            for own.used in heads:
                yield model(batch(0)).clone()

    expected = list(results_of(own))
    with wrap(own) as engine:
        assert all(torch.equal(a, b) for a, b in zip(results_of(engine), expected, strict=True))


class Experts(nn.Module):
    """Calls its experts, their parts, or uses their weights, as `form` says. Each input names those that it is routed to."""

    def __init__(self, form):
        super().__init__()
        self.form, self.enter = form, nn.Linear(WIDTH, WIDTH)
        self.list = nn.ModuleList(nn.Module() for _ in range(4)) if form != "weights of modules" else nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for expert in self.list if form != "weights of modules" else ():
            if form == "weights":
                expert.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
            else:
                expert.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, routed):
        x, experts = routed
        x = self.enter(x)
        return sum(self.list[i].up(x) if self.form == "parts" else F.linear(x, self.list[i].weight) for i in experts)


ROUTES = ([0, 1], [0, 1], [2], [2, 3], [1, 2], [0, 3])


@pytest.mark.parametrize("form", ["weights", "weights of modules", "parts"])
def test_experts_that_no_token_was_routed_to_in_the_first_pass(wrap, form):
    """Experts that nothing calls: their likes are announced with the first of them. Experts that are not used have a gradient of
    zeros here, as in memory below."""
    inputs = [(batch(i), route) for i, route in enumerate(ROUTES)]
    expected = losses_in_memory(seeded(lambda: Experts(form)), inputs, lambda model, x: mean_square(model, x) + 0 * sum(
        p.sum() for p in model.parameters()))
    with wrap(seeded(lambda: Experts(form))) as engine:
        close_to([step_of(engine, x) for x in inputs], expected)


def test_where_a_use_that_was_missed_cannot_be_refused_the_step_after_the_skipped_one_finds_it(wrap, monkeypatch):
    """As with PyTorch before 2.13, where weights that are not loaded are NaN."""
    monkeypatch.setattr(hoist.torch.model.unit_tensors, "CAN_REFUSE", False)
    applied = []
    model = seeded(lambda: Experts("weights"))
    model.other = nn.Linear(WIDTH, WIDTH, bias=False)
    with wrap(model) as engine:
        for step in range(5):
            if step == 2:
                model.forward = lambda x: F.linear(model.enter(x), model.other.weight)
            engine.backward(mean_square(engine, batch(0) if step >= 2 else (batch(0), [0])))
            applied.append(engine.step().applied)
    assert applied == [True, True, False, True, True]


@pytest.mark.parametrize("called_before", [False, True])
def test_weights_that_the_model_itself_uses_in_vertical_order(wrap, called_before):
    """Found in the first micro-batch, when the others' calls have begun already, and units stay for those that come."""
    class Uncalled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.uncalled, self.last = Block(), Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.uncalled(x) if called_before else x
            return self.last(F.linear(self.first(x), self.uncalled.down.weight[:, :WIDTH]))

    class Trained(Uncalled):
        def forward(self, x):
            return super().forward(x) + 0 * self.uncalled(x)  # so that all of it has gradients

    inputs = [batch(i) for i in range(6)]
    expected = losses_in_memory(seeded(Trained), inputs, micro_batches=3)
    with wrap(seeded(Uncalled), gradient_accumulation_steps=3,
              hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "micro_batch_order": "vertical"}) as engine:
        losses = [engine.train_batch(inputs[i:i + 3], lambda x: mean_square(engine, x)).item() for i in (0, 3)]
    close_to(losses, [sum(expected[i:i + 3]) / 3 for i in (0, 3)])
