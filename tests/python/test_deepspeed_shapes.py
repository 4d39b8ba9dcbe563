# SPDX-License-Identifier: Apache-2.0
"""Loops and configuration files written for DeepSpeed, and a Hugging Face model, unchanged."""

import argparse
import copy
import json

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import hoist
import hoist.optim
import hoist.torch
from hoist._hoist import read_tensor, tensors_in
from models import Gpt, batches, loss_of

# As in DeepSpeed's and Hugging Face's documentation for ZeRO-Infinity, down to the performance hints; nothing of hoist's
# own. The budgets are then the defaults, 1 GiB each.
DS_CONFIG = """{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "steps_per_print": 2000,
  "wall_clock_breakdown": false,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear"}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "%s", "pin_memory": true, "buffer_count": 4,
                          "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "%s", "pin_memory": true, "buffer_count": 5, "buffer_size": 1e8,
                      "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9
  },
  "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true}
}"""


@pytest.fixture
def ds_config(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(DS_CONFIG % (tmp_path / "nvme", tmp_path / "nvme"))
    return path


def tiny_llama(**changes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
                "tie_word_embeddings": True}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))


def test_a_hugging_face_model_in_a_trainers_loop(ds_config):
    model = tiny_llama()
    args = argparse.Namespace(deepspeed_config=str(ds_config), local_rank=-1)
    engine, optimizer, loader, scheduler = hoist.torch.initialize(
        args=args, model=model, model_parameters=model.parameters())
    assert loader is None and optimizer is engine.optimizer
    assert model.lm_head.weight.dtype == torch.bfloat16
    losses, rates = [], []
    engine.train()
    for index, (tokens, _) in enumerate(batches(48, seed=3)):
        output = engine(input_ids=tokens % 13, labels=tokens % 13, use_cache=False)
        engine.backward(output.loss)
        boundary = engine.is_gradient_accumulation_boundary()
        assert boundary == (index % 2 == 1)
        engine.step()
        losses.append(output.loss.item())
        assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()
        if boundary:
            rates.append(scheduler.get_last_lr()[0])
            assert engine.get_global_grad_norm() > 0
    assert engine.global_steps == 24
    assert losses[-1] < 0.8 * losses[0]
    assert rates[0] < rates[3] == pytest.approx(6e-4) and rates[-1] == 1e-3
    engine.eval()
    generated = engine.generate(tokens[:1, :4] % 13, max_new_tokens=6, do_sample=False)
    assert generated.shape == (1, 10)
    engine.train()
    saved = model.state_dict()
    assert all(torch.isfinite(v).all() for v in saved.values())
    engine.close()


def test_gradient_checkpointing_of_hugging_face(ds_config):
    losses = []
    for recompute in (False, True):
        model = tiny_llama()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        config = json.loads(ds_config.read_text())
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] += str(recompute)
        engine, *_ = hoist.torch.initialize(model=model, config=config)
        engine.train()
        for tokens, _ in batches(8, seed=3):
            output = engine(input_ids=tokens, labels=tokens, use_cache=False)
            engine.backward(output.loss)
            engine.step()
            losses.append(output.loss.item())
        engine.close()
    assert losses[:8] == losses[8:]


def test_an_optimizer_of_pytorchs_is_taken_over(settings):
    torch.manual_seed(0)
    model = Gpt()
    reference = copy.deepcopy(model)

    def make(m):
        return torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)

    client = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(client, step_size=3, gamma=0.5)
    engine, optimizer, _, returned = hoist.torch.initialize(
        model=model, optimizer=client, lr_scheduler=scheduler, config=settings())
    assert returned is scheduler
    theirs = make(reference)
    their_scheduler = torch.optim.lr_scheduler.StepLR(theirs, step_size=3, gamma=0.5)
    client.load_state_dict(client.state_dict())  # gives it other groups
    for inputs, targets in batches(12):
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        loss_of(reference(inputs), targets).backward()
        theirs.step()
        theirs.zero_grad()
        their_scheduler.step()
        assert optimizer.param_groups[0]["lr"] == their_scheduler.get_last_lr()[0]
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name].cpu(), rtol=1e-5, atol=1e-6)
    engine.close()


def test_settings_that_pytorchs_optimizer_lacks_are_not_the_configurations(settings):
    def weights(store, **params):
        model = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        config = settings(store=store, optimizer={"type": "AdamW", "params": {"lr": 1e-3} | params})
        client = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with hoist.torch.initialize(model=model, optimizer=client, config=config)[0] as engine:
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()
            return engine.state_dict()["weight"]

    assert torch.equal(weights("a", bias_correction=False), weights("b"))


def test_moments_of_an_optimizer_that_is_taken_over_are_not_lost_in_silence(settings, caplog):
    model = torch.nn.Linear(8, 8)
    client = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    client.step()
    engine, *_ = hoist.torch.initialize(model=model, optimizer=client, config=settings())
    assert "AdamW that was passed has moments, and they are not used" in caplog.text
    with engine:
        groups = client.param_groups
        with pytest.raises(hoist.UsageError, match="a state_dict that has moments: .*resume=True"):
            client.load_state_dict(client.state_dict())
        assert client.param_groups is groups
    client.load_state_dict(client.state_dict())


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD"])
def test_a_new_optimizer_has_no_moments(settings, caplog, kind):
    """PyTorch's Adagrad makes its state before the first step."""
    model = torch.nn.Linear(8, 8)
    client = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    with hoist.torch.initialize(model=model, optimizer=client, config=settings())[0]:
        assert "has moments" not in caplog.text


def test_an_optimizer_with_another_formula_is_refused(settings):
    """A class that is PyTorch's AdamW, Adam or SGD by its parent only."""
    class Other(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    class Another(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("it would never be called")

    class Further(Another):
        pass

    class Settings(torch.optim.AdamW):
        def __init__(self, parameters):
            super().__init__(parameters, lr=1e-2)

    for kind, formula in ((Other, "AdamW"), (Another, "SGD"), (Further, "SGD")):
        model = Gpt()
        with pytest.raises(hoist.UsageError, match=f"{kind.__name__} is a torch.optim.{formula} with a step.. of its own"):
            hoist.torch.initialize(model=model, optimizer=kind(model.parameters()), config=settings())
    model = Gpt()
    client = Settings(model.parameters())
    torch.optim.lr_scheduler.StepLR(client, 3)  # which puts a function of its own around step()
    engine, *_ = hoist.torch.initialize(model=model, optimizer=client, config=settings())
    assert engine.get_lr() == [1e-2]
    engine.close()


def test_parameters_that_are_not_the_models_are_refused(settings):
    """A temperature beside the model, for instance: the engine would not train it."""
    model, temperature = Gpt(), torch.nn.Parameter(torch.ones(1))
    for parameters in ([*model.parameters(), temperature], [{"params": [*model.parameters()]}, {"params": [temperature]}]):
        with pytest.raises(hoist.UsageError, match=r"shape \(1,\) that is not the model's: it would not be trained"):
            hoist.torch.initialize(model=model, model_parameters=parameters, config=settings())
    model.temperature = temperature
    engine, *_ = hoist.torch.initialize(model=model, model_parameters=[*model.parameters()], config=settings())
    engine.close()


def test_training_data_becomes_a_loader(settings):
    data = torch.utils.data.TensorDataset(torch.arange(40).view(10, 4), torch.arange(40).view(10, 4))
    engine, _, loader, _ = hoist.torch.initialize(model=Gpt(), training_data=data, config=settings())
    with torch.device("cpu"):  # PyTorch draws the order with the CPU's generator
        drawn = list(loader)
    for inputs, targets in drawn:
        assert inputs.shape[0] <= 4
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
    assert engine.global_steps == 3
    engine.close()


def test_names_of_deepspeeds_engine(settings, tmp_path):
    parser = hoist.torch.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "c.json"]).deepspeed_config == "c.json"
    engine, *_ = hoist.torch.initialize(model=Gpt(), config=settings(gradient_accumulation_steps=2))
    with engine:
        counted = []
        for inputs, targets in batches(3):
            with engine.no_sync():
                engine.backward(loss_of(engine(inputs), targets))
            counted.append(engine.micro_steps)
            engine.step()
        assert counted == [0, 1, 2] and engine.micro_steps == 3 and engine.global_samples == 8
        engine.drop_gradients()
        assert (engine.local_rank, engine.global_rank, engine.zero_optimization_stage()) == (0, 0, 3)
        assert engine.get_batch_info() == (8, 4, 2) and engine.gradient_clipping() == 0
        engine.set_lr(0.25)
        assert engine.get_lr() == [0.25]
        assert engine.save_16bit_model(tmp_path / "saved") and (tmp_path / "saved" / "model.safetensors").exists()
        assert engine.module_state_dict().keys() == engine.state_dict().keys()
        with pytest.raises(AttributeError, match=r"no offload_states: engine\.sleep\(\)"):
            engine.offload_states()
        for name in ("zero_offload_optimizer", "training_dataloader", "_zero3_consolidated_16bit_state_dict", "get_mom"):
            with pytest.raises(AttributeError, match=f"hoist's engine has no {name}: .*(engine|initialize)"):
                getattr(engine, name)
        for name in ("zero", "utils", "ops", "runtime", "get_accelerator", "PipelineModule", "checkpointing"):
            with pytest.raises(AttributeError, match=f"hoist.torch has no {name}: "):
                getattr(hoist.torch, name)
        assert not hasattr(engine, "deepspeed_io") and not hasattr(hoist.torch, "other")
        engine.destroy()


def test_a_loop_that_steps_the_optimizer_that_it_passed_is_told_what_to_call(settings):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    with hoist.torch.initialize(model=model, optimizer=optimizer, config=settings())[0] as engine:
        inputs, targets = next(batches(1))
        loss_of(engine(inputs), targets).backward()
        optimizer.step()
        with pytest.raises(hoist.UsageError, match=r"call engine\.step\(\)"):
            engine(inputs)


def test_an_engine_in_the_place_of_a_child_module(settings):
    """DeepSpeed's engine is a module, and programs set it where the model was. The error says how both are kept here."""
    class Actor(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Gpt()

        def forward(self, tokens):
            return self.model(tokens)

    actor = Actor()
    with hoist.torch.initialize(model=actor.model, config=settings())[0] as engine:
        with pytest.raises(TypeError, match=r"changed the model in place.*object\.__setattr__\(parent, 'model', engine\)"):
            actor.model = engine
        with pytest.raises(TypeError, match="changed the model in place"):
            torch.nn.ModuleDict({"actor": engine})
        object.__setattr__(actor, "model", engine)
        inputs, targets = next(batches(1))
        actor.train()
        actor.model.backward(loss_of(actor(inputs), targets))
        assert actor.model.step().applied
        assert not actor.eval().model.module.training
        assert actor.state_dict().keys() == {f"model.{name}" for name in engine.state_dict()}
        assert [p.shape for p in actor.parameters()] == [p.shape for p in engine.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_are_left_out_where_the_program_says_so(settings, tmp_path, dtype):
    model = Gpt().to(dtype)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if name.startswith("blocks.0.")}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    with hoist.torch.initialize(model=model, config=settings(bf16={"enabled": dtype == torch.bfloat16}))[0] as engine:
        every = engine.module_state_dict()
        trained = engine.module_state_dict(exclude_frozen_parameters=True)
        assert frozen and trained.keys() == every.keys() - frozen
        assert engine.save_16bit_model(tmp_path / "saved", exclude_frozen_parameters=True)
        assert all(torch.equal(values, every[name]) for name, values in trained.items())
    saved = str(tmp_path / "saved")
    assert {name: shape for name, (_, shape) in tensors_in(saved).items()} == {
        name: list(values.shape) for name, values in trained.items() if name != "head.weight"}  # tied
    for name in tensors_in(saved):
        assert read_tensor(saved, name) == trained[name].view(torch.uint8).numpy().tobytes()


def test_a_last_step_of_fewer_micro_batches(settings):
    """As DeepSpeed does: the boundary is where the program says, and the loss is divided by the configured number."""
    torch.manual_seed(0)
    model = Gpt()
    reference = copy.deepcopy(model)
    with hoist.torch.wrap(model, settings(gradient_accumulation_steps=4)) as engine:
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        data = list(batches(2))
        for index, (inputs, targets) in enumerate(data):
            engine.set_gradient_accumulation_boundary(index == 1)
            engine.backward(loss_of(engine(inputs), targets))
            report = engine.step()
            (loss_of(reference(inputs), targets) / 4).backward()
            assert engine.micro_steps == index + 1
        assert report is not None and report.step == 1
        optimizer.step()
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name].cpu(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("enabled, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_float64_parameters_become_the_configuration_s_type(settings, enabled, dtype):
    """As other floating types do: trained ones, frozen ones, and those that a module on the meta device makes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 2), torch.nn.Linear(
        2, 2, device="meta", dtype=torch.float64))
    model[0].bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    with hoist.torch.wrap(model, settings(**{enabled: {"enabled": True}})) as engine:
        for name, values in before.items():
            expected = values.float().to(dtype).float() if name == "0.bias" else values.float()
            torch.testing.assert_close(engine.read(name), expected.cpu(), rtol=0, atol=0)
        assert all(values.dtype == dtype for values in engine.state_dict().values())
        engine.backward(engine(torch.ones(1, 4, dtype=dtype)).float().pow(2).sum())
        assert engine.step() is not None


def test_float64_without_another_type_is_refused(settings):
    with pytest.raises(hoist.UsageError, match="parameter 'weight' is torch.float64; hoist trains only float32"):
        hoist.torch.wrap(torch.nn.Linear(4, 4).double(), settings())


def test_a_parameter_of_several_tensors_is_refused(settings):
    """As torchao's quantized weights are."""
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), requires_grad=False)
    with pytest.raises(hoist.UsageError, match="parameter 'weight' is a TwoTensor, which consists of several tensors"):
        hoist.torch.wrap(model, settings())


def test_a_model_of_inference_mode_is_refused(settings, tmp_path):
    with torch.inference_mode():
        model = torch.nn.Linear(4, 4)
    with pytest.raises(hoist.UsageError, match=r"parameter 'weight' was made under torch.inference_mode\(\)"):
        hoist.torch.wrap(model, settings())
    assert not list(tmp_path.iterdir())


def test_what_has_another_meaning_is_refused(settings):
    with pytest.raises(hoist.UsageError, match="model"):
        hoist.torch.initialize(config=settings())
    with pytest.raises(hoist.UsageError, match="config"):
        hoist.torch.initialize(model=Gpt())
    model = Gpt()
    for optimizer, name in ((torch.optim.RMSprop, "torch.optim.rmsprop.RMSprop: pass torch.optim's"), (
            hoist.optim.Lion, "hoist.optim.Lion, since .* loops without an engine: pass torch.optim's")):
        with pytest.raises(hoist.UsageError, match=name):
            hoist.torch.initialize(model=model, optimizer=optimizer(model.parameters()), config=settings())
    with pytest.raises(hoist.UsageError, match="mpu"):
        hoist.torch.initialize(model=Gpt(), config=settings(), mpu=object())
    with pytest.raises(hoist.UsageError, match="compiled before it was wrapped"):
        hoist.torch.wrap(torch.compile(Gpt()), settings())
    in_place = Gpt()
    in_place.compile()
    with pytest.raises(hoist.UsageError, match="compiled before it was wrapped"):
        hoist.torch.wrap(in_place, settings())
