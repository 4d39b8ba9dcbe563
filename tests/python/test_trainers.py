# SPDX-License-Identifier: Apache-2.0
"""Trainers of transformers and TRL, with and without adapters: what docs/trainers.md says of each is a test here.

A run is evaluated, saved, stopped early and given its best weights back, as the same run in memory is; a killed one is resumed.
The hoisted model's weights come from files. The metric is the evaluation's loss, taken as a score: the first evaluation is the
best, so that the best checkpoint is not the last one.
"""

import copy
import functools
import math
import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
import accelerate  # noqa: E402
import datasets  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import hoist  # noqa: E402
import hoist.torch.transformers as hoist_transformers  # noqa: E402
from hoist.torch.model import casts  # noqa: E402

WORDS = 300
pytestmark = pytest.mark.usefixtures("cpu_by_default")
ON_CPU = not os.environ.get("HOIST_TEST_ACCELERATOR")


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, WORDS)}
    of_words = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                                model_input_names=["input_ids", "attention_mask"])


def text(seed):
    words = torch.randint(3, WORDS, (32, 8), generator=torch.Generator().manual_seed(seed), device="cpu")
    return [" ".join(f"w{n}" for n in row) for row in words.tolist()]


def reward(completions, **_):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


ROWS = torch.randint(3, WORDS, (32, 12), generator=torch.Generator().manual_seed(4), device="cpu").tolist()
TOKENS = {"input_ids": ROWS, "labels": ROWS}
SHAPE = {"vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 2}
LLAMA = (transformers.LlamaForCausalLM, transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1,
    tie_word_embeddings=True, **SHAPE))
SCORE = (transformers.LlamaForSequenceClassification, transformers.LlamaConfig(**LLAMA[1].to_dict() | {"num_labels": 1}))
T5 = (transformers.T5ForConditionalGeneration, transformers.T5Config(
    d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, **SHAPE))
# The trainer, its arguments' class, its model, its data, what else its constructor and its arguments take.
KINDS = {
    "trainer": (transformers.Trainer, transformers.TrainingArguments, LLAMA, TOKENS, {}, {}),
    "seq2seq": (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments, T5, TOKENS, {},
                {"predict_with_generate": True, "generation_max_length": 6}),
    "sft": (trl.SFTTrainer, trl.SFTConfig, LLAMA, {"text": text(0)}, {}, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, LLAMA, {"prompt": text(0), "chosen": text(1), "rejected": text(2)}, {}, {}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, LLAMA, {"prompt": text(0), "completion": text(1), "label": [True, False] * 16},
            {}, {}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, SCORE, {"chosen": text(1), "rejected": text(2)}, {}, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, LLAMA, {"prompt": text(0)}, {"reward_funcs": reward},
             {"num_generations": 4, "max_completion_length": 6}),
}
CASES = [pytest.param(kind, adapters, id=f"{kind}-{'lora' if adapters else 'full'}")
         for kind in KINDS for adapters in (False, True)]


def make(kind, path, hub, adapters, hoisted, callbacks=(), **changes):
    base, options, (model_class, shape), data, more, settings = KINDS[kind]
    if not (hub / "config.json").exists():
        torch.manual_seed(0)
        model_class(shape).save_pretrained(hub)
    lora = adapters if isinstance(adapters, peft.PeftConfig) else None
    if adapters is True:
        lora = peft.LoraConfig(r=4, target_modules=["q", "v"] if model_class is T5[0] else ["q_proj", "v_proj"],
                               task_type={"seq2seq": "SEQ_2_SEQ_LM", "reward": "SEQ_CLS"}.get(kind, "CAUSAL_LM"))
    if hoisted:
        base = type("Hoisted", (hoist_transformers.Trainer, base), {})
        nvme = {"device": "nvme", "nvme_path": str(path / "nvme")}
        more = more | {"hoist_config": {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
                                        "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"}}
        model = hoist_transformers.from_pretrained(model_class, hub, dtype=torch.float32)
    else:
        model = model_class.from_pretrained(hub, dtype=torch.float32)
    torch.manual_seed(1)  # of the adapters
    if kind in ("sft", "dpo", "kto", "reward", "grpo"):
        more = more | {"peft_config": lora}
    elif adapters:
        model = peft.get_peft_model(model, lora)
    settings = {"max_steps": 8, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-3,
                "bf16": False, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
                "logging_steps": 1, "report_to": [], "use_cpu": ON_CPU, "dataloader_pin_memory": ON_CPU, "disable_tqdm": True,
                "seed": 7} | settings | changes
    rows = datasets.Dataset.from_dict(data)
    return base(model=model, args=options(output_dir=str(path), **settings), train_dataset=rows,
                eval_dataset=rows.select(range(8)), processing_class=tokenizer(), callbacks=list(callbacks), **more)


def weights_of(path, kind, hub, adapters):
    """As transformers and PEFT load them again."""
    model_class = KINDS[kind][2][0]
    if not adapters:
        return model_class.from_pretrained(path).state_dict()
    names = {p.name for p in path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
    base = model_class.from_pretrained(hub)
    return peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, path))


def test_what_needs_weights_before_they_are_read_is_refused(tmp_path, monkeypatch):
    """TRL computes the reference's values with the model in files: they would be NaN, and so would saved weights."""
    hub = tmp_path / "hub"
    with pytest.raises(hoist.UsageError, match="precompute_ref_log_probs=False"):
        make("dpo", tmp_path, hub, True, True, precompute_ref_log_probs=True).train()
    trainer = make("trainer", tmp_path, hub, False, True)
    for call in (trainer.save_model, trainer.evaluate):
        with pytest.raises(hoist.UsageError, match="still in their files.*or load the model"):
            call()
    monkeypatch.setattr(hoist_transformers, "from_pretrained", lambda kind, *at, **named: kind.from_pretrained(*at, **named))
    losses = []
    for hoisted in (False, True):
        trainer = make("dpo", tmp_path / str(hoisted), hub, True, hoisted, max_steps=3, precompute_ref_log_probs=True)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    trainer.engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3


def zeros(model):
    return torch.zeros_like(model.lm_head.weight, memory_format=torch.contiguous_format)


def set_row(model):
    with torch.no_grad():
        model.lm_head.weight[5] = 0.0


# Changes of a model between from_pretrained and training, and whether hoist can begin with what they make.
EDITS = {
    "other_tensor": (True, lambda model: setattr(model.lm_head.weight, "data", zeros(model))),
    "other_parameter": (True, lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(zeros(model)))),
    "loaded": (True, lambda model: model.load_state_dict({name: torch.full(value.shape, 0.5) for name, value in
                                                          model.state_dict().items() if "embed" not in name}, strict=False)),
    "more_tokens": (True, lambda model: model.resize_token_embeddings(WORDS + 10)),
    "fewer_tokens": (True, lambda model: model.resize_token_embeddings(WORDS - 10)),
    "fewer_layers": (True, lambda model: setattr(model.model, "layers", model.model.layers[:1])),
    "tied": (True, lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight)),
    "another_type": (True, lambda model: model.to(torch.float64).to(torch.float32)),
    "zeros_": (False, lambda model: torch.nn.init.zeros_(model.lm_head.weight)),
    "data.zero_": (False, lambda model: model.lm_head.weight.data.zero_()),
    "a_row": (False, set_row),
    "fewer_rows": (False, lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data[:9])),
    "a_copy": (False, lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.data.clone()))),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_before_training_counts_or_is_refused(tmp_path, edit):
    counts, change = EDITS[edit]
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA[1].to_dict() | {"tie_word_embeddings": False})
                                  ).save_pretrained(tmp_path / "hub")
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    model = hoist_transformers.from_pretrained(transformers.LlamaForCausalLM, tmp_path / "hub", dtype=torch.float32)
    for each in (expected, model):
        torch.manual_seed(1)  # of new tokens
        change(each)
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    if not counts:
        with pytest.raises(hoist.UsageError, match="'lm_head.weight' was changed.*own from_pretrained.*modify=True"):
            hoist.torch.wrap(model, config)
        return
    copied = copy.deepcopy(model).state_dict()
    with hoist.torch.wrap(model, config) as engine:
        found = engine.state_dict()
    assert found.keys() == expected.state_dict().keys() == copied.keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name].cpu(), value.cpu()) and torch.equal(copied[name].cpu(), value.cpu()), name


ON_QUERIES = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
ADAPTERS = {
    "modules_to_save": lambda: peft.LoraConfig(modules_to_save=["lm_head"], **ON_QUERIES),
    "tokens": lambda: peft.LoraConfig(trainable_token_indices=[3, 4], **ON_QUERIES),
    "vera": lambda: peft.VeraConfig(**ON_QUERIES),
    "classification": lambda: peft.LoraConfig(**ON_QUERIES | {"task_type": "SEQ_CLS"}),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.cpu_tensors("PEFT draws VeRA's vectors by the CPU's generator")] * (name == "vera"))
    for name in ADAPTERS])
def test_adapters_beside_which_more_is_saved(tmp_path, name):
    """Checkpoints and the best weights, as of the same run in memory."""
    model_class = transformers.LlamaForSequenceClassification if name == "classification" else LLAMA[0]
    torch.manual_seed(0)
    model_class(transformers.LlamaConfig(**LLAMA[1].to_dict() | {"tie_word_embeddings": False})).save_pretrained(tmp_path / "hub")
    labels = [index % 2 for index in range(32)] if name == "classification" else ROWS
    rows = datasets.Dataset.from_dict({"input_ids": ROWS, "labels": labels})
    saved = []
    for hoisted in (False, True):
        base = hoist_transformers.Trainer if hoisted else transformers.Trainer
        config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
        from_files = hoisted and name != "tokens"  # whose values begin as copies of the embeddings
        model = (hoist_transformers.from_pretrained(model_class, tmp_path / "hub", dtype=torch.float32) if from_files
                 else model_class.from_pretrained(tmp_path / "hub", dtype=torch.float32))
        torch.manual_seed(1)  # of the adapters
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(hoisted)), max_steps=4, learning_rate=1e-2, per_device_train_batch_size=4, seed=7,
            report_to=[], use_cpu=ON_CPU, dataloader_pin_memory=ON_CPU, disable_tqdm=True, eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, **BEST)
        trainer = base(model=peft.get_peft_model(model, ADAPTERS[name]()), args=args, train_dataset=rows,
                       eval_dataset=rows.select(range(8)), **({"hoist_config": config} if hoisted else {}))
        trainer.train()
        trainer.save_model(tmp_path / str(hoisted) / "saved")
        begun = model_class.from_pretrained(tmp_path / "hub")
        saved.append(peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(begun, tmp_path / str(hoisted) / "saved")))
    trainer.engine.close()
    assert saved[0].keys() == saved[1].keys() and (tmp_path / "True" / "saved" / "training_args.bin").exists()
    for key, value in saved[0].items():
        torch.testing.assert_close(saved[1][key], value, rtol=0, atol=2e-5)


@pytest.mark.cpu_tensors("moving the reference to the test accelerator unties its weights")
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_reference_that_follows_the_trained_weights(tmp_path, kind):
    changes = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "max_steps": 5, "beta": 0.2,
               "eval_strategy": "no", "save_strategy": "no"}
    runs = []
    for hoisted in (False, True):
        trainer = make(kind, tmp_path / str(hoisted), tmp_path / "hub", False, hoisted, **changes)
        trainer.train()
        runs.append(([row["loss"] for row in trainer.state.log_history if "loss" in row], trainer.ref_model.state_dict()))
    trainer.engine.close()
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-4, abs=1e-5) and len(runs[0][0]) == 5
    begun = KINDS[kind][2][0].from_pretrained(tmp_path / "hub").state_dict()
    for name, value in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], value, rtol=0, atol=2e-5)
    assert any(not torch.equal(begun[name].cpu(), value.cpu()) for name, value in runs[1][1].items())


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_reference_is_the_trained_model_at_the_first_step(tmp_path, caplog, monkeypatch, kind, dtype):
    """With the rounding of hoist's weights, and without autocast: TRL's loss begins where that of equal models does. If the
    reference then takes all of the trained weights (DPO), it has their bits."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 sets it, for all that follow in the process
    caplog.set_level("INFO", "hoist")
    # Small differences of weights show. Moving the reference to the test accelerator would untie them.
    shape = transformers.LlamaConfig(**LLAMA[1].to_dict() | {"initializer_range": 0.2, "tie_word_embeddings": ON_CPU})
    monkeypatch.setitem(KINDS, kind, (*KINDS[kind][:2], (LLAMA[0], shape), *KINDS[kind][3:]))
    changes = {"beta": 0.2, "max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "bf16": dtype == "bf16",
               "fp16": dtype == "fp16", "warmup_steps": 1}
    if kind != "kto":  # whose callback TRL does not have in each release
        changes |= {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0 if kind == "dpo" else 0.05}
    trainer = make(kind, tmp_path, tmp_path / "hub", False, True, **changes)
    trainer.train()
    weights = trainer.engine.state_dict()
    trainer.engine.close()
    first = next(row for row in trainer.state.log_history if "loss" in row)
    for key in {"dpo": ["rewards/chosen", "rewards/rejected"], "kto": ["kl", "rewards/chosen"], "grpo": ["kl"]}[kind]:
        assert first[key] == pytest.approx(0, abs=1e-7), key
    reference = trainer.ref_model.state_dict()
    assert caplog.text.count("ref_model gets weights of") == 1
    assert {value.dtype for value in reference.values()} == {torch.bfloat16 if dtype == "bf16" else torch.float16}
    assert ("ref_model_mixup_alpha=0.05 is small" in caplog.text) == ("up to 10 steps" in caplog.text) == (kind == "grpo")
    if kind == "dpo":
        assert all(torch.equal(reference[name].cpu(), value.cpu()) for name, value in weights.items())


def equal_models(count):
    """Small differences of weights show in their results."""
    torch.manual_seed(0)
    model = LLAMA[0](transformers.LlamaConfig(**LLAMA[1].to_dict() | {"initializer_range": 0.2, "tie_word_embeddings": False}))
    return [copy.deepcopy(model) for _ in range(count)]


def first_rewards(trainer):
    """Of DPO, which are 0 for equal models."""
    trainer.train()
    trainer.engine.close()
    first = next(row for row in trainer.state.log_history if "loss" in row)
    return [first["rewards/chosen"], first["rewards/rejected"]]


def dpo(monkeypatch, path, model, reference, **changes):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(hoist_transformers, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setitem(KINDS, "dpo", (*KINDS["dpo"][:4], {"ref_model": reference}, {}))
    return make("dpo", path, path / "hub", False, True, max_steps=1, eval_strategy="no", save_strategy="no", **changes)


def test_one_reference_for_two_trainers(tmp_path, caplog, monkeypatch):
    """Before accelerate 1.12, the second one puts autocast around the first one's. A third one trains in another type."""
    *policies, reference = equal_models(4)
    trainers = [dpo(monkeypatch, tmp_path / str(n), model, reference, bf16=True) for n, model in enumerate(policies[:2])]
    for trainer in trainers:
        assert first_rewards(trainer) == pytest.approx([0, 0], abs=1e-7)
        assert "_original_forward" not in vars(reference) and len(reference._forward_pre_hooks) == 1
    assert "earlier trainer" not in caplog.text
    first_rewards(dpo(monkeypatch, tmp_path / "fp32", policies[2], reference))
    assert "rounded this ref_model to torch.bfloat16, and this one trains in torch.float32" in caplog.text


def test_a_second_trainer_trains_what_two_have_evaluated(tmp_path, monkeypatch):
    [model] = equal_models(1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(hoist_transformers, "from_pretrained", lambda *_, **__: model)
    trainers = [make("trainer", tmp_path / name, tmp_path / "hub", False, True, max_steps=1, bf16=True, save_strategy="no")
                for name in ("first", "second")]
    for trainer in trainers:
        trainer.evaluate()
    trainers[1].train()
    with torch.no_grad():
        assert model(input_ids=torch.tensor(ROWS[:2], device=trainers[1].engine.device)).logits.dtype == torch.bfloat16
    trainers[1].engine.close()


@pytest.mark.parametrize("own", [False, True])
def test_all_that_accelerate_puts_around_a_forward_is_taken_away(monkeypatch, own):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    model = torch.nn.Linear(2, 2)
    if own:  # as TRL's
        plain = model.forward
        model.forward = functools.wraps(plain)(lambda x: plain(x) + 1)
    before = getattr(model.forward, "__func__", model.forward)
    for _ in range(2):
        model.__dict__.pop("_is_accelerate_prepared", None)  # as before accelerate 1.12
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=ON_CPU)
        accelerator.prepare_model(model, evaluation_mode=True, device_placement=False)
    casts.restore_forward(model)
    assert getattr(model.forward, "__func__", model.forward) is before and model.forward(torch.ones(1, 2)).shape == (1, 2)
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.cpu_tensors("the reference shares a module with a model of the host's")
def test_a_reference_that_shares_a_module_with_the_trained_model(tmp_path, monkeypatch):
    model, reference = equal_models(2)
    reference.model.embed_tokens = model.model.embed_tokens
    trainer = dpo(monkeypatch, tmp_path, model, reference, bf16=True)
    assert first_rewards(trainer) == pytest.approx([0, 0], abs=1e-7)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}


class PackedInFloats(torch.nn.Parameter):  # as bitsandbytes' Params4bit with bnb_4bit_quant_storage=torch.float32
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


def quantized_modules():
    """Stand-ins for modules of bitsandbytes, of fp8 in blocks, and of GPTQ."""
    packed, blocks, gptq = (torch.nn.Module() for _ in range(3))
    packed.weight = PackedInFloats(torch.randint(0, 255, (32, 4), dtype=torch.uint8, device="cpu").view(torch.float32))
    blocks.weight = torch.nn.Parameter(torch.randn(8, 8, device="cpu").to(torch.float8_e4m3fn), requires_grad=False)
    blocks.weight_scale_inv = torch.nn.Parameter(torch.rand(1, 1, device="cpu"), requires_grad=False)
    gptq.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32, device="cpu"))
    gptq.register_buffer("scales", torch.rand(4, 4, device="cpu").half())
    return torch.nn.ModuleList([packed, blocks, gptq])


@pytest.mark.cpu_tensors("to() of another type of device makes plain parameters of PackedInFloats")
@pytest.mark.parametrize("marked", [False, True])
def test_quantized_parts_of_a_reference_stay(tmp_path, caplog, monkeypatch, marked):
    """Of a model that transformers has quantized (marked), all stays."""
    caplog.set_level("INFO", "hoist")
    model, reference = equal_models(2)
    reference.quantized = quantized_modules()
    if marked:
        reference.is_quantized = True
    before = {name: value.clone() for name, value in reference.quantized.state_dict().items()}
    trainer = dpo(monkeypatch, tmp_path, model, reference, bf16=True)
    rewards = first_rewards(trainer)
    assert marked or rewards == pytest.approx([0, 0], abs=1e-7)
    after = reference.quantized.state_dict()
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name].cpu().view(torch.uint8), value.view(torch.uint8)), name
    assert reference.lm_head.weight.dtype == (torch.float32 if marked else torch.bfloat16)
    assert ("ref_model is quantized" in caplog.text) == marked


@pytest.mark.parametrize("first", ["sft", "dpo"])
def test_evaluated_before_it_is_trained_in_16_bits(tmp_path, caplog, monkeypatch, first):
    """accelerate then puts autocast around a forward() that is TRL's. What DPO computes before, it computes in fp32."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(hoist_transformers, "from_pretrained", lambda kind, *at, **named: kind.from_pretrained(*at, **named))
    changes = {"precompute_ref_log_probs": True} if first == "dpo" else {}
    trainer = make(first, tmp_path, tmp_path / "hub", False, True, max_steps=1, bf16=True, save_strategy="no", **changes)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert "_original_forward" not in vars(trainer.model)
    with torch.no_grad():
        assert trainer.model(input_ids=torch.tensor(ROWS[:2], device=trainer.engine.device)).logits.dtype == torch.bfloat16
    trainer.engine.close()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(before, rel=0.02)
    assert ("computes with weights in torch.float32" in caplog.text) == (first == "dpo")


def test_trained_adapters_are_merged_and_are_no_weights_of_a_whole_model(tmp_path):
    trainer = make("sft", tmp_path, tmp_path / "hub", True, True, max_steps=2, save_strategy="no")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    with trainer.engine.gathered(modify=True):
        merged = trainer.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    trainer.engine.close()
    model = peft.PeftModel.from_pretrained(LLAMA[0].from_pretrained(tmp_path / "hub"), tmp_path / "saved")
    found = LLAMA[0].from_pretrained(tmp_path / "merged").state_dict()
    (tmp_path / "saved" / "model_card.md").write_text("adapters")
    with pytest.raises(hoist.SafetensorsError, match="adapters and no weight.*is_trainable=True"):
        hoist.torch.wrap(model, {"optimizer": {"type": "AdamW"}}, weights=tmp_path / "saved")
    for name, value in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=0, atol=1e-6)


def test_a_head_that_is_trained_beside_adapters_has_its_original_as_the_reference(tmp_path):
    """TRL reads the weights of the one or of the other without a call of their modules."""
    torch.manual_seed(0)
    LLAMA[0](transformers.LlamaConfig(**LLAMA[1].to_dict() | {"tie_word_embeddings": False})).save_pretrained(tmp_path / "hub")
    losses = []
    for hoisted in (False, True):
        trainer = make("dpo", tmp_path / str(hoisted), tmp_path / "hub", ADAPTERS["modules_to_save"](), hoisted, max_steps=3,
                       save_strategy="no")
        trainer.train()
        losses.append([row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row])
    trainer.engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    is_older = transformers.__version__.startswith("4.")  # with a TRL that does not evaluate at the end
    assert len(losses[0]) == (4 if is_older else 5)


def test_precomputed_reference_log_probabilities_are_not_rounded(tmp_path, caplog, monkeypatch):
    """They are sums over a whole text: rounded to bf16 they would be off by up to 1. An untrained model is its own reference."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 sets it to bf16, for all that follow in the process
    torch.manual_seed(0)
    LLAMA[0](LLAMA[1]).save_pretrained(tmp_path / "hub")
    words = torch.randint(3, WORDS, (2, 8, 60), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    chosen, rejected = ([" ".join(f"w{n}" for n in row) for row in rows] for rows in words)
    rows = datasets.Dataset.from_dict({"prompt": text(0)[:8], "chosen": chosen, "rejected": rejected})
    args = trl.DPOConfig(str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, beta=0.1, bf16=True, seed=7,
                         precompute_ref_log_probs=True, save_strategy="no", logging_steps=1, report_to=[], use_cpu=ON_CPU,
                         dataloader_pin_memory=ON_CPU, disable_tqdm=True, gradient_checkpointing=False)
    offloaded = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    trainer = type("Hoisted", (hoist_transformers.Trainer, trl.DPOTrainer), {})(
        model=LLAMA[0].from_pretrained(tmp_path / "hub", dtype=torch.bfloat16), args=args, train_dataset=rows,
        processing_class=tokenizer(), hoist_config={"zero_optimization": {"stage": 3, **offloaded}})
    trainer.train()
    trainer.engine.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == [pytest.approx(math.log(2), abs=1e-4)] and "precompute_ref_log_probs" not in caplog.text


class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True, "save_total_limit": 1}


@pytest.mark.parametrize(("kind", "adapters"), CASES)
def test_evaluated_stopped_early_and_given_the_best_weights_back(tmp_path, kind, adapters):
    runs = []
    for hoisted in (False, True):
        path = tmp_path / str(hoisted)
        stop = transformers.EarlyStoppingCallback(early_stopping_patience=2)
        trainer = make(kind, path, tmp_path / "hub", adapters, hoisted, [stop], **BEST)
        trainer.train()
        trainer.save_model(path / "saved")
        after = trainer.evaluate()["eval_loss"]
        if hoisted:
            trainer.engine.close()
        history = [(row["step"], key, row[key]) for row in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss")
                   if key in row]
        runs.append((history, trainer.state.global_step, trainer.state.best_global_step, after,
                     weights_of(path / "saved", kind, tmp_path / "hub", adapters)))
    (expected, *ends, after, weights), (found, *found_ends, found_after, found_weights) = runs
    assert ends == found_ends and (ends[1] < ends[0] or kind == "grpo")  # whose loss says little of its reward
    for (step, key, value), row in zip(expected, found, strict=True):
        assert row == (step, key, pytest.approx(value, rel=1e-4, abs=1e-5))
    assert found_after == pytest.approx(after, rel=1e-4, abs=1e-5)
    assert weights.keys() == found_weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found_weights[name], value, rtol=0, atol=2e-5)


# KTO's and rewards' with adapters only: the whole file takes long.
@pytest.mark.parametrize(("kind", "adapters"), [case for case in CASES if case.id not in ("kto-full", "reward-full")])
def test_killed_and_resumed_with_the_bits_of_an_undisturbed_run(tmp_path, kind, adapters):
    def ends_of(trainer, path):
        trainer.save_model(path / "saved")
        trainer.engine.close()
        return weights_of(path / "saved", kind, tmp_path / "hub", adapters)

    whole = make(kind, tmp_path / "whole", tmp_path / "hub", adapters, True, eval_strategy="no", save_strategy="no", max_steps=6)
    whole.train()
    expected = ends_of(whole, tmp_path / "whole")
    path = tmp_path / "killed"
    killed = make(kind, path, tmp_path / "hub", adapters, True, [Dies()], eval_strategy="no", max_steps=6)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    killed.engine.close()
    resumed = make(kind, path, tmp_path / "hub", adapters, True, eval_strategy="no", max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    found = ends_of(resumed, path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_weights_that_were_saved_alone_are_continued_from(tmp_path, caplog, adapters):
    """As by transformers' Trainer: with new moments and a new schedule."""
    settings = {"save_only_model": True, "max_steps": 4}
    first = make("trainer", tmp_path / "out", tmp_path / "hub", adapters, hoisted=True, **settings)
    first.train()
    first.engine.close()
    histories = []
    for hoisted in (False, True):
        trainer = make("trainer", tmp_path / str(hoisted), tmp_path / "hub", adapters, hoisted)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        histories.append([entry for entry in trainer.state.log_history if "grad_norm" in entry])
    assert "moments and the schedule of learning rates begin anew" in caplog.text
    assert trainer.engine.step_count == 4 and len(histories[0]) == 8
    trainer.engine.close()
    for plain, ours in zip(*histories, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert ours[key] == pytest.approx(plain[key], abs=1e-4)


PROMPTS = {"prompt": ("PromptTuningConfig", {}), "prefix": ("PrefixTuningConfig", {}),
           "p_tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 16}),
           "multitask": ("MultitaskPromptTuningConfig", {"num_tasks": 2}), "cartridge": ("CartridgeConfig", {})}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_are_learned_are_saved(tmp_path, name):
    """Some of PEFT's encoders read their parameters outside of a call."""
    kind, settings = PROMPTS[name]
    if not hasattr(peft, kind):
        pytest.skip(f"this version of PEFT has no {kind}")

    def made():
        torch.manual_seed(0)
        config = getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(LLAMA[0](LLAMA[1]), config)

    batch = {"input_ids": torch.tensor(ROWS[:2]), "labels": torch.tensor(ROWS[:2])}
    if name == "multitask":
        batch["task_ids"] = torch.tensor([0, 1])
    cpu = {"device": "cpu"}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {
        "stage": 3, "offload_param": cpu, "offload_optimizer": cpu, "stage3_param_persistence_threshold": 0}}
    with hoist.torch.wrap(made(), config) as engine:
        engine.backward(engine(**batch).loss)
        engine.step()
        hoist_transformers.save_pretrained(engine, tmp_path / "saved")
        engine.backward(engine(**batch).loss)  # nothing has stayed gathered
        plain, state = made(), engine.state_dict()
    plain.load_state_dict(state)
    expected = peft.get_peft_model_state_dict(plain)
    found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(LLAMA[0](LLAMA[1]), tmp_path / "saved"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].cpu(), value.cpu(), rtol=0, atol=1e-6)
