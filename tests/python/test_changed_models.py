# SPDX-License-Identifier: Apache-2.0
"""Programs that change a wrapped model itself: tied weights, moved layers, attributes, methods. It works, or is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from two_layers import WIDTH, batch, model_of, step

import hoist
import hoist.torch
from models import on_device_of_tests


def test_a_model_is_wrapped_again_after_close(settings):
    model = model_of()
    with hoist.torch.wrap(model, settings()) as engine:
        losses = [step(engine) for _ in range(3)]
    with hoist.torch.wrap(model, settings(), resume=True) as engine:
        losses += [step(engine) for _ in range(3)]
    with hoist.torch.wrap(model_of(), settings(store="other")) as engine:
        assert losses == [step(engine) for _ in range(6)]


def test_a_parameter_of_another_wrapped_model_is_refused_and_trained_there(wrapped):
    with wrapped() as undisturbed:
        expected = [step(undisturbed) for _ in range(2)]
    first, second = model_of(), model_of()
    with wrapped(first) as engine:
        losses = [step(engine)]
        second[2].weight = engine.module[2].weight
        with pytest.raises(hoist.UsageError, match=r"parameter '2\.weight' belongs to an engine of another model"):
            wrapped(second)
        losses.append(step(engine))
    assert losses == expected


def test_weights_that_are_tied_after_wrapping_are_refused(wrapped):
    with wrapped() as engine:
        with pytest.raises(hoist.UsageError, match="'weight' of a Linear was set to another parameter of the model"):
            engine.module[2].weight = engine.module[0].weight
        engine.module[2].weight = engine.module[2].weight
        step(engine)


def test_weights_that_share_a_part_of_their_memory_are_refused(wrapped):
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(3 * WIDTH, WIDTH))
    whole = model[0].weight.data
    model[1].weight.data = whole[WIDTH:2 * WIDTH]
    with pytest.raises(hoist.UsageError, match=r"'0\.weight' and '1\.weight' share memory"):
        wrapped(model)
    for number, fused in enumerate((torch.empty(2, WIDTH, WIDTH), torch.empty(WIDTH, 2, WIDTH).transpose(0, 1))):
        model = model_of()  # the halves of one tensor, one after the other and row by row
        for layer, half in zip((model[0], model[2]), fused, strict=True):
            layer.weight.data = half.copy_(layer.weight.data)
        assert model[0].weight.is_contiguous() == (number == 0)
        with wrapped(model) as engine:
            step(engine)


def test_weights_that_share_memory_without_being_one_parameter_are_refused(wrapped):
    model = model_of()
    model[2].weight.data = model[0].weight.data
    with pytest.raises(hoist.UsageError, match=r"'0\.weight' and '2\.weight' share memory.*head.weight = embedding.weight"):
        wrapped(model)
    model[2].weight = model[0].weight
    with wrapped(model) as engine:
        step(engine)
        assert torch.equal(engine.read("2.weight"), engine.read("0.weight"))
    model, whole = model_of(), torch.randn(2, WIDTH, WIDTH)
    model[0].weight.data, model[2].weight.data = whole  # parts of one tensor
    with wrapped(model) as engine:
        assert torch.equal(engine.read("2.weight"), whole[1].cpu())


@pytest.mark.parametrize("message, change", [
    (r"'layers\.0\.weight' was 'layers\.2\.weight' when", lambda model: nn.Sequential(model[2], model[1], model[0])),
    (r"'layers\.2\.bias' was removed", lambda model: model[:2]),
])
def test_a_model_whose_layers_were_moved_is_not_saved(wrapped, tmp_path, message, change):
    model = nn.Sequential()
    model.layers = model_of()
    with wrapped(model) as engine:
        model.layers = change(layers := model.layers)
        for save in (engine.state_dict, model.state_dict, lambda: engine.export(tmp_path / "exported")):
            with pytest.raises(hoist.UsageError, match=message):
                save()
        model.layers = layers
        assert engine.state_dict().keys() == model.state_dict().keys()


def test_a_layer_that_another_module_contains_now_is_saved_and_loaded(wrapped):
    with wrapped() as engine:
        engine.module[0] = torch.compile(engine.module[0], backend="eager")
        step(engine)
        saved = engine.module.state_dict()
        assert torch.equal(saved["0._orig_mod.weight"], engine.read("0.weight"))
        engine.module.load_state_dict({name: torch.ones_like(values) for name, values in saved.items()})
        assert all((engine.read(name) == 1).all() for name in ("0.weight", "2.bias"))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, WIDTH), nn.Parameter(torch.ones(3, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, tokens):
        return self.head(self.tokens(tokens) + self.positions)

    def forward(self, tokens):
        return self.encode(tokens).mean()


@pytest.mark.parametrize("memory", ["1MiB", "12KiB"])
def test_methods_that_use_the_models_own_weights_are_called_inside_of_gathered(wrapped, memory):
    torch.manual_seed(0)
    model = Clip()
    tokens = on_device_of_tests(torch.ones(2, 3, dtype=torch.long))
    expected = copy.deepcopy(model).encode(tokens)
    with wrapped(model, hoist={"device_memory": memory, "pinned_memory": "32MiB"}) as engine:
        for _ in range(2):
            with torch.no_grad(), engine.gathered(["positions"]):
                assert torch.equal(engine.encode(tokens), expected)
                assert torch.equal(engine.encode(tokens), expected)
                assert engine.module.positions.mean() == 1
            engine.backward(engine(tokens))
            engine.zero_grad()
        with engine.gathered(["positions"]), pytest.raises(hoist.UsageError, match=r"inside of gathered\(\).*no_grad"):
            engine(tokens)
        engine.backward(engine(tokens))
        engine.step()


class Patched(nn.Linear):
    """Whose forward() is replaced."""


@pytest.mark.parametrize("whole", [False, True])
def test_a_forward_that_the_class_is_given_after_wrapping_counts_at_once_and_after_close(settings, monkeypatch, whole):
    """As mock.patch.object and libraries that replace a layer's kernels do it."""
    torch.manual_seed(0)
    model = Patched(WIDTH, WIDTH) if whole else nn.Sequential(nn.Tanh(), Patched(WIDTH, WIDTH))
    inputs = batch()[0]

    def doubled(self, x):
        return nn.Linear.forward(self, x) * 2

    with hoist.torch.wrap(model, settings()) as engine, torch.no_grad():
        for call in (engine, model):
            before = call(inputs)
            with monkeypatch.context() as patches:
                patches.setattr(Patched, "forward", doubled)
                if whole and call is model:
                    with pytest.raises(hoist.UsageError, match=r"forward\(\) of Patched was replaced.*repeat the call"):
                        call(inputs)
                assert torch.equal(call(inputs), 2 * before)
                assert torch.equal(engine.module(inputs), 2 * before)
            assert torch.equal(engine(inputs), before)
        monkeypatch.setattr(Patched, "forward", doubled)
        engine.save().wait()
    with hoist.torch.wrap(model, settings(), resume=True) as engine, torch.no_grad():
        assert torch.equal(engine(inputs), 2 * before)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.beta = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x):
        return self.layer(x).pow(2).mean() * self.beta


def test_attributes_of_the_model_are_set_in_the_model(wrapped):
    with wrapped(Weighted()) as engine:
        losses = []
        for _ in range(3):
            engine.beta += 0.5
            losses.append(engine(batch()[0]).item())
        assert engine.module.beta == engine.beta == 1.5
        assert losses == pytest.approx([losses[0], 2 * losses[0], 3 * losses[0]]) and losses[0] > 0
        engine.state = {"epoch": 1}  # the engine's own
        engine.remark = "new"
        assert not hasattr(engine.module, "state") and not hasattr(engine.module, "remark")
        engine.training = False
        assert not engine.module.training


def test_a_wrapped_model_stays_where_it_is(wrapped):
    with wrapped() as engine:
        assert all(engine.to(what) is engine for what in (engine.device, engine.device.type, torch.float32))
        with pytest.raises(hoist.UsageError, match="device=.*of wrap"):
            engine.to("meta")
        with pytest.raises(hoist.UsageError, match=r"bf16\.enabled"):
            engine.to(torch.bfloat16)
        step(engine)


def test_parameters_taken_on_the_meta_device_are_known_by_the_new_ones(wrapped):
    with torch.device("meta"):
        model = model_of()
    former = list(model.parameters())
    seen = []
    former[0].register_hook(lambda gradient: seen.append(gradient.shape))
    former[0]._no_weight_decay = True
    with wrapped(model) as engine:
        assert [getattr(p, "_no_weight_decay", False) for p in model.parameters()] == [True, False, False, False]
        in_groups = [p for group in engine.optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in in_groups] == [id(p) for p in engine.module.parameters()]
        for parameters in (former, in_groups):
            inputs, targets = batch()
            engine.backward(F.mse_loss(engine(inputs), targets))
            assert torch.nn.utils.clip_grad_norm_(parameters, 1e-4) > 1e-4
            assert engine.step().clip_factor < 1
        assert seen == [former[0].shape] * 2


def test_two_models_are_not_clipped_in_one_call(wrapped):
    with wrapped() as first, wrapped() as second:
        second.module(first.module(batch()[0])).sum().backward()
        with pytest.raises(hoist.UsageError, match="each by itself"):
            torch.nn.utils.clip_grad_norm_([*first.module.parameters(), *second.module.parameters()], 1)
        for engine in (first, second):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
            assert engine.step().clip_factor < 1


def test_rotary_frequencies_keep_their_type(wrapped):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, WIDTH, 2, device="cpu") / WIDTH), persistent=False)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return self.layer(x * self.scale) + torch.outer(torch.arange(4.0), self.inv_freq).repeat(1, 2).to(x.dtype)

    model = Rotary()
    before = model.inv_freq.clone()
    with wrapped(model, bf16={"enabled": True}) as engine:
        assert engine.module.inv_freq.dtype == torch.float32 and torch.equal(engine.module.inv_freq.cpu(), before.cpu())
        assert engine.module.scale.dtype == torch.bfloat16
        engine.backward(engine(batch()[0].bfloat16()).float().pow(2).mean())
        engine.step()
