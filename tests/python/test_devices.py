# SPDX-License-Identifier: Apache-2.0
"""Which GPU is taken, and whose random numbers: asked of PyTorch's functions, without a GPU."""

import pytest
import torch
from torch import nn

import hoist
import hoist.torch
from hoist.torch.devices import device_of


@pytest.fixture
def two_gpus(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(current))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(torch.device(device).index))
    return current


class OnGpu:
    """As much of a parameter as is asked for."""

    def __init__(self, index):
        self.device = torch.device("cuda", index)


@pytest.mark.parametrize("wanted, parameters, current, ordinal", [
    (None, [], None, -1),  # the launcher's local rank
    (None, [], 0, -1),
    (None, [], 1, 1),
    ("cuda", [], 1, 1),
    ("cuda:0", [OnGpu(1)], 1, 0),
    ("cuda:1", [], None, 1),
    (None, [torch.empty(1, device="cpu"), OnGpu(1)], 0, 1),
    (None, [OnGpu(0)], 1, 0),
])
def test_which_gpu(settings, two_gpus, wanted, parameters, current, ordinal):
    config = hoist.torch.load_config(settings(hoist={"device": "cuda"}))
    if current is not None:
        torch.cuda.set_device(torch.device("cuda", current))
    assert device_of(config, wanted, parameters).type == "cuda"
    assert config.device_ordinal == ordinal


def test_the_configuration_names_a_gpu(settings, two_gpus):
    config = hoist.torch.load_config(settings(hoist={"device": "cuda", "device_ordinal": 1}))
    assert device_of(config, "cuda", [OnGpu(0)]).type == "cuda" and config.device_ordinal == 1
    assert device_of(config, "cuda:1").type == "cuda"
    with pytest.raises(hoist.UsageError, match=r"wrap\(device='cuda:0'\), and hoist.device_ordinal .* is 1"):
        device_of(config, "cuda:0")


def test_a_configuration_refuses_other_words_for_the_device(settings):
    config = hoist.torch.load_config(settings())
    config.device = "cuda"
    with pytest.raises(hoist.UsageError, match="takes \"cuda\" or \"host\", not \"CUDA\""):
        config.device = "CUDA"
    assert config.device == "cuda"


def test_initialize_makes_its_gpu_the_current_one(settings, two_gpus, monkeypatch):
    """DeepSpeed does, so that its loops write `batch.cuda()` on every rank."""
    class Engine:
        device, optimizer, lr_scheduler = torch.device("cuda", 1), None, None

        def __init__(self, *_, **__):
            pass

    monkeypatch.setattr(hoist.torch, "Engine", Engine)
    hoist.torch.initialize(model=nn.Linear(3, 3), config=settings())
    assert two_gpus == [1]


@pytest.mark.parametrize("weights", ["reset_parameters", "a function"])
def test_initialization_leaves_the_programs_random_numbers_alone(settings, monkeypatch, weights):
    """Ranks that have seeded their GPUs differently, for dropout, must not draw the same numbers from then on."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)

    def normal(module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    def states():
        device = torch.get_default_device()
        on_device = [] if device.type == "cpu" else torch.get_device_module(device).get_rng_state().tolist()
        return torch.get_rng_state().tolist(), on_device

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.manual_seed(3)
    assert seeded.pop() == 3  # so it is seen
    before = states()
    with hoist.torch.wrap(model, settings(), initialize=normal if weights == "a function" else None, seed=7) as engine:
        assert seeded == [] and states() == before
        first = engine.read("0.weight")
    assert first.std() > 0.01
