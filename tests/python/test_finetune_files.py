# SPDX-License-Identifier: Apache-2.0
"""Recipes and data sets of LLaMA-Factory and axolotl that are read, without training: the rows they make, and what is refused."""

import json
import types

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
from recipes import (  # noqa: E402
    AXOLOTL_CHAT,
    AXOLOTL_KTO,
    AXOLOTL_REWARD,
    FULL_SFT,
    LORA_DPO,
    LORA_KTO,
    LORA_RM,
    LORA_SFT,
    TEMPLATE,
    assistant,
    places_in,
    recipe,
    tokens_of,
    user,
)

import hoist  # noqa: E402
from hoist.torch import finetune  # noqa: E402
from hoist.torch.finetune import data as finetune_data  # noqa: E402
from hoist.torch.finetune.methods import KTO, SFT  # noqa: E402


@pytest.fixture
def places(tmp_path):
    return places_in(tmp_path)


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
    (LORA_SFT, {"dataset": "dpo_en_demo"}, ["SFT needs an answer in each row, and the data have a pair of answers"]),
    (LORA_DPO, {"dataset": "identity"}, ["DPO needs a pair of answers in each row, and the data have an answer", "ranking"]),
    (LORA_SFT, {"dataset": "kto_en_demo"}, ["SFT needs an answer in each row, and the data have an answer with a label"]),
    (LORA_KTO, {"dataset": "dpo_en_demo"}, ["KTO needs an answer with a label in each row, and the data have a pair", "kto_tag"]),
    (LORA_RM, {"dataset": "kto_en_demo"}, ["a reward model needs a pair of answers in each row"]),
    (LORA_KTO, {"gradient_accumulation_steps": 3}, ["micro-batch, which has one row here: set per_device_train_batch_size to 2"]),
    (LORA_DPO, {"pref_loss": "simpo"}, ["pref_loss: simpo"]),
    (AXOLOTL_CHAT, {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, ["plugins: [", "--set plugins=null"]),
    (AXOLOTL_CHAT, {"adapter": "lora"}, ["adapter: lora needs lora_r"]),
    (AXOLOTL_CHAT, {"special_tokens": {"pad_token": "<new>"}}, ["pad_token: <new> is not in the vocabulary"]),
    (AXOLOTL_CHAT, {"rl": "grpo"}, ["rl: grpo"]),
    (AXOLOTL_KTO, {"datasets": [{"path": "x", "type": "llama3.own"}]}, ["llama3.own is not supported: KTO reads llama3.argilla"]),
    (AXOLOTL_REWARD, {"datasets": [{"path": "x", "type": "bradley_terry.llama3.icr"}]}, [
        "type: bradley_terry.llama3.icr is not supported: a reward model reads bradley_terry.chat_template"]),
    (AXOLOTL_REWARD, {"num_labels": 2}, ["num_labels: 2: a reward is one number"]),
    (AXOLOTL_REWARD, {"model_type": "LlamaForCausalLM"}, ["LlamaForCausalLM is not for a reward model: leave it"]),
    (AXOLOTL_REWARD, {"reward_model": None, "center_rewards_coefficient": None}, [
        "model_type: AutoModelForSequenceClassification is not for SFT"]),
    (AXOLOTL_CHAT, {"datasets": [{"path": "x", "type": "sharegpt"}]}, ["type: sharegpt is not supported"]),
    (AXOLOTL_CHAT, {"datasets": [{"path": "x", "type": "alpaca", "shards": 2}]}, ["datasets, x: shards"]),
    (AXOLOTL_CHAT, {"datasets": "x"}, ["datasets: x: a list of entries with a path"]),
    (AXOLOTL_CHAT, {"datasets": [{"type": "alpaca"}]}, ["datasets: ", "a list of entries with a path"]),
    (AXOLOTL_CHAT, {"micro_batch_size": 0}, ["micro_batch_size: 0: a whole number of 1 or more"]),
    (LORA_SFT, {"max_samples": 0}, ["max_samples: 0: a whole number of 1 or more"]),
    (LORA_SFT, {"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps: 0: a whole number of 1 or more"]),
    (LORA_SFT, {"cutoff_len": "long"}, ["cutoff_len: long: a whole number of 1 or more"]),
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


def rows_of(path, places, method, kind, *rows):
    path.write_text(of_json(*rows))
    tokenizer = transformers.AutoTokenizer.from_pretrained(places["model"])
    asked = {"base_model": "", "shuffle_merged_datasets": False, "datasets": [{"path": str(path), "type": kind}]}
    return list(finetune_data.load_rows(asked, tokenizer, method, [])[0])


CHATML = "<|im_start|>{}\n{}<|im_end|>\n"


@pytest.mark.parametrize(("kind", "row", "prompt"), [
    ("chatml.argilla", {"system": "w1", "instruction": "w2"}, CHATML.format("system", "w1") + CHATML.format("user", "w2")),
    ("chatml.intel", {"system": "", "question": "w2"}, CHATML.format("user", "w2")),
    ("chatml.prompt_pairs", {"prompt": "w2"}, CHATML.format("user", "w2")),
    ("chatml.argilla_chat", {"completion": [user("w2"), assistant("w3")]}, CHATML.format("user", "w2")),
    ({"field_prompt": "asked", "field_label": "good", "prompt_format": "{system}: {prompt}>",
      "completion_format": "{completion}<"}, {"asked": "w2", "system": "w1", "good": 1}, "w1: w2>"),
])
def test_rows_of_axolotl_for_kto(tmp_path, places, kind, row, prompt):
    expected = ({"prompt": prompt, "completion": "w3<"} if isinstance(kind, dict) else
                {"prompt": prompt + "<|im_start|>assistant\n", "completion": "w3<|im_end|>"})
    found = rows_of(tmp_path / "x.jsonl", places, KTO, kind, {"completion": "w3", "label": True} | row)
    assert found == [expected | {"label": True}]


@pytest.mark.parametrize(("kind", "row", "message"), [
    ("llama3.ultra", {"prompt": "w2"}, "no column for label; they have"),
    ("llama3.argilla", {"prompt": "w2", "label": True}, r"no column for prompt \(instruction\)"),
    ("llama3.ultra", {"prompt": "w2", "label": "good"}, "label: 'good' is neither true nor false"),
    ({"prompt_format": "{question}"}, {"prompt": "w2", "label": True}, "type: a format has .*question"),
    ({"format": "{prompt}"}, {"prompt": "w2", "label": True}, "type: format: hoist does not know this"),
])
def test_unusable_rows_of_axolotl_for_kto(tmp_path, places, kind, row, message):
    with pytest.raises(hoist.UsageError, match=message):
        rows_of(tmp_path / "x.jsonl", places, KTO, kind, {"completion": "w3"} | row)


def test_a_release_of_trl_without_the_trainer_is_named(places, monkeypatch):
    monkeypatch.setattr(finetune, "trl", types.SimpleNamespace(__version__="0.99"))
    with pytest.raises(hoist.UsageError, match="KTO: trl 0.99 has no KTOTrainer; install trl 0.24 or 1.16"):
        finetune.run(recipe(LORA_KTO, places))


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
            finetune_data.load_rows(asked, tokenizer, SFT, [])
    # The end of an answer, which is trained, is the template's.
    tokenizer.chat_template = TEMPLATE
    rows, _ = finetune_data.load_rows(asked | {"eot_tokens": ["</s>"]}, tokenizer, SFT, [])
    assert rows["labels"] == finetune_data.load_rows(asked, tokenizer, SFT, [])[0]["labels"]
    tokenizer.chat_template = TEMPLATE.replace(" </s>", "")
    with pytest.raises(hoist.UsageError, match="eot_tokens: <end>"):
        finetune_data.load_rows(asked | {"eot_tokens": ["<end>"]}, tokenizer, SFT, [])
