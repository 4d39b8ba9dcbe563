# SPDX-License-Identifier: Apache-2.0
"""hoist.torch.estimate(): what an engine would take, without one."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

import hoist
import hoist.torch
from models import Gpt


def plain(**zero):
    return {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 3, **zero}}


def test_is_what_the_engine_then_takes(settings):
    model, config = Gpt(), settings()
    estimate = hoist.torch.estimate(model, config)
    assert estimate.fits and not estimate.problems
    assert estimate.parameters == sum(p.numel() for p in model.parameters())
    with hoist.torch.wrap(model, config) as engine:
        tiers = engine.statistics()["tiers"]
        assert tiers["pinned"]["peak_bytes"] == estimate.pinned_bytes
        assert tiers["device"]["peak_bytes"] == estimate.device_bytes


@pytest.mark.host_device("the memory of the GPU is what lacks first")
def test_of_a_model_on_the_meta_device_that_no_machine_has_room_for():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(100_000, 100_000) for _ in range(100)))
    estimate = hoist.torch.estimate(model, plain(offload_optimizer={"device": "cpu"}), world_size=4)
    assert not estimate.fits
    assert "host memory" in estimate.problems[0] and '"nvme" needs less' in estimate.problems[0]
    assert [m.name for m in estimate.memories] == ["host memory"]
    assert estimate.memories[0].least > 12 * estimate.parameters
    text = str(estimate)
    assert "on 4 ranks" in text and text.endswith("does not fit this machine")
    assert all(p.is_meta for p in model.parameters()), "the model was changed"


def test_fewer_ranks_on_this_machine_need_less_of_it():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(8)))
    config = plain(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    all_here = hoist.torch.estimate(model, config, world_size=4)
    one_here = hoist.torch.estimate(model, config, world_size=4, local_ranks=1)
    assert all_here.memories[0].held == 4 * one_here.memories[0].held


def test_of_a_configuration_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                                     num_attention_heads=4, num_key_value_heads=2)
    expected = sum(p.numel() for p in transformers.LlamaForCausalLM(shape).parameters())
    assert hoist.torch.estimate(shape, plain()).parameters == expected
    shape.architectures = ["LlamaForCausalLM"]
    shape.save_pretrained(tmp_path)
    assert hoist.torch.estimate(tmp_path, plain()).parameters == expected


def test_leaves_the_length_of_the_run_to_the_trainer():
    schedule = {"scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": "auto", "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2}}}
    assert hoist.torch.estimate(Gpt(), {**plain(), **schedule}).parameters > 0
    with pytest.raises(hoist.ConfigError, match="total_num_steps"):
        hoist.torch.wrap(Gpt(), {**plain(), **schedule})


def test_says_what_it_cannot_do():
    with pytest.raises(hoist.UsageError, match="no parameters"):
        hoist.torch.estimate(torch.nn.ReLU(), plain())


def test_a_units_file_tells_the_command_the_same(settings, tmp_path):
    command = pathlib.Path(sys.modules["hoist"].__file__).parents[2] / "bin" / "hoist"
    if not command.exists():
        pytest.skip("the command was not built")
    model = Gpt()
    model.blocks[0].requires_grad_(False)
    (tmp_path / "config.json").write_text(json.dumps(settings()))
    hoist.torch.write_units(model, tmp_path / "units.json", settings())
    subprocess.run([command, "check", tmp_path / "config.json", "--units", tmp_path / "units.json", "--json",
                    tmp_path / "found.json"], check=True)
    found = json.loads((tmp_path / "found.json").read_text())["prediction"]
    estimate = hoist.torch.estimate(model, settings())
    assert found["parameters"] == estimate.parameters
    assert (found["device"]["bytes"], found["pinned"]["bytes"]) == (estimate.device_bytes, estimate.pinned_bytes)


def test_a_units_file_of_what_cannot_be_trained(tmp_path):
    with pytest.raises(hoist.UsageError, match="'weight' is torch.float64"):
        hoist.torch.write_units(torch.nn.Linear(4, 4, dtype=torch.float64), tmp_path / "units.json")
