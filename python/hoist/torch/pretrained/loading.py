# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose weights stay in their files until they are wrapped.

transformers itself builds the model on the meta device. It compares names and shapes with the files, and reports missing and
unexpected ones. Each parameter then carries a function that reads its values: wrap() calls these one unit after the
other, so that memory holds one unit. Weights that have another name or shape in files than in the model (the experts of a
mixture) are converted by transformers' own rules.

Until then each parameter shows a single NaN in all its places. It is on the CPU, because PEFT and others make what they
add on the same device, and no store accepts NaN. Modules refuse to be called. A parameter that the program gives other values
begins with these; if it changes only some of them, wrap() refuses. The magnitudes that PEFT's DoRA derives from weights are
computed when the weights are read.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    is_peft_available,
)

from hoist import _hoist
from hoist.torch.model.weight_files import FLOAT8, TYPES, can_be_mapped

__all__ = ["from_pretrained"]

IS_TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5

Read = Callable[[], torch.Tensor]

_log = logging.getLogger("hoist")
# The arguments of from_pretrained that say where files are.
_PLACES = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


def from_pretrained(model_class: Any, name: str | os.PathLike[str], *positional: Any, **arguments: Any) -> Any:
    """Does as `model_class.from_pretrained(name, ...)` of transformers, but reads no weights yet.

    model_class  transformers' AutoModelForCausalLM, LlamaForCausalLM, and so on
    name         a directory, or a name on the hub as transformers resolves it (its cache, HF_HUB_OFFLINE)
    arguments    those of transformers: dtype, revision, output_loading_info, trust_remote_code...

    wrap() and Trainer read the weights from the files, which must stay there until then; before that, parameters are NaN,
    calling the model is a UsageError, and state_dict() reads the files.
    Parameters that the files lack are initialized here, as transformers does.
    """
    for key in ("device_map", "quantization_config", "state_dict", "gguf_file", "tp_plan", "distributed_config"):
        if arguments.pop(key, None) is not None:
            raise _hoist.UsageError(f"from_pretrained({key}=...) is not supported here: weights stay in their files until the "
                                    "model is wrapped; the engine then decides where they are")
    _refuse_adapter(os.fspath(name), arguments)
    with_info = arguments.pop("output_loading_info", False)
    with torch.random.fork_rng(devices=[]):  # transformers 4 draws values that _attach draws again
        model, info = model_class.from_pretrained(name, *positional, **arguments, device_map="meta", output_loading_info=True)
    if getattr(model, "hf_quantizer", None) is not None:
        raise _hoist.UsageError(f"{name} holds quantized weights; hoist trains only float32, bfloat16 and float16")
    files = [_tensors_in(os.path.join(os.getcwd(), path)) for path in _files_of(os.fspath(name), model, arguments)]
    tensors = {key: read for file in files for key, read in file.items()}
    reads = _reads_of(model, tensors, cast("dict[str, str] | None", arguments.get("key_mapping")))
    _tie_what_is_equal(model, reads)
    model.__dict__.pop("hf_device_map", None)  # of the meta device, which Trainer would take for the weights' place
    unexpected_shapes = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}  # transformers 4: names
    _attach(model, {key: read for key, read in reads.items() if key not in unexpected_shapes})
    return (model, info) if with_info else model


# --- files -----------------------------------------------------------------------------------------------------------

def _places_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: arguments[key] for key in _PLACES if arguments.get(key) is not None}


def _refuse_adapter(name: str, arguments: dict[str, Any]) -> None:
    """Errors: UsageError for what PEFT saved: transformers would load its base, and the adapter at once."""
    def found(file: str) -> str | None:
        path: str | None = cached_file(name, file, **_places_of(arguments), _raise_exceptions_for_missing_entries=False,
                                       _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False)
        return path

    if not is_peft_available() or (adapter := found("adapter_config.json")) is None:
        return
    if found("config.json") is not None:
        raise _hoist.UsageError(f"{name} has an adapter of PEFT beside the model: to train the model alone, move "
                                "adapter_config.json away; else call from_pretrained of a directory without it, and then "
                                f"peft.PeftModel.from_pretrained(model, '{name}', is_trainable=True)")
    with open(adapter, encoding="utf-8") as opened:
        base = json.load(opened).get("base_model_name_or_path")
    raise _hoist.UsageError(f"{name} is an adapter of PEFT: call from_pretrained of '{base}', its base, and then "
                            f"peft.PeftModel.from_pretrained(model, '{name}', is_trainable=True)")


def _files_of(name: str, model: Any, arguments: dict[str, Any]) -> Iterator[str]:
    """The files that transformers has just taken for this model."""
    places = _places_of(arguments)
    commit = getattr(model.config, "_commit_hash", None)
    if commit is not None:
        places["revision"] = commit
    safe = arguments.get("use_safetensors")
    candidates = [] if safe is False else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    candidates += [] if safe else [WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    variant = arguments.get("variant")
    for file in candidates:
        if variant is not None:
            stem, *rest = file.split(".")
            file = ".".join([stem, *rest[:-1], variant, rest[-1]])
        found = cached_file(name, file, **places, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        if not file.endswith(".json"):
            yield found
            return
        with open(found, encoding="utf-8") as opened:
            for shard in sorted(set(json.load(opened)["weight_map"].values())):
                yield cast(str, cached_file(name, shard, **places))
        return
    raise _hoist.UsageError(f"{name} has neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index of several files")


def _tensors_in(path: str) -> dict[str, Read]:
    """Every tensor of a file, mapped into memory while it is used."""
    if not path.endswith(".safetensors"):
        loaded = torch.load(path, map_location="cpu", mmap=can_be_mapped(path), weights_only=True)
        return {key: partial(torch.Tensor.detach, value) for key, value in loaded.items()}
    with open(path, "rb") as file:
        identity = _identity_of(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, 100_000_000)))
    header.pop("__metadata__", None)
    for key, entry in header.items():
        if entry["dtype"] not in TYPES:
            raise _hoist.UsageError(f"{path}: '{key}' is {entry['dtype']}; quantized weights are not supported here")
    return {key: _Mapped(path, identity, 8 + length, entry) for key, entry in header.items()}


def _identity_of(descriptor: int) -> tuple[int, ...]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class _Mapped:
    """A tensor of a safetensors file. Its pages are given back with the tensor."""

    def __init__(self, path: str, identity: tuple[int, ...], data_offset: int, entry: dict[str, Any]):
        self.path = path
        self._identity = identity
        self._begin, end = (data_offset + offset for offset in entry["data_offsets"])
        self._bytes = end - self._begin
        self.dtype = TYPES[entry["dtype"]]
        self._shape = entry["shape"]

    def __call__(self) -> torch.Tensor:
        if self._bytes == 0:
            return torch.empty(self._shape, dtype=self.dtype, device="cpu")
        before = self._begin % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            if _identity_of(file.fileno()) != self._identity:
                raise _hoist.UsageError(f"{self.path} was written anew since the model was made from it, and before its weights "
                                        "were read: make the model again, with from_pretrained")
            pages = mmap.mmap(file.fileno(), before + self._bytes, access=mmap.ACCESS_COPY, offset=self._begin - before)
        pages.madvise(mmap.MADV_WILLNEED)
        raw = torch.frombuffer(pages, dtype=torch.uint8, offset=before, count=self._bytes)
        if self._begin % self.dtype.itemsize:
            raw = raw.clone()  # a header of an odd length
        return raw.view(self.dtype).view(self._shape)


# --- names -----------------------------------------------------------------------------------------------------------

def _reads_of(model: Any, tensors: dict[str, Read], key_mapping: dict[str, str] | None) -> dict[str, Read]:
    """How to read each parameter and buffer that the files have: by the calls that PEFT makes, too, to convert adapters."""
    if IS_TRANSFORMERS_4:
        return _reads_of_4(model, tensors, key_mapping)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model, key_mapping)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted = model.state_dict()
    result: dict[str, Read] = {}
    groups: dict[str, _Converted] = {}
    for key in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and key in wanted:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if target not in wanted:
            continue  # transformers has reported it
        if pattern is None:
            result[target] = _reading(wanted[target].dtype, key, tensors[key])
        else:
            group = groups.setdefault(target, _Converted(model, target, converter_of[pattern]))
            group.add(key, pattern, _reading(wanted[target].dtype, key, tensors[key]))
    for group in groups.values():
        for target in group.targets(wanted):
            result[target] = partial(group.take, target)
    return result


def _reads_of_4(model: Any, tensors: dict[str, Read], key_mapping: dict[str, str] | None) -> dict[str, Read]:
    """transformers 4 renames tensors, and converts none."""
    from transformers.modeling_utils import VLMS  # type: ignore[attr-defined]  # transformers 5 has none

    if key_mapping is None and any(name in type(model).__name__.lower() for name in VLMS):
        key_mapping = model._checkpoint_conversion_mapping
    prefix = model.base_model_prefix
    in_files = bool(prefix) and any(key.startswith(prefix) for key in tensors)
    in_model = bool(prefix) and hasattr(model, prefix)
    names = model._get_key_renaming_mapping(
        list(tensors), key_mapping, loading_base_model_from_task_state_dict=in_files and not in_model,
        loading_task_model_from_base_state_dict=in_model and not in_files)
    wanted = model.state_dict()
    return {name: _reading(wanted[name].dtype, key, tensors[key]) for key, name in names.items() if name in wanted}


def _reading(dtype: torch.dtype, key: str, read: Read) -> Read:
    """Reads a tensor in the type that the model has it in: transformers casts before it converts. Errors: UsageError for 8 bits
    of a tensor that the model has in more: quantized weights, which have scales."""
    if isinstance(read, _Mapped) and read.dtype in FLOAT8.values() and dtype not in FLOAT8.values():
        raise _hoist.UsageError(f"{read.path}: '{key}' is {read.dtype}; quantized weights are not supported here")
    return partial(_read_as, dtype, read)


def _read_as(dtype: torch.dtype, read: Read) -> torch.Tensor:
    return read().to(dtype)


class _Converted:
    """Tensors of the files that one rule turns into one or several of the model's."""

    def __init__(self, model: Any, first_target: str, rule: Any):
        self._model = model
        self._first_target = first_target
        self._rule = rule
        self._sources: list[tuple[str, str, Read]] = []
        self._values: dict[str, torch.Tensor] = {}  # made, and not taken yet

    def add(self, key: str, pattern: str, read: Read) -> None:
        self._sources.append((key, pattern, read))

    def targets(self, wanted: dict[str, torch.Tensor]) -> list[str]:
        first, *others = self._rule.target_patterns
        names = [self._first_target, *(self._first_target.replace(first, other) for other in others)]
        return [name for name in names if name in wanted]

    def take(self, target: str) -> torch.Tensor:
        if target not in self._values:
            rule = copy.deepcopy(self._rule)
            for key, pattern, read in self._sources:
                rule.add_tensor(self._first_target, key, pattern, read)
            made = rule.convert(self._first_target, model=self._model, config=self._model.config)
            self._values = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return self._values.pop(target)


# --- the model -------------------------------------------------------------------------------------------------------

class _InFile:
    """Reads a parameter's values."""

    def __init__(self, name: str, shape: torch.Size, read: Read):
        self._name = name
        self._shape = shape
        self._read = read
        self._shown: Callable[[], torch.Tensor | None] = lambda: None

    def __call__(self) -> torch.Tensor:
        return self._read()

    def shown(self) -> torch.Tensor:
        """The values as a tensor of its own, which tied names share as long as someone has it."""
        value = self._shown()
        if value is None:
            value = self._read().detach().clone()
            self._shown = weakref.ref(value)
        return value

    def is_replaced(self, parameter: torch.Tensor) -> bool:
        """Whether the program has given the parameter other values. Errors: UsageError if these are not complete."""
        values = parameter.detach()
        # All elements of the placeholder are one value in memory: a program that changes one changes all.
        has_memory = values.untyped_storage().nbytes() >= values.numel() * values.element_size()
        absent = (values if has_memory else values.as_strided((1,), (1,))).isnan()
        if absent.all() and values.shape == self._shape:
            return False
        if absent.any() or not has_memory:
            raise _change_of(self._name)
        return True


def _change_of(name: str) -> _hoist.UsageError:
    return _hoist.UsageError(
        f"'{name}' was changed, or made from other weights, while weights were still in their files: the values that hoist would "
        "begin with are incomplete. Load the model with transformers' own from_pretrained, or change weights after the model is "
        "wrapped, in a block of engine.gathered(modify=True)")


def _copy_of(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """With its values: TRL copies a model before training, for reference."""
    read = parameter.initial_values
    values = (parameter.detach() if read.is_replaced(parameter) else read()).clone()
    memo[id(parameter)] = copied = nn.Parameter(values, requires_grad=parameter.requires_grad)
    return copied


def _is_in_files(parameter: Any) -> bool:
    return "__deepcopy__" in getattr(parameter, "__dict__", ())  # wrapping takes that away, and copies have values


def _refuse_call(module: nn.Module, _: Any) -> None:
    if any(map(_is_in_files, module._parameters.values())):
        raise _hoist.UsageError(
            f"a module ({type(module).__name__}) was called, and its weights are still in their files: hoist reads them when the "
            "model is wrapped. Call hoist.torch.wrap(model, config) or Trainer.train() before you use the model (with TRL, set "
            "precompute_ref_log_probs=False), or load it with transformers' own from_pretrained")


def _show_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """state_dict() has the files' values, which take memory, and not NaN: they may be saved, even over the files."""
    parameter: Any
    for name, parameter in module._parameters.items():
        if prefix + name in state and _is_in_files(parameter) and not parameter.initial_values.is_replaced(parameter):
            state[prefix + name] = parameter.initial_values.shown()


def _give_memory(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before load_state_dict() copies values."""
    parameter: Any
    for name, parameter in module._parameters.items():
        if prefix + name in state and _is_in_files(parameter) and not parameter.initial_values.is_replaced(parameter):
            parameter.data = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=parameter.device)


def _resize_token_embeddings(model: Any, *positional: Any, **arguments: Any) -> Any:
    """transformers copies the embeddings' values, and computes those of new tokens from them."""
    for module in filter(None, (model.get_input_embeddings(), model.get_output_embeddings())):
        for parameter in module.parameters():
            if _is_in_files(parameter) and not parameter.initial_values.is_replaced(parameter):
                parameter.data = parameter.initial_values().clone().to(parameter.device)
    return type(model).resize_token_embeddings(model, *positional, **arguments)


def _take_edits(model: Any) -> None:
    """Parameters that the program has given values of its own begin with them."""
    for parameter in model.parameters():
        if _is_in_files(parameter) and parameter.initial_values.is_replaced(parameter):
            del parameter.initial_values, parameter.__deepcopy__


def _refuse_absent(model: Any) -> None:
    """Errors: UsageError for a parameter or buffer whose values were made from ones that are still in files."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_known = hasattr(tensor, "initial_values") or getattr(tensor, "has_nan_of_its_own", False)
        if not is_known and not tensor.is_meta and tensor.isnan().any():
            raise _change_of(name)


@contextlib.contextmanager
def reading_files(model: Any) -> Iterator[None]:
    """Around the making of an engine: the model may be called after it."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    reads = bool(modules) and any(map(_is_in_files, model.parameters()))
    if reads:
        _take_edits(model)
    magnitudes = []
    for module in modules:
        for adapter, layer in (getattr(module, "lora_magnitude_vector", None) or {}).items():
            base = cast(Any, module).get_base_layer().weight
            if _is_in_files(base) and layer.weight.isnan().all():
                layer.weight.initial_values = _Magnitude(module, adapter, base.initial_values)
                magnitudes.append(layer.weight)
    if reads:
        _refuse_absent(model)
    yield
    for magnitude in magnitudes:
        magnitude.__dict__.pop("initial_values", None)  # and with it what it has of the adapters
    for module in modules:
        module.__dict__.pop("resize_token_embeddings", None)
        for hooks, own in ((module._forward_pre_hooks, _refuse_call), (module._load_state_dict_pre_hooks, _give_memory),
                           (module._state_dict_hooks, _show_values)):
            for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is own]:
                del hooks[key]


class _Magnitude:
    """The initial magnitudes of a layer with DoRA, by PEFT's own formula."""

    def __init__(self, module: Any, adapter: str, read: Read):
        self._layer = module.lora_magnitude_vector[adapter]
        factors = [getattr(named[adapter], "weight", named[adapter]) for named in (
            (module.lora_A, module.lora_B) if adapter in module.lora_A else (module.lora_embedding_A, module.lora_embedding_B))]
        self._factors = [factor.detach() for factor in factors]  # their memory is the engine's soon
        self._scaling = module.scaling[adapter]
        self._read = read

    def __call__(self) -> torch.Tensor:
        base: Any = nn.Module()
        base.weight = nn.Parameter(self._read(), requires_grad=False)
        lora_A, lora_B = (factor.to(base.weight.dtype) for factor in self._factors)
        made = type(self._layer)(self._layer.fan_in_fan_out)
        made.update_layer(base_layer=base, lora_A=lora_A, lora_B=lora_B, scaling=self._scaling)
        return cast(torch.Tensor, made.weight.detach())


def _tie_what_is_equal(model: Any, reads: dict[str, Read]) -> None:
    """Ties parameters that the model ties and the files hold under both names, unless their values differ. transformers 5 leaves
    that to the end of its loading, when it has the values; on the meta device it never has."""
    tied = getattr(model, "all_tied_weights_keys", None)
    for alias, source in tied.items() if isinstance(tied, dict) else ():
        if alias not in reads or source not in reads or model.get_parameter(alias) is model.get_parameter(source):
            continue
        if torch.equal(reads[alias](), reads[source]()):
            path, _, name = alias.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(source))
        else:
            _log.warning("%s and %s are tied in the model and differ in its files: they are trained apart", alias, source)


def _attach(model: Any, reads: dict[str, Read]) -> None:
    """Gives each parameter its function, and memory to what no file has: buffers that are computed, missing parameters."""
    replaced: dict[int, nn.Parameter] = {}
    for name, meta in model.named_parameters(remove_duplicate=False):
        if name in reads:
            absent = torch.full((), torch.nan, dtype=meta.dtype, device="cpu").expand(meta.shape)
            parameter: Any = nn.Parameter(absent, requires_grad=meta.requires_grad)
            parameter.initial_values, parameter._is_hf_initialized = _InFile(name, meta.shape, reads[name]), True
            parameter.__deepcopy__ = partial(_copy_of, parameter)
            replaced[id(meta)] = parameter
    for prefix, module in model.named_modules():
        module.__dict__.pop("_is_hf_initialized", None)
        for name, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                empty = nn.Parameter(torch.empty_like(meta, device="cpu"), requires_grad=meta.requires_grad)
                module._parameters[name] = replaced.setdefault(id(meta), empty)
        if any(map(_is_in_files, module._parameters.values())):
            module._register_load_state_dict_pre_hook(_give_memory, with_module=True)
            module._register_state_dict_hook(_show_values)
        for name, buffer in module._buffers.items():
            read = reads.get(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and buffer.is_meta:
                value: Any = torch.empty_like(buffer, device="cpu") if read is None else read().clone()
                value._is_hf_initialized = read is not None
                module._buffers[name] = value
    if IS_TRANSFORMERS_4:
        _initialize_as_4(model)
    else:
        model.initialize_weights()
    # Only now: initializing a module with a parametrization calls the parametrization, which the hook would refuse.
    for module in model.modules():
        if any(map(_is_in_files, module._parameters.values())):
            module.register_forward_pre_hook(_refuse_call)
    for buffer in model.buffers():
        buffer.has_nan_of_its_own = bool(buffer.isnan().any())
    model.resize_token_embeddings = MethodType(_resize_token_embeddings, model)


def _initialize_as_4(model: Any) -> None:
    """transformers 4 initializes modules whole, and computes buffers only where they are made."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]  # it has no types

    with init_empty_weights():
        computed = dict(type(model)(model.config).named_buffers())
    absent: dict[nn.Parameter, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not getattr(buffer, "_is_hf_initialized", True):
                buffer.copy_(computed[f"{prefix}.{name}" if prefix else name])
        own = list(module.parameters(recurse=False))
        read = [p for p in own if hasattr(p, "initial_values")]
        module._is_hf_initialized = len(read) == len(own)
        if not module._is_hf_initialized:
            absent |= {p: p.data for p in read}
    for parameter, data in absent.items():
        parameter.data = torch.empty_like(data, memory_format=torch.contiguous_format)
    model.initialize_weights()
    for parameter, data in absent.items():
        parameter.data = data
