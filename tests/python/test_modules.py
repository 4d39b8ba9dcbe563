# SPDX-License-Identifier: Apache-2.0
"""Modules whose calls, weights or graphs have an unusual form, against torch.optim.AdamW in memory: losses, weights, the names of
all weights, and the same bits wherever the state is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch
import ranks
from models import has_values, on_device_of_tests
from training import digests

WIDTH, STEPS = 12, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, count=3, block=Mlp):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Linears(nn.Module):
    """Six linear layers, each a unit."""

    def __init__(self):
        super().__init__()
        for name in "abcdef":
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for name in "abcdef":
            x = torch.tanh(getattr(self, name)(x))
        return x


class WeightsOfOthers(Linears):
    """Gradients of most units are complete only at the end."""

    def forward(self, x):
        x = F.linear(x, self.b.weight)
        x = F.linear(torch.tanh(self.c(x)), self.a.weight, self.a.bias)
        return self.b(self.d(x) + F.linear(x, self.e.weight) + self.e(x)) + self.f(x)


class InterleavedBiases(Linears):
    """The weights of all layers are used after their biases."""

    def forward(self, x):
        for name in "abcd":
            x = torch.tanh(x + getattr(self, name).bias)
        for name in "abcd":
            x = torch.tanh(x @ getattr(self, name).weight)
        return self.f(self.e(x))


class Tied(Linears):
    def __init__(self):
        super().__init__()
        self.c.weight, self.d.bias, self.f.weight = self.a.weight, self.b.bias, self.e.weight


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        block = Mlp()
        block.register_buffer("mean", torch.ones(1))
        self.blocks = nn.ModuleList([block, Mlp(), block])
        self.again = block
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.again(x)


class BesideBlock(Mlp):
    """Returns what it was given beside its result, as T5 does with the bias of its first block."""

    def forward(self, x, beside):
        return super().forward(x) * beside, beside


class Beside(Stack):
    def __init__(self):
        super().__init__(4, BesideBlock)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        beside = self.scale(x).sigmoid()
        for block in self.blocks:
            x, beside = block(x, beside)
        return self.out(x)


class InTurn(Stack):
    """As ALBERT: one block, of several units, is called several times."""

    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        for _ in range(3):
            x = super().forward(x)
        return x


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weights = torch.stack([expert.weight for expert in self.experts])
        return torch.tanh(x @ weights).mean(0) + self.experts[0].bias


class Methods(nn.Module):
    """Two methods beside forward(), each with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def encode(self, x):
        return torch.tanh(x @ self.first)

    def decode(self, x):
        return torch.tanh(x @ self.second)


class EncodesAndDecodes(Stack):
    def __init__(self):
        super().__init__(3, Methods)

    def forward(self, x):
        for block in self.blocks:
            x = block.encode(x)
        x = self.out(x)
        for block in self.blocks:
            x = block.decode(x)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.cell = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        steps = self.lstm(x[:, None].expand(-1, 3, -1))[0]
        state = torch.zeros_like(x)
        for step in range(3):
            state = self.cell(steps[:, step], state)
        return x + self.attention(state[:, None], state[:, None], state[:, None], need_weights=False)[0][:, 0]


class Functional(Stack):
    def forward(self, x):
        doubled = {name: 2 * value for name, value in self.blocks[0].named_parameters()}
        x = torch.func.functional_call(self.blocks[0], doubled, (x,))
        return self.out(torch.vmap(self.blocks[1])(x) + checkpoint(self.nested, x, use_reentrant=False))

    def nested(self, x):
        return checkpoint(self.blocks[2], self.blocks[1](x), use_reentrant=False)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class ParametrizedForAWhile(Stack):
    """As PEFT's LoRA for parameters (target_parameters) does in each call."""

    def forward(self, x):
        parametrize.register_parametrization(self.out, "weight", Doubled(), unsafe=True)
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.out, "weight", leave_parametrized=False)


class GradientInForward(Stack):
    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            slope, = torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)
        return slope


def old_weight_norm():
    model = Stack()
    for module in (model.blocks[0].up, model.blocks[1].down, model.out):
        nn.utils.weight_norm(module)
    return model


def parametrized():
    model = Stack()
    parametrizations.weight_norm(model.out)
    parametrizations.spectral_norm(model.blocks[0].up)
    return model


def square(model, x):
    return model(x).pow(2).mean()


def penalized(model, x):
    x = x.clone().requires_grad_()
    result = model(x)
    slope, = torch.autograd.grad(result.sum(), x, create_graph=True)
    return result.pow(2).mean() + slope.pow(2).mean()


def adversarial(model, x):
    change = torch.zeros_like(x).requires_grad_()
    slope, = torch.autograd.grad(square(model, x + change), change)
    return square(model, x + 0.1 * slope.sign())


def with_cached_weights(model, x):
    with parametrize.cached():
        return square(model, x)


# The function that makes the model, the loss, and whether weights of several units are needed at once.
CASES = {
    "weights of others": (WeightsOfOthers, square, True),
    "biases first": (InterleavedBiases, square, True),
    "tied": (Tied, square, False),
    "two names": (TwoNames, square, False),
    "an input is returned": (Beside, square, False),
    "in turn": (InTurn, square, False),
    "stacked": (Stacked, square, True),
    "methods": (EncodesAndDecodes, square, True),
    "recurrent": (Recurrent, square, False),
    "functional": (Functional, square, True),
    "weight_norm by hooks": (old_weight_norm, square, False),
    "parametrized": (parametrized, with_cached_weights, True),
    "parametrized for a while": (ParametrizedForAWhile, square, True),
    "autograd.grad in forward()": (GradientInForward, square, True),
    "gradient penalty": (Tied, penalized, True),
    "adversarial inputs": (Stack, adversarial, False),
}


def batches():
    generator = torch.Generator().manual_seed(2)
    return [on_device_of_tests(torch.randn(4, WIDTH, generator=generator, device="cpu")) for _ in range(STEPS)]


def make(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize(("kind", "loss_of", "needs_several"), [
    pytest.param(*case, id=name, marks=pytest.mark.cpu_tensors("PyTorch has one fused operator for nn.LSTM, of CUDA")
                 if case[0] is Recurrent else ()) for name, case in CASES.items()])
def test_trains_as_in_memory(settings, kind, loss_of, needs_several):
    reference = make(kind)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)
    expected = []
    for x in batches():
        for half in x.chunk(2):
            loss = loss_of(reference, half)
            (loss / 2).backward()
            expected.append(loss.item())
        for parameter in reference.parameters():  # a gradient of zeros, as here
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()

    ends = []
    for small in (True, False):
        adamw = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}}
        config = settings(gradient_accumulation_steps=2, optimizer=adamw)
        config["hoist"]["device_memory"] = "8MiB"
        if small and not needs_several:
            config["zero_optimization"]["stage3_max_live_parameters"] = 1
        if not small:
            for part in ("offload_param", "offload_optimizer"):
                config["zero_optimization"][part] = {"device": "cpu"}
        losses = []
        model = make(kind)
        torch.manual_seed(1)
        with hoist.torch.wrap(model, config) as engine:
            for x in batches():
                for half in x.chunk(2):
                    loss = loss_of(engine.module, half)
                    engine.backward(loss)
                    report = engine.step()
                    losses.append(loss.item())
                assert report.applied
            weights = engine.state_dict()
            engine.load_state_dict(weights)
            ends.append(digests(engine))
        assert losses == pytest.approx(expected, rel=1e-5)
        assert weights.keys() == reference.state_dict().keys()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name].cpu(), value.cpu(), rtol=0, atol=1e-5)
    assert ends[0] == ends[1]


class Projects(nn.Embedding):
    """Embeds, and computes the logits, too."""

    def forward(self, x):
        return super().forward(x) if x.dtype == torch.int64 else F.linear(x, self.weight)


class Factorized(nn.Embedding):
    def __init__(self, count, width):
        super().__init__(count, 4)
        self.projection = nn.Parameter(torch.randn(width, 4))

    def forward(self, x):
        return F.linear(super().forward(x), self.projection)


class Embeds(Stack):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.embedding(x.argsort()).mean(1) + x)


class EmbedsAndProjects(Embeds):
    def __init__(self):
        super().__init__(Projects)

    def forward(self, x):
        return self.embedding(super().forward(x))


def normed_embedding(how):
    return lambda: Embeds(lambda *sizes: how(nn.Embedding(*sizes)))


@pytest.mark.parametrize("kind", [EmbedsAndProjects, lambda: Embeds(Factorized), normed_embedding(nn.utils.weight_norm),
                                  normed_embedding(nn.utils.spectral_norm)], ids=["projects", "factorized", "weight", "spectral"])
def test_an_embedding_whose_backward_pass_reads_its_weights(settings, kind):
    """By PyTorch's backward(), which hoist does not watch."""
    reference, model = make(kind), make(kind)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)
    config = settings(optimizer={"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1}})
    config["hoist"]["device_memory"] = "8MiB"
    config["zero_optimization"]["stage3_max_live_parameters"] = 1
    with hoist.torch.wrap(model, config) as engine:
        for x in batches():
            expected, loss = square(reference, x), square(engine, x)
            torch.testing.assert_close(loss, expected)
            for each in (expected, loss):
                each.backward()
            for each in (optimizer, engine):
                each.step()
                each.zero_grad()


class Scaled(Stack):
    """With a parameter that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))


def test_a_small_parameter_is_there_for_a_loss_outside_of_forward(settings):
    """In training and in evaluation: it stays gathered until the pass ends. Layers, which share their memory, do not."""
    def loss_of(model, x):
        return (model(x) * model.scale).pow(2).mean() + model.scale.norm()

    def run(model, optimizer, backward):
        losses = []
        for x in batches():
            loss = loss_of(model, x)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), loss_of(model, x).item()]
        return losses

    reference = make(Scaled)
    expected = run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), torch.Tensor.backward)
    config = settings(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}})
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 2 * WIDTH, "stage3_max_live_parameters": 1}
    config["hoist"]["device_memory"] = "8MiB"
    with hoist.torch.wrap(make(Scaled), config) as engine:
        assert run(engine.module, engine.optimizer, engine.backward) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(engine.read("scale"), reference.scale.detach().cpu(), rtol=0, atol=1e-5)
        engine.module(batches()[0])
        assert not has_values(engine.module.blocks[0].up.weight)


RANK = """
from test_modules import *
name, config = config
join()
with hoist.torch.wrap(make(CASES[name][0]), config) as engine:
    for x in batches():
        engine.backward(square(engine.module, x.chunk(size)[rank]))
        engine.step()
    print(json.dumps(digests(engine)))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["weights of others", "tied"])
def test_ranks_wait_for_gradient_memory_alike(settings, tmp_path, name):
    config = settings(hoist={"device_memory": "8MiB", "pinned_memory": "32MiB"})
    found = ranks.results(ranks.start(RANK, tmp_path / "ranks", [name, config]))
    config = settings("one", gradient_accumulation_steps=2, hoist=config["hoist"])
    with hoist.torch.wrap(make(CASES[name][0]), config) as engine:
        for x in batches():
            for half in x.chunk(2):
                engine.backward(square(engine.module, half))
                engine.step()
        assert found == [digests(engine)] * 2


def test_gradients_of_inputs_are_no_backward_pass(settings):
    with hoist.torch.wrap(make(Stack), settings()) as engine:
        x = batches()[0].requires_grad_()
        torch.autograd.grad(engine(x).sum(), x)
        with pytest.raises(hoist.UsageError, match="step\\(\\) needs a backward pass before it"):
            engine.step()
        torch.autograd.grad(engine(x).sum(), x)
        engine(x).sum().backward()
        assert engine.step().applied


@pytest.mark.parametrize("max_norm", [0.5, 100.0], ids=["changes", "will_change"])
def test_a_forward_that_changes_its_weights_is_refused(settings, max_norm):
    model = nn.Sequential(nn.Embedding(7, WIDTH, max_norm=max_norm), nn.Linear(WIDTH, WIDTH))
    with hoist.torch.wrap(model, settings()) as engine:
        with pytest.raises(hoist.UsageError, match="embedding_renorm_.*changes parameter '0.weight' in forward.*max_norm"):
            engine(torch.arange(7))


class Writes(nn.Module):
    """As Gemma 3n, which clamps some of its weights in each training pass."""

    def __init__(self, write, recompute=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.write = write
        self.recompute = recompute

    def second(self, x):
        with torch.no_grad():
            self.write(self.layers[1])
        return self.layers[1](x)

    def forward(self, x):
        x = self.layers[0](x)
        return self.second(x) if self.recompute is None else checkpoint(self.second, x, use_reentrant=self.recompute)


@pytest.mark.parametrize("recompute", [None, False, True], ids=["kept", "not reentrant", "reentrant"])
def test_a_clamp_that_cuts_nothing_changes_nothing_and_is_said(settings, caplog, recompute):
    found = []
    for store, write in (("clamped", lambda layer: layer.weight.data.clamp_(-120, 120)), ("not", lambda _: None)):
        with hoist.torch.wrap(make(lambda w=write: Writes(w, recompute)), settings(store)) as engine:
            for x in batches():
                engine.backward(square(engine.module, x))
                engine.step()
            found.append(digests(engine))
    assert found[0] == found[1]
    assert [record.args for record in caplog.records if "forward() clamps" in record.msg] == [("layers.1.weight",)]


class WritesItsOwn(nn.Linear):
    write = staticmethod(lambda layer: None)

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return super().forward(x)


@pytest.mark.parametrize("first", [lambda layer: layer.weight.clamp_(-120, 120), lambda _: None], ids=["cuts nothing", "none"])
def test_a_clamp_of_the_parameter_itself_is_never_lost(settings, first):
    """Autograd counts it, also where it cuts nothing."""
    with hoist.torch.wrap(make(lambda: WritesItsOwn(WIDTH, WIDTH)), settings()) as engine:
        engine.module.write = first
        with pytest.raises(hoist.UsageError, match="parameter 'weight' was changed in place"):
            for x in batches():
                engine.backward(square(engine.module, x))
                engine.step()
                engine.module.write = lambda layer: layer.weight.clamp_(-0.001, 0.001)


@pytest.mark.parametrize(("write", "name"), [
    (lambda layer: layer.weight.data.clamp_(-0.01, 0.01), "layers.1.weight"),
    (lambda layer: layer.weight.data[3].mul_(1.0), "layers.1.weight"),
    (lambda layer: torch.mul(layer.weight.data, 2.0, out=layer.weight.data), "layers.1.weight"),
    (lambda layer: layer.bias.copy_(torch.zeros(WIDTH)), "layers.1.bias"),
    (lambda layer: torch._foreach_mul_([layer.weight.data, layer.bias.data], [1.0, 2.0]), "layers.1.weight"),
], ids=["data", "row", "out", "parameter", "list"])
def test_a_change_in_forward_is_refused_by_name(settings, write, name):
    with hoist.torch.wrap(make(lambda: Writes(write)), settings()) as engine:
        before = digests(engine)
        for _ in range(2):
            with pytest.raises(hoist.UsageError, match=f"changes parameter '{name}' in forward"):
                engine(batches()[0])
        assert digests(engine) == before
        engine.module.write = lambda _: None
        engine.backward(square(engine.module, batches()[0]))
        engine.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(settings, foreach):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].weight.register_post_accumulate_grad_hook(
        lambda weight: torch.optim.SGD([weight], lr=0.1, foreach=foreach).step() and None)
    with hoist.torch.wrap(model, settings()) as engine:
        with pytest.raises(hoist.UsageError, match="changes parameter '0.weight' in the backward pass.*Remove the hook"):
            engine.backward(engine(torch.ones(2, WIDTH)).sum())


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(WIDTH), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_are_called_before_they_are_wrapped(settings, layer):
    model = nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(hoist.UsageError, match="'0.*' is a lazy module's .*call the model with a batch"):
        hoist.torch.wrap(model, settings())
    model(torch.ones(2, WIDTH))
    with hoist.torch.wrap(model, settings()) as engine:
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        assert engine.step().applied


def test_a_module_without_hooks_is_refused(settings):
    model = Stack()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    with pytest.raises(hoist.UsageError, match="'blocks.1' was made by torch.jit"):
        hoist.torch.wrap(model, settings())


class Stage(Stack):
    """A member of a list that contains a list."""


@pytest.mark.parametrize(("make_model", "classes", "names"), [
    (lambda: nn.Sequential(*(nn.Sequential(Mlp(), Mlp()) for _ in range(2))), [], ["0.0", "0.1", "1.0", "1.1"]),
    (lambda: nn.ModuleList(nn.ModuleList([Mlp(), Mlp()]) for _ in range(2)), [], ["0.0", "0.1", "1.0", "1.1"]),
    (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(2))), [], ["0", "1"]),
    (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), Mlp()) for _ in range(2))), [], ["0", "1"]),
    (lambda: nn.Sequential(Stage(2), Stage(2)), [], ["0", "1"]),
    (lambda: nn.Sequential(Stage(1), Stage(1)), [Mlp], ["0.blocks.0", "0.out", "1.blocks.0", "1.out"]),
    (lambda: nn.Sequential(Stage(2), Stage(2)), [Stage, Mlp], ["0", "1"]),
])
def test_lists_of_lists_are_cut_into_blocks(make_model, classes, names):
    assert [unit.name for unit in hoist.torch.units_of(make_model(), classes).units] == names
