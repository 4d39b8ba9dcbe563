# SPDX-License-Identifier: Apache-2.0
"""A program may set PyTorch's default dtype, as loops of bf16 models do: masters and moments stay fp32. Nor does its default
device decide where hoist's tensors are."""

import pytest
import torch
from torch import nn

import hoist.optim
import hoist.store
import hoist.torch

WIDTH = 24


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request):
    """Called when the model and its batches are there."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def model_and_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).bfloat16()
    return model, [torch.randn(4, WIDTH).bfloat16() for _ in range(4)]


@pytest.mark.parametrize("offload", [None, "cpu"] if torch.get_default_device().type == "cpu" else ["cpu"])
def test_states_of_the_optimizer_are_fp32(default_dtype, offload):
    def train(model, data):
        optimizer = hoist.optim.AdamW(model.parameters(), lr=1e-2, offload=offload)
        for x in data:
            model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = [optimizer.master(p) for p in model.parameters()]
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return masters, [s["exp_avg"] for s in state["state"].values()]

    expected = train(*model_and_batches())
    model, data = model_and_batches()
    default_dtype()
    result = train(model, data)
    for of_all, expected_of_all in zip(result, expected, strict=True):
        assert all(value.dtype == torch.float32 for value in of_all)
        assert all(torch.equal(*pair) for pair in zip(of_all, expected_of_all, strict=True))


def test_states_of_the_engine_are_fp32(default_dtype, settings):
    def train(model, data, place):
        config = settings(place, hoist={"device_memory": "1MiB", "pinned_memory": "64MiB"})
        with hoist.torch.wrap(model, config) as engine:
            for x in data:
                engine.backward(engine(x).float().pow(2).mean())
                engine.step()
            weights = engine.state_dict()
            masters = engine.state_dict(torch.float32)
            engine.write("0.bias", engine.read("0.bias"))
        with hoist.store.open(config["zero_optimization"]["offload_param"]["nvme_path"]) as stored:
            assert torch.equal(stored.read("0.weight"), masters["0.weight"])
        return [*weights.values(), *masters.values()]

    expected = train(*model_and_batches(), "1")
    model, data = model_and_batches()
    default_dtype()
    result = train(model, data, "2")
    assert [t.dtype for t in result] == [t.dtype for t in expected]
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_the_default_device_is_for_the_programs_tensors(settings, order):
    def train(place):
        config = settings(place, gradient_accumulation_steps=2, hoist={
            "device_memory": "1MiB", "pinned_memory": "64MiB", "micro_batch_order": order})
        (model, data), default = model_and_batches(), torch.get_default_device()
        with torch.device(default if place == "1" else "meta"), hoist.torch.wrap(model, config) as engine:
            batches = iter(data)
            for _ in range(2):
                engine.train_batch(batches, lambda x: engine(x).float().pow(2).mean())
            return engine.digest()

    assert train("2") == train("1")
