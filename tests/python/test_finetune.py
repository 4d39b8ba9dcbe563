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
import yaml  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

import hoist  # noqa: E402
from hoist.torch import finetune  # noqa: E402
from hoist.torch.finetune import data as finetune_data  # noqa: E402

ON_CPU = not os.environ.get("HOIST_TEST_ACCELERATOR")
# A recipe takes CUDA, or the CPU; another device when it is told so.
DEVICE = {} if ON_CPU else {"use_cpu": False, "dataloader_pin_memory": False}

TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} </s>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|> {% endif %}")
ALPACA = ("Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
          "### Instruction:\n{instruction}\n\n### Response:\n")
ALPACA_INPUT = ("Below is an instruction that describes a task, paired with an input that provides further context. Write a "
                "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
                "### Response:\n")

LORA_SFT = """
### model
model_name_or_path: {model}
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: identity,alpaca_en_demo
dataset_dir: {data}
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 0
### output
output_dir: {out}
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_steps: 0
warmup_ratio: 0.1
bf16: false
ddp_timeout: 180000000
resume_from_checkpoint: null
### eval
val_size: 0.2
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 2
"""
FULL_SFT = LORA_SFT.replace("finetuning_type: lora\nlora_rank: 8\nlora_target: all",
                            "finetuning_type: full\ndeepspeed: {deepspeed}")
LORA_DPO = LORA_SFT.replace("stage: sft", "stage: dpo").replace("lora_target: all", """lora_target: all
pref_beta: 0.1
pref_loss: sigmoid  # choices: [sigmoid (dpo), orpo, simpo]""").replace("identity,alpaca_en_demo", "dpo_en_demo")
AXOLOTL_LORA = """
base_model: {model}
datasets:
  - path: {data}/alpaca.jsonl
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: {out}
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - up_proj
  - q_proj
  - v_proj
  - k_proj
  - o_proj
wandb_project:
wandb_name:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
"""
AXOLOTL_CHAT = """
base_model: {model}
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
chat_template: llama3
datasets:
  - path: json
    data_files: {data}/chat.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles:
      user: [human]
      assistant: [gpt]
dataset_prepared_path:
val_set_size: 0
output_dir: {out}
sequence_len: 4096
sample_packing: false
gradient_accumulation_steps: 1
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_fused_linear_cross_entropy: true
warmup_steps: 2
saves_per_epoch: 1
weight_decay: 0.01
deepspeed: {deepspeed}
"""
UNPACKED = {"sample_packing": "false", "eval_sample_packing": "false", "optimizer": "adamw_torch"}
PRETRAIN = LORA_SFT.replace("stage: sft", "stage: pt").replace("identity,alpaca_en_demo", "texts").replace(
    "cutoff_len: 2048", "cutoff_len: 16").replace("template: llama3\n", "")


@pytest.fixture
def places(tmp_path):
    """A model, its tokenizer and the data, named as recipes name them."""
    generator = torch.Generator().manual_seed(5)

    def said():
        return " ".join(f"w{n}" for n in torch.randint(0, 250, (6,), generator=generator, device="cpu").tolist())

    own = " ".join([ALPACA_INPUT, "<| user |> system assistant"])
    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted({word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(own)}),
             *(f"w{n}" for n in range(250))]
    of_words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(dict.fromkeys(words))}, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    of_words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>",
                                                     eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    alpaca = [{"instruction": said(), "input": said() if n % 2 else "", "output": said()} for n in range(20)]
    chats = [[{"from": "human", "value": said()}, {"from": "gpt", "value": said()}] for _ in range(16)]
    pairs = [{"conversations": [{"from": "human", "value": said()}], "chosen": {"from": "gpt", "value": said()},
              "rejected": {"from": "gpt", "value": said()}} for _ in range(20)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "identity.json").write_text(json.dumps(alpaca[:8]))
    (data / "alpaca_en_demo.json").write_text(json.dumps(alpaca[8:]))
    (data / "dpo_en_demo.json").write_text(json.dumps(pairs))
    (data / "alpaca.jsonl").write_text("\n".join(map(json.dumps, alpaca)))
    (data / "chat.jsonl").write_text("\n".join(json.dumps({"conversations": chat}) for chat in chats))
    (data / "dataset_info.json").write_text(json.dumps({
        "identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
        "dpo_en_demo": {"file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt", "columns": {
            "messages": "conversations", "chosen": "chosen", "rejected": "rejected"}}}))
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "elsewhere"), "pin_memory": True}
    (tmp_path / "ds_z3_offload_config.json").write_text(json.dumps({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "zero_optimization": {
            "stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "overlap_comm": False, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True}}))
    return {"model": str(tmp_path / "model"), "data": str(data), "out": str(tmp_path / "out"),
            "deepspeed": str(tmp_path / "ds_z3_offload_config.json"), "alpaca": alpaca, "chats": chats, "pairs": pairs}


def recipe(text, places, **changes):
    return yaml.safe_load(text.format(**places)) | changes


def command(text, places, path, **changes):
    """Runs the recipe as a user does. Returns the exit status."""
    (path / "recipe.yaml").write_text(text.format(**places))
    changes = [word for key, value in (DEVICE | changes).items() for word in ("--set", f"{key}={value}")]
    return finetune.main([str(path / "recipe.yaml"), *changes])


def numbers(log):
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return [(row["step"], key, row[key]) for row in log for key in keys if key in row]


def history(places):
    with open(f"{places['out']}/trainer_state.json") as file:
        return numbers(json.load(file)["log_history"])


def in_memory(places, base, train, evaluation=None, lora=None, **arguments):
    """The same run by TRL alone."""
    options = {"report_to": "none", "bf16": False, "seed": 42, "output_dir": places["out"] + "-memory", "use_cpu": True,
               "logging_steps": 1, "lr_scheduler_type": "cosine", "disable_tqdm": True, "save_strategy": "no"}
    options |= DEVICE | arguments
    if transformers.__version__.startswith("4.") and 0 < options["warmup_steps"] < 1:
        options["warmup_ratio"] = options.pop("warmup_steps")
    model = transformers.AutoModelForCausalLM.from_pretrained(places["model"], dtype=torch.float32)
    kind, config = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[base]
    transformers.set_seed(42)
    trainer = kind(model=model, args=config(**options), train_dataset=train, eval_dataset=evaluation, peft_config=lora,
                   processing_class=transformers.AutoTokenizer.from_pretrained(places["model"]))
    trainer.train()
    return numbers(trainer.state.log_history)


def same(found, expected):
    assert [row[:2] for row in found] == [row[:2] for row in expected] and expected
    for (*place, value), (*_, wanted) in zip(found, expected, strict=True):
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-6), place


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def conversation(row):
    asked = "\n".join(filter(None, (row["instruction"], row["input"])))
    return {"prompt": [user(asked)], "completion": [assistant(row["output"])]}


LLAMA_FACTORY = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "num_train_epochs": 2,
                 "warmup_steps": 0.1, "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("text", [LORA_SFT, FULL_SFT], ids=["lora", "full"])
def test_llama_factory_sft(tmp_path, places, capsys, text):
    assert command(text, places, tmp_path) == 0
    said = capsys.readouterr().err
    assert "plot_loss" in said and "template llama3" in said and ("no deepspeed file" in said) == (text is LORA_SFT)
    split = datasets.Dataset.from_list([conversation(row) for row in places["alpaca"]]).train_test_split(test_size=0.2, seed=42)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if text is LORA_SFT else None
    same(history(places), in_memory(places, "sft", split["train"], split["test"], lora, **LLAMA_FACTORY))


def test_llama_factory_dpo(tmp_path, places):
    assert command(LORA_DPO, places, tmp_path, pref_beta=0.2) == 0
    rows = [{"prompt": [user(row["conversations"][0]["value"])], "chosen": [assistant(row["chosen"]["value"])],
             "rejected": [assistant(row["rejected"]["value"])]} for row in places["pairs"]]
    split = datasets.Dataset.from_list(rows).train_test_split(test_size=0.2, seed=42)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    same(history(places), in_memory(places, "dpo", split["train"], split["test"], lora, beta=0.2, **LLAMA_FACTORY))


def alpaca_split(places):
    rows = [{"prompt": (ALPACA_INPUT if row["input"] else ALPACA).format(**row), "completion": row["output"]}
            for row in places["alpaca"]]
    return datasets.Dataset.from_list(rows).shuffle(seed=42).train_test_split(test_size=0.1, shuffle=False)


def alpaca_adapters():
    return peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, task_type="CAUSAL_LM", target_modules=[
        "gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"])


def test_axolotl_lora_alpaca(tmp_path, places):
    assert command(AXOLOTL_LORA, places, tmp_path, **UNPACKED) == 0
    split, lora = alpaca_split(places), alpaca_adapters()
    same(history(places), in_memory(
        places, "sft", split["train"], split["test"], lora, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=2e-4, max_steps=5, warmup_steps=0, per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=0.25,
        eval_on_start=True, weight_decay=0.0))


def test_dora(tmp_path, places):
    """Magnitudes begin as the norms of weights that are still in files when PEFT makes the adapters."""
    assert command(LORA_SFT, places, tmp_path, use_dora=True) == 0
    split = datasets.Dataset.from_list([conversation(row) for row in places["alpaca"]]).train_test_split(test_size=0.2, seed=42)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True)
    same(history(places), in_memory(places, "sft", split["train"], split["test"], lora, **LLAMA_FACTORY))


# As axolotl publishes most of its examples: packed, 8-bit optimizer states, a quantized base.
def test_axolotl_unchanged(tmp_path, places, capsys, caplog):
    text = AXOLOTL_LORA.replace("adapter: lora\n", "adapter: qlora\nload_in_4bit: true\n").replace(
        "sequence_len: 2048", "sequence_len: 256") + "fsdp_version: 2\nearly_stopping_patience: 2\n"
    assert command(text, places, tmp_path) == 0
    said = capsys.readouterr().err
    assert "adapter: qlora, load_in_4bit: the base weights are not quantized" in said
    assert "packing: 18 rows of the training data are in" in said
    assert "optim adamw_8bit is hoist's AdamW" in caplog.text and "moments of 8 bits" in caplog.text
    split = alpaca_split(places)
    found, expected = history(places), in_memory(
        places, "sft", split["train"], split["test"], alpaca_adapters(), packing=True, max_length=256,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-4, max_steps=steps_of(places),
        warmup_steps=0, per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=0.25, eval_on_start=True,
        weight_decay=0.0)
    # The first losses are before any update, where states of 8 bits make no difference.
    first = [row for row in found if row[0] <= 1]
    same(first, [row for row in expected if row[0] <= 1])
    assert len(found) == len(expected)


def steps_of(places):
    with open(f"{places['out']}/trainer_state.json") as file:
        return json.load(file)["max_steps"]


def test_packed_rows_are_those_of_trl(tmp_path, places, capsys):
    assert command(AXOLOTL_LORA, places, tmp_path, optimizer="adamw_torch", sequence_len=256) == 0
    assert "do not see each other" in capsys.readouterr().err
    split = alpaca_split(places)
    same(history(places), in_memory(
        places, "sft", split["train"], split["test"], alpaca_adapters(), packing=True, max_length=256,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=2e-4, max_steps=steps_of(places),
        warmup_steps=0, per_device_eval_batch_size=2, eval_strategy="steps", eval_steps=0.25, eval_on_start=True,
        weight_decay=0.0))


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
    said = capsys.readouterr().err
    assert "packing: 16 rows of the training data are in 1 of up to 2048" in said and "quantization_bit: the base" in said


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
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    same(history(places), in_memory(places, "sft", *cut, lora, **LLAMA_FACTORY))


def test_early_stopping(tmp_path, places):
    changes = {"early_stopping_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": "true", "save_steps": 1,
               "eval_steps": 1, "save_strategy": "steps", "learning_rate": 0.5, "num_train_epochs": 8, "max_grad_norm": 0}
    assert command(LORA_SFT, places, tmp_path, **changes) == 0
    with open(f"{places['out']}/trainer_state.json") as file:
        state = json.load(file)
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
    rows = [{"prompt": [user(row["conversations"][0]["value"])], "chosen": [assistant(row["chosen"]["value"])],
             "rejected": [assistant(row["rejected"]["value"])]} for row in places["pairs"]]
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    same(history(places), in_memory(places, "dpo", datasets.Dataset.from_list(rows).shuffle(seed=42), None, adapters, beta=0.2,
                                    learning_rate=2e-4, per_device_train_batch_size=4, max_steps=5, warmup_steps=2,
                                    weight_decay=0.01))


class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


def weights(path):
    from safetensors.torch import load_file
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize(("text", "resume"), [
    (LORA_SFT, {"overwrite_output_dir": "false"}), (FULL_SFT, {"resume_from_checkpoint": "{out}/checkpoint-2"}),
    (AXOLOTL_CHAT, {"auto_resume_from_checkpoints": "true"}), (AXOLOTL_CHAT, {"resume_from_checkpoint": "true"})])
def test_killed_and_resumed_with_the_bits_of_an_undisturbed_run(tmp_path, places, monkeypatch, text, resume):
    changes = {"save_steps": 1, "saves_per_epoch": "null"} if text is AXOLOTL_CHAT else {"save_steps": 1}
    assert command(text, places, tmp_path, output_dir=tmp_path / "whole", **changes) == 0
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
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert expected and expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with open(tmp_path / "out" / "trainer_state.json") as file:
        steps = [row["step"] for row in json.load(file)["log_history"] if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(("text", "changes", "names"), [
    (LORA_SFT, {"stage": "ppo"}, ["stage: ppo", "--set stage=sft"]),
    (LORA_SFT, {"finetuning_type": "freeze", "pure_bf16": True}, [
        "finetuning_type: freeze", "pure_bf16: True", "--set finetuning_type=lora --set pure_bf16=false"]),
    (LORA_SFT, {"optim": "adafactor"}, ["optim: adafactor"]),
    (LORA_SFT, {"early_stopping_steps": 2, "eval_strategy": "no"}, ["early_stopping_steps: nothing is evaluated"]),
    (LORA_SFT, {"model_name_or_path": "no-body/no-model"}, ["the model no-body/no-model is no path here", "hf download"]),
    (AXOLOTL_CHAT, {"datasets": [{"path": "no-body/no-data", "type": "alpaca"}]}, ["the data set no-body/no-data is no path"]),
    (FULL_SFT, {"deepspeed": "/no/ds.json"}, ["deepspeed: there is no file /no/ds.json"]),
    (LORA_SFT, {"dataset_dir": "/no/data"}, ["/no/data/dataset_info.json cannot be read", "No such file"]),
    (LORA_SFT, {"resume_from_checkpoint": True}, ["resume_from_checkpoint", "has no complete checkpoint to continue from"]),
    (LORA_SFT, {"resume_from_checkpoint": "/no"}, ["/no is not a directory that a Trainer saved"]),
    (LORA_SFT, {"lora_ranks": 4}, ["lora_ranks: hoist does not know this key"]),
    (LORA_SFT, {"val_set_size": 0.1}, ["val_set_size: hoist does not know this key"]),
    (LORA_SFT, {"max_length": 16}, ["max_length: hoist does not know this key"]),
    (LORA_SFT, {"dataset": None}, ["dataset: the recipe lacks it"]),
    (LORA_SFT, {"model_name_or_path": None}, ["has neither"]),
    (LORA_SFT, {"dataset": "nothing"}, ["nothing is not in", "dataset_info.json"]),
    (LORA_SFT, {"dataset": "dpo_en_demo"}, ["does not ask for DPO"]),
    (LORA_DPO, {"dataset": "identity"}, ["DPO needs pairs of answers"]),
    (LORA_DPO, {"pref_loss": "simpo"}, ["pref_loss: simpo"]),
    (AXOLOTL_CHAT, {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, ["plugins: [", "--set plugins=null"]),
    (AXOLOTL_CHAT, {"adapter": "lora"}, ["adapter: lora needs lora_r"]),
    (AXOLOTL_CHAT, {"special_tokens": {"pad_token": "<new>"}}, ["pad_token: <new> is not in the vocabulary"]),
    (AXOLOTL_CHAT, {"rl": "kto"}, ["rl: kto"]),
    (AXOLOTL_CHAT, {"datasets": [{"path": "x", "type": "sharegpt"}]}, ["type: sharegpt is not supported"]),
    (AXOLOTL_CHAT, {"datasets": [{"path": "x", "type": "alpaca", "shards": 2}]}, ["datasets, x: shards"]),
    (AXOLOTL_CHAT, {"datasets": "x"}, ["datasets: x: a list of entries with a path"]),
    (AXOLOTL_CHAT, {"datasets": [{"type": "alpaca"}]}, ["datasets: ", "a list of entries with a path"]),
    (AXOLOTL_CHAT, {"micro_batch_size": 0}, ["micro_batch_size: 0: a number of 1 or more"]),
    (LORA_SFT, {"max_samples": 0}, ["max_samples: 0: a number of 1 or more"]),
    (LORA_SFT, {"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps: 0: a number of 1 or more"]),
    (LORA_SFT, {"cutoff_len": "long"}, ["cutoff_len: long: a number of 1 or more"]),
    (LORA_SFT, {"warmup_ratio": 1.5}, ["warmup_ratio: 1.5: a share of the steps, from 0 to 1"]),
    (LORA_SFT, {"learning_rate": "abc"}, ["learning_rate: abc: a number is needed"]),
    (LORA_SFT, {"num_train_epochs": [1]}, ["num_train_epochs: [1]: a number is needed"]),
    (LORA_SFT, {"lora_rank": "eight"}, ["lora_rank: eight: a whole number is needed"]),
    (LORA_SFT, {"lr_scheduler_type": "foo"}, ["the recipe's values are refused", "foo"]),
    (LORA_SFT, {"lora_target": "nope"}, ["the recipe's values are refused", "nope"]),
])
def test_refused_by_name(places, text, changes, names):
    with pytest.raises(hoist.UsageError) as error:
        finetune.run(recipe(text, places, **changes))
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize(("text", "changes", "expected"), [
    (LORA_SFT, {"save_strategy": False, "eval_strategy": False, "dataset": ["identity"], "warmup_ratio": 1.0, "val_size": 0,
                "gradient_accumulation_steps": 1}, {"save_strategy": "no", "eval_strategy": "no"}),
    (LORA_SFT, {"warmup_ratio": 0.5, "gradient_accumulation_steps": 1, "eval_strategy": False, "val_size": 0}, {}),
    (AXOLOTL_CHAT, {"save_strategy": False}, {"save_strategy": "no"})])
def test_values_as_yaml_reads_them(tmp_path, places, text, changes, expected):
    """`no` is False, and a ratio of 1 is not one step."""
    trainer = finetune.run(recipe(text, places, output_dir=str(tmp_path / "out"), **changes))
    for name, value in expected.items():
        assert getattr(trainer.args, name) == value
    if "warmup_ratio" in changes:
        steps = trainer.state.max_steps
        assert steps > 1 and trainer.args.get_warmup_steps(steps) == -(-steps * changes["warmup_ratio"] // 1)


def tokens_of(places, **keys):
    """The rows that a recipe's keys make, as words, with the trained ones in brackets."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(places["model"])
    notices = []
    rows, _ = finetune_data.load_rows(keys, tokenizer, False, notices)
    assert all(label in (-100, token) for row in rows for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return [" ".join(f"[{word}]" if label >= 0 else word for word, label in zip(
        tokenizer.convert_ids_to_tokens(row["input_ids"]), row["labels"], strict=True)) for row in rows], notices


def of_json(*rows):
    return "\n".join(map(json.dumps, rows))


PAIR = {"instruction": "w1", "output": "w2"}
# A data set's file, its part of dataset_info.json or the keys of an axolotl recipe, and what is said of it.
UNUSABLE = {
    "no_prompt_column": (of_json({"prompt": "w1", "output": "w2"}), {"columns": None}, [
        "dataset_info.json, x: columns: the data have no column for prompt (instruction); they have prompt, output"]),
    "misspelt_column": (of_json(PAIR), {"columns": {"prompt": "question", "response": "output"}}, ["prompt (question)"]),
    "misspelt_query": (of_json(PAIR), {"columns": {"prompt": "instruction", "query": "inptu", "response": "output"}}, [
        "no column for query (inptu)"]),
    "no_column_named": (of_json(PAIR), {"columns": {"response": "output"}}, ["prompt (which is not named)"]),
    "no_messages": (of_json(PAIR), {"formatting": "sharegpt"}, ["no column for messages (conversations)"]),
    "no_answers": (of_json({"instruction": "w1", "output": None}), {"columns": None}, [
        "no row of the training data can be used; training data: 1 rows dropped"]),
    "alpaca": (of_json({"question": "w1", "answer": "w2"}), {}, [
        "the data have no column for instruction, output; they have question, answer"]),
    "text": (of_json(PAIR), {"type": "completion"}, ["no column for field (text); they have"]),
    "conversations": (of_json(PAIR), {"type": "chat_template", "field_messages": "chat"}, ["field_messages (chat)"]),
    "no_outputs": (of_json(PAIR | {"output": None}), {}, ["training data: 1 of 1 rows dropped, which lack a text"]),
    "all_too_long": (of_json(PAIR), {"sequence_len": 4}, ["no row of the training data", "more than 4 tokens (sequence_len)"]),
    "a_split_of_one_row": (of_json(PAIR), {"val_set_size": 0.1}, ["val_set_size: 0.1, of 1 rows"]),
    "broken_json": (of_json(PAIR) + "\n{broken", {}, ["x.jsonl cannot be read: ", "JSON"]),
    "empty": ("", {}, ["x.jsonl cannot be read: it is empty"]),
    "no_file": (None, {}, ["there is no data file", "x.jsonl"]),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_data_are_said_in_a_sentence(tmp_path, places, case):
    content, keys, messages = UNUSABLE[case]
    if content is not None:
        (tmp_path / "x.jsonl").write_text(content)
    if keys.keys() & {"columns", "formatting"}:
        info = {key: value for key, value in keys.items() if value}
        (tmp_path / "dataset_info.json").write_text(json.dumps({"x": {"file_name": "x.jsonl"} | info}))
        asked = {"model_name_or_path": "", "dataset": "x", "dataset_dir": str(tmp_path)}
    else:
        of_entry = {key: keys[key] for key in keys.keys() & {"type", "field_messages"}}
        asked = {"base_model": "", "datasets": [{"path": str(tmp_path / "x.jsonl"), "type": "alpaca"} | of_entry],
                 } | {key: value for key, value in keys.items() if key not in of_entry}
    with pytest.raises(hoist.UsageError) as error:
        tokens_of(places, **asked)
    assert all(message in str(error.value) for message in messages), str(error.value)


def test_rows_of_axolotl_that_lack_a_text_are_dropped(tmp_path, places):
    (tmp_path / "x.jsonl").write_text(of_json(PAIR, {"instruction": "w3"}, {"instruction": None, "output": "w4"}))
    (tmp_path / "y.jsonl").write_text(of_json({"messages": [user("w5"), assistant(None)]}, {"messages": None},
                                              {"messages": [user("w6"), assistant("w7")]}))
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "type": kind}
               for name, kind in (("x", "alpaca"), ("y", "chat_template"))]
    rows, notices = tokens_of(places, base_model="", datasets=entries, shuffle_merged_datasets=False)
    assert [row.partition(": ")[2].split()[-2:] for row in rows[:1]] == [["[w2]", "[</s>]"]]
    assert rows[1:] == ["<| user |> w6 </s> <| assistant |> [w7] [</s>]"]
    assert notices == ["training data: 4 of 6 rows dropped, which lack a text"]


@pytest.mark.parametrize(("keys", "expected"), [
    ({"saves_per_epoch": 1, "evals_per_epoch": 1}, ("epoch", None, "epoch", None)),
    ({"saves_per_epoch": 1, "evals_per_epoch": 2, "num_epochs": 2}, ("steps", 0.5, "steps", 0.25)),
    ({"saves_per_epoch": 4, "eval_steps": 3}, ("steps", 0.25, "steps", 3)),
    ({"save_strategy": "no"}, ("no", None, "epoch", None)),
    ({"val_set_size": 0, "evals_per_epoch": 2}, ("epoch", None, "no", None)),
])
def test_axolotl_saves_and_evaluates_as_often_as_asked(keys, expected):
    """1.0 would be one step to transformers."""
    given = {key: value for key, value in keys.items() if key.startswith(("save_", "eval_"))}
    defaults = finetune._of_axolotl({"val_set_size": 0.1} | keys, given, rows=100)
    found = tuple((defaults | given).get(f"{kind}_{key}") for kind in ("save", "eval") for key in ("strategy", "steps"))
    assert found == expected


LONG = [user("w1"), assistant("w2"), user("w3 w4 w5 w6 w7 w8"), assistant("w9 w10 w11 w12 w13 w14")]


def test_every_answer_of_a_conversation_is_trained_and_long_rows_are_cut_or_dropped(tmp_path, places):
    (tmp_path / "chats.json").write_text(json.dumps([{"messages": LONG}, {"messages": LONG[:2]}, {"messages": LONG[:1]}]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"chats": {
        "file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": {
            "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}}))
    first = "<| user |> w1 </s> <| assistant |> [w2] [</s>]"
    whole, notices = tokens_of(places, model_name_or_path="", dataset="chats", dataset_dir=str(tmp_path))
    assert whole == [first + " <| user |> w3 w4 w5 w6 w7 w8 </s> <| assistant |> " + " ".join(
        f"[w{n}]" for n in range(9, 15)) + " [</s>]", first]
    assert notices == ["training data: 1 rows dropped, whose turns do not alternate or lack an answer"]
    cut, notices = tokens_of(places, model_name_or_path="", dataset="chats", dataset_dir=str(tmp_path), cutoff_len=20)
    # 10 tokens stay for 13 and 7: the answer's share is 10 * 7 / 20.
    assert cut == [first + " <| user |> w3 w4 w5 w6 [w9] [w10] [w11]", first]
    assert "1 of 2 rows have more than 20 tokens" in notices[1]
    entry = {"path": str(tmp_path / "chats.json"), "type": "chat_template"}
    dropped, notices = tokens_of(places, base_model="", datasets=[entry], sequence_len=20)
    assert dropped == [first] and "2 of 3 rows dropped" in notices[0]


def test_history_and_system_of_alpaca_and_raw_text(tmp_path, places):
    row = {"instruction": "w1", "output": "w2", "system": "w3", "history": [["w4", "w5"]]}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json", "columns": {
        "prompt": "instruction", "response": "output", "system": "system", "history": "history"}}}))
    found, _ = tokens_of(places, model_name_or_path="", dataset="rows", dataset_dir=str(tmp_path))
    assert found == ["<| system |> w3 </s> <| user |> w4 </s> <| assistant |> [w5] [</s>] "
                     "<| user |> w1 </s> <| assistant |> [w2] [</s>]"]
    (tmp_path / "raw.jsonl").write_text(json.dumps({"text": "w1 w2 w3 w4 w5"}))
    entry = {"path": str(tmp_path / "raw.jsonl"), "type": "completion"}
    found, _ = tokens_of(places, base_model="", datasets=[entry], sequence_len=4, shuffle_merged_datasets=False)
    assert found == ["[<s>] [w1] [w2] [w3]", "[w4] [w5] [</s>]"]


def test_conversations_need_a_chat_template_that_keeps_earlier_turns(tmp_path, places):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": LONG}))
    asked = {"base_model": "", "datasets": [{"path": str(tmp_path / "chats.jsonl"), "type": "chat_template"}]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(places["model"])
    counted = "{{ messages | length }}" + TEMPLATE
    for template, why in ((None, "no chat template"), (counted, "renders earlier turns differently")):
        tokenizer.chat_template = template
        with pytest.raises(hoist.UsageError, match=why):
            finetune_data.load_rows(asked, tokenizer, False, [])
    # The end of an answer, which is trained, is the template's.
    tokenizer.chat_template = TEMPLATE
    rows, _ = finetune_data.load_rows(asked | {"eot_tokens": ["</s>"]}, tokenizer, False, [])
    assert rows["labels"] == finetune_data.load_rows(asked, tokenizer, False, [])[0]["labels"]
    tokenizer.chat_template = TEMPLATE.replace(" </s>", "")
    with pytest.raises(hoist.UsageError, match="eot_tokens: <end>"):
        finetune_data.load_rows(asked | {"eot_tokens": ["<end>"]}, tokenizer, False, [])
