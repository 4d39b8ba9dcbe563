# SPDX-License-Identifier: Apache-2.0
"""The rows of a recipe's data sets, as the tokens that LLaMA-Factory or axolotl would train.

The tokenizer's own chat template renders conversations: up to each answer, and with it. The difference is what the loss
counts, and each part is tokenized by itself. Rows are dropped or cut where the two projects do that; `notices` says how many.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import datasets

from hoist import _hoist, signal_handlers
from hoist.torch.finetune.methods import KTO, PRETRAINING, REWARD, Method

__all__ = ["from_the_hub", "load_rows"]

Messages = list[dict[str, str]]
# A row becomes {"messages": [...]}, {"prompt": [...], "chosen": text, "rejected": text}, {"plain": [source, target]},
# {"prompt": [...] or text, "completion": text, "label": bool}, {"pretrain": text}, or None.
Convert = Callable[[dict[str, Any]], dict[str, Any] | None]

_BUILDERS = {"json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "txt": "text"}
# The keys that the description of a data set may have, in dataset_info.json and in axolotl's `datasets`.
_INFO_KEYS = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "formatting", "ranking", "subset", "split", "folder",
              "columns", "tags"}
_ENTRY_KEYS = {"path", "name", "split", "type", "ds_type", "data_files", "revision", "field", "field_messages", "field_chosen",
               "field_rejected", "message_property_mappings", "message_field_role", "message_field_content", "roles",
               "roles_to_train", "train_on_eos", "chat_template"}
_ALPACA = ("Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
           "### Instruction:\n{}\n\n{}### Response:\n")
# In axolotl's data for KTO: a template's marks before a turn, at its end and after it, and the column that has the prompt.
_MARKS = {"llama3": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", ""),
          "chatml": ("<|im_start|>{}\n", "<|im_end|>", "\n")}
_PROMPTS = {"argilla": "instruction", "argilla_chat": "completion", "intel": "question", "prompt_pairs": "prompt",
            "ultra": "prompt"}
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt", "system_tag": "system"}
_ROLES = {"human": "user", "user": "user", "assistant": "assistant", "gpt": "assistant", "system": "system", "tool": "tool"}


def load_rows(recipe: dict[str, Any], tokenizer: Any, method: Method,
              notices: list[str]) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The rows to train on and those to evaluate on. Errors: UsageError for what neither format has, or hoist does not do."""
    parts = (_llama_factory if "model_name_or_path" in recipe else _axolotl)(recipe, _Encoder(tokenizer, method, recipe), notices)
    for part, role in zip(parts, ("training", "evaluation"), strict=True):
        if part is not None and not len(part):
            why = [notice for notice in notices if notice.startswith(f"{role} data: ")]
            raise _hoist.UsageError("; ".join([f"no row of the {role} data can be used", *why]))
    return parts


@contextlib.contextmanager
def from_the_hub(what: str, path: str) -> Iterator[None]:
    """Reads what may be a name on the hub. Errors: UsageError, where it can neither be downloaded nor is in the cache."""
    signal_handlers.note()
    try:
        yield
    except OSError as error:
        if signal_handlers.raised(error) or os.path.exists(path):
            raise
        said = " ".join(str(error).split())
        raise _hoist.UsageError(f"{what} is no path here, and cannot be read from Hugging Face's hub or cache: {said[:300]}. On "
                                f"a machine without the hub, `hf download {path}` elsewhere and name the directory in the recipe "
                                "instead") from error


def _read(path: str, name: str | None = None, split: str | None = None, **options: Any) -> Any:
    """A file, a directory (also one that save_to_disk wrote), or a name on the hub or in the cache. Errors: UsageError."""
    try:
        data = _data_set(path, name, split or "train", **options)
    except _hoist.UsageError:
        raise
    except (datasets.exceptions.DatasetsError, ValueError, StopIteration) as error:  # the last one is for an empty file
        why = " ".join(str(error.__cause__ or error).split()) or "it is empty"
        raise _hoist.UsageError(f"the data set {path} cannot be read: {why[:300]}") from error
    if not len(data):
        raise _hoist.UsageError(f"the data set {path} has no rows")
    return data


def _data_set(path: str, name: str | None, split: str, **options: Any) -> Any:
    if os.path.isfile(path):
        if os.path.getsize(path) == 0:
            raise _hoist.UsageError(f"the data set {path} cannot be read: it is empty")
        extension = os.path.splitext(path)[1][1:]
        if "ds_type" not in options and extension not in _BUILDERS:
            raise _hoist.UsageError(f"the data file {path} is none of .{', .'.join(_BUILDERS)}")
        return datasets.load_dataset(options.get("ds_type") or _BUILDERS[extension], data_files=path, split=split)
    if os.path.splitext(path)[1][1:] in _BUILDERS and not os.path.exists(path):
        raise _hoist.UsageError(f"there is no data file {path}")
    if any(os.path.exists(os.path.join(path, file)) for file in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(path)
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    with from_the_hub(f"the data set {path}", path):
        return datasets.load_dataset(path, name, split=split, **{k: value for k, value in options.items() if k != "ds_type"})


class _Encoder:
    """From conversations and texts to the rows that TRL's trainers take."""

    def __init__(self, tokenizer: Any, method: Method, recipe: dict[str, Any]):
        self.tokenizer, self.method = tokenizer, method
        self.pretrains, self.packs = method is PRETRAINING, recipe.get("packing", True)
        self.rows = recipe.get("preprocessing_batch_size", 1000) if self.pretrains else 100
        # LLaMA-Factory's template llama3 ends texts by another token than conversations.
        self.end = "<|end_of_text|>" if recipe.get("template") == "llama3" else tokenizer.eos_token
        self.eot = recipe.get("eot_tokens") or []
        self.limit = recipe.get("cutoff_len", 2048) if "model_name_or_path" in recipe else recipe.get("sequence_len", 512)
        self.cuts = "model_name_or_path" in recipe  # axolotl drops longer rows
        self.inputs = bool(recipe.get("train_on_prompt") or recipe.get("train_on_inputs"))

    def encode(self, data: Any) -> Any:
        """The rows of `_standard`, tokenized; `tokens` is their length before any cut."""
        keys = (*self.method.columns, "tokens")

        def batch(columns: dict[str, list[str]]) -> dict[str, list[Any]]:
            rows = [json.loads(row) for row in columns["row"]]
            made = self.pretrain([row["pretrain"] for row in rows if row]) if self.pretrains else [
                new for row in rows for new in self.one(row)]
            return {key: [new[key] for new in made] for key in keys}

        return data.map(batch, batched=True, batch_size=self.rows, remove_columns=["row"])

    def pretrain(self, texts: list[str]) -> list[dict[str, Any]]:
        """Blocks of as many tokens as a row may have, cut from all texts one after the other; without packing a row a text."""
        tokens = [self.ids(text + self.end) for text in texts]
        first = [self.tokenizer.bos_token_id] if getattr(self.tokenizer, "add_bos_token", False) else []
        if self.packs:
            joined = list(itertools.chain(*tokens))
            whole = len(joined) // self.limit * self.limit
            rows = [first + joined[at + len(first):at + self.limit] for at in range(0, whole, self.limit)]
        else:
            rows = [(first + row)[:self.limit] for row in tokens]
        # LLaMA-Factory's collator leaves out every token that also pads.
        return [{"input_ids": row, "labels": [-100 if token == self.tokenizer.pad_token_id else token for token in row],
                 "tokens": len(row)} for row in rows]

    def one(self, row: dict[str, Any] | None) -> list[dict[str, Any]]:
        if row is None:
            return []
        found = "a pair of answers" if "chosen" in row else "an answer with a label" if "label" in row else "an answer"
        if found != self.method.needs:
            raise _hoist.UsageError(f"{self.method.name} needs {self.method.needs} in each row, and the data have {found} (in "
                                    "dataset_info.json, \"ranking\" makes pairs, and the column kto_tag makes labels)")
        if "prompt" in row:
            return self.preference(**row)
        return self.plain(*row["plain"]) if "plain" in row else self.chat(row["messages"])

    def render(self, messages: Messages, **options: Any) -> str:
        if self.tokenizer.chat_template is None:
            raise _hoist.UsageError("the data are conversations, and the model's tokenizer has no chat template: put one beside "
                                    "the tokenizer's files as chat_template.jinja. Templates that a recipe names (template, "
                                    "chat_template) are not part of hoist")
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def turns(self, messages: Messages) -> Iterator[tuple[str, str]]:
        """The text between two answers, and the answer with what the template puts after it."""
        done = ""
        for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            before, after = self.render(messages[:index], add_generation_prompt=True), self.render(messages[:index + 1])
            if not (before.startswith(done) and after.startswith(before)):
                raise _hoist.UsageError("the chat template renders earlier turns differently once a conversation continues, so "
                                        "that answers have no place of their own in the text: use rows with a single answer. "
                                        f"The conversation is {messages}")
            answer = after[len(before):] if self.cuts else after[len(before):].rstrip()  # axolotl: up to the end token
            if self.eot and not answer.endswith((*self.eot, self.tokenizer.eos_token)):
                raise _hoist.UsageError(f"eot_tokens: {', '.join(self.eot)}: the chat template ends an answer with none of them: "
                                        f"{answer[-40:]!r}")
            yield before[len(done):], answer
            done = before + answer

    def chat(self, messages: Messages) -> list[dict[str, Any]]:
        return self.supervised([(self.ids(before), self.ids(answer)) for before, answer in self.turns(messages)])

    def ids(self, text: str, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []

    def plain(self, source: str, target: str) -> list[dict[str, Any]]:
        """A text without a template: the tokenizer's first token, and its end token after the target."""
        before, after = self.ids(source, special=True), self.ids(target, special=True)
        after = after[1:] if before and after[:1] == [self.tokenizer.bos_token_id] else after
        after += [] if after[-1:] == [self.tokenizer.eos_token_id] else [self.tokenizer.eos_token_id]
        if source:
            return self.supervised([(before, after)])
        # axolotl reads no more than 64 rows' tokens of a text.
        cuts = [after[begin:begin + self.limit] for begin in range(0, min(len(after), 64 * self.limit), self.limit)]
        return [row for cut in cuts for row in self.supervised([([], cut)])]

    def supervised(self, pairs: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
        input_ids: list[int] = []
        labels: list[int] = []
        for source, target in pairs:
            if self.cuts:  # LLaMA-Factory: both sides of the turn lose in proportion, unless one is short
                room, both = self.limit - len(input_ids), len(source) + len(target)
                if room <= 0:
                    break
                most = room if 2 * len(target) < room else room - len(source) if 2 * len(source) < room else (
                    room * len(target) // both)
                target = target[:most]
                source = source[:room - len(target)]
            input_ids += source + target
            labels += (source if self.inputs else [-100] * len(source)) + target
        return [{"input_ids": input_ids, "labels": labels, "tokens": sum(len(part) for pair in pairs for part in pair)}]

    def preference(self, prompt: Messages | str, **row: Any) -> list[dict[str, Any]]:
        """A row of a trainer that renders and tokenizes it itself."""
        if isinstance(prompt, str):
            return [{"prompt": prompt, **row, "tokens": len(self.ids(prompt)) + len(self.ids(row["completion"]))}]
        answers = {key: [{"role": "assistant", "content": text}] for key, text in row.items() if key != "label"}
        tokens = max(len(self.ids(self.render(prompt + answer))) for answer in answers.values())
        return [{"prompt": prompt, **row, **answers, "tokens": tokens}]


def _standard(data: Any, convert: Convert) -> Any:
    """One column of JSON, so that data sets of different columns become one."""
    return data.map(lambda row: {"row": json.dumps(convert(row))}, remove_columns=data.column_names)


def _require_columns(what: str, data: Any, needed: Mapping[str, str | None]) -> None:
    """`needed` has the column's name for each use of one."""
    missing = [use if use == column else f"{use} ({column or 'which is not named'})" for use, column in needed.items()
               if column not in data.column_names]
    if missing:
        raise _hoist.UsageError(f"{what}: the data have no column for {', '.join(missing)}; they have "
                                f"{', '.join(data.column_names)}")


def _split(data: Any, key: str, share: float, **options: Any) -> tuple[Any, Any]:
    try:
        parts = data.train_test_split(test_size=int(share) if share >= 1 else share, **options)
    except ValueError as error:
        raise _hoist.UsageError(f"{key}: {share}, of {len(data)} rows: {error}") from error
    return parts["train"], parts["test"]


def _known(what: str, description: dict[str, Any], keys: set[str]) -> None:
    unknown = {key for key, value in description.items() if value is not None} - keys
    if unknown:
        raise _hoist.UsageError(f"{what}: {', '.join(sorted(unknown))}: hoist does not know this; prepare the data and remove it")


# --- LLaMA-Factory -----------------------------------------------------------------------------------------------------

def _llama_factory(recipe: dict[str, Any], encoder: _Encoder, notices: list[str]) -> tuple[Any, Any]:
    directory = recipe.get("dataset_dir", "data")
    try:
        with open(os.path.join(directory, "dataset_info.json"), encoding="utf-8") as file:
            known = json.load(file)
    except (OSError, ValueError) as error:
        if signal_handlers.raised(error):
            raise
        raise _hoist.UsageError(f"dataset_dir: {directory}/dataset_info.json cannot be read: {error}") from error

    def load(names: str | list[str]) -> Any:
        parts = []
        for name in map(str.strip, names.split(",") if isinstance(names, str) else map(str, names)):
            if name not in known:
                raise _hoist.UsageError(f"dataset: {name} is not in {directory}/dataset_info.json")
            data, convert = _of_info(name, known[name], directory, encoder.method)
            data = data.select(range(min(len(data), recipe.get("max_samples", len(data)))))
            parts.append(_standard(data, convert))
        return datasets.concatenate_datasets(parts)

    def encoded(data: Any, role: str) -> Any:
        rows = encoder.encode(data)
        if encoder.pretrains:
            notices.append(f"{role}: {len(data)} texts are {len(rows)} rows of up to {encoder.limit} tokens")
        elif len(rows) < len(data):
            notices.append(f"{role}: {len(data) - len(rows)} rows dropped, whose turns do not alternate or lack "
                           f"{encoder.method.needs}")
        if encoder.pretrains or not len(rows):
            return rows.remove_columns("tokens") if len(rows) else rows
        longer = sum(length > encoder.limit for length in rows["tokens"])
        if longer:
            notices.append(f"{role}: {longer} of {len(rows)} rows have more than {encoder.limit} tokens (cutoff_len): "
                           f"{encoder.method.long_rows}")
        return rows.remove_columns("tokens")

    train, evaluation = load(recipe["dataset"]), load(recipe["eval_dataset"]) if recipe.get("eval_dataset") else None
    if share := recipe.get("val_size"):
        if evaluation is not None:
            raise _hoist.UsageError("val_size and eval_dataset contradict each other: leave one out")
        train, evaluation = _split(train, "val_size", share, seed=recipe.get("seed", 42))
    if encoder.method.in_order:
        train = train.shuffle(seed=recipe.get("seed", 42))
    return encoded(train, "training data"), None if evaluation is None else encoded(evaluation, "evaluation data")


def _of_info(name: str, info: dict[str, Any], directory: str, method: Method) -> tuple[Any, Convert]:
    """A data set and how to read its rows, from its entry in dataset_info.json."""
    _known(f"dataset_info.json, {name}", info, _INFO_KEYS)
    columns, tags = info.get("columns", _COLUMNS), info.get("tags", _TAGS)
    if "file_name" in info:
        data = _read(os.path.join(directory, info["file_name"]), split=info.get("split"))
    elif "hf_hub_url" in info:
        data = _read(info["hf_hub_url"], info.get("subset"), info.get("split"), data_dir=info.get("folder"))
    else:
        raise _hoist.UsageError(f"dataset_info.json, {name}: only file_name and hf_hub_url are read")
    alpaca, ranks = info.get("formatting", "alpaca") == "alpaca", info.get("ranking")
    answers = ["chosen", "rejected"] if ranks else ["response"] if alpaca and method is not PRETRAINING else []
    named = [key for key, column in info.get("columns", {}).items() if column]
    needed = [*([] if alpaca and "query" in named else ["prompt" if alpaca else "messages"]), *answers, *named]
    _require_columns(f"dataset_info.json, {name}: columns", data, {key: columns.get(key) for key in needed})
    roles = {tags.get(f"{role}_tag"): role for role in ("user", "assistant", "system")}

    def value(row: dict[str, Any], column: str) -> Any:
        return row.get(columns[column]) if columns.get(column) else None

    def message(turn: dict[str, Any]) -> dict[str, str]:
        role = roles.get(turn[tags["role_tag"]])
        if role is None or turn.get("tool_calls"):
            raise _hoist.UsageError(f"dataset {name}: a turn of '{turn[tags['role_tag']]}': tool calls are not supported; remove "
                                    "these rows")
        return {"role": role, "content": turn[tags["content_tag"]]}

    def convert(row: dict[str, Any]) -> dict[str, Any] | None:
        for column in ("tools", "images", "videos", "audios"):
            if value(row, column):
                raise _hoist.UsageError(f"dataset {name}: '{column}': rows with tools or media are not supported; remove them")
        if alpaca:
            history = [{"role": role, "content": text} for pair in value(row, "history") or []
                       for role, text in zip(("user", "assistant"), pair, strict=True)]
            query = "\n".join(text for text in (value(row, "prompt"), value(row, "query")) if text)
            messages = [*history, {"role": "user", "content": query}]
            chosen, rejected = value(row, "chosen"), value(row, "rejected")
            if not ranks and isinstance(value(row, "response"), str):
                messages.append({"role": "assistant", "content": value(row, "response")})
        else:
            messages = [message(turn) for turn in value(row, "messages") or []]
            chosen, rejected = (message(turn)["content"] if isinstance(turn := value(row, side), dict) else None
                                for side in ("chosen", "rejected"))
        system = [messages.pop(0)] if messages and messages[0]["role"] == "system" else (
            [{"role": "system", "content": value(row, "system")}] if value(row, "system") else [])
        if any(turn["content"] is None for turn in messages):
            return None
        if method is PRETRAINING:
            return {"pretrain": messages[0]["content"]} if messages else None
        alternate = all(turn["role"] == ("user", "assistant")[index % 2] for index, turn in enumerate(messages))
        if ranks:
            complete = alternate and len(messages) % 2 == 1 and isinstance(chosen, str) and isinstance(rejected, str)
            return {"prompt": system + messages, "chosen": chosen, "rejected": rejected} if complete else None
        if not (alternate and messages and len(messages) % 2 == 0):
            return None
        if "kto_tag" not in named:
            return {"messages": system + messages}
        labelled = {"prompt": system + messages[:-1], "completion": messages[-1]["content"], "label": value(row, "kto_tag")}
        return labelled if isinstance(labelled["label"], bool) else None

    return data, convert


# --- axolotl -----------------------------------------------------------------------------------------------------------

def _axolotl(recipe: dict[str, Any], encoder: _Encoder, notices: list[str]) -> tuple[Any, Any]:
    def load(entries: list[dict[str, Any]], role: str) -> Any:
        data = datasets.concatenate_datasets([_of_entry(entry, encoder.method) for entry in entries])
        complete = data.filter(lambda row: row["row"] != "null")
        if len(complete) < len(data):
            notices.append(f"{role}: {len(data) - len(complete)} of {len(data)} rows dropped, which lack a text")
        if not len(complete):
            return complete
        rows = encoder.encode(complete)
        if recipe.get("shuffle_merged_datasets", True):
            rows = rows.shuffle(seed=recipe.get("seed", 42))
        kept = rows.filter(lambda row: recipe.get("min_sample_len", 2) <= row["tokens"] <= encoder.limit)
        if len(kept) < len(rows):
            notices.append(f"{role}: {len(rows) - len(kept)} of {len(rows)} rows dropped, which have more than {encoder.limit} "
                           "tokens (sequence_len) or fewer than min_sample_len")
        return kept.remove_columns("tokens")

    train = load(recipe["datasets"], "training data")
    if recipe.get("test_datasets"):
        return train, load(recipe["test_datasets"], "evaluation data")
    if not (share := recipe.get("val_set_size")):
        return train, None
    return _split(train, "val_set_size", share, shuffle=False) if len(train) else (train, None)


def _of_entry(entry: dict[str, Any], method: Method) -> Any:
    """The standard rows of one entry of `datasets`."""
    path, kind = entry["path"], entry.get("type")
    _known(f"datasets, {path}", entry, _ENTRY_KEYS)
    if kind not in method.kinds and not (method is KTO and isinstance(kind, dict)):
        raise _hoist.UsageError(f"datasets, {path}: type: {kind} is not supported: {method.name} reads {', '.join(method.kinds)}")
    if entry.get("roles_to_train") not in (None, ["assistant"], ["gpt"]) or entry.get("train_on_eos") not in (None, "turn"):
        raise _hoist.UsageError(f"datasets, {path}: roles_to_train, train_on_eos: answers are trained with their end token, and "
                                "nothing else; remove these keys")
    keys = {"role": entry.get("message_field_role", "role"), "content": entry.get("message_field_content", "content"),
            **(entry.get("message_property_mappings") or {})}
    given = entry.get("roles")
    roles = {source: role for role, sources in given.items() for source in sources} if given else _ROLES

    def message(turn: dict[str, Any]) -> dict[str, str]:
        if turn[keys["role"]] not in roles:
            raise _hoist.UsageError(f"datasets, {path}: roles: '{turn[keys['role']]}' is not among {', '.join(roles)}")
        return {"role": roles[turn[keys["role"]]], "content": turn[keys["content"]]}

    def answer(side: Any) -> Any:
        return side if isinstance(side, str) else message(side if isinstance(side, dict) else side[-1])["content"]

    def convert(row: dict[str, Any]) -> dict[str, Any] | None:
        if any(row[column] is None for column in needed.values()):
            return None
        if kind == "alpaca":
            context = (", paired with an input that provides further context", f"### Input:\n{row['input']}\n\n") if row.get(
                "input") else ("", "")
            return {"plain": [_ALPACA.format(context[0], row["instruction"], context[1]), row["output"]]}
        if kind == "completion":
            return {"plain": ["", row[needed["field"]]]}
        said = row[needed["field_messages"]]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else [message(turn) for turn in said]
        if method is REWARD and row.get("system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        chosen, rejected = (answer(row[needed[key]]) for key in ("field_chosen", "field_rejected")) if pairs else ("", "")
        if any(text is None for text in (chosen, rejected, *(turn["content"] for turn in messages))):
            return None
        return {"prompt": messages, "chosen": chosen, "rejected": rejected} if pairs else {"messages": messages}

    options = {key: entry[key] for key in ("data_files", "revision", "ds_type") if entry.get(key) is not None}
    data = _read(path, entry.get("name"), entry.get("split"), **options)
    pairs = "chosen" in method.columns
    fields = {"field_messages": "input" if method is REWARD else "messages"} | (
        {"field_chosen": "chosen", "field_rejected": "rejected"} if pairs else {})
    needed = {"instruction": "instruction", "output": "output"} if kind == "alpaca" else {
        key: entry.get(key) or column for key, column in ({"field": "text"} if kind == "completion" else fields).items()}
    read: Convert = convert
    if method is KTO:
        needed, read = _labelled(path, kind)
    _require_columns(f"datasets, {path}", data, needed)
    return _standard(data, read)


def _labelled(path: str, kind: Any) -> tuple[dict[str, str], Convert]:
    """The columns and the reading of data for KTO: texts in the marks of a template, or in the formats of the recipe."""
    columns = {"prompt": "prompt", "completion": "completion", "label": "label"}
    system_column, of_system = "system", ""
    if isinstance(kind, dict):
        _known(f"datasets, {path}: type", kind, {"field_system", "prompt_format", "completion_format",
                                                 *(f"field_{key}" for key in columns)})
        columns = {key: kind.get(f"field_{key}") or key for key in columns}
        system_column = kind.get("field_system") or "system"
        of_prompt, of_completion = kind.get("prompt_format") or "{prompt}", kind.get("completion_format") or "{completion}"
        try:
            (of_prompt + of_completion).format(prompt="", system="", completion="")
        except (KeyError, IndexError, ValueError) as error:
            raise _hoist.UsageError(f"datasets, {path}: type: a format has {{prompt}}, {{system}} or {{completion}}: "
                                    f"{error!r}") from error
    else:
        template, _, source = kind.partition(".")
        mark, end, between = _MARKS[template]
        columns["prompt"] = _PROMPTS[source]
        of_system = mark.format("system") + "{system}" + end + between
        of_prompt = mark.format("user") + "{prompt}" + end + between + mark.format("assistant")
        of_completion = "{completion}" + end

    def convert(row: dict[str, Any]) -> dict[str, Any] | None:
        prompt, completion, label = (row[column] for column in columns.values())
        if isinstance(completion, list):  # argilla_chat's, of both turns
            prompt, completion = (turn["content"] for turn in completion[:2])
        if prompt is None or completion is None or label is None:
            return None
        if label not in (True, False):
            raise _hoist.UsageError(f"datasets, {path}: {columns['label']}: {label!r} is neither true nor false")
        system = row.get(system_column) or ""
        return {"prompt": (of_system if system else "").format(system=system) + of_prompt.format(prompt=prompt, system=system),
                "completion": of_completion.format(completion=completion), "label": bool(label)}

    return columns, convert
