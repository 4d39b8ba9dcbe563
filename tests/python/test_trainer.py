# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer with an unchanged DeepSpeed JSON, against the plain loop, resumed, and within its budgets."""

import json
import math
import os
import subprocess
import sys
import textwrap

import accelerator
import pytest
import torch

import hoist

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
import hoist.torch.transformers as hoist_transformers  # noqa: E402
from hoist.torch.model.unit_tensors import CAN_REFUSE  # noqa: E402
from training import digests  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_by_default")
ON_CPU = not os.environ.get("HOIST_TEST_ACCELERATOR")
IS_4 = transformers.__version__.startswith("4.")  # whose mean counts each sequence's first token, too

# As people have it for Hugging Face's DeepSpeed integration, ZeRO-3 with NVMe; nothing of hoist's own.
DS_CONFIG = """{
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "%s", "pin_memory": true, "buffer_count": 4, "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "%s", "pin_memory": true, "buffer_count": 5, "buffer_size": 1e8,
                      "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": true
  },
  "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""


def ds_config(path, without=()):
    config = json.loads(DS_CONFIG % (path, path))
    return {key: value for key, value in config.items() if key not in without}


def tiny_llama(seed=0, **changes):
    settings = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
                "tie_word_embeddings": True}
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count=96):
        self.rows = torch.randint(0, 97, (count, 16), generator=torch.Generator().manual_seed(3), device="cpu") % 13

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(path, **changes):
    settings = {"output_dir": str(path), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
                "learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": 16, "logging_steps": 1, "save_strategy": "no",
                "report_to": [], "use_cpu": ON_CPU, "dataloader_pin_memory": ON_CPU, "disable_tqdm": True, "warmup_steps": 4,
                "seed": 7, "bf16": True}
    return transformers.TrainingArguments(**(settings | changes))


def trainer_of(args, config, model=None, rows=96, **more):
    return hoist_transformers.Trainer(model=model or tiny_llama(), args=args, train_dataset=Tokens(rows), hoist_config=config,
                                      **more)


def losses_of(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


class Recorded:
    """A collator that remembers the batches it made, in their order."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        self.batches.append(transformers.default_data_collator(rows))
        return self.batches[-1]


def the_plain_loop(args, config, steps, batches_per_epoch, batches, optimizer_of=None, schedule_of=None):
    """The same batches, and the loss that Trainer makes of them: the mean over a step's tokens."""
    model = tiny_llama()
    client = optimizer_of(model) if optimizer_of else None
    engine, optimizer, _, _ = hoist.torch.initialize(
        model=model, optimizer=client, config=hoist_transformers.fill_in(config, args, steps))
    if schedule_of:
        engine.lr_scheduler = schedule_of(optimizer)
    engine.train()
    losses, norms = [], []
    data = iter(batches)
    left = batches_per_epoch
    while len(losses) < steps:
        step = [next(data) for _ in range(min(args.gradient_accumulation_steps, left))]
        left = left - len(step) or batches_per_epoch
        items = sum(batch["labels"][:, 0 if IS_4 else 1:].ne(-100).sum() for batch in step)
        total = 0.0
        for index, batch in enumerate(step):
            inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            loss = engine(**inputs, num_items_in_batch=items.to(engine.device)).loss
            engine.set_gradient_accumulation_boundary(index == len(step) - 1)
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            total += loss.item()
        losses.append(total)
        norms.append(engine.get_global_grad_norm())
    ends = digests(engine)
    engine.close()
    return losses, norms, ends


@pytest.mark.cpu_tensors("the backward pass of a BatchNorm in bf16 takes means of another type there, also without hoist")
def test_images_have_the_weights_type(tmp_path):
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3))
    rows = [{"pixel_values": torch.randn(3, 16, 16, device="cpu"), "labels": index % 3} for index in range(16)]
    trainer = hoist_transformers.Trainer(model=model, args=arguments(tmp_path / "out", max_steps=3), train_dataset=rows,
                                         eval_dataset=rows, hoist_config=ds_config(tmp_path / "nvme"))
    trainer.train()
    assert next(model.parameters()).dtype == torch.bfloat16
    assert len(losses_of(trainer)) == 3 and math.isfinite(trainer.evaluate()["eval_loss"])
    trainer.engine.close()


def test_sounds_have_the_weights_type_in_generate(tmp_path):
    """generate() calls the encoder without the model's own forward()."""
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None))
    rows = [{"input_features": torch.randn(8, 40, device="cpu"), "labels": torch.arange(3, 9)} for _ in range(8)]
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, bf16=True, predict_with_generate=True,
        generation_max_length=8, report_to=[], use_cpu=ON_CPU, dataloader_pin_memory=ON_CPU, save_strategy="no",
        disable_tqdm=True, logging_steps=1)
    trainer = type("Hoisted", (hoist_transformers.Trainer, transformers.Seq2SeqTrainer), {})(
        model=model, args=args, train_dataset=rows, hoist_config=ds_config(tmp_path / "nvme"))
    trainer.train()
    types = set()
    model.model.encoder.conv1.register_forward_pre_hook(lambda _, inputs: types.add(inputs[0].dtype))
    assert len(losses_of(trainer)) == 2 and len(trainer.predict(rows).predictions) == 8
    assert types == {torch.bfloat16}
    trainer.engine.close()


class Plain(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.norm = torch.nn.Embedding(97, 16), torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 97, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, input_ids, labels):
        logits = self.head(self.norm(self.table(input_ids))) * self.scale
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_module_that_is_not_of_transformers(tmp_path):
    """Saved under its own names, resumed, and given its best weights back."""
    from safetensors.torch import load_file

    settings = {"bf16": False, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
                "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}

    def trained(name, seed=0, resume=None, **changes):
        trainer = trainer_of(arguments(tmp_path / name, **settings | changes), ds_config(tmp_path / f"{name}-nvme"), rows=120,
                             model=Plain(seed), eval_dataset=Tokens(8))
        trainer.train(resume_from_checkpoint=resume)
        state = trainer.engine.state_dict()
        trainer.engine.close()
        return state

    expected = trained("whole", max_steps=6)
    trained("parts", max_steps=4)
    found = trained("parts", max_steps=6, seed=1, resume=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
    saved = load_file(tmp_path / "parts" / "checkpoint-6" / "model.safetensors")
    assert saved.keys() == {"table.weight", "norm.weight", "norm.bias", "head.weight", "scale"}
    assert all(torch.equal(value, expected[name].cpu()) for name, value in saved.items())
    worst = trained("best", max_steps=4, greater_is_better=True)  # the first evaluation's weights
    first = load_file(tmp_path / "best" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(worst[name].cpu(), value) for name, value in first.items())


def test_other_nodes_get_no_weights_of_a_plain_module(tmp_path, monkeypatch):
    """save_on_each_node: the first rank of another node writes all but the weights. A file without tensors would load."""
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=1, bf16=False, save_on_each_node=True),
                         ds_config(tmp_path / "nvme"), model=Plain())
    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(hoist.torch.Engine, "_is_first_of_job", False)
        trainer.save_model(tmp_path / "other")
    assert os.listdir(tmp_path / "other") == ["training_args.bin"]
    trainer.save_model(tmp_path / "first")
    trainer.engine.close()
    assert sorted(os.listdir(tmp_path / "first")) == ["model.safetensors", "training_args.bin"]


def test_trainer_trains_with_an_unchanged_json(tmp_path):
    """bf16, accumulation, clipping, and the file's own schedule: the plain loop's bits."""
    args = arguments(tmp_path / "out")
    recorded = Recorded()
    trainer = trainer_of(args, ds_config(tmp_path / "nvme"), data_collator=recorded)
    result = trainer.train()
    assert result.global_step == trainer.engine.global_steps == 16
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    losses = losses_of(trainer)
    assert losses[-1] < 0.8 * losses[0]
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates[0] < rates[3] and rates[-1] == 1e-3
    ours = digests(trainer.engine)
    norms = [row["grad_norm"] for row in trainer.state.log_history if "loss" in row]
    trainer.engine.close()
    loop_losses, loop_norms, loop_ends = the_plain_loop(args, ds_config(tmp_path / "loop"), 16, 24, recorded.batches)
    assert ours == loop_ends and norms == loop_norms
    assert losses == pytest.approx(loop_losses, rel=1e-3)  # Trainer logs them rounded


def fp16_config(path, power, without=()):
    """As Hugging Face's documentation has it: both sections, and the arguments choose."""
    config = ds_config(path, without=without)
    config["fp16"] = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": power,
                      "hysteresis": 1, "min_loss_scale": 1}
    return config


def test_fp16(tmp_path):
    """The plain loop's bits, with steps that overflow at first; the weights are saved as they are."""
    args = arguments(tmp_path / "out", bf16=False, fp16=True)
    recorded = Recorded()
    trainer = trainer_of(args, fp16_config(tmp_path / "nvme", 28), data_collator=recorded)
    result = trainer.train()
    engine = trainer.engine
    assert result.global_step == engine.global_steps == 16
    assert 2 < engine.skipped_steps < 14 and engine.optimizer.loss_scale == 2.0**(28 - engine.skipped_steps)
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float16
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all(math.isfinite(row["grad_norm"]) == (index >= engine.skipped_steps) for index, row in enumerate(rows))
    assert rows[0]["learning_rate"] == rows[engine.skipped_steps]["learning_rate"] < rows[-1]["learning_rate"]
    assert rows[-1]["loss"] < rows[0]["loss"]
    trainer.save_model(str(tmp_path / "weights"))
    expected, ours = engine.state_dict(), digests(engine)
    engine.close()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype="auto")
    assert all(value.dtype == torch.float16 and torch.equal(value.cpu(), expected[n]) for n, value in loaded.state_dict().items())
    _, _, loop_ends = the_plain_loop(args, fp16_config(tmp_path / "loop", 28), 16, 24, recorded.batches)
    assert ours == loop_ends


def test_fp16_resumed_from_a_checkpoint_after_skipped_steps(tmp_path):
    """Trainer's own schedule stands still with them; the scale goes on where it was."""
    def run(path, max_steps, resume=None, seed=0):
        args = arguments(tmp_path / path / "out", bf16=False, fp16=True, max_steps=max_steps, save_strategy="steps",
                         save_steps=1, lr_scheduler_type="constant_with_warmup")
        config = fp16_config(tmp_path / path / "nvme", 28, without=("optimizer", "scheduler"))
        trainer = trainer_of(args, config, model=tiny_llama(seed=seed), rows=120)  # one epoch: see docs/trainers.md
        trainer.train(resume_from_checkpoint=resume)
        end = digests(trainer.engine), trainer.engine.skipped_steps, trainer.lr_scheduler.last_epoch
        assert trainer.lr_scheduler.last_epoch == trainer.engine.step_count
        trainer.engine.close()
        return end

    expected = run("whole", 14)
    assert 3 < expected[1] < 13
    for steps in (2, 3, 13):
        run("parts", steps, resume=steps > 2 or None, seed=steps - 2)
    assert run("parts", 14, resume=True, seed=5) == expected


def test_trainers_own_optimizer_and_schedule(tmp_path):
    """Where the file has neither: Trainer's groups (no decay for norms) and its linear schedule; fp32; a remainder of one
    micro-batch at the end of each epoch of 24."""
    args = arguments(tmp_path / "out", bf16=False, gradient_accumulation_steps=5, max_steps=11, max_grad_norm=0.5)
    recorded = Recorded()
    trainer = trainer_of(args, ds_config(tmp_path / "nvme", without=("optimizer", "scheduler")), data_collator=recorded)
    trainer.train()
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    ours, losses = digests(trainer.engine), losses_of(trainer)
    trainer.engine.close()

    def optimizer_of(model):
        names = trainer.get_decay_parameter_names(model)
        groups = [{"params": [p for n, p in model.named_parameters() if (n in names) == decays],
                   "weight_decay": 0.1 if decays else 0.0} for decays in (True, False)]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)

    def schedule_of(optimizer):
        return transformers.get_linear_schedule_with_warmup(optimizer, 4, 11)

    loop_losses, _, loop_ends = the_plain_loop(args, ds_config(tmp_path / "loop", without=("optimizer", "scheduler")), 11,
                                               24, recorded.batches, optimizer_of, schedule_of)
    assert ours == loop_ends
    assert losses == pytest.approx(loop_losses, rel=1e-3)


@pytest.mark.skipif(not CAN_REFUSE, reason="before PyTorch 2.13 the modules of the first pass stay uncompiled (docs/pytorch.md)")
def test_compiled_by_trainer(tmp_path):
    """torch_compile of TrainingArguments; aot_eager traces and differentiates as inductor does, and needs no compiler."""
    losses = []
    for compiled in (False, True):
        args = arguments(tmp_path / "out", bf16=False, torch_compile=compiled,
                         **({"torch_compile_backend": "aot_eager"} if compiled else {}))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer = trainer_of(args, ds_config(tmp_path / f"nvme-{compiled}"))
        trainer.train()
        losses.append(losses_of(trainer))
        trainer.engine.close()
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > before) == compiled
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_evaluation_and_what_is_saved(tmp_path):
    args = arguments(tmp_path / "out", max_steps=6, eval_strategy="steps", eval_steps=2)
    trainer = trainer_of(args, ds_config(tmp_path / "nvme"), eval_dataset=Tokens(16))
    before = trainer.evaluate()["eval_loss"]  # in memory, before there is an engine
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before
    assert len([row for row in trainer.state.log_history if "eval_loss" in row]) >= 4
    assert trainer.predict(Tokens(8)).predictions.shape == (8, 16, 97)
    trainer.save_model(str(tmp_path / "weights"))
    expected = trainer.engine.state_dict()
    trainer.engine.close()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.bfloat16)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert set(expected) == set(loaded.state_dict())
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.cpu(), expected[name]), name


def test_two_ranks(tmp_path):
    """torchrun: half of each batch on either rank, averaged over the tokens of both; one checkpoint, one set of weights."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(f"""
        import json, os, sys
        from pathlib import Path
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        import accelerator
        accelerator.use_if_asked(cpu_by_default=True)
        from test_trainer import *
        path = Path({str(tmp_path)!r})
        saved, save = [], transformers.Trainer._save
        def counted(self, *positional, **named):
            saved.append(positional)
            save(self, *positional, **named)
        transformers.Trainer._save = counted
        args = arguments(path / "out", max_steps=6, save_strategy="steps", save_steps=3, bf16=False)
        trainer = trainer_of(args, ds_config(path / "nvme"))
        trainer.train()
        assert trainer.engine.world_size == 2
        trainer.save_model()
        with open(path / f"end-{{trainer.engine.rank}}", "w") as file:
            json.dump([losses_of(trainer), digests(trainer.engine), len(saved)], file)
        trainer.engine.close()
    """))
    accelerator.skip_without_gpus(2)
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                            str(script)], capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-4000:]
    ends = [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends[0][1] == ends[1][1]
    assert [end[2] for end in ends] == [3, 0]  # one process writes what is not the engine's
    assert len(ends[0][0]) == 6 and ends[0][0][-1] < ends[0][0][0]
    assert sorted(os.listdir(tmp_path / "out"))[:2] == ["checkpoint-3", "checkpoint-6"]
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_one_process_trains_on_one_of_several_gpus(tmp_path, caplog):
    """transformers would copy the model to all GPUs in sight, and multiply the batch."""
    args = arguments(tmp_path / "out", max_steps=2, bf16=False)
    args._n_gpu = 2
    recorded = Recorded()
    trainer = trainer_of(args, ds_config(tmp_path / "nvme"), data_collator=recorded)
    trainer.train()
    trainer.engine.close()
    assert trainer.model_wrapped is trainer.model
    assert {len(batch["labels"]) for batch in recorded.batches} == {4}
    assert "one of 2 GPUs: start one for each (torchrun --nproc-per-node 2)" in caplog.text


@pytest.mark.cpu_tensors("activations are in the accelerator's memory, which is the process's")
def test_memory_of_the_process_is_bounded(tmp_path):
    """A model of 342 MB of masters and moments, on the meta device, trained and saved by Trainer in less than half of that."""
    program = textwrap.dedent(f"""
        import json, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        import accelerator
        accelerator.use_if_asked(cpu_by_default=True)
        from pathlib import Path
        from test_trainer import *
        path = Path({str(tmp_path)!r})
        def resident():
            for line in open("/proc/self/status"):
                if line.startswith("VmHWM"): return int(line.split()[1]) * 1024
        tokens = torch.randint(0, 512, (1, 16))
        small = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=6,
            num_key_value_heads=6, dtype=torch.bfloat16))  # PyTorch loads its kernels, before memory is looked at
        small(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=6,
                num_key_value_heads=6, tie_word_embeddings=True, dtype=torch.bfloat16))
        parameters = sum(p.numel() for p in model.parameters())
        def initialize(module):
            for p in module.parameters(recurse=False):
                torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
            if hasattr(module, "inv_freq"):
                rotary = type(module)(module.config)
                module.inv_freq = module.original_inv_freq = rotary.inv_freq
        config = ds_config(path / "nvme")
        config["zero_optimization"]["sub_group_size"] = 131072
        config["hoist"] = {{"device_memory": "16MiB", "pinned_memory": "64MiB"}}
        args = arguments(path / "out", max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=1,
                         gradient_accumulation_steps=1)
        trainer = trainer_of(args, config, model=model, hoist_options={{"initialize": initialize}})
        before = resident()
        trainer.train()
        tiers = trainer.engine.statistics()["tiers"]
        assert all(t["peak_bytes"] <= t["budget_bytes"] for t in tiers.values()), tiers
        trainer.engine.close()
        print(json.dumps({{"parameters": parameters, "grown": resident() - before}}))
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    state = 12 * result["parameters"]
    assert state > 340e6
    budgets = 80 * 2**20
    # Gradients of up to three units (4 MB each) on their way into pinned memory, 8 MiB of values on their way into files, 10 MB
    # of code that is read for the first time, activations, and what malloc keeps between them: 32 to 49 MB.
    slack = 56 * 2**20
    assert result["grown"] < budgets + slack, result
    assert budgets + slack < 0.45 * state
    assert os.path.getsize(tmp_path / "out" / "checkpoint-4" / "model.safetensors") > 2 * result["parameters"]


def test_a_model_whose_files_have_other_names(tmp_path):
    """A mixture of experts: one tensor for all experts in memory, one for each in files, as transformers saves it."""
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64))
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=4, bf16=False), ds_config(tmp_path / "nvme"), model=model)
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "weights"))
    expected = trainer.engine.state_dict()
    trainer.engine.close()
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "weights")
    assert set(expected) == set(loaded.state_dict())
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.cpu(), expected[name]), name


# --- used again, stopped early -----------------------------------------------------------------------------------------------

class Stream(torch.utils.data.IterableDataset):
    """14 rows: with 2 a batch and 4 batches a step, an epoch ends in the middle of its second step."""

    def __iter__(self):
        return iter(Tokens(14))


def test_an_epoch_that_ends_in_the_middle_of_a_step(tmp_path, caplog):
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3, bf16=False)
    trainer = hoist_transformers.Trainer(model=tiny_llama(), args=args, train_dataset=Stream(),
                                         hoist_config=ds_config(tmp_path / "store"))
    trainer.train()
    assert trainer.engine.step_count == 3 and len(losses_of(trainer)) == 3
    assert "the epoch ended in the middle of a step: the gradients of 3 micro-batches are dropped" in caplog.text
    trainer.engine.close()


class StopsBefore(transformers.TrainerCallback):
    """As transformers saves a last checkpoint when a job is about to be taken from its machine."""

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 2:
            control.should_training_stop = True


def test_a_last_checkpoint_in_the_middle_of_a_step(tmp_path, caplog):
    args = arguments(tmp_path, save_strategy="epoch", max_steps=8, bf16=False)
    trainer = trainer_of(args, ds_config(tmp_path / "store"), callbacks=[StopsBefore()])
    trainer.train()
    assert trainer.engine.step_count == 2 and "gradients of 1 micro-batches are dropped" in caplog.text
    trainer.engine.close()
    again = trainer_of(args, ds_config(tmp_path / "store"))
    again.train(resume_from_checkpoint=True)
    assert again.engine.step_count == 8
    again.engine.close()
