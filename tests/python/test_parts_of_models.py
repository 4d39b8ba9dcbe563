# SPDX-License-Identifier: Apache-2.0
"""Programs that call parts of a model themselves, recompute parts of layers, or use weights outside of the module that holds
them: each trains as with torch.optim in memory, however much memory there is."""

import pytest
import torch
import torch.nn.functional as F
from loops import RATE, WIDTH, Block, close_to, reference_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch
from models import on_device_of_tests

STEPS = 8


def drawn(count=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [on_device_of_tests(torch.randn(4, WIDTH, generator=generator, device="cpu")) for _ in range(count)]


@pytest.fixture(params=["ample", "little"])
def wrap(request, settings):
    """Wraps a model; in memory for all of it, or for the weights of one call."""
    def make(model):
        config = settings(optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
                          hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
        if request.param == "little":
            config["zero_optimization"] |= {"stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 0,
                                            "stage3_param_persistence_threshold": 0}
        return hoist.torch.wrap(model, config)

    return make


def expect_trained_alike(wrap, make, loss_of=lambda model, x, step: model(x).pow(2).mean()):
    """`loss_of(model, x, step)`."""
    torch.manual_seed(0)
    model = make()
    optimizer, expected = reference_of(model), []
    for step, x in enumerate(drawn()):
        loss = loss_of(model, x, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.manual_seed(0)
    with wrap(make()) as engine:
        losses = []
        for step, x in enumerate(drawn()):
            loss = loss_of(engine, x, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    close_to(losses, expected)


# --- weights of another module -------------------------------------------------------------------------------------------

class TiedByHand(nn.Module):
    """Its head is the embedding's weight, without a call of the embedding."""

    def __init__(self):
        super().__init__()
        self.token, self.blocks = nn.Embedding(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, embedded):
        if not embedded:
            x = self.token(x.argmax(-1))
        for block in self.blocks:
            x = block(x)
        return x @ self.token.weight.T


def test_a_use_whose_module_is_called_before_it_in_some_passes_only(wrap):
    def loss_of(model, x, step):
        return model(x, step == 5).pow(2).mean()

    expect_trained_alike(wrap, TiedByHand, loss_of)


# --- recomputation of parts of layers ------------------------------------------------------------------------------------

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.mlp = nn.Linear(WIDTH, WIDTH), Block()


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self.through(layer, x)
        return x

    def through(self, layer, x):
        return checkpoint(layer.mlp, checkpoint(layer.mixer, x, use_reentrant=False), use_reentrant=False)


class RecomputedNested(Recomputed):
    def through(self, layer, x):
        return checkpoint(lambda y: super(RecomputedNested, self).through(layer, y), x, use_reentrant=False)


class RecomputedOverAndOver(nn.Module):
    """One block, several times; its second weight is of use in the later calls only."""

    def __init__(self):
        super().__init__()
        self.block = Often()

    def forward(self, x):
        for call in range(4):
            x = checkpoint(self.block, x, call, use_reentrant=False)
        return x


class Often(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.later = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, call):
        return x + torch.tanh(self.later(self.first(x)) if call > 1 else self.first(x))


@pytest.mark.parametrize("make", [Recomputed, RecomputedNested, RecomputedOverAndOver])
def test_parts_of_layers_are_recomputed_one_by_one(wrap, make):
    expect_trained_alike(wrap, make)


# --- calls without a backward pass of their own --------------------------------------------------------------------------

class Ponders(nn.Module):
    """Returns what it is given where there is nothing to do, and uses one of its weights in one call only."""

    def __init__(self):
        super().__init__()
        self.always, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, call):
        if call >= 3:
            return x
        return x + torch.tanh(self.always(x) if call < 1 else self.always(self.once(x)))


class Pondering(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Ponders(), Ponders()])

    def forward(self, x):
        for part in self.parts:
            for call in range(6):
                x = part(x, call)
        return x


def test_a_module_that_returns_its_input_at_times(wrap):
    expect_trained_alike(wrap, Pondering)


# --- a loss that forward() does not return -------------------------------------------------------------------------------

class Fails(Exception):
    pass


@pytest.mark.parametrize("fails", [True, False])
def test_gradients_of_an_auxiliary_loss_are_dropped_by_zero_grad(wrap, fails):
    """They came through a feature that a hook took: in part, if the backward pass ended by an error."""
    def refuse(_):
        raise Fails

    def run(model, backward, step, zero_grad):
        features, losses = [], []
        model[0].register_forward_hook(lambda _, __, output: features.append(output))
        for index, x in enumerate(drawn(4)):
            if index == 2:
                refusing = model[0].up.weight.register_hook(refuse) if fails else None
                features.clear()
                model(x)
                try:
                    (features[0].pow(2).mean() * 50).backward()
                except Fails:
                    assert fails
                if refusing is not None:
                    refusing.remove()
                zero_grad()
            loss = model(x).pow(2).mean()
            backward(loss)
            step()
            zero_grad()
            losses.append(loss.item())
        return losses

    def made():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))

    model = made()
    optimizer = reference_of(model)
    expected = run(model, torch.Tensor.backward, optimizer.step, optimizer.zero_grad)
    with wrap(made()) as engine:
        close_to(run(engine.module, engine.backward, engine.step, engine.zero_grad), expected)


# --- parts that the program calls ----------------------------------------------------------------------------------------

class Decoder(nn.Module):
    """nn.MultiheadAttention uses the weight of its out_proj without calling it."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = torch.stack([self.query(x), x], 1)
        return self.attention(x, x, x, need_weights=False)[0]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Decoder()


def test_a_loop_that_calls_the_towers_of_a_model(wrap):
    expect_trained_alike(wrap, Towers, lambda model, x, step: model.decoder(model.encoder(x)).pow(2).mean())


def test_an_edit_between_the_calls_of_two_parts_is_refused(wrap):
    with wrap(Towers()) as engine:
        for x in drawn(2):
            between = engine.encoder(x)
            with pytest.raises((hoist.UsageError, RuntimeError), match="changed in place|are not loaded"):
                with torch.no_grad():
                    engine.encoder[0].bias.add_(1)
                engine.decoder(between)


def test_towers_are_called_in_an_evaluation_first(wrap):
    torch.manual_seed(0)
    model = Towers()
    x = drawn(1)[0]
    with torch.no_grad():
        expected = model.decoder(model.encoder(x))
    with wrap(model) as engine, torch.no_grad():
        assert torch.equal(F.relu(engine.decoder(engine.encoder(x))), F.relu(expected))
