# SPDX-License-Identifier: Apache-2.0
"""Persistent buffers, and parameters without elements, in safetensors files of weights: export() writes them beside the
parameters, as save_pretrained() and `save_file(model.state_dict())` do, and wrap(weights=...) takes them from such files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from hoist import _hoist

_log = logging.getLogger("hoist")

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
         "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
         "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64}
# Older PyTorch lacks some.
FLOAT8 = {name: getattr(torch, attribute) for name, attribute in (
    ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E8M0", "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E5M2FNUZ", "float8_e5m2fnuz")) if hasattr(torch, attribute)}
TYPES |= FLOAT8
NAMES = {dtype: name for name, dtype in TYPES.items()}

# (name, type, shape, address), as the extension takes tensors.
FileTensor = tuple[str, str, list[int], int]


def can_be_mapped(path: str) -> bool:
    """Whether torch.save wrote a file in its format since PyTorch 1.6, an archive."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def without_unknown(buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The log names those that such files cannot hold, which are left out."""
    for name, buffer in buffers:
        if buffer.layout == torch.strided and buffer.dtype in NAMES:
            yield name, buffer
        else:
            _log.warning("buffer '%s' is left out: safetensors files cannot hold %s, %s", name, buffer.dtype, buffer.layout)


def plain(buffer: torch.Tensor) -> torch.Tensor:
    """Its values in main memory, one after the other, as files have them."""
    return buffer.detach().to("cpu").resolve_neg().resolve_conj().contiguous()


def file_tensors(buffers: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[FileTensor], list[torch.Tensor]]:
    """Buffers for a file, the widest types first, and the tensors that have to live as long."""
    named = sorted(((name, plain(buffer)) for name, buffer in buffers), key=lambda pair: -pair[1].element_size())
    return [(name, NAMES[v.dtype], list(v.shape), v.data_ptr()) for name, v in named], [v for _, v in named]


def read_buffers(path: str, model: nn.Module, persistent: dict[str, torch.Tensor],
                 empty: dict[str, torch.Tensor]) -> tuple[set[str], Callable[[], None]]:
    """The names in the files that are not for the engine and have their right there, and what fills the model's persistent
    buffers. `empty`: parameters without elements. Tensors that are named like buffers that the model computes are passed over,
    and those that the model itself names (transformers' _keys_to_ignore_on_load_unexpected). Errors: UsageError for one of
    another shape, and for a buffer of another type that is not a floating-point number in both."""
    found = _hoist.tensors_in(path)
    values: dict[str, torch.Tensor] = {}
    for name in persistent.keys() & found.keys():
        kind, shape = found[name]
        dtype, buffer = TYPES.get(kind), persistent[name]
        fits = dtype == buffer.dtype or (dtype is not None and dtype.is_floating_point and buffer.is_floating_point())
        if dtype is None or not fits or list(buffer.shape) != shape:
            raise _hoist.UsageError(f"{path}: '{name}' is {kind} {shape}, and the model's buffer is {buffer.dtype} "
                                    f"{list(buffer.shape)}")
        data = bytearray(_hoist.read_tensor(path, name))
        values[name] = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype, device="cpu")
    for name in empty.keys() & found.keys():
        if list(empty[name].shape) != found[name][1]:
            raise _hoist.UsageError(f"{path}: '{name}' is {found[name][1]}, and the model's parameter {list(empty[name].shape)}")
    if absent := sorted(persistent.keys() - found.keys()):
        _log.warning("%s has no values for %d of the model's buffers, '%s' first: they begin as the model was built", path,
                     len(absent), absent[0])

    def tail(name: str) -> str:
        return ".".join(name.split(".")[-2:])

    computed = {tail(name) for name, _ in model.named_buffers() if name not in persistent}
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    others = {name for name in found if tail(name) in computed or any(re.search(pattern, name) for pattern in patterns)}

    def fill() -> None:
        for name, value in values.items():
            persistent[name].copy_(value)

    return values.keys() | others | (empty.keys() & found.keys()), fill
