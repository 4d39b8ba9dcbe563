# SPDX-License-Identifier: Apache-2.0
"""Recipes of LLaMA-Factory and axolotl, written as these projects' examples write them, on a model of 0.1 M parameters.

Each is compared with the run that it stands for: TRL's trainer in memory, with TRL's own handling of the raw rows.
"""

import json
import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
import datasets  # noqa: E402
from recipes import (  # noqa: E402
    ALPACA,
    ALPACA_INPUT,
    AXOLOTL_CHAT,
    AXOLOTL_KTO,
    AXOLOTL_LORA,
    AXOLOTL_REWARD,
    FULL_SFT,
    LORA_DPO,
    LORA_KTO,
    LORA_RM,
    LORA_SFT,
    PRETRAIN,
    TEMPLATE,
    UNPACKED,
    assistant,
    places_in,
    recipe,
    tokens_of,
    user,
)

from hoist.torch import finetune  # noqa: E402

ON_CPU = not os.environ.get("HOIST_TEST_ACCELERATOR")
# A recipe takes CUDA, or the CPU; another device when it is told so.
DEVICE = {} if ON_CPU else {"use_cpu": False, "dataloader_pin_memory": False}


@pytest.fixture
def places(tmp_path):
    return places_in(tmp_path)


def command(text, places, path, **changes):
    """Runs the recipe as a user does. Returns the exit status."""
    (path / "recipe.yaml").write_text(text.format(**places))
    changes = [word for key, value in (DEVICE | changes).items() for word in ("--set", f"{key}={value}")]
    return finetune.main([str(path / "recipe.yaml"), *changes])


def numbers(log):
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return [(row["step"], key, row[key]) for row in log for key in keys if key in row]


def state_of(path):
    with open(f"{path}/trainer_state.json") as file:
        return json.load(file)


def history(places):
    return numbers(state_of(places["out"])["log_history"])


def in_memory(places, base, train, evaluation=None, lora=None, **arguments):
    """The same run by TRL alone."""
    options = {"report_to": "none", "bf16": False, "seed": 42, "output_dir": places["out"] + "-memory", "use_cpu": True,
               "logging_steps": 1, "lr_scheduler_type": "cosine", "disable_tqdm": True, "save_strategy": "no"}
    options |= DEVICE | arguments
    if transformers.__version__.startswith("4.") and 0 < options["warmup_steps"] < 1:
        options["warmup_ratio"] = options.pop("warmup_steps")
    kind, config = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig),
                    "kto": (trl.KTOTrainer, trl.KTOConfig), "reward": (trl.RewardTrainer, trl.RewardConfig)}[base]
    transformers.set_seed(42)
    if base == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(places["model"], dtype=torch.float32,
                                                                                num_labels=1)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(places["model"], dtype=torch.float32)
    transformers.set_seed(42)
    trainer = kind(model=model, args=config(**options), train_dataset=train, eval_dataset=evaluation, peft_config=lora,
                   processing_class=transformers.AutoTokenizer.from_pretrained(places["model"]))
    trainer.train()
    return numbers(trainer.state.log_history)


def same(found, expected):
    assert [row[:2] for row in found] == [row[:2] for row in expected] and expected
    for (*place, value), (*_, wanted) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-6), place


def conversation(row):
    asked = "\n".join(filter(None, (row["instruction"], row["input"])))
    return {"prompt": [user(asked)], "completion": [assistant(row["output"])]}


def conversations_of(places):
    """The rows to train with, and those to evaluate with."""
    rows = datasets.Dataset.from_list([conversation(row) for row in places["alpaca"]])
    return rows.train_test_split(test_size=0.2, seed=42).values()


def pairs_of(places):
    return datasets.Dataset.from_list([
        {"prompt": [user(row["conversations"][0]["value"])], "chosen": [assistant(row["chosen"]["value"])],
         "rejected": [assistant(row["rejected"]["value"])]} for row in places["pairs"]])


def adapters(**changes):
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"} | changes)


LLAMA_FACTORY = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "num_train_epochs": 2,
                 "warmup_steps": 0.1, "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("text", [LORA_SFT, FULL_SFT], ids=["lora", "full"])
def test_llama_factory_sft(tmp_path, places, capsys, text):
    assert command(text, places, tmp_path) == 0
    printed = capsys.readouterr().err
    assert "plot_loss" in printed and "template llama3" in printed and ("no deepspeed file" in printed) == (text is LORA_SFT)
    lora = adapters() if text is LORA_SFT else None
    same(history(places), in_memory(places, "sft", *conversations_of(places), lora, **LLAMA_FACTORY))


def test_llama_factory_dpo(tmp_path, places):
    assert command(LORA_DPO, places, tmp_path, pref_beta=0.2) == 0
    split = pairs_of(places).train_test_split(test_size=0.2, seed=42)
    same(history(places), in_memory(places, "dpo", split["train"], split["test"], adapters(), beta=0.2, **LLAMA_FACTORY))


def test_llama_factory_kto(tmp_path, places, capsys):
    assert command(LORA_KTO, places, tmp_path, pref_beta=0.2, kto_rejected_weight=1.5, logging_steps=1) == 0
    printed = capsys.readouterr().err
    assert "KTO: micro-batches have 2 rows, not 1, and a step has 4 of them" in printed and "it is shuffled once" in printed
    split = datasets.Dataset.from_list([
        {"prompt": row["messages"][:1], "completion": row["messages"][1:], "label": row["label"]} for row in places["judged"]
        ]).train_test_split(test_size=0.2, seed=42)
    same(history(places), in_memory(
        places, "kto", split["train"].shuffle(seed=42), split["test"], adapters(), beta=0.2, undesirable_weight=1.5,
        **LLAMA_FACTORY | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}))


def test_axolotl_kto(tmp_path, places):
    assert command(AXOLOTL_KTO, places, tmp_path, optimizer="adamw_torch") == 0
    mark = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    rows = [{"prompt": mark("user") + row["prompt"] + "<|eot_id|>" + mark("assistant"),
             "completion": row["completion"] + "<|eot_id|>", "label": row["label"]}
            for row in places["ultra"]]
    same(history(places), in_memory(
        places, "kto", datasets.Dataset.from_list(rows).shuffle(seed=42), None, adapters(r=32, lora_alpha=64, lora_dropout=0.05),
        beta=0.5, desirable_weight=0.2, learning_rate=2e-4, per_device_train_batch_size=2, max_steps=4, warmup_steps=0,
        weight_decay=0.0))


def test_llama_factory_reward_model(tmp_path, places, capsys):
    """The head is not in the model's files."""
    assert command(LORA_RM, places, tmp_path) == 0
    assert "the reward is the head `score`" in capsys.readouterr().err
    split = pairs_of(places).train_test_split(test_size=0.2, seed=42)
    lora = adapters(task_type="SEQ_CLS")
    same(history(places), in_memory(places, "reward", split["train"], split["test"], lora, **LLAMA_FACTORY))
    base = transformers.AutoModelForSequenceClassification.from_pretrained(places["model"], num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, places["out"])
    assert peft.PeftConfig.from_pretrained(places["out"]).task_type == "SEQ_CLS"
    assert torch.equal(peft.get_peft_model_state_dict(loaded)["base_model.model.score.weight"].cpu(),
                       weights(tmp_path / "out")["base_model.model.score.weight"])


def test_axolotl_reward_model(tmp_path, places):
    assert command(AXOLOTL_REWARD, places, tmp_path, optimizer="adamw_torch") == 0
    rows = [{"prompt": ([{"role": "system", "content": row["system"]}] if row["system"] else []) + [user(row["input"])],
             "chosen": [assistant(row["chosen"])], "rejected": [assistant(row["rejected"])]} for row in places["orca"]]
    same(history(places), in_memory(
        places, "reward", datasets.Dataset.from_list(rows).shuffle(seed=42), None, None, center_rewards_coefficient=0.01,
        learning_rate=2e-4, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, warmup_steps=0,
        weight_decay=0.0))
    saved, info = transformers.AutoModelForSequenceClassification.from_pretrained(places["out"], output_loading_info=True)
    assert saved.num_labels == 1 and not info["missing_keys"]


def alpaca_in_memory(places, **arguments):
    """What AXOLOTL_LORA stands for."""
    rows = [{"prompt": (ALPACA_INPUT if row["input"] else ALPACA).format(**row), "completion": row["output"]}
            for row in places["alpaca"]]
    split = datasets.Dataset.from_list(rows).shuffle(seed=42).train_test_split(test_size=0.1, shuffle=False)
    lora = adapters(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=[
        "gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"])
    return in_memory(
        places, "sft", split["train"], split["test"], lora, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=2e-4, max_steps=state_of(places["out"])["max_steps"], warmup_steps=0, per_device_eval_batch_size=2,
        eval_strategy="steps", eval_steps=0.25, eval_on_start=True, weight_decay=0.0, **arguments)


def test_axolotl_lora_alpaca(tmp_path, places):
    assert command(AXOLOTL_LORA, places, tmp_path, **UNPACKED) == 0
    assert state_of(places["out"])["max_steps"] == 5
    same(history(places), alpaca_in_memory(places))


def test_dora(tmp_path, places):
    """Magnitudes begin as the norms of weights that are still in files when PEFT makes the adapters."""
    assert command(LORA_SFT, places, tmp_path, use_dora=True) == 0
    same(history(places), in_memory(places, "sft", *conversations_of(places), adapters(use_dora=True), **LLAMA_FACTORY))


# As axolotl publishes most of its examples: packed, 8-bit optimizer states, a quantized base.
def test_axolotl_unchanged(tmp_path, places, capsys, caplog):
    text = AXOLOTL_LORA.replace("adapter: lora\n", "adapter: qlora\nload_in_4bit: true\n").replace(
        "sequence_len: 2048", "sequence_len: 256") + "fsdp_version: 2\nearly_stopping_patience: 2\n"
    assert command(text, places, tmp_path) == 0
    printed = capsys.readouterr().err
    assert "adapter: qlora, load_in_4bit: the base weights are not quantized" in printed
    assert "packing: 18 rows of the training data are in" in printed
    assert "optim adamw_8bit is hoist's AdamW" in caplog.text and "moments of 8 bits" in caplog.text
    found, expected = history(places), alpaca_in_memory(places, packing=True, max_length=256)
    # The first losses are before any update, where states of 8 bits make no difference.
    first = [row for row in found if row[0] <= 1]
    same(first, [row for row in expected if row[0] <= 1])
    assert len(found) == len(expected)


def test_packed_rows_are_those_of_trl(tmp_path, places, capsys):
    assert command(AXOLOTL_LORA, places, tmp_path, optimizer="adamw_torch", sequence_len=256) == 0
    assert "do not see each other" in capsys.readouterr().err
    same(history(places), alpaca_in_memory(places, packing=True, max_length=256))


def test_a_packed_row_sees_its_own_tokens_only(tmp_path, places):
    """All rows in one step: the loss of its tokens is the same, however they are put together."""
    one = {"optimizer": "adamw_torch", "sequence_len": 256, "micro_batch_size": 18, "gradient_accumulation_steps": 1,
           "lora_dropout": 0, "max_steps": 1}
    losses = []
    for packing in ("true", "false"):
        places["out"] += packing
        assert command(AXOLOTL_LORA, places, tmp_path, sample_packing=packing, eval_sample_packing=packing, **one) == 0
        losses += [value for _, key, value in history(places) if key in ("loss", "grad_norm")]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


def test_llama_factory_packs_rows_too(tmp_path, places, capsys):
    assert command(LORA_SFT, places, tmp_path, packing="true", quantization_bit=4) == 0
    printed = capsys.readouterr().err
    assert "packing: 16 rows of the training data are in 1 of up to 2048" in printed and "quantization_bit: the base" in printed


def test_llama_factory_pretraining(tmp_path, places):
    """Texts one after the other, in blocks, as LLaMA-Factory's processor cuts them."""
    texts = [" ".join(f"w{n}" for n in range(at, at + 9)) for at in range(0, 200, 5)]
    (tmp_path / "data" / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    info = json.loads((tmp_path / "data" / "dataset_info.json").read_text())
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(
        info | {"texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}}}))
    keys = {"model_name_or_path": "", "stage": "pt", "dataset": "texts", "dataset_dir": places["data"], "cutoff_len": 16}
    rows, notices = tokens_of(places, **keys)
    whole = " ".join(f"[{word}]" for text in texts for word in [*text.split(), "</s>"]).split()
    assert [row.split() for row in rows] == [whole[at:at + 16] for at in range(0, len(whole) // 16 * 16, 16)]
    assert notices == ["training data: 40 texts are 25 rows of up to 16 tokens"]
    rows, _ = tokens_of(places, **keys, packing=False)
    assert rows == [" ".join(f"[{word}]" for word in [*text.split(), "</s>"]) for text in texts]
    assert command(PRETRAIN, places, tmp_path) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(places["model"])
    blocks = [tokenizer.convert_tokens_to_ids([word.strip("[]") for word in whole[at:at + 16]]) for at in range(0, 400, 16)]
    split = datasets.Dataset.from_list([{"text": text} for text in texts]).train_test_split(test_size=0.2, seed=42)
    assert len(split["train"]) == 32 and len(blocks) == 25
    joined = [token for row in split["train"] for token in tokenizer(row["text"] + "</s>", add_special_tokens=False)["input_ids"]]
    other = [token for row in split["test"] for token in tokenizer(row["text"] + "</s>", add_special_tokens=False)["input_ids"]]
    cut = [datasets.Dataset.from_list([{"input_ids": tokens[at:at + 16]} for at in range(0, len(tokens) // 16 * 16, 16)])
           for tokens in (joined, other)]
    same(history(places), in_memory(places, "sft", *cut, adapters(), **LLAMA_FACTORY))


def test_early_stopping(tmp_path, places):
    changes = {"early_stopping_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": "true", "save_steps": 1,
               "eval_steps": 1, "save_strategy": "steps", "learning_rate": 0.5, "num_train_epochs": 8, "max_grad_norm": 0}
    assert command(LORA_SFT, places, tmp_path, **changes) == 0
    state = state_of(places["out"])
    losses = [row["eval_loss"] for row in state["log_history"] if "eval_loss" in row]
    assert state["global_step"] < state["max_steps"] and losses[1] > losses[0]


def test_axolotl_chat_template(tmp_path, places, capsys):
    assert command(AXOLOTL_CHAT, places, tmp_path) == 0
    rows = [{"prompt": [user(chat[0]["value"])], "completion": [assistant(chat[1]["value"])]} for chat in places["chats"]]
    same(history(places), in_memory(places, "sft", datasets.Dataset.from_list(rows).shuffle(seed=42), learning_rate=2e-4,
                                    per_device_train_batch_size=4, max_steps=4, warmup_steps=2, weight_decay=0.01))
    saved = transformers.AutoModelForCausalLM.from_pretrained(places["out"])
    assert command(AXOLOTL_CHAT, places, tmp_path) == 2 and "--set resume_from_checkpoint=true" in capsys.readouterr().err
    assert saved.num_parameters() > 0 and transformers.AutoTokenizer.from_pretrained(places["out"]).chat_template == TEMPLATE


def test_axolotl_dpo(places):
    entry = {"path": places["data"] + "/dpo_en_demo.json", "type": "chat_template.default", "field_messages": "conversations",
             "message_property_mappings": {"role": "from", "content": "value"},
             "roles": {"user": ["human"], "assistant": ["gpt"]}}
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}
    finetune.run(recipe(AXOLOTL_CHAT, places, rl="dpo", rl_beta=0.2, datasets=[entry], **lora, **DEVICE))
    same(history(places), in_memory(places, "dpo", pairs_of(places).shuffle(seed=42), None, adapters(r=4, lora_alpha=8), beta=0.2,
                                    learning_rate=2e-4, per_device_train_batch_size=4, max_steps=5, warmup_steps=2,
                                    weight_decay=0.01))


class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


def weights(path):
    from safetensors.torch import load_file
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def undisturbed():
    """What recipes end with: some are resumed in more than one way."""
    return {}


@pytest.mark.parametrize(("text", "resume"), [
    (LORA_SFT, {"overwrite_output_dir": "false"}), (FULL_SFT, {"resume_from_checkpoint": "{out}/checkpoint-2"}),
    (LORA_RM, {"overwrite_output_dir": "false"}),
    (AXOLOTL_CHAT, {"auto_resume_from_checkpoints": "true"}), (AXOLOTL_CHAT, {"resume_from_checkpoint": "true"})])
def test_killed_and_resumed_with_the_bits_of_an_undisturbed_run(tmp_path, places, monkeypatch, undisturbed, text, resume):
    changes = {"save_steps": 1, "saves_per_epoch": "null"} if text is AXOLOTL_CHAT else {"save_steps": 1}
    if text not in undisturbed:
        assert command(text, places, tmp_path, output_dir=tmp_path / "whole", **changes) == 0
        undisturbed[text] = weights(tmp_path / "whole")
    places["deepspeed"] = places["deepspeed"].replace(".json", "-2.json")
    (tmp_path / "ds_z3_offload_config-2.json").write_text((tmp_path / "ds_z3_offload_config.json").read_text().replace(
        "elsewhere", "elsewhere-2"))
    made = finetune.Trainer.__init__

    def with_death(self, *positional, **arguments):
        made(self, *positional, **arguments)
        self.add_callback(Dies())

    with monkeypatch.context() as patched:
        patched.setattr(finetune.Trainer, "__init__", with_death)
        trainers = []
        patched.setattr(finetune.Trainer, "train", lambda self, *a, _train=finetune.Trainer.train, **k: (
            trainers.append(self), _train(self, *a, **k))[1])
        with pytest.raises(KeyboardInterrupt):
            command(text, places, tmp_path, **changes)
        trainers[0].engine.close()
    assert command(text, places, tmp_path, **{key: value.format(**places) for key, value in resume.items()}, **changes) == 0
    expected, found = undisturbed[text], weights(tmp_path / "out")
    assert expected and expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    steps = [row["step"] for row in state_of(tmp_path / "out")["log_history"] if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(("text", "changes", "expected"), [
    (LORA_SFT, {"save_strategy": False, "eval_strategy": False, "dataset": ["identity"], "warmup_ratio": 1.0, "val_size": 0,
                "gradient_accumulation_steps": 1}, {"save_strategy": "no", "eval_strategy": "no"}),
    (LORA_SFT, {"warmup_ratio": 0.5, "gradient_accumulation_steps": 1, "eval_strategy": False, "val_size": 0}, {}),
    (AXOLOTL_CHAT, {"save_strategy": False}, {"save_strategy": "no"})])
def test_values_as_yaml_reads_them(tmp_path, places, text, changes, expected):
    """`no` is False, and a ratio of 1 is not one step."""
    trainer = finetune.run(recipe(text, places, output_dir=str(tmp_path / "out"), **changes, **DEVICE))
    for name, value in expected.items():
        assert getattr(trainer.args, name) == value
    if "warmup_ratio" in changes:
        steps = trainer.state.max_steps
        assert steps > 1 and trainer.args.get_warmup_steps(steps) == -(-steps * changes["warmup_ratio"] // 1)
