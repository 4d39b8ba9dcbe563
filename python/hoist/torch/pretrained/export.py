# SPDX-License-Identifier: Apache-2.0
"""Writes a wrapped model of transformers, or PEFT's adapters on one, as their own save_pretrained does. Memory holds one
parameter, or one unit where files have its tensors in another form."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hoist import _hoist, signal_handlers
from hoist.torch.checkpoint.checkpoints import io_error, sync
from hoist.torch.checkpoint.directories import made_and_locked
from hoist.torch.model.weight_files import NAMES, plain
from hoist.torch.pretrained.loading import IS_TRANSFORMERS_4
from hoist.torch.ranks import distributed

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

__all__ = ["save_pretrained"]


Tensors = dict[str, torch.Tensor]


def save_pretrained(engine: Engine, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB",
                    write_settings: Callable[[str], object] | None = None) -> None:
    """[C] The directory that transformers' from_pretrained loads: safetensors, an index if there are several, config.json and
    generation_config.json. Writes only the adapters of a PEFT model, as PEFT does. Every rank calls it; the first one writes.

    Each tensor has the model's type, and the name and shape that it has in files. A model in the directory stays until the new
    one is complete: the drive holds both for a while. `write_settings` writes what is not weights into a folder; None: as the
    model's own save_pretrained.
    """
    model: Any = engine.module
    refuse_adapters(model)
    is_whole = isinstance(model, transformers.PreTrainedModel)
    if not is_whole and not hasattr(model, "peft_config"):
        raise _hoist.UsageError(f"a {type(model).__name__} has no save_pretrained form: use engine.export(directory)")

    def settings(folder: str) -> None:
        if write_settings is not None:
            write_settings(folder)
        elif is_whole:
            model.save_pretrained(folder, state_dict={}, max_shard_size=max_shard_size)

    def adapters(folder: str | None) -> None:
        tensors = _adapters(engine)
        # On the first rank, PEFT computes the prompts that it saves, for which some encoders read their parameters outside of a
        # call, and asks modules_to_save for their state_dict() once more. That would be a collective call.
        read = [name for name in engine._parameters.by_name if name.startswith("prompt_encoder.") or ".modules_to_save." in name]
        with torch.no_grad(), engine.gathered(read) if read else contextlib.nullcontext():
            if folder is not None:
                model.save_pretrained(folder, state_dict=tensors)

    write_model(engine, directory, settings,
                (lambda folder: write_weights(engine, folder, max_shard_size)) if is_whole else adapters)


def write_model(engine: Engine, directory: str | os.PathLike[str], settings: Callable[[str], object],
                weights: Callable[[str | None], object]) -> None:
    """[C] Calls both for a folder whose files then replace those in the directory: `settings` on the first rank, and `weights` on
    all, which is given None on the others."""
    with distributed.work_of_one_rank(engine._unit_manager), contextlib.ExitStack() as stack:
        with distributed.work_of_one_rank(engine._unit_manager):
            folder = stack.enter_context(_new_model(os.fspath(directory))) if engine._is_first_of_job else None
            if folder is not None:
                settings(folder)
        weights(folder)


def refuse_adapters(model: Any) -> None:
    """Errors: UsageError for those of PEFT that cannot be saved here."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _hoist.UsageError("adapters that model.add_adapter() has added are not saved as such here: add them with "
                                "peft.get_peft_model(model, config)")


def write_weights(engine: Engine, folder: str | None, max_shard_size: int | str) -> None:
    """[C] Pre: within work_of_one_rank()."""
    engine._parameters.names_in_model()  # refuses another model than the one that was wrapped
    others = engine._parameters.others_in_files()
    planned, parts = _plan(engine, others)
    kept = distributed.KeptError()
    files = None if folder is None else kept.call(functools.partial(_Files, folder, planned, max_shard_size))
    with files or contextlib.nullcontext():
        engine._between_passes()
        for part in parts:
            values = {name: others[name] if name in others else engine._parameters.read_as_stored(name) for name in part}
            if files is not None:
                kept.call(functools.partial(files.write, engine.module, values))
    kept.raise_it()


def _plan(engine: Engine, others: Tensors) -> tuple[Tensors, list[list[str]]]:
    """The tensors of the files, without values, and which parameters and `others` to convert together: each alone, if that
    makes the same tensors, or a unit, or all."""
    model = engine.module
    units: dict[int, list[str]] = {}
    tensors: Tensors = {}
    for name, declared in engine._parameters.by_name.items():
        units.setdefault(declared.unit, []).append(name)
        tensors[name] = torch.empty(declared.shape, dtype=declared.dtype, device="meta")
    for name, other in others.items():
        tensors[name] = torch.empty_like(other, device="meta")

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
    parts += [[name] for name in others]
    made = made_of(parts)
    return (made, parts) if is_same(made, whole) else (whole, [list(tensors)])


def _as_in_files(model: Any, tensors: Tensors) -> Tensors:
    """With the names and shapes that files of this model have."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: value for name, value in tensors.items() if name not in ignored}
    if IS_TRANSFORMERS_4:
        return kept
    from transformers.core_model_loading import revert_weight_conversion

    converted: Tensors = revert_weight_conversion(model, kept)
    return converted


def _adapters(engine: Engine) -> Tensors:
    """The tensors that PEFT may save: of the base only embeddings, which it saves where their size has changed."""
    model: Any = engine.module
    names = engine._parameters.names_in_model()
    prefix = getattr(model.base_model, "prefix", None)
    embeddings = {id(p) for get in (model.get_input_embeddings, model.get_output_embeddings) if get() is not None
                  for p in get().parameters()}
    engine._between_passes()
    found = {name: engine._parameters.read_as_stored(names[name]) for name, p in model.named_parameters(remove_duplicate=False)
             if name in names and (p.requires_grad or id(p) in embeddings or (prefix and prefix in name))}
    return found | dict(engine._parameters.persistent_buffers(remove_duplicate=False))


class _Files:
    """safetensors files of known tensors, whose data comes in any order."""

    def __init__(self, folder: str, tensors: Tensors, max_shard_size: int | str):
        split = split_torch_state_dict_into_shards(
            tensors, filename_pattern=SAFE_WEIGHTS_NAME.replace(".", "{suffix}."), max_shard_size=max_shard_size)
        self._place: dict[str, tuple[int, int]] = {}  # of a tensor: its file's descriptor, its offset
        self._open: list[int] = []
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(self._close)
            for file, names in split.filename_to_tensors.items():
                self._begin(os.path.join(folder, file), {name: tensors[name] for name in names})
            if split.is_sharded:
                parameters = sum(tensor.numel() for tensor in tensors.values())
                with open(os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as index:
                    json.dump({"metadata": {"total_parameters": parameters, **split.metadata},
                               "weight_map": split.tensor_to_filename}, index, indent=2, sort_keys=True)
                    index.write("\n")
            unless_made.pop_all()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def _begin(self, path: str, tensors: Tensors) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._open.append(descriptor)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        for name in tensors:
            self._place[name] = descriptor, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, model: Any, values: Tensors) -> None:
        """Values under the model's own names, which have others in files."""
        for name, tensor in _as_in_files(model, values).items():
            descriptor, offset = self._place[name]
            raw: Any = plain(tensor).view(-1).view(torch.uint8).numpy()
            data = memoryview(raw)
            while len(data) > 0:
                written = os.pwrite(descriptor, data[:1 << 30], offset)
                data, offset = data[written:], offset + written


# A killed program leaves it, and the next save_pretrained removes it, after moving the files of a complete model up.
_FOLDER = "model.partial"
# Loaders begin with these, and refuse a directory without them.
_HEADS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "adapter_config.json")
# Ends the names of an older model's heads in the folder. They are there once the new model is complete and its move has begun.
_OLD = ".old"


@contextlib.contextmanager
def _new_model(directory: str) -> Iterator[str]:
    """A folder in `directory` for a model's files, which replace those of the model there when all are complete. If writing
    them fails, the folder is removed, and the directory is as it was.

    Errors: UsageError if another program saves to this directory, IoError if writing or flushing fails.
    """
    folder = os.path.join(directory, _FOLDER)
    with made_and_locked(directory, _FOLDER + ".lock", "save_pretrained()"):
        _finish_move(folder, directory)
        with signal_handlers.suppressing(OSError):
            shutil.rmtree(folder)
        os.makedirs(folder)
        try:
            card = os.path.join(directory, "README.md")
            if os.path.exists(card):
                shutil.copy(card, folder)  # PEFT adds to it
            yield folder
            for path, _, files in os.walk(folder):
                sync(path, *(os.path.join(path, file) for file in files))
        except BaseException as error:
            with signal_handlers.suppressing(OSError):
                shutil.rmtree(folder)
            if signal_handlers.raised(error):
                raise
            if isinstance(error, OSError) and error.errno and error.filename is None:  # of a write, or a flush
                raise io_error(error.errno, directory, f"writing the model to {directory} failed: {error.strerror}") from error
            raise
        _move_up(folder, directory)  # if this fails, the files that were not moved stay in the folder
        shutil.rmtree(folder)


def _move_up(folder: str, directory: str) -> None:
    """Moves a complete model into the directory that holds its folder, and removes the weights of an older one.

    A crash leaves the old model, the new one, or a directory that loaders refuse. If settings are the same, one rename or
    removal changes from the old weights to the new: loaders prefer model.safetensors to an index, and shards of another number
    have other names. If settings change, or shards have the names of old ones, the old model's head leaves first and the new
    one's comes last. Nothing loads between the two. The next save first moves the folder's files up, which completes the new
    model.
    """
    new = _files_below(folder)
    old = set(_weight_files(directory)) if SAFE_WEIGHTS_NAME in new or SAFE_WEIGHTS_INDEX_NAME in new else set()

    def changes(file: str) -> bool:
        target = os.path.join(directory, file)
        return os.path.exists(target) and not filecmp.cmp(os.path.join(folder, file), target, shallow=False)

    settings = {file for file in new if os.path.basename(file) in ("config.json", "adapter_config.json")}
    if any(map(changes, settings)) or (new & old).difference(_HEADS):
        old -= _set_heads_aside(new, folder, directory)
    _move(new, folder, directory)
    for file in sorted(old - new, key=lambda file: file not in _HEADS):  # shards after the index that names them
        os.unlink(os.path.join(directory, file))
    sync(directory)


def _finish_move(folder: str, directory: str) -> None:
    """Completes a move that ended after the old model's heads had left. The folder has the only copies of some new files then."""
    found = _files_below(folder)
    new = {file for file in found if not file.endswith(_OLD)}
    if new != found:
        _set_heads_aside(new, folder, directory)
        _move(new, folder, directory)


def _set_heads_aside(new: set[str], folder: str, directory: str) -> set[str]:
    """Moves the heads that are in the way of the new model's into the folder, and returns their names."""
    heads = _heads_of(new)
    if not heads.isdisjoint((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        heads |= {SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}
    old = {file for file in heads if os.path.exists(os.path.join(directory, file))}
    for file in old:
        os.replace(os.path.join(directory, file), os.path.join(folder, file + _OLD))
    sync(directory, folder)
    return old


def _move(new: set[str], folder: str, directory: str) -> None:
    heads = _heads_of(new)
    for files in (new - heads, heads):
        parents = {os.path.dirname(os.path.join(directory, file)) for file in files}
        for parent in parents:
            os.makedirs(parent, exist_ok=True)
        for file in files:
            os.replace(os.path.join(folder, file), os.path.join(directory, file))
        sync(*parents)


def _files_below(folder: str) -> set[str]:
    return {os.path.relpath(os.path.join(path, file), folder) for path, _, files in os.walk(folder) for file in files}


def _heads_of(files: Iterable[str]) -> set[str]:
    return {file for file in files if os.path.basename(file) in _HEADS}


def _weight_files(directory: str) -> Iterator[str]:
    """The weight files of a model that was saved here before."""
    stem, suffix = os.path.splitext(SAFE_WEIGHTS_NAME)
    for file in os.listdir(directory):
        if file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) or (file.startswith(stem + "-") and file.endswith(suffix)):
            yield file
