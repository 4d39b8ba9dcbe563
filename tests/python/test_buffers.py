# SPDX-License-Identifier: Apache-2.0
"""Buffers: saved, resumed, exported and read in, in unusual forms, and made while the program runs."""

import copy

import pytest
import torch
from small_models import RATE, WIDTH, batch, close_to, losses_in_memory, seeded, step_of
from test_state import assert_same
from torch import nn

import hoist
import hoist.torch
from hoist.torch.model.weight_files import FLOAT8
from models import on_device_of_tests
from training import make, train


class WithBuffers(nn.Module):
    """Running means, a count of another type, and a buffer that is computed and not saved."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.layers(x) * self.mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_go_through_files_of_weights(settings, tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.torch")

    def wrapped(store, **arguments):
        return hoist.torch.wrap(WithBuffers(), settings(store), **arguments)

    def refused(tensors, error, match):
        safetensors.save_file({**plain, **tensors}, tmp_path / "wrong.safetensors")
        with pytest.raises(error, match=match):
            wrapped("wrong", weights=tmp_path / "wrong.safetensors")

    with wrapped("first") as engine:
        engine.backward(engine(on_device_of_tests(torch.randn(4, 8) * 3 + 5)).sum())
        engine.step()
        engine.module.mask[1] = True
        engine.export(tmp_path / "exported", dtype)
        expected = engine.state_dict()
    assert safetensors.load_file(tmp_path / "exported" / "model.safetensors").keys() == expected.keys()
    plain = {name: value.cpu().contiguous() for name, value in expected.items()}
    # As old models of Llama have them in each layer.
    safetensors.save_file({**plain, "layers.0.rotary.inv_freq": torch.ones(3), "rotary.inv_freq": torch.ones(3)},
                          tmp_path / "plain.safetensors")
    for number, weights in enumerate((tmp_path / "exported", tmp_path / "plain.safetensors")):
        with wrapped(f"again-{number}", weights=weights) as engine:
            for name, value in engine.state_dict().items():
                rounds = number == 0 and name in dict(engine.module.named_parameters())
                saved = expected[name].to(dtype).to(value.dtype) if rounds else expected[name]
                assert value.dtype == saved.dtype and torch.equal(value.cpu(), saved.cpu()), name
            assert engine.module.mask.all() and engine.module.layers[1].num_batches_tracked == 1
    refused({"layers.1.running_mean": torch.zeros(7)}, hoist.UsageError, r"'layers.1.running_mean' is F32 \[7\], and the model's")
    refused({"mask": torch.zeros(2)}, hoist.UsageError, r"'mask' is F32 \[2\], and the model's buffer is torch.bool")
    refused({"layers.9.running_mean": torch.zeros(7)}, hoist.SafetensorsError, "'layers.9.running_mean' is not a parameter")


def test_parameters_without_elements_go_through_files_of_weights(settings, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def model_of(rows=4):
        model = nn.Sequential(nn.Linear(WIDTH, 2))
        model.register_parameter("none", nn.Parameter(torch.empty(0, rows)))
        return model

    with hoist.torch.wrap(model_of(), settings("first")) as engine:
        engine.export(tmp_path / "exported")
        expected = engine.state_dict()
    found = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    assert found["none"].shape == (0, 4)
    model_of().load_state_dict(found)
    with hoist.torch.wrap(model_of(), settings("second"), weights=tmp_path / "exported") as engine:
        assert_same(engine.state_dict(), expected)
    with pytest.raises(hoist.UsageError, match=r"'none' is \[0, 4\], and the model's parameter \[0, 5\]"):
        hoist.torch.wrap(model_of(5), settings("third"), weights=tmp_path / "exported")


@pytest.mark.cpu_tensors("it has no numbers of 8 bits")
def test_buffers_of_float8_go_through_files_of_weights(settings, tmp_path):
    def model_of(fill):
        model = make()
        for name, dtype in FLOAT8.items():
            model.register_buffer(name, torch.full((3, 2), fill).to(dtype))
        return model

    with hoist.torch.wrap(model_of(4.0), settings("first")) as engine:
        engine.export(tmp_path / "exported")
    with hoist.torch.wrap(model_of(2.0), settings("second"), weights=tmp_path / "exported") as engine:
        for name, dtype in FLOAT8.items():
            assert getattr(engine.module, name).dtype == dtype and (getattr(engine.module, name).float() == 4).all(), name


@pytest.mark.cpu_tensors("it has no complex numbers and no sparse tensors")
def test_buffers_in_unusual_forms_come_back_or_are_refused_by_name(settings):
    views = {"conjugate": torch.polar(torch.ones(3), torch.arange(3.0)).conj(), "negative": torch._neg_view(torch.arange(3.0))}
    for resume in (False, True):
        model = make()
        for name, view in views.items():
            model.register_buffer(name, torch.zeros_like(view) if resume else view)
        with hoist.torch.wrap(model, settings(), resume=resume) as engine:
            train(engine, 1)
            assert all(torch.equal(getattr(model, name), view) for name, view in views.items())
            assert torch.equal(engine.state_dict()["negative"], views["negative"])
    for sparse in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()):
        model = make()
        model.blocks[0].register_buffer("mask", sparse)
        with pytest.raises(hoist.UsageError, match=r"'blocks\.0\.mask' is torch\.sparse.*persistent=False"):
            hoist.torch.wrap(model, settings())
        model.blocks[0].register_buffer("mask", sparse, persistent=False)
        with hoist.torch.wrap(model, settings(), resume=True) as engine:
            train(engine, 1)


def test_small_buffers_come_back(settings):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(self.linear(x))

    torch.manual_seed(0)
    with hoist.torch.wrap(Normed(), settings()) as engine:
        engine.backward(engine(torch.randn(16, 8)).square().sum())
        engine.step()
        expected = engine.state_dict()
    with hoist.torch.wrap(Normed(), settings(), resume=True) as engine:
        assert_same(engine.state_dict(), expected)
        assert expected["norm.num_batches_tracked"] == 1


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("least", torch.tensor([]))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(WIDTH, device=x.device))
        if self.least.numel() == 0:
            self.least = x.min(0).values.detach().clone()
        self.mean += x.mean(0).detach()
        return self.linear(x)


def test_buffers_that_come_when_the_program_runs_are_resumed(settings):
    model = seeded(Lazy)
    expected = losses_in_memory(model, [batch(i) for i in range(4)])
    config = settings(optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}})
    with hoist.torch.wrap(seeded(Lazy), config) as engine:
        losses = [step_of(engine, batch(i)) for i in range(2)]
    resumed = seeded(Lazy)
    with hoist.torch.wrap(resumed, config, resume=True) as engine:
        losses += [step_of(engine, batch(i)) for i in range(2, 4)]
        close_to(losses, expected)
        assert torch.equal(resumed.mean, model.mean) and torch.equal(resumed.least, model.least)


def test_buffers_of_another_size_are_refused_before_anything_is_loaded(settings):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with hoist.torch.wrap(model, settings()) as engine:
        before = engine.state_dict()
        wrong = copy.deepcopy(before)
        wrong["0.weight"].fill_(7.0)
        wrong["1.running_mean"] = torch.zeros(3)
        with pytest.raises(hoist.UsageError, match="buffer '1.running_mean'"):
            engine.load_state_dict(wrong)
        assert torch.equal(engine.state_dict()["0.weight"], before["0.weight"])


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 3.0))


def test_files_fill_a_buffer_of_the_meta_device_that_its_module_does_not_reset(settings, tmp_path):
    with hoist.torch.wrap(Scaled(), settings("first")) as engine:
        engine.export(tmp_path / "exported")
    with torch.device("meta"):
        model, other = Scaled(), Scaled()
    with pytest.raises(hoist.UsageError, match="buffer 'scale' is on the meta device and nothing says what it holds"):
        hoist.torch.wrap(other, settings("second"))
    with hoist.torch.wrap(model, settings("second"), weights=tmp_path / "exported"):
        assert (model.scale == 3).all()
