# SPDX-License-Identifier: Apache-2.0
"""Writes a wrapped model of transformers, or PEFT's adapters on one, as their own save_pretrained does. Memory holds one
parameter, or one unit where files have its tensors in another form."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hoist import _hoist
from hoist.torch.pretrained import IS_4

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

__all__ = ["save_pretrained"]

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}

Tensors = dict[str, torch.Tensor]


def save_pretrained(engine: Engine, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB",
                    with_settings: bool = True) -> None:
    """[C] The directory that transformers' from_pretrained loads: safetensors, an index if there are several, config.json and
    generation_config.json. Writes only the adapters of a PEFT model, as PEFT does. Every rank calls it; the first one writes.

    Each tensor has the model's type, and the name and shape that it has in files. `with_settings`: also what is not weights.
    """
    directory = os.fspath(directory)
    model: Any = engine.module
    writes = engine._is_first_of_job
    if not isinstance(model, transformers.PreTrainedModel):
        if not hasattr(model, "peft_config"):
            raise _hoist.UsageError(f"a {type(model).__name__} has no save_pretrained form: use engine.export(directory)")
        adapters = _adapters(engine)
        if writes:
            model.save_pretrained(directory, state_dict=adapters)
        return
    if writes and with_settings:
        model.save_pretrained(directory, state_dict={}, max_shard_size=max_shard_size)
    planned, parts = _plan(engine)
    files = _Files(directory, planned, max_shard_size) if writes else None
    buffers = dict(engine._parameters.persistent_buffers())
    for part in parts:
        values = {name: buffers[name] if name in buffers else engine._parameters.read_as_stored(name) for name in part}
        if files is not None:
            files.write(_as_in_files(model, values))
    if files is not None:
        files.finish()


def _plan(engine: Engine) -> tuple[Tensors, list[list[str]]]:
    """The tensors of the files, without values, and which parameters and buffers to convert together: each alone, if that
    makes the same tensors, or a unit, or all."""
    model = engine.module
    units: dict[int, list[str]] = {}
    tensors: Tensors = {}
    for name, shape, dtype in engine._parameters.shapes():
        units.setdefault(engine._parameters.unit_of(name), []).append(name)
        tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
    for name, buffer in engine._parameters.persistent_buffers():
        tensors[name] = torch.empty_like(buffer, device="meta")

    def made_of(parts: Iterable[list[str]]) -> Tensors:
        made: Tensors = {}
        for part in parts:
            made |= _as_in_files(model, {name: tensors[name] for name in part})
        return made

    def is_same(some: Tensors, others: Tensors) -> bool:
        return {name: t.shape for name, t in some.items()} == {name: t.shape for name, t in others.items()}

    whole = made_of([list(tensors)])
    parts: list[list[str]] = []
    for unit in units.values():
        alone = [[name] for name in unit]
        parts += alone if is_same(made_of(alone), made_of([unit])) else [unit]
    parts += [[name] for name, _ in engine._parameters.persistent_buffers()]
    made = made_of(parts)
    return (made, parts) if is_same(made, whole) else (whole, [list(tensors)])


def _as_in_files(model: Any, tensors: Tensors) -> Tensors:
    """With the names and shapes that files of this model have."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: value for name, value in tensors.items() if name not in ignored}
    if IS_4:
        return kept
    from transformers.core_model_loading import revert_weight_conversion

    converted: Tensors = revert_weight_conversion(model, kept)
    return converted


def _adapters(engine: Engine) -> Tensors:
    """What PEFT may save: not the base, but for embeddings, which it saves where their size has changed."""
    model: Any = engine.module
    prefix = getattr(model.base_model, "prefix", None)
    embeddings = {id(p) for get in (model.get_input_embeddings, model.get_output_embeddings) if get() is not None
                  for p in get().parameters()}
    found = {name: engine._parameters.read_as_stored(name) for name, p in model.named_parameters(remove_duplicate=False)
             if p.requires_grad or id(p) in embeddings or (prefix and prefix in name)}
    return found | dict(engine._parameters.persistent_buffers())


class _Files:
    """safetensors files of known tensors, whose data comes in any order. They get their names when they are complete."""

    def __init__(self, directory: str, tensors: Tensors, max_shard_size: int | str):
        os.makedirs(directory, exist_ok=True)
        split = split_torch_state_dict_into_shards(
            tensors, filename_pattern=SAFE_WEIGHTS_NAME.replace(".", "{suffix}."), max_shard_size=max_shard_size)
        self._directory = directory
        self._place: dict[str, tuple[int, int]] = {}  # of a tensor: its file's descriptor, its offset
        self._open = {file: os.open(self._path(file) + ".partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                      for file in split.filename_to_tensors}
        for file, names in split.filename_to_tensors.items():
            self._begin(self._open[file], {name: tensors[name] for name in names})
        self._index: dict[str, Any] | None = None
        if split.is_sharded:
            parameters = sum(tensor.numel() for tensor in tensors.values())
            self._index = {"metadata": {"total_parameters": parameters, **split.metadata},
                           "weight_map": split.tensor_to_filename}

    def _path(self, file: str) -> str:
        return os.path.join(self._directory, file)

    def _begin(self, descriptor: int, tensors: Tensors) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        for name in tensors:
            self._place[name] = descriptor, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            descriptor, offset = self._place[name]
            raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            data = memoryview(raw)
            while len(data) > 0:
                written = os.pwrite(descriptor, data[:1 << 30], offset)
                data, offset = data[written:], offset + written

    def finish(self) -> None:
        for existing in _weight_files(self._directory):
            os.unlink(self._path(existing))
        for file, descriptor in self._open.items():
            os.fsync(descriptor)
            os.close(descriptor)
            os.replace(self._path(file) + ".partial", self._path(file))
        if self._index is not None:
            with open(self._path(SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as index:
                index.write(json.dumps(self._index, indent=2, sort_keys=True) + "\n")


def _weight_files(directory: str) -> Iterator[str]:
    """The weight files of a model that was saved here before."""
    stem, suffix = os.path.splitext(SAFE_WEIGHTS_NAME)
    for file in os.listdir(directory):
        if file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) or (file.startswith(stem + "-") and file.endswith(suffix)):
            yield file
