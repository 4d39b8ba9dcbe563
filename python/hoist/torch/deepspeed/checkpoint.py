# SPDX-License-Identifier: Apache-2.0
"""The contents of one DeepSpeed checkpoint: masters and moments of any elements of a parameter, and all other state."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hoist import _hoist, signal_handlers
from hoist.torch.deepspeed import files
from hoist.torch.deepspeed.files import refuse
from hoist.torch.deepspeed.whole_files import refuse_copies

# DeepSpeed's names of what the engine keeps of a parameter.
KEYS = {_hoist.State.master: "fp32", _hoist.State.moment1: "exp_avg", _hoist.State.moment2: "exp_avg_sq"}

_RANKS_MAX = 1 << 20  # more than any run has; a file that says so is damaged

# The keys of a model file that DeepSpeed itself writes; all others are the program's client state.
OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info",
    "checkpoint_parallel_dimensions",
}


def open(directory: str | os.PathLike[str], tag: str | None = None, trusted: bool = False) -> Checkpoint:
    """A checkpoint below `directory`: of a tag, or the newest (`latest`); or a tag's directory itself.

    Only the descriptions in the files are read; tensors stay on disk until they are used, but for files in PyTorch's format
    before 1.6, which are read into memory. `trusted`: load any object that the files hold, which may run any code.

    Errors: StoreError, naming the file and what helps.
    """
    signal_handlers.note()
    folder = files.find(os.path.join(os.getcwd(), directory), tag)
    try:
        return (_open_universal if folder.is_universal else _open_partitioned)(folder, trusted)
    except _hoist.Error:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if signal_handlers.raised(error):
            raise
        refuse(f"{folder.path} is not as DeepSpeed 0.19 writes checkpoints ({type(error).__name__}: {str(error)[:200]}): its "
               "files were changed, or another version wrote them")


@dataclasses.dataclass
class Span:
    """Elements [first, first + count) of a flattened parameter."""

    first: int
    count: int
    source: Any  # which tensors hold them
    offset: int  # of the first element there


@dataclasses.dataclass
class Checkpoint:
    """Weights and training state as DeepSpeed left them. `parameters` and `frozen` are shapes by DeepSpeed's names."""

    path: str
    stage: int
    ranks: int  # that wrote it; 0 of a universal checkpoint
    step: int  # of the optimizer, by which its bias correction counts
    global_steps: int  # skipped ones included
    parameters: dict[str, torch.Size]
    frozen: dict[str, torch.Size]
    tied: dict[str, str]  # name -> the name under which the parameter is stored
    buffers: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]  # of the optimizer, without their parameters
    group_of: dict[str, int]
    loss_scale: tuple[float, int, int] | None  # as UnitManager.begin_at takes it; None without a dynamic one
    scheduler: dict[str, Any] | None
    client_state: dict[str, Any]
    ds_config: Mapping[str, Any]
    spans: dict[str, list[Span]]
    states: _RankStates | _ParameterFiles
    files: list[str]  # that hold it

    @property
    def has_moments(self) -> bool:
        return self.step > 0

    @property
    def tag(self) -> str:
        return os.path.basename(os.path.normpath(self.path))

    def read(self, name: str, state: _hoist.State, first: int, out: torch.Tensor) -> None:
        """Elements [first, first + out.numel()) of a flattened parameter, as fp32. Frozen ones have a master only."""
        end = first + out.numel()
        for span in self.spans[name]:
            low, high = max(first, span.first), min(end, span.first + span.count)
            if low >= high:
                continue
            values = self.states.get(span.source, KEYS[state])
            begin = span.offset + low - span.first
            out[low - first:high - first].copy_(values[begin:begin + high - low])

    def master(self, name: str) -> torch.Tensor:
        shape = (self.parameters | self.frozen)[name]
        out = torch.empty(shape.numel(), dtype=torch.float32, device="cpu")
        self.read(name, _hoist.State.master, 0, out)
        return out.view(shape)


# --- of ZeRO 1, 2 and 3 ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Rank:
    path: str
    flat: list[torch.Tensor]  # masters, one flat tensor for each group (ZeRO 3: for each sub-group)
    states: dict[int, dict[str, torch.Tensor]]
    optimizer: dict[str, Any]


class _RankStates:
    """A source is (rank, group) of the optimizer, or a tensor: a frozen weight, or a part of it."""

    def __init__(self, ranks: Sequence[_Rank]):
        self._ranks = ranks

    def get(self, source: Any, key: str) -> torch.Tensor:
        if isinstance(source, torch.Tensor):
            return source
        rank, group = source
        held: _Rank = self._ranks[rank]
        return held.flat[group] if key == "fp32" else held.states[group][key]


def _open_partitioned(folder: files.Folder, trusted: bool) -> Checkpoint:
    for path in [*folder.optimizer.values(), *folder.model.values()]:
        refuse_copies(path)
    loaded = {rank: _optimizer_of(path, trusted) for rank, path in folder.optimizer.items()}
    first_path, first = next(iter(sorted(folder.optimizer.items())))[1], loaded[min(loaded)]
    counts = first.get("partition_count")
    count = max(counts) if isinstance(counts, list) and counts else counts
    if not isinstance(count, int) or not 0 < count <= _RANKS_MAX:
        refuse(f"{first_path} does not say how many ranks wrote it (partition_count)")
    if isinstance(counts, list) and len(set(counts)) > 1:
        refuse(f"{first_path} is of groups that were partitioned over different numbers of ranks {sorted(set(counts))}, as those "
               "of experts are: such runs are not continued here")
    missing = [rank for rank in range(count) if rank not in loaded]
    extra = [rank for rank in loaded if rank >= count]
    if missing:
        refuse(f"{folder.path} is of {count} ranks, and has no *_optim_states.pt of rank {', '.join(map(str, missing[:8]))}: "
               "copy the files of every rank, from all machines")
    if extra:
        refuse(f"{folder.path} is of {count} ranks, and {os.path.basename(folder.optimizer[extra[0]])} is of another run: "
               "remove it")
    stage = int(first.get("zero_stage", 1))  # BF16_Optimizer, which is of stage 1, does not say
    if stage not in (1, 2, 3):
        refuse(f"{first_path} is of ZeRO stage {stage}; 1, 2 and 3 are continued here")
    models = {rank: _model_of(path, trusted) for rank, path in folder.model.items() if rank == 0 or stage == 3}
    if 0 not in models:
        refuse(f"{folder.path} has no model_states file of rank 0: copy it as well")
    model = models[0]
    if stage == 3 and (absent := [rank for rank in range(count) if rank not in models]) and model.get("frozen_param_shapes"):
        refuse(f"{folder.path} has no *_model_states.pt of rank {absent[0]}, which holds parts of frozen parameters: copy the "
               "files of every rank")
    ranks = [_rank_of(folder.optimizer[rank], loaded[rank], stage) for rank in range(count)]
    shapes: list[dict[str, torch.Size]] = [_shapes_in(group, folder.model[0]) for group in model["param_shapes"]]
    if any(len(rank.flat) != len(shapes) for rank in ranks):
        refuse(f"{folder.path}: the optimizer's files have another number of parameter groups than {folder.model[0]} names: they "
               "are not of the same checkpoint")
    spans: dict[str, list[Span]] = {}
    paddings = first.get("param_alignment_paddings") or [[0] * len(named) for named in shapes]
    for group, (named, after) in enumerate(zip(shapes, paddings, strict=True)):
        spans |= _spans_of_stage3(group, named, ranks) if stage == 3 else _spans_of_groups(group, named, after, ranks)
    frozen, frozen_spans = _frozen_of(models, count, stage, shapes)
    groups, group_of_flat = _groups_in(ranks[0].optimizer, ranks[0].path, len(shapes))
    step = _common_step([(rank.path, _step_in(state, rank.optimizer["param_groups"], group_of_flat[index]))
                         for rank in ranks for index, state in sorted(rank.states.items())])
    if step is None and _applied(model) > 0:
        refuse(f"{ranks[0].path} holds no optimizer states, and the run had made {_applied(model)} steps: they were left "
               "elsewhere (offloaded, or dropped). Begin with the weights (weights=...)")
    return Checkpoint(
        path=folder.path, stage=stage, ranks=count, step=step or 0, global_steps=int(model["global_steps"]),
        parameters={name: shape for named in shapes for name, shape in named.items()}, frozen=frozen,
        tied=_names_in(model.get("shared_params")), buffers=_buffers_in(model), groups=groups,
        group_of={name: group_of_flat[index] for index, named in enumerate(shapes) for name in named},
        loss_scale=_loss_scale_in(first, first_path), scheduler=_scheduler_in(model), client_state=_client_state_in(model),
        ds_config=_config_in(model), spans=spans | frozen_spans, states=_RankStates(ranks),
        files=[*folder.optimizer.values(), *(folder.model[rank] for rank in models)])


def _optimizer_of(path: str, trusted: bool) -> dict[str, Any]:
    loaded = files.load(path, trusted)
    optimizer = loaded.get("optimizer_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(optimizer, dict):
        refuse(f"{path} is no file of ZeRO's: it has no optimizer_state_dict")
    return optimizer


def _model_of(path: str, trusted: bool) -> dict[str, Any]:
    model: dict[str, Any] = files.load(path, trusted)
    lacking = [key for key in ("module", "param_shapes", "global_steps", "skipped_steps") if
               not isinstance(model, dict) or key not in model]
    if lacking or not isinstance(model["param_shapes"], list):
        refuse(f"{path} is no file of a ZeRO run: it has no {', '.join(lacking) or 'list of shapes'}")
    if model.get("mp_world_size", 1) != 1:
        refuse(f"{path} is of a run with {model['mp_world_size']} model-parallel ranks, whose slices are not put together here: "
               "begin with its weights (weights=...)")
    if "num_experts" in model:
        refuse(f"{path} is of a mixture of experts, whose parts are not put together here: begin with its weights (weights=...)")
    return model


def _rank_of(path: str, optimizer: dict[str, Any], stage: int) -> _Rank:
    base = optimizer.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):
        refuse(f'{path} is an elastic checkpoint ("elastic_checkpoint": true): load it in DeepSpeed with that setting off, save '
               "it, and continue from there")
    flat = optimizer.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(base, dict) or not isinstance(flat, list) or not isinstance(base.get("param_groups"), list):
        refuse(f"{path} holds no masters of ZeRO stage {stage}: it was written by another version of DeepSpeed, or changed")
    # Empty ones are of a run that has skipped all its steps so far.
    states: dict[int, dict[str, torch.Tensor]] = {index: state for index, state in (base.get("state") or {}).items() if state}
    flat = [_flat(values, path, "masters") for values in flat]
    for index, state in states.items():
        if not isinstance(index, int) or not 0 <= index < len(flat):
            refuse(f"{path} holds optimizer states of a group {index}, which there is not")
        unknown = sorted(str(key) for key in state if key not in ("step", "exp_avg", "exp_avg_sq"))
        lacking = [key for key in ("exp_avg", "exp_avg_sq") if key not in state]
        if unknown or lacking:
            refuse(f"{path} is of another optimizer than Adam: its states are {', '.join(sorted(map(str, state))[:6])}. Adam's "
                   "and AdamW's (exp_avg, exp_avg_sq, without amsgrad) are continued here; begin with the weights (weights=...)")
        for key in ("exp_avg", "exp_avg_sq"):
            if _flat(state[key], path, key).numel() < flat[index].numel():
                refuse(f"{path}: group {index} has {flat[index].numel()} masters and {state[key].numel()} of {key}")
    if states and len(states) != len(flat):
        refuse(f"{path} holds optimizer states of {len(states)} of its {len(flat)} groups: the others were left elsewhere "
               "(offloaded, or dropped). Begin with the weights (weights=...)")
    return _Rank(path, flat, states, base)


def _flat(values: Any, path: str, what: str) -> torch.Tensor:
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_floating_point():
        refuse(f"{path}: {what} are no flat tensors of numbers")
    return values


def _shapes_in(group: Any, path: str) -> dict[str, torch.Size]:
    if not isinstance(group, Mapping):
        refuse(f"{path}: param_shapes names no parameters")
    return {str(name): torch.Size(shape) for name, shape in group.items()}


# ZeRO 1 and 2: a group's parameters one after the other, in equal parts, the last of which is padded (and saved without). With
# "parameter_alignment" each parameter is followed by unused elements, as many as `paddings` says.
def _spans_of_groups(group: int, shapes: dict[str, torch.Size], paddings: Sequence[int],
                     ranks: Sequence[_Rank]) -> dict[str, list[Span]]:
    part = ranks[0].flat[group].numel()
    have = [min(rank.flat[group].numel(), part) for rank in ranks]
    if not all(isinstance(padding, int) and padding >= 0 for padding in paddings):
        refuse(f"{ranks[0].path}: the paddings of group {group} (param_alignment_paddings) are no numbers of elements")
    need = sum(shape.numel() for shape in shapes.values()) + sum(paddings)
    for rank, count in enumerate(have):
        wanted = min(part, max(0, need - rank * part))
        if count < wanted:
            refuse(f"{ranks[rank].path}: group {group} has {count} masters, and its parameters need {wanted}: the file is of "
                   "another run")
    if part * len(ranks) < need:
        refuse(f"{ranks[0].path}: group {group} has {part} masters of each of {len(ranks)} ranks, and its parameters need {need}")
    spans: dict[str, list[Span]] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end = begin + shape.numel()
        spans[name] = []
        for rank in range(begin // part, math.ceil(end / part)) if part > 0 else ():
            low, high = max(begin, rank * part), min(end, (rank + 1) * part)
            spans[name].append(Span(low - begin, high - low, (rank, group), low - rank * part))
        begin = end + padding
    return spans


# ZeRO 3: each parameter in equal parts, of which a rank has one of every parameter, one after the other.
def _spans_of_stage3(group: int, shapes: dict[str, torch.Size], ranks: Sequence[_Rank]) -> dict[str, list[Span]]:
    parts = {name: math.ceil(shape.numel() / len(ranks)) for name, shape in shapes.items()}
    for rank in ranks:
        if rank.flat[group].numel() < sum(parts.values()):
            refuse(f"{rank.path}: sub-group {group} has {rank.flat[group].numel()} masters, and its parameters need "
                   f"{sum(parts.values())} (states that DeepSpeed offloads to NVMe are not in its files)")
    spans: dict[str, list[Span]] = {}
    offset = 0
    for name, shape in shapes.items():
        spans[name] = _equal_parts(shape.numel(), parts[name], [(rank, group) for rank in range(len(ranks))], offset)
        offset += parts[name]
    return spans


def _equal_parts(count: int, part: int, sources: Sequence[Any], offset: int) -> list[Span]:
    return [Span(rank * part, min(part, count - rank * part), source, offset) for rank, source in enumerate(sources)
            if rank * part < count]


def _frozen_of(models: dict[int, dict[str, Any]], ranks: int, stage: int, shapes: Sequence[dict[str, torch.Size]],
               ) -> tuple[dict[str, torch.Size], dict[str, list[Span]]]:
    model = models[0]
    frozen: dict[str, torch.Size] = {}
    spans: dict[str, list[Span]] = {}
    if stage == 3:
        for name, shape in _shapes_in(model.get("frozen_param_shapes") or {}, "a model file").items():
            parts = [models[rank]["frozen_param_fragments"][name].reshape(-1) for rank in range(ranks)]
            if sum(part.numel() for part in parts) < shape.numel():
                refuse(f"the frozen parameter '{name}' has {shape.numel()} elements, of which the files hold "
                       f"{sum(part.numel() for part in parts)}")
            frozen[name] = shape
            spans[name] = _equal_parts(shape.numel(), parts[0].numel(), parts, 0)
        return frozen, spans
    known = {name for named in shapes for name in named} | set(model["buffer_names"]) | set(model.get("shared_params") or ())
    for name, values in model["module"].items():
        if name not in known and isinstance(values, torch.Tensor) and values.is_floating_point():
            frozen[str(name)] = values.shape
            spans[str(name)] = [Span(0, values.numel(), values.reshape(-1), 0)]
    return frozen, spans


# --- universal -------------------------------------------------------------------------------------------------------


class _ParameterFiles:
    """A source is a parameter's name, or a frozen weight."""

    def __init__(self, folder: files.Folder, trusted: bool):
        self._folder = folder
        self._trusted = trusted
        self._read = functools.lru_cache(maxsize=16)(self._load)  # mapped: the next elements are asked for next

    def get(self, source: Any, key: str) -> torch.Tensor:
        return source if isinstance(source, torch.Tensor) else self._read(source, key)

    def _load(self, name: str, key: str) -> torch.Tensor:
        path = self.path(name, f"{key}.pt")
        loaded = files.load(path, self._trusted)
        values = loaded.get("param") if isinstance(loaded, dict) else loaded  # ZeRO 1 and 2, or 3
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            refuse(f"{path} holds no tensor of numbers")
        return values.reshape(-1)

    def path(self, name: str, file: str) -> str:
        if "/" in name or name in ("", ".", ".."):
            refuse(f"{self._folder.model[0]} names a parameter '{name}', which is no name of a directory")
        return self._folder.file("zero", name, file)

    def step_of(self, name: str) -> int | None:
        path = self.path(name, "step.pt")
        return _as_step(files.load(path, self._trusted)) if os.path.isfile(path) else None


def _open_universal(folder: files.Folder, trusted: bool) -> Checkpoint:
    state_path = folder.file("zero", "optimizer_state.pt")
    optimizer = files.load(state_path, trusted)
    if 0 not in folder.model:
        refuse(f"{folder.path} has no model_states file of rank 0: copy it as well")
    models = {rank: _model_of(path, trusted) for rank, path in folder.model.items()}
    model = models[0]
    stage = int(optimizer.get("zero_stage", 1))
    shapes = [_shapes_in(group, folder.model[0]) for group in model["param_shapes"]]
    parameters = {name: shape for named in shapes for name, shape in named.items()}
    states = _ParameterFiles(folder, trusted)
    base = optimizer.get("optimizer_state_dict") if stage == 3 else optimizer
    if not isinstance(base, dict) or not isinstance(base.get("param_groups"), list):
        refuse(f"{state_path} holds no parameter groups")
    groups, group_of_flat = _groups_in(base, state_path, len(shapes))
    steps = [(states.path(name, "step.pt"), states.step_of(name)) for name in parameters]
    if stage == 3:
        of_groups = base.get("state") or {}
        steps = [(state_path, _step_in(state, base["param_groups"], 0)) for _, state in sorted(of_groups.items())]
    elif all(step is None for _, step in steps):
        steps = [(state_path, _step_in({}, base["param_groups"], 0))]
    step = _common_step(steps)
    if step is None:
        refuse(f"{folder.path} does not say how many steps its optimizer had made (step.pt of a parameter, or {state_path})")
    spans: dict[str, list[Span]] = {}
    for name, shape in parameters.items():
        spans[name] = [Span(0, shape.numel(), name, 0)]
        for key in KEYS.values():
            if states.get(name, key).numel() != shape.numel():
                refuse(f"{states.path(name, key + '.pt')} has {states.get(name, key).numel()} elements, and the parameter "
                       f"{shape.numel()}")
    frozen, frozen_spans = ({}, {}) if stage == 3 and len(models) < int(model.get("dp_world_size", 1)) else _frozen_of(
        models, len(models), stage, shapes)
    return Checkpoint(
        path=folder.path, stage=stage, ranks=0, step=step, global_steps=int(model["global_steps"]), parameters=parameters,
        frozen=frozen, tied=_names_in(model.get("shared_params")), buffers=_buffers_in(model), groups=groups,
        group_of={name: group_of_flat[index] for index, named in enumerate(shapes) for name in named},
        loss_scale=_loss_scale_in(optimizer, state_path), scheduler=_scheduler_in(model), client_state=_client_state_in(model),
        ds_config=_config_in(model), spans=spans | frozen_spans, states=states,
        files=[state_path, *(folder.model[rank] for rank in models),
               *(path for name in parameters for kind in (*KEYS.values(), "step")
                 if os.path.isfile(path := states.path(name, f"{kind}.pt")))])


# --- what is in both -------------------------------------------------------------------------------------------------


def _applied(model: dict[str, Any]) -> int:
    return int(model["global_steps"]) - int(model["skipped_steps"])


def _as_step(value: Any) -> int | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, (int, float)) and 0 <= value < 2**53 else None


def _step_in(state: dict[str, Any], groups: list[Any], group: int) -> int | None:
    """The step count of a group; older versions have it in the parameter group, not in the state."""
    return _as_step(state.get("step", groups[group].get("step")))


def _common_step(steps: list[tuple[str, int | None]]) -> int | None:
    found = {step: path for path, step in steps if step is not None}
    if len(found) > 1:
        (one, path), (other, other_path) = list(found.items())[:2]
        refuse(f"{path} is of step {one} of the optimizer, and {other_path} of step {other}: they are of two checkpoints, or "
               "parameters were left out of some steps, which is not continued here")
    return next(iter(found), None)


def _groups_in(base: dict[str, Any], path: str, flat_count: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Hyperparameters of each group, and the group of each flat tensor."""
    groups = base["param_groups"]
    order = [index for group in groups for index in group.get("params", ())]
    group_of = [number for number, group in enumerate(groups) for _ in group.get("params", ())]
    if order != list(range(flat_count)):
        refuse(f"{path}: its parameter groups are of {len(order)} flat tensors, and {flat_count} are stored")
    return [{key: value for key, value in group.items() if key != "params"} for group in groups], group_of


def _names_in(shared: Any) -> dict[str, str]:
    return {str(name): str(owner) for name, owner in (shared or {}).items()}


def _buffers_in(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    module = model["module"]
    return {str(name): module[name] for name in model.get("buffer_names") or () if isinstance(module.get(name), torch.Tensor)}


def _scheduler_in(model: dict[str, Any]) -> dict[str, Any] | None:
    scheduler = model.get("lr_scheduler")
    return dict(scheduler) if isinstance(scheduler, Mapping) else None


def _client_state_in(model: dict[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in model.items() if key not in OWN_KEYS}


def _config_in(model: dict[str, Any]) -> Mapping[str, Any]:
    config = model.get("ds_config")
    return config if isinstance(config, Mapping) else {}


_LOSS_SCALE_MAX = 2.0**64  # as the engine's


def _loss_scale_in(optimizer: dict[str, Any], path: str) -> tuple[float, int, int] | None:
    scaler: Any = optimizer.get("loss_scaler")
    if not getattr(scaler, "dynamic", False):
        return None
    try:
        scale = float(scaler.cur_scale)
        steps = int(scaler.cur_iter) - int(scaler.last_overflow_iter) - 1
        hysteresis = int(scaler.cur_hysteresis)
    except (AttributeError, TypeError, ValueError) as error:
        refuse(f"{path}: its loss scale cannot be read ({error})")
    if not 0 < scale <= _LOSS_SCALE_MAX or steps < 0 or not 0 < hysteresis < 2**32:
        refuse(f"{path}: {scale} after {steps} steps is not a loss scale that can be continued with: from 0 to 2^64")
    return scale, steps, hysteresis
