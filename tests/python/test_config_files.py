# SPDX-License-Identifier: Apache-2.0
"""Configurations as Python programs have them: DeepSpeed's JSON, and the YAML that `accelerate config` writes."""

import base64
import json
import re
from pathlib import Path

import numpy
import pytest
import torch

import hoist
import hoist.torch
from hoist.torch.config_files import read_config
from test_distributed import at
from training import digests, make, train

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")

# As `accelerate config` writes it for ZeRO-3.
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False,
    "deepspeed_config": {"deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 4,
                         "gradient_clipping": 0.5, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nvme",
                         "offload_param_device": "cpu", "offload_param_nvme_path": None, "zero3_init_flag": True,
                         "zero3_save_16bit_model": True, "zero_stage": 3},
    "distributed_type": "DEEPSPEED", "downcast_bf16": "no", "machine_rank": 0, "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "use_cpu": False}


def written(folder, content, name="accelerate.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_accelerates_section_becomes_deepspeeds(tmp_path):
    expected = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                              "offload_param": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
        "bf16": {"enabled": True}}
    assert read_config(written(tmp_path, ACCELERATE)) == expected
    config = hoist.torch.load_config(str(written(tmp_path, ACCELERATE)))
    assert (config.setting("zero_optimization.offload_param.device"), config.gradient_clipping) == ("cpu", 0.5)
    assert config.training.gradient_accumulation_steps == 4
    # Without keys, the defaults are Accelerate's.
    few = ACCELERATE | {"deepspeed_config": {"zero3_init_flag": False}, "mixed_precision": "no"}
    assert read_config(few) == {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto",
                                "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}


def test_accelerates_file_may_name_deepspeeds(tmp_path):
    deepspeed = {"zero_optimization": {"stage": 1}, "train_batch_size": 8}
    named = written(tmp_path, json.dumps(deepspeed), "ds.json")
    assert read_config(written(tmp_path, ACCELERATE | {"deepspeed_config": {"deepspeed_config_file": str(named)}})) == deepspeed


def test_files_are_read_as_the_command_line_reads_them(tmp_path):
    content = '{"train_batch_size": 8}'
    assert read_config(written(tmp_path, "\ufeff" + content, "bom.json")) == json.loads(content)
    with pytest.raises(hoist.ConfigError, match="train_batch_size"):
        read_config(written(tmp_path, '{"train_batch_size": 8, "train_batch_size": 16}', "twice.json"))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(hoist.UsageError, match="UTF-8"):
        read_config(tmp_path / "latin.json")


def test_base64_text_is_a_configuration_as_for_deepspeed(tmp_path, monkeypatch):
    def encoded(text):
        return base64.urlsafe_b64encode(text.encode()).decode()

    content = {"train_batch_size": 8, "hoist": {"metrics": "é" * 200}}
    assert read_config(encoded(json.dumps(content))) == content
    assert hoist.torch.load_config(encoded(json.dumps(content))).training.train_batch_size == 8
    for read in (read_config, hoist.torch.load_config):
        with pytest.raises(hoist.ConfigError, match="train_batch_size"):
            read(encoded('{"train_batch_size": 8, "train_batch_size": 16}'))
    monkeypatch.chdir(tmp_path)
    name = encoded('{"a":1}')
    written(tmp_path, '{"train_batch_size": 4}', name)  # a file of that name is the file
    assert hoist.torch.load_config(name).training.train_batch_size == 4
    with pytest.raises(hoist.IoError, match="other.json"):
        hoist.torch.load_config("other.json")


def test_a_model_is_wrapped_by_accelerates_file(tmp_path, settings):
    config = settings()
    nvme = config["zero_optimization"]["offload_param"]["nvme_path"]
    section = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": nvme,
               "offload_param_device": "nvme", "offload_param_nvme_path": nvme}
    file = written(tmp_path, ACCELERATE | {"deepspeed_config": section, "mixed_precision": "no"})
    with hoist.torch.wrap(make(), file) as engine:
        assert engine.config.store_directory.startswith(nvme)


@pytest.mark.parametrize("content, message", [
    (ACCELERATE | {"distributed_type": "FSDP"}, "distributed_type FSDP"),
    (ACCELERATE | {"mixed_precision": "fp8"}, "mixed_precision: fp8"),
    (ACCELERATE | {"deepspeed_config": {"zero_stages": 3}}, "zero_stages"),
    ({"base_model": "llama"}, "not a file of `accelerate config`"),
    ("- a list", "has no keys"),
    ("a: [", "is not YAML"),
])
def test_what_is_no_such_file_is_said(tmp_path, content, message):
    with pytest.raises(hoist.UsageError, match=message):
        hoist.torch.load_config(written(tmp_path, content))


def test_no_configuration_is_said(tmp_path):
    for nothing in (None, 3, ["ds.json"]):
        with pytest.raises(hoist.UsageError, match="DeepSpeed JSON file"):
            hoist.torch.load_config(nothing)
    with pytest.raises(hoist.UsageError, match="has no keys"):
        read_config(written(tmp_path, "[1]", "list.json"))
    # YAML under a name of JSON: the error says what it is.
    with pytest.raises(hoist.ConfigError, match="this is YAML"):
        read_config(written(tmp_path, ACCELERATE, "accelerate.json"))


def test_python_writes_infinity(tmp_path):
    config = hoist.torch.load_config({"steps_per_print": float("inf"), "train_batch_size": 2})
    assert config.training.train_batch_size == 2
    with pytest.raises(hoist.ConfigError, match="gradient_clipping: Infinity is not a number"):
        hoist.torch.load_config({"gradient_clipping": float("inf")})


def test_offloaded_weights_alone_train_with_the_same_bits(settings, caplog):
    """A GPU could not update the states where DeepSpeed leaves them, so they are offloaded, too."""
    cpu, results = {"device": "cpu"}, []
    for zero in ({"offload_param": cpu}, {"offload_param": cpu, "offload_optimizer": cpu}, {"stage": 2, "offload_param": cpu}):
        config = settings(zero_optimization={"stage": 3} | zero, hoist={"device_memory": "8MiB", "pinned_memory": "32MiB"})
        with hoist.torch.wrap(make(), config) as engine:
            results.append((train(engine, 3), digests(engine)))
    assert results[0] == results[1] == results[2]
    assert 'optimizer states are offloaded to "cpu"' in caplog.text and "offload_param is not used: stage 2" in caplog.text


def test_the_loader_drops_a_short_batch_where_the_file_says_so(settings):
    for drop, batches in ((True, 2), (False, 3)):
        config = settings(train_micro_batch_size_per_gpu=4, dataloader_drop_last=drop)
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "cpu"}
        engine, _, loader, _ = hoist.torch.initialize(model=make(), training_data=list(range(10)), config=config)
        with engine:
            with torch.device("cpu"):  # PyTorch draws the order with the CPU's generator
                assert len(list(loader)) == batches


def test_paths_and_numbers_of_other_libraries_are_taken_in_a_dictionary(settings, tmp_path):
    config = settings(train_micro_batch_size_per_gpu=numpy.int64(4), gradient_clipping=torch.tensor(0.5))
    config["zero_optimization"]["offload_param"]["nvme_path"] = tmp_path
    config["optimizer"]["params"].update(lr=numpy.float32(0.5), betas=(numpy.float64(0.5), 0.75))
    loaded = hoist.torch.load_config(config)
    assert loaded.setting("zero_optimization.offload_param.nvme_path") == [str(tmp_path)]
    assert loaded.optimizer.learning_rate == loaded.optimizer.beta1 == loaded.setting("gradient_clipping") == 0.5
    config["optimizer"]["params"]["lr"] = torch.ones(2)
    with pytest.raises(hoist.UsageError, match=r"config: optimizer\.params\.lr is of type torch\.Tensor"):
        hoist.torch.load_config(config)


AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": "auto", "loss_scale": "auto"}}


def initialized(model, config):
    return hoist.torch.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("make_engine", [hoist.torch.wrap, initialized])
def test_auto_is_what_a_key_left_out_is(settings, make_engine, tmp_path):
    """Weights keep their types, and steps are kept for save_checkpoint() of initialize()."""
    ends = []
    for changes in ({}, AUTO):
        config = at(tmp_path / f"store{len(ends)}", settings(**changes))
        if changes:
            config["zero_optimization"]["stage"] = config["dataloader_drop_last"] = config["hoist"]["keep_steps"] = "auto"
        with make_engine(make(), config) as engine:
            assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}
            assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.zero_optimization_stage()) == (False, False, 3)
            ends.append((train(engine, 3), digests(engine), engine.config.keep_steps))
    assert ends[0] == ends[1]


def test_auto_is_no_value_of_any_key_that_python_reads():
    """Except of a key that has a choice of this name."""
    package = Path(hoist.torch.__file__).parent
    keys = {key for file in package.rglob("*.py") for key in re.findall(r'\bsetting\(\s*"([\w.]+)"\)', file.read_text())}
    keys |= {f"fp16.{key}" for key in ("loss_scale_window", "min_loss_scale", "hysteresis", "consecutive_hysteresis")}
    assert {"bf16.enabled", "hoist.keep_steps", "zero_optimization.stage", "scheduler.type"} <= keys
    for key in keys - {"scheduler.type", "optimizer.type", "hoist.update_mode", "optimizer.params.torch_adam"}:
        config = "auto"
        for part in reversed(key.split(".")):
            config = {part: config}
        assert hoist.torch.load_config(config).setting(key) is None, key
