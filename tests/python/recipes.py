# SPDX-License-Identifier: Apache-2.0
"""Recipes as the examples of LLaMA-Factory and axolotl have them, a model of 0.1 M parameters, and data for them."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
import yaml  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from hoist.torch.finetune import data as finetune_data  # noqa: E402
from hoist.torch.finetune.methods import method_of  # noqa: E402

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
LORA_KTO = LORA_SFT.replace("stage: sft", "stage: kto").replace("lora_target: all", "lora_target: all\npref_beta: 0.1").replace(
    "identity,alpaca_en_demo", "kto_en_demo")
LORA_RM = LORA_SFT.replace("stage: sft", "stage: rm").replace("identity,alpaca_en_demo", "dpo_en_demo")
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
AXOLOTL_KTO = """
base_model: {model}
load_in_8bit: false
load_in_4bit: true
rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2
datasets:
  - path: {data}/ultra.jsonl
    type: llama3.ultra
    split: train
dataset_prepared_path: last_run_prepared
val_set_size: 0.0
output_dir: {out}
remove_unused_columns: false
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: false  # not supported with kto
eval_sample_packing: false
pad_to_sequence_len: false
lora_r: 32
lora_alpha: 64
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 1
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
"""
AXOLOTL_REWARD = """
base_model: {model}
model_type: AutoModelForSequenceClassification
num_labels: 1
tokenizer_type: AutoTokenizer
reward_model: true
center_rewards_coefficient: 0.01
chat_template: qwen_25
datasets:
  - path: {data}/pairs.jsonl
    type: bradley_terry.chat_template
val_set_size: 0.0
output_dir: {out}
remove_unused_columns: false
sequence_len: 2048
sample_packing: false
eval_sample_packing: false
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch:
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
"""
UNPACKED = {"sample_packing": "false", "eval_sample_packing": "false", "optimizer": "adamw_torch"}
PRETRAIN = LORA_SFT.replace("stage: sft", "stage: pt").replace("identity,alpaca_en_demo", "texts").replace(
    "cutoff_len: 2048", "cutoff_len: 16").replace("template: llama3\n", "")


def places_in(tmp_path):
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
    judged = [{"messages": [user(said()), assistant(said())], "label": n % 3 > 0} for n in range(20)]
    ultra = [{"prompt": said(), "completion": said(), "label": n % 2 > 0} for n in range(8)]
    orca = [{"system": said() if n % 2 else "", "input": said(), "chosen": said(), "rejected": said()} for n in range(16)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "identity.json").write_text(json.dumps(alpaca[:8]))
    (data / "alpaca_en_demo.json").write_text(json.dumps(alpaca[8:]))
    (data / "dpo_en_demo.json").write_text(json.dumps(pairs))
    (data / "kto_en_demo.json").write_text(json.dumps(judged))
    for name, rows in (("alpaca", alpaca), ("ultra", ultra), ("pairs", orca)):
        (data / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "chat.jsonl").write_text("\n".join(json.dumps({"conversations": chat}) for chat in chats))
    (data / "dataset_info.json").write_text(json.dumps({
        "identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
        "dpo_en_demo": {"file_name": "dpo_en_demo.json", "ranking": True, "formatting": "sharegpt", "columns": {
            "messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        "kto_en_demo": {"file_name": "kto_en_demo.json", "formatting": "sharegpt", "columns": {
            "messages": "messages", "kto_tag": "label"}, "tags": {"role_tag": "role", "content_tag": "content",
                                                                  "user_tag": "user", "assistant_tag": "assistant"}}}))
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "elsewhere"), "pin_memory": True}
    (tmp_path / "ds_z3_offload_config.json").write_text(json.dumps({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "zero_optimization": {
            "stage": 3, "offload_optimizer": nvme, "offload_param": nvme, "overlap_comm": False, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": True}}))
    return {"model": str(tmp_path / "model"), "data": str(data), "out": str(tmp_path / "out"),
            "deepspeed": str(tmp_path / "ds_z3_offload_config.json"), "alpaca": alpaca, "chats": chats, "pairs": pairs,
            "judged": judged, "ultra": ultra, "orca": orca}


def recipe(text, places, **changes):
    return yaml.safe_load(text.format(**places)) | changes


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tokens_of(places, **keys):
    """The rows that a recipe's keys make, as words, with the trained ones in brackets."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(places["model"])
    notices = []
    rows, _ = finetune_data.load_rows(keys, tokenizer, method_of(keys), notices)
    assert all(label in (-100, token) for row in rows for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return [" ".join(f"[{word}]" if label >= 0 else word for word, label in zip(
        tokenizer.convert_ids_to_tokens(row["input_ids"]), row["labels"], strict=True)) for row in rows], notices
