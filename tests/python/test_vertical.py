# SPDX-License-Identifier: Apache-2.0
"""Vertical order: train_batch() takes all micro-batches of a step through each layer together."""

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoist
import hoist.torch
from models import batches, loss_of, on_device_of_tests
from ranks import results, start
from test_distributed import at
from training import digests, make

STEPS, COUNT = 4, 4


def config_of(settings, order, path, **changes):
    config = at(path, settings(gradient_accumulation_steps=COUNT, **changes))
    config["hoist"] |= {"micro_batch_order": order, "device_memory": "32MiB"}
    return config


def train(engine, steps=STEPS, first=0, loss=loss_of):
    """Returns the mean losses of steps `first` to `first + steps`."""
    data = list(batches((first + steps) * COUNT))[first * COUNT:]
    return [engine.train_batch(data[step * COUNT:(step + 1) * COUNT], lambda batch: loss(engine(batch[0]), batch[1])).item()
            for step in range(steps)]


def both_orders(settings, tmp_path, model, **changes):
    """Returns (losses, digests, bytes of all links) of each order."""
    ends = {}
    for order in ("horizontal", "vertical"):
        with hoist.torch.wrap(model(), config_of(settings, order, tmp_path / order, **changes)) as engine:
            ends[order] = train(engine), digests(engine), engine.statistics()["links"]
    return ends["horizontal"], ends["vertical"]


def untied(**options):
    model = make(**options)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


@pytest.mark.parametrize("recompute", [None, "non-reentrant"])
def test_both_orders_have_the_same_bits(settings, tmp_path, recompute):
    """fp32, one rank, and a power of two of micro-batches: the sums and roundings are the same. Weights go up and gradients
    come down once a step instead of once a micro-batch."""
    horizontal, vertical = both_orders(settings, tmp_path, lambda: untied(recompute=recompute), gradient_clipping=0.5)
    assert vertical[:2] == horizontal[:2]
    for link in ("host_to_device", "device_to_host"):
        assert vertical[2][link] * COUNT == horizontal[2][link]


@pytest.mark.parametrize("changes, tolerance", [({}, 1e-5), ({"bf16": {"enabled": True}}, 1e-2),
                                                ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 1e-2)])
def test_tied_weights_and_16_bits(settings, tmp_path, changes, tolerance):
    """Gradients of both uses of a weight, and roundings to 16 bits, are added up in another order."""
    horizontal, vertical = both_orders(settings, tmp_path, make, **changes)
    assert vertical[0][0] == horizontal[0][0]
    assert vertical[0] == pytest.approx(horizontal[0], rel=tolerance)


@pytest.mark.parametrize("weights", [{}, {"bf16": {"enabled": True}}])
def test_placement_changes_no_bit(settings, tmp_path, weights):
    ends = []
    for place in ("nvme", "cpu", "none"):
        config = config_of(settings, "vertical", tmp_path / place, **weights)
        for part in ("offload_param", "offload_optimizer") if place != "nvme" else ():
            config["zero_optimization"][part] = {"device": place}
        with hoist.torch.wrap(make(), config) as engine:
            ends.append((train(engine), digests(engine)))
    assert ends[0] == ends[1] == ends[2]


# --- models whose layers are not a chain of tensors --------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    norm: torch.Tensor
    cached: object = dataclasses.field(init=False, repr=False)  # without a value


class Layer(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.returns = returns
        self.kept = None

    def forward(self, x):
        added = self.down(F.silu(self.up(x)))
        self.kept = added.square().mean()
        return self.returns(x + added, self.kept)


READ = {"tuple": lambda value, layer: (value[0], value[2][0]), "dict": lambda value, layer: (value["hidden"], value["norm"]),
        "dataclass": lambda value, layer: (value.hidden, value.norm), "attribute": lambda value, layer: (value, layer.kept)}
FORMS = {"tuple": lambda hidden, norm: (hidden, None, [norm]), "dict": lambda hidden, norm: {"hidden": hidden, "norm": norm},
         "dataclass": Output, "attribute": lambda hidden, norm: hidden}


class Net(nn.Module):
    """Every layer's input is the sum of all earlier outputs, one of which is changed in place, and the loss has a term of each
    layer."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList(Layer(FORMS[form]) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        outputs, extra = [x], 0
        for layer in self.layers:
            value = layer(torch.stack(outputs).sum(0))
            hidden, norm = READ[self.form](value, layer)
            hidden += 0.125
            outputs.append(hidden)
            extra = extra + norm
        return self.head(torch.tanh(outputs[-1]) * torch.sigmoid(outputs[-2])).mean() + 0.01 * extra


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_are_no_chain(settings, tmp_path, form):
    """Compares gradients of every micro-batch with autograd over the whole model. A tensor that a layer passes on in an
    attribute cannot be cut, and is refused."""
    torch.manual_seed(0)
    data = [torch.randn(8, 16) for _ in range(COUNT * 3)]
    torch.manual_seed(1)
    model = Net(form)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(3):
        for batch in data[step * COUNT:(step + 1) * COUNT]:
            loss = model(batch) / COUNT
            loss.backward()
            expected.append(loss.item() * COUNT)
        plain.step()
        plain.zero_grad()
    torch.manual_seed(1)
    config = config_of(settings, "vertical", tmp_path, optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}})
    losses = []
    with hoist.torch.wrap(Net(form), config) as engine:
        if form == "attribute":
            with pytest.raises(hoist.UsageError, match=r"kept in an attribute perhaps.*Return it from forward\(\)"):
                engine.train_batch(data[:COUNT], lambda batch: engine(batch))
            return
        for step in range(3):
            engine.train_batch(iter(data[step * COUNT:(step + 1) * COUNT]),
                               lambda batch: (losses.append(loss := engine(batch)), loss)[1])
        weights = engine.state_dict()
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(weights[name], value.cpu(), rtol=1e-4, atol=1e-5), name


class Enclosing(nn.Module):
    """Uses a parameter of its own before and after a module that is a unit."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.shift = nn.Parameter(torch.zeros(16))
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x * self.scale) * self.scale + self.shift


@pytest.mark.parametrize("memory", ["32MiB", "100KiB"])
def test_a_module_around_another(settings, tmp_path, memory):
    ends = []
    for order in ("horizontal", "vertical"):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(16, 16), *(Enclosing() for _ in range(3)))
        config = config_of(settings, order, tmp_path / order)
        config["hoist"]["device_memory"] = memory
        with hoist.torch.wrap(model, config) as engine:
            generator = torch.Generator().manual_seed(1)
            drawn = on_device_of_tests(torch.randn(3, COUNT, 8, 16, generator=generator, device="cpu"))
            ends.append([engine.train_batch(step, lambda batch: engine(batch).square().mean()).item() for step in drawn])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_frozen_layers(settings, tmp_path):
    from models import freeze_base
    horizontal, vertical = both_orders(settings, tmp_path, lambda: freeze_base(make()))
    assert vertical[:2] == horizontal[:2]


@pytest.mark.parametrize("recompute", [None, "non-reentrant"])
def test_saved_tensors_in_cpu_memory(settings, tmp_path, recompute):
    """loss_of runs in a thread of its own for each micro-batch, so the hooks of autograd's saved tensors are set in it."""
    ends = []
    for context in (contextlib.nullcontext, torch.autograd.graph.save_on_cpu):
        config = config_of(settings, "vertical", tmp_path / context.__name__)
        with hoist.torch.wrap(make(recompute=recompute), config) as engine:
            def loss(batch, engine=engine, context=context):
                with context():
                    return loss_of(engine(batch[0]), batch[1])

            data = iter(list(batches(STEPS * COUNT)))
            ends.append(([engine.train_batch(data, loss).item() for _ in range(STEPS)], digests(engine)))
    assert ends[0] == ends[1]


def test_autocast_of_the_caller(settings, tmp_path):
    ends = []
    for order in ("horizontal", "vertical"):
        with hoist.torch.wrap(untied(), config_of(settings, order, tmp_path / order)) as engine, \
                torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            types = []

            def loss(logits, targets, types=types):
                types.append(logits.dtype)
                return loss_of(logits, targets)

            ends.append(train(engine, 2, loss=loss))
            assert set(types) == {torch.bfloat16}
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)


def test_memory_of_activations_is_given_back(settings, tmp_path):
    """When the call returns no graph is left, without Python's collector of cycles."""
    with hoist.torch.wrap(make(), config_of(settings, "vertical", tmp_path)) as engine:
        train(engine, 1)
        seen = []

        def loss(logits, targets):
            seen.append(weakref.ref(logits.grad_fn))
            return loss_of(logits, targets)

        gc.collect()
        gc.disable()
        try:
            train(engine, 1, first=1, loss=loss)
            assert len(seen) == COUNT and not any(node() for node in seen)
        finally:
            gc.enable()


# --- errors ------------------------------------------------------------------------------------------------------------


def test_refusals(settings, tmp_path):
    (inputs, targets), *more = batches(COUNT)
    data = [(inputs, targets), *more]
    with hoist.torch.wrap(make(), config_of(settings, "vertical", tmp_path)) as engine:
        with pytest.raises(hoist.UsageError, match=r"call engine.train_batch\(micro_batches, loss_of\)"):
            engine(inputs)
        with pytest.raises(hoist.UsageError, match="got 3 micro-batches; a step has 4"):
            engine.train_batch(data[:3], lambda batch: loss_of(engine(batch[0]), batch[1]))
        with pytest.raises(hoist.UsageError, match="a tensor with one element and a history"):
            engine.train_batch(data, lambda batch: loss_of(engine(batch[0]), batch[1]).item())
        engine.module.recompute = "reentrant"
        with pytest.raises(hoist.UsageError, match="use_reentrant=False"):
            train(engine, 1)
        engine.module.recompute = None
        with torch.no_grad():
            assert engine(inputs).shape == (4, 16, 97)  # evaluation is as ever
        assert engine.step_count == 0
        train(engine, 1)
        assert engine.step_count == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_micro_batch_that_fails(settings, tmp_path, error):
    """The others end, their gradients are dropped, and the step can be repeated."""
    with hoist.torch.wrap(make(), config_of(settings, "vertical", tmp_path / "undisturbed")) as engine:
        train(engine, 2)
        end = digests(engine)
    with hoist.torch.wrap(make(), config_of(settings, "vertical", tmp_path / "disturbed")) as engine:
        train(engine, 1)
        calls = []
        left = []

        def fails(logits, targets):
            calls.append(None)
            left.append(weakref.ref(logits))
            if len(calls) == 3:
                raise error("in the third")
            return loss_of(logits, targets)

        gc.disable()
        try:
            with contextlib.suppress(error):
                train(engine, 1, first=1, loss=fails)
            torch.ones(1).item()  # operators that a stream has still to run hold their tensors
            assert len(calls) == 3 and not any(logits() is not None for logits in left)  # activations are given back
        finally:
            gc.enable()
        if error is KeyboardInterrupt:
            with pytest.raises(hoist.UsageError, match="was interrupted"):
                train(engine, 1, first=1)
            engine.restore()
        train(engine, 1, first=1)
        assert digests(engine) == end


def test_a_loss_that_the_program_divides(settings, tmp_path, caplog):
    with hoist.torch.wrap(make(), config_of(settings, "vertical", tmp_path)) as engine:
        train(engine, 1, loss=lambda logits, targets: loss_of(logits, targets) / COUNT)
    assert "as if the program had divided it by 4" in caplog.text


def test_errors_in_horizontal_order(settings, tmp_path):
    """The gradients of a call that fails are dropped, and a call does not add to gradients that are there already."""
    data = list(batches(COUNT))
    with hoist.torch.wrap(make(), config_of(settings, "horizontal", tmp_path / "undisturbed")) as engine:
        train(engine, 1)
        end = digests(engine)
    with hoist.torch.wrap(make(), config_of(settings, "horizontal", tmp_path / "disturbed")) as engine:
        def fails(batch):
            if batch is data[2]:
                raise ValueError("in the third")
            return loss_of(engine(batch[0]), batch[1])

        with pytest.raises(ValueError, match="in the third"):
            engine.train_batch(data, fails)
        engine.backward(loss_of(engine(data[0][0]), data[0][1]))
        with pytest.raises(hoist.UsageError, match="takes all micro-batches of a step"):
            train(engine, 1)
        engine.zero_grad()
        train(engine, 1)
        assert digests(engine) == end


def test_an_engine_in_horizontal_order(settings, tmp_path):
    """In horizontal order, train_batch() is the usual loop."""
    with hoist.torch.wrap(make(), config_of(settings, "horizontal", tmp_path / "loop")) as engine:
        for inputs, targets in batches(STEPS * COUNT):
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()
        end = digests(engine)
    with hoist.torch.wrap(make(), config_of(settings, "horizontal", tmp_path / "call")) as engine:
        train(engine)
        assert digests(engine) == end


PROGRAM = """
from test_vertical import COUNT, loss_of
join()
engine = hoist.torch.wrap(make(), config)
data = list(batches(3 * COUNT * size))[rank::size]
losses = [engine.train_batch(data[step * COUNT:], lambda batch: loss_of(engine(batch[0]), batch[1])).item() for step in range(3)]
print(json.dumps([losses, digests(engine)]))
engine.close()
"""


def test_two_ranks(settings, tmp_path):
    ends = {}
    for order in ("horizontal", "vertical"):
        ends[order] = results(start(PROGRAM, tmp_path / order, config_of(settings, order, tmp_path / order / "store")))
    for rank in range(2):
        assert ends["vertical"][rank][0] == pytest.approx(ends["horizontal"][rank][0], rel=1e-5)
    assert ends["vertical"][0][1] == ends["vertical"][1][1]
