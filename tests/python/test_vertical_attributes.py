# SPDX-License-Identifier: Apache-2.0
"""Vertical order, with models whose forward() leaves something in an attribute of a module for code that comes later."""

import gc
import weakref

import pytest
import torch
from test_vertical import COUNT, config_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch
from models import on_device_of_tests

STEPS, WIDTH = 3, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x):
        return x + self.linear(x).tanh() * self.scale


class Chain(nn.Module):
    """What forward() keeps, and what reads it, is the tests'."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.extra = 1.0

    def keep(self, x, hidden):
        """Called between the embedding and the blocks."""

    def forward(self, x):
        hidden = self.embedding(x)
        self.keep(x, hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, x):
        return (self(x) - 1).square().mean() * self.extra


class PartOfLoss(Chain):
    def keep(self, x, hidden):
        self.extra = 1 + hidden.square().mean()


class Statistic(Chain):
    def keep(self, x, hidden):
        self.extra = hidden.detach().abs().mean()


class Number(Chain):
    def keep(self, x, hidden):
        self.extra = 0.5 + float(x.detach().abs().max())


class Mask(Chain):
    def keep(self, x, hidden):
        for block in self.blocks:
            block.scale = (x > 0).float()


class MaskForALinear(Chain):
    def keep(self, x, hidden):
        self.head.mask = (x > 0).float()

    def forward(self, x):
        return super().forward(x) * self.head.mask


class RecomputedMask(Mask):
    def forward(self, x):
        hidden = self.embedding(x)
        self.keep(x, hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


class Buffer(Chain):
    def __init__(self):
        super().__init__()
        self.register_buffer("extra_of_batch", None, persistent=False)

    def keep(self, x, hidden):
        self.extra_of_batch = x.detach().abs().mean()

    def loss(self, x):
        return super().loss(x) * self.extra_of_batch


class Dictionary(Chain):
    def __init__(self):
        super().__init__()
        self.kept = {"calls": 0}

    def keep(self, x, hidden):
        self.kept["extra"] = hidden.square().mean()

    def loss(self, x):
        return super().loss(x) + self.kept["extra"]


class List(Chain):
    def __init__(self):
        super().__init__()
        self.losses = []

    def keep(self, x, hidden):
        self.losses.clear()
        self.losses += [hidden.square().mean(), x.square().mean()]

    def loss(self, x):
        return super().loss(x) + sum(self.losses)


class ListOfEachCall(List):
    def keep(self, x, hidden):
        self.losses = []
        super().keep(x, hidden)
        self.losses.pop()


class ListOfTensorsThenNumbers(Chain):
    def __init__(self):
        super().__init__()
        self.stack = []

    def forward(self, x):
        hidden = self.embedding(x)
        self.stack.append(x)
        hidden = self.blocks[0](hidden) + self.stack.pop()
        self.stack.append(float(x.abs().max()))
        hidden = self.head(self.blocks[1](hidden))
        return hidden * self.stack.pop()


class NumberInADictionary(Chain):
    def __init__(self):
        super().__init__()
        self.kept = {"scale": 1.0}

    def keep(self, x, hidden):
        self.kept["scale"] = float(x.detach().abs().max())

    def forward(self, x):
        return super().forward(x) * self.kept["scale"]


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


class ModuleOfEachCall(Chain):
    def keep(self, x, hidden):
        self.masked = Masked((x > 0).float())

    def forward(self, x):
        hidden = super().forward(x)
        return self.masked(hidden)


class Deleted(Chain):
    def keep(self, x, hidden):
        self.kept = hidden.square().mean()

    def loss(self, x):
        loss = super().loss(x) + self.kept
        del self.kept
        return loss


class Cache(Chain):
    """A table that grows with the longest input, and the length that it is for."""

    def __init__(self):
        super().__init__()
        self.length = 0

    def keep(self, x, hidden):
        if len(x) > self.length:
            self.length, self.table = len(x), torch.arange(len(x), device=x.device).float()[:, None] / 8
        for block in self.blocks:
            block.scale = self.table[:len(x)]


class OtherParameters(nn.Module):
    """The weight of the head, and a buffer, depend on the input."""

    def __init__(self):
        super().__init__()
        self.chain = Chain()
        self.chain.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        others = {"head.weight": torch.eye(WIDTH, device=x.device) * x.mean(), "scale": x.abs().max()}
        return torch.func.functional_call(self.chain, others, (x,)) * self.chain.scale

    def loss(self, x):
        return (self(x) - 1).square().mean()


class Memory(Chain):
    """Each micro-batch begins with what the one before has left."""

    def __init__(self):
        super().__init__()
        self.memory, self.mean = None, 0.0
        self.register_buffer("average", torch.zeros(WIDTH))

    def keep(self, x, hidden):
        if self.memory is not None:
            self.extra = 1 + (self.memory * x.mean()).square().mean()
        self.memory = x.detach().mean(0)
        self.average = 0.5 * self.average + self.memory
        self.blocks[0].scale = self.average


class ForAPart(Chain):
    """A second pass, in which a flag is set, gives the target."""

    def __init__(self):
        super().__init__()
        self.is_target = False

    def forward(self, x):
        hidden = super().forward(x)
        return hidden if self.is_target else hidden * 2

    def loss(self, x):
        found = self(x)
        self.is_target = True
        with torch.no_grad():
            target = self(x)
        self.is_target = False
        return (found - target).square().mean()


class InEvalMode(Chain):
    def loss(self, x):
        loss, was = super().loss(x), self.training
        self.eval()
        with torch.no_grad():
            target = self(x)
        self.train(was)
        return loss + target.mean()


KINDS = (PartOfLoss, Statistic, Number, Mask, MaskForALinear, RecomputedMask, Buffer, Dictionary, List, ListOfEachCall,
         ListOfTensorsThenNumbers, NumberInADictionary, ModuleOfEachCall, Deleted, Cache, ForAPart, InEvalMode,
         OtherParameters, Memory)


def steps_of_data():
    generator = torch.Generator().manual_seed(5)
    return [[on_device_of_tests(torch.randn(3 + (step + index) % 4, WIDTH, generator=generator, device="cpu") * (1 + index))
             for index in range(COUNT)] for step in range(STEPS)]


def trained(settings, path, order, model):
    """Returns (losses of steps, weights, attributes that are tensors)."""
    with hoist.torch.wrap(model, config_of(settings, order, path / order)) as engine:
        losses = [engine.train_batch(data, model.loss).item() for data in steps_of_data()]
        return losses, engine.state_dict(), {f"{name}.{key}": value.detach() for name, module in model.named_modules()
                                             for key, value in vars(module).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_micro_batch_has_its_own(settings, tmp_path, kind):
    """Losses and weights are those of horizontal order, and so are the attributes afterwards."""
    ends = []
    for order in ("horizontal", "vertical"):
        torch.manual_seed(0)
        ends.append(trained(settings, tmp_path, order, kind()))
    (expected, *tensors), (losses, *others) = ends
    assert losses == pytest.approx(expected, rel=1e-5)
    for these, those in zip(tensors, others, strict=True):
        assert these.keys() == those.keys()
        for name, value in these.items():
            assert torch.allclose(those[name], value, rtol=1e-4, atol=1e-5), name


class EmptiedCache(Chain):
    def __init__(self):
        super().__init__()
        self.cache = None

    def keep(self, x, hidden):
        if self.cache is None:
            self.cache = (x > 0).float()
        self.blocks[0].scale = self.cache

    def loss(self, x):
        loss, self.cache = super().loss(x), None
        return loss


def test_what_is_emptied_within_forward_is_refused(settings, tmp_path):
    """The next micro-batch has found it full. Horizontal order trains such models."""
    model = EmptiedCache()
    with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path)) as engine:
        with pytest.raises(hoist.UsageError, match="'cache' is set for a part of forward.*\"horizontal\""):
            engine.train_batch([batch[:3] for batch in steps_of_data()[0]], model.loss)
        assert engine.step_count == 0 and model.cache is None


class SetLate(Chain):
    def __init__(self):
        super().__init__()
        self.is_late = False

    def forward(self, x):
        self.is_late = False
        hidden = super().forward(x)
        self.is_late = True
        return hidden


class Depth(Chain):
    def __init__(self):
        super().__init__()
        self.depth = 0

    def forward(self, x):
        self.depth += 1
        hidden = super().forward(x)
        self.depth -= 1
        return hidden


class Average(Chain):
    """Changes after each block."""

    def __init__(self):
        super().__init__()
        self.average = 0.0

    def forward(self, x):
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean()
        return self.head(hidden) * (1 + self.average)


class AverageInABuffer(Average):
    def __init__(self):
        super().__init__()
        del self.average
        self.register_buffer("average", torch.zeros(()))


@pytest.mark.parametrize("kind, name", [(SetLate, "is_late"), (Depth, "depth"), (Average, "average"),
                                        (AverageInABuffer, "average")])
def test_what_may_differ_is_said_once(settings, tmp_path, caplog, monkeypatch, kind, name):
    monkeypatch.setattr("hoist.torch.passes.attributes._warned", set())
    trained(settings, tmp_path, "vertical", kind())
    assert sum(f"'{name}'" in record.getMessage() for record in caplog.records) == 1


def test_a_list_of_each_call_is_its_micro_batchs_alone(settings, tmp_path):
    class Seen(Chain):
        def forward(self, x):
            self.seen = [x]
            hidden = super().forward(x)
            self.seen.append(hidden.detach())
            return hidden

    kept, model = [], Seen()

    def loss(x):
        loss = model.loss(x)
        kept.append(model.seen)
        return loss

    with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path)) as engine:
        engine.train_batch(steps_of_data()[0], loss)
    assert [len(each) for each in kept] == [2] * COUNT


def test_an_error_keeps_no_attributes_alive(settings, tmp_path):
    model, made = Chain(), []

    def loss(x):
        model.extra = 1 + x.mean()
        made.append(weakref.ref(model.extra))
        return model.loss(x) * (1 / int(len(made) < COUNT))

    with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path)) as engine:
        with pytest.raises(ZeroDivisionError) as caught:
            engine.train_batch(steps_of_data()[0], loss)
        gc.collect()
        assert len(made) == COUNT and sum(each() is not None for each in made) <= 1, caught
    assert model.extra == 1.0


class Counting(Chain):
    def __init__(self):
        super().__init__()
        self.calls, self.of_blocks, self.log = 0, {"calls": 0}, []
        for block in self.blocks:
            block.register_forward_hook(self.count)

    def count(self, *_):
        self.of_blocks["calls"] += 1
        self.log.append(self.of_blocks["calls"])

    def keep(self, x, hidden):
        self.calls += 1


def test_counts_go_on(settings, tmp_path):
    """A micro-batch counts from where the others are; all of them share a dictionary of numbers, and a list."""
    model = Counting()
    trained(settings, tmp_path, "vertical", model)
    calls = COUNT * STEPS
    assert model.calls == calls and model.of_blocks == {"calls": 3 * calls} and model.log == list(range(1, 3 * calls + 1))


def test_a_step_that_fails_leaves_a_usable_model(settings, tmp_path):
    ends = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = Mask()
        data, *others = steps_of_data()
        with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path / str(fails))) as engine:
            if fails:
                with pytest.raises(ZeroDivisionError):
                    engine.train_batch(data, lambda x, model=model, last=data[-1]: model.loss(x) * (1 / int(x is not last)))
            ends.append([engine.train_batch(each, model.loss).item() for each in (data, *others)])
    assert ends[0] == ends[1]


class FailsInRecomputation(Block):
    def __init__(self):
        super().__init__()
        self.fails, self.calls = False, 0

    def changed(self, x):
        self.calls += 1
        if self.fails and self.calls > COUNT:
            self.scale = 2.0
            raise ZeroDivisionError
        return self.linear(x).tanh() * self.scale

    def forward(self, x):
        return x + checkpoint(self.changed, x, use_reentrant=False)


def test_what_a_failed_recomputation_has_set_is_undone(settings, tmp_path):
    model = Chain()
    block = model.blocks[1] = FailsInRecomputation()
    with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path)) as engine:
        engine.train_batch(steps_of_data()[0], model.loss)
        block.fails, block.calls = True, 0
        with pytest.raises(ZeroDivisionError):
            engine.train_batch(steps_of_data()[1], model.loss)
    assert block.scale == 1.0


@pytest.mark.parametrize("kept", ["by a hook", "by the loss"])
def test_what_is_no_attribute_is_refused(settings, tmp_path, kept):
    """A gradient shows that a loss depends on another micro-batch's tensor."""
    model, found = Chain(), {}

    def loss(x):
        if kept == "by the loss":
            loss = model.loss(x) + found.get("loss", 0)
            found["loss"] = loss
            return loss
        return model.loss(x) + found["hidden"].square().mean()

    if kept == "by a hook":
        model.embedding.register_forward_hook(lambda module, inputs, output: found.__setitem__("hidden", output))
    with hoist.torch.wrap(model, config_of(settings, "vertical", tmp_path)) as engine:
        with pytest.raises(hoist.UsageError, match=r"loss of micro-batch \d depends on a tensor that unit '\w+' has made for "
                                                   r"micro-batch \d.*a list, a dictionary or an object of the program's"):
            engine.train_batch(steps_of_data()[0], loss)
        assert engine.step_count == 0
        engine.train_batch(steps_of_data()[1], lambda x: engine(x).square().mean())
