# SPDX-License-Identifier: Apache-2.0
"""Finds and reads DeepSpeed's files without running any code in them.

DeepSpeed pickles a few objects of its own beside tensors. PyTorch's restricted unpickler makes stand-in objects, which
hold their attributes; DeepSpeed need not be installed. Tensors are mapped, not read: their bytes come from the file when
they are used. Files of PyTorch's format before 1.6 are read into memory.
"""

from __future__ import annotations

import os
import pickle
import re
import types
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from hoist import _hoist, signal_handlers
from hoist.torch.model.weight_files import can_be_mapped


def _stand_in(module: str, name: str, base: type) -> type:
    return type(name, (base,), {"__module__": module, "__qualname__": name})


# The types that files of DeepSpeed 0.19 contain besides PyTorch's own.
_STAND_INS = [
    _stand_in("deepspeed.runtime.zero.config", "ZeroStageEnum", int),
    _stand_in("deepspeed.utils.tensor_fragment", "fragment_address", object),
    _stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler", object),
    _stand_in("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", object),
]


class _TrustingUnpickler(pickle.Unpickler):
    """For files that the program trusts: loads any class, but still uses stand-ins for DeepSpeed's."""

    def find_class(self, module: str, name: str) -> Any:
        for kind in _STAND_INS:
            if (kind.__module__, kind.__qualname__) == (module, name):
                return kind
        return super().find_class(module, name)


def shown(text: str) -> str:
    """Text with names from files, safe for a terminal."""
    return _hoist.printable(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def refuse(text: str) -> NoReturn:
    """Errors: StoreError. The text may hold names from files."""
    raise _hoist.StoreError(shown(text))


def load(path: str, trusted: bool) -> Any:
    """Loads a file that torch.save wrote. Errors: StoreError, naming the file."""
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        raise _hoist.UsageError("DeepSpeed's checkpoints are read with PyTorch 2.6 or newer, whose torch.load runs nothing")
    if not os.path.isfile(path):  # a pipe would be waited for
        refuse(f"{path} is missing, or no regular file: copy the whole checkpoint, the files of all its ranks included")
    try:
        mmap = can_be_mapped(path)  # not with DeepSpeed's "checkpoint_serialization": false
        if trusted:
            reader = types.SimpleNamespace(Unpickler=_TrustingUnpickler, __name__="pickle",
                                           load=lambda file, **options: _TrustingUnpickler(file, **options).load())
            loaded = torch.load(path, map_location="cpu", weights_only=False, mmap=mmap, pickle_module=reader)
        else:
            with torch.serialization.safe_globals(list(_STAND_INS)):
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        _refuse_objects(path, error, trusted)
    except (RuntimeError, ValueError, EOFError, OSError, LookupError, TypeError, ImportError, AttributeError) as error:
        if signal_handlers.raised(error):
            raise
        _refuse_damaged(path, error)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in tree_leaves(loaded)):
        refuse(f"{path} has tensors on the meta device, which hold no values: save it once more with values")
    return loaded


def _refuse_damaged(path: str, error: BaseException) -> NoReturn:
    refuse(f"{path} cannot be read as a file of torch.save: {line_of(error)}. It may be cut short or damaged: copy it once more")


def line_of(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _is_of_the_old_format(path: str) -> bool:
    with open(path, "rb") as file:
        return torch.serialization.MAGIC_NUMBER.to_bytes(10, "little") in file.read(64)


def _refuse_objects(path: str, error: Exception, trusted: bool) -> NoReturn:
    known = {f"{kind.__module__}.{kind.__qualname__}" for kind in _STAND_INS}
    found: list[str] = []
    with signal_handlers.suppressing(Exception):
        found = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - known)
    if not found and (trusted or not _is_of_the_old_format(path)):  # of which PyTorch cannot say what it holds
        _refuse_damaged(path, error.__context__ or error)  # without PyTorch's advice to trust the file
    if not found:
        refuse(f"{path} cannot be read as a file of torch.save: {line_of(error)}. If you trust the file, pass trusted=True to "
               "hoist.torch.deepspeed.open()")
    refuse(f"{path} holds objects of {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}, and making such objects may run "
           "any program: they are the program's own client state, or a version of DeepSpeed writes what 0.19 does not. If you "
           "trust the file, allow these classes with torch.serialization.add_safe_globals([...]), or everything with "
           "hoist.torch.deepspeed.open(..., trusted=True)")


# --- which file is what ----------------------------------------------------------------------------------------------

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXPERTS = re.compile(r"(?:(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states|expp_rank_\d+_mp_rank_\d+_optim_states)\.pt")
_PIPELINE = re.compile(r"layer_\d+-model_.*\.pt")


class Folder:
    """The files of one tag, by rank."""

    def __init__(self, path: str):
        self.path = path
        self.optimizer: dict[int, str] = {}
        self.model: dict[int, str] = {}
        self.is_universal = os.path.isfile(self.file("zero", "optimizer_state.pt"))
        for name in sorted(os.listdir(path)):
            if found := _OPTIMIZER.fullmatch(name):
                self._add(self.optimizer, int(found[1]), int(found[2]), name)
            elif found := _MODEL.fullmatch(name):
                self._add(self.model, int(found[1] or 0), int(found[2]), name)
            elif _EXPERTS.fullmatch(name):
                refuse(f"{path} is of a mixture of experts (it has {name}), whose parts are not put together here: begin with "
                       "its weights (weights=...)")
            elif _PIPELINE.fullmatch(name):
                refuse(f"{path} is of a pipeline-parallel run (it has {name}), whose stages are not put together here: begin "
                       "with its weights (weights=...)")
        if os.path.isdir(self.file("offloaded_tensors")):
            refuse(f"{path} was saved with the optimizer offloaded to NVMe: DeepSpeed then leaves masters and moments in files "
                   "of its swapper (offloaded_tensors), which say nothing of what they hold. Save one with "
                   'offload_optimizer {"device": "cpu"}, or begin with the weights (save_16bit_model and weights=...)')

    def file(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def _add(self, files: dict[int, str], rank: int, model_parallel_rank: int, name: str) -> None:
        if model_parallel_rank != 0:
            refuse(f"{self.path} is of a tensor- or pipeline-parallel run (it has {name}), whose slices are not put together "
                   "here: begin with its weights (weights=...)")
        if rank in files:
            refuse(f"{self.path} has two files of rank {rank}, {os.path.basename(files[rank])} and {name}: they are of two "
                   "runs; remove those that are not this one's")
        files[rank] = self.file(name)


def find(directory: str, tag: str | None) -> Folder:
    """The folder of a tag, of the newest one, or `directory` itself if it is one."""
    if not os.path.isdir(directory):
        refuse(f"there is no directory {directory}")
    if tag is None:
        for pointer in ("latest", "latest_universal"):
            path = os.path.join(directory, pointer)
            if os.path.isfile(path):
                with open(path, encoding="utf-8", errors="surrogateescape") as file:
                    tag = file.read(4096).strip()
                if os.path.basename(tag) != tag or tag in ("", ".", ".."):
                    refuse(f"{path} holds '{tag}', which is not the name of a checkpoint beside it: name one with tag=...")
                break
    path = directory if tag is None else os.path.join(directory, tag)
    if not os.path.isdir(path):
        refuse(f"there is no checkpoint {path}: " + ("name another with tag=..." if tag is not None else ""))
    folder = Folder(path)
    if not folder.is_universal and not folder.optimizer:
        if os.path.isdir(folder.file("zero")):
            refuse(f"{folder.file('zero', 'optimizer_state.pt')} of a universal checkpoint is missing: copy the whole checkpoint")
        if folder.model:
            refuse(f"{path} has no file *_optim_states.pt: it is of a run without ZeRO (stage 0), or the files were not all "
                   "copied. Stages 1, 2 and 3 are continued here; begin with the weights alone with weights=...")
        refuse(f"{path} is no checkpoint of DeepSpeed's: it has no *_optim_states.pt and no zero/optimizer_state.pt. Name the "
               "directory with the file `latest`, or a tag's own")
    if not folder.model:
        refuse(f"{path} has no file *_model_states.pt, which says which parameters its states are of: copy it as well")
    return folder
