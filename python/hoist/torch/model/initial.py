# SPDX-License-Identifier: Apache-2.0
"""Finds initial values, one unit at a time. They come from a parameter's attribute `initial_values`, a function that returns
them; or from the tensor that it was built with; or, for one on the meta device, from its module, which gets memory and is
initialized. That memory holds NaN before, which shows the elements that were left out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from hoist import _hoist, signal_handlers
from hoist.optim.values import DTYPES
from hoist.torch.devices import own_random_numbers
from hoist.torch.model.units import Unit

_log = logging.getLogger("hoist")

Initialize = Callable[[nn.Module], None]
Source = torch.Tensor | Callable[[], torch.Tensor]  # a parameter's initial values, or what reads them
_PIECE = 1 << 20  # elements that are looked at at a time


def values_of(source: Source) -> torch.Tensor:
    return source if isinstance(source, torch.Tensor) else source()


def refuse_lost(name: str) -> NoReturn:
    """Errors: UsageError, for a parameter whose values were in the memory of a closed engine."""
    raise _hoist.UsageError(f"parameter '{name}' has no values: the engine that had this model was closed, and the weights were "
                            "in its memory. Build the model anew, or pass weights=DIR (for a Trainer hoist_options={\"weights\": "
                            "DIR}), which engine.export(DIR) wrote before close(), or resume=True with a store that holds a "
                            "commit")


def _origin(source: Source | None) -> str:
    if source is None:
        return "to be made"
    return str(source.dtype) if isinstance(source, torch.Tensor) else "to be read"


def agree_on_initial_values(unit_manager: _hoist.UnitManager, units: list[Unit], sources: dict[int, Source], seed: int) -> int:
    """[C] Where ranks have built a model with other values than rank 0 of those that divide it, they take rank 0's, as with
    DistributedDataParallel. Returns the seed of what is to be initialized: rank 0's. Values that are read later, from files, are
    not compared. Pre: 0 <= seed < 2^64. Errors: UsageError on all ranks where they have built different parameters."""
    if unit_manager.world_size == 1:
        return seed
    named = [(name, p) for unit in units for name, p in unit.parameters.items()]
    if not unit_manager.same_on_all(repr([(name, list(p.shape)) for name, p in named])):
        return seed  # initialize() names the difference
    origins = [_origin(sources.get(id(p))) for _, p in named]
    if not unit_manager.same_on_all(repr(origins)):
        raise _hoist.UsageError("the ranks have built different parameters of the model, or of different types, and left others "
                                "to the meta device or to files: build it in the same way on every rank")
    if "to be made" in origins:
        bits = torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")
        if any(unit_manager.overwrite_with_rank_0([(bits.data_ptr(), 8)])):
            seed = int.from_bytes(bytes(bits.tolist()), "little")
    overwrite_with_rank_0(unit_manager, (
        [(name, s.detach()) for name, p in unit.parameters.items() if isinstance(s := sources.get(id(p)), torch.Tensor)]
        for unit in units))
    return seed


def overwrite_with_rank_0(unit_manager: _hoist.UnitManager, parts: Iterable[list[tuple[str, torch.Tensor]]]) -> None:
    """[C] Gives the tensors rank 0's values where other ranks have others, a part at a time. Pre: as many tensors, of the same
    shapes and types, on each rank."""
    differing: list[str] = []
    for part in parts:
        values = [own.cpu().contiguous() for _, own in part]  # the parameters' own memory where that is possible
        differs = unit_manager.overwrite_with_rank_0([(v.data_ptr(), v.numel() * v.element_size()) for v in values])
        for (name, own), value, differs_here in zip(part, values, differs, strict=True):
            if differs_here:
                differing.append(name)
                if value.data_ptr() != own.data_ptr():
                    own.copy_(value)
    if differing and unit_manager.rank == 0:
        _log.warning("%d parameters had other initial values on other ranks, '%s' first: all ranks begin with rank 0's",
                     len(differing), differing[0])


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """PyTorch's convention: modules that hold parameters or buffers know how to reset them."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def default_initialize(module: nn.Module) -> None:
    reset = _reset_of(module)
    if reset is None:
        raise _hoist.UsageError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(): pass initialize=..., a "
            "function that initializes one module in place, or weights=..., files to begin with"
        )
    _reset(module, reset)


def _reset(module: nn.Module, reset: Callable[[], object]) -> None:
    try:
        reset()
    except RuntimeError as error:
        raise _hoist.UsageError(
            f"reset_parameters() of a {type(module).__name__} on the meta device fails where only one unit at a time has memory "
            f"({error}): pass initialize=..., a function that initializes one module in place") from error


class InitialValues:
    """Called by the engine for one unit after the other; keeps the values of the last one alive."""

    def __init__(self, units: list[Unit], sources: dict[int, Source], number_of: Callable[[nn.Parameter], int],
                 initialize: Initialize, seed: int, device: torch.device):
        self._units = units
        self._sources = sources  # by id of a parameter; none for those that are to be initialized
        self._number_of = number_of  # the engine's number of a parameter
        self._initialize = initialize
        self._seed = seed
        self._device = device  # a function of the program's may draw its numbers there
        self._alive: list[torch.Tensor] = []

    def __call__(self, index: int) -> dict[int, tuple[int, _hoist.DType, int]]:
        unit = self._units[index]
        self._alive = []  # the last unit's values go before this one's come
        built = {p: values_of(self._sources[id(p)]) for p in unit.parameters.values() if id(p) in self._sources}
        values = built if len(built) == len(unit.parameters) else self._make(index, unit, built) | built
        # The masters are fp32, which a type that the engine does not know (float64) becomes here.
        self._alive = [v.detach().to("cpu", v.dtype if v.dtype in DTYPES else torch.float32).contiguous()
                       for v in values.values()]
        return {
            self._number_of(p): (v.data_ptr(), DTYPES[v.dtype], v.numel())
            for p, v in zip(values, self._alive, strict=True)
        }

    def _make(self, index: int, unit: Unit, built: dict[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """Initializes the modules that have parameters without values, and returns values for all of the unit's parameters. A
        module may also reset the modules inside it, so it is initialized after them, as when it was built. Modules that enclose
        this unit find the parameters of other units on the meta device."""
        enclosing = [] if self._initialize is not default_initialize else [
            other.module for other in self._units
            if other.encloses and other is not unit and unit.module in other.module.modules()]
        lacking = [m for m in dict.fromkeys((*_inner_first(unit.module), *reversed(enclosing)))
                   if m in (*unit.modules, *enclosing) and any(id(p) not in self._sources for p in m.parameters(recurse=False))]
        known = {id(p): value for p, value in built.items()}
        # The same numbers whatever was initialized before, and when this unit is asked for twice.
        with (_own_memory(unit.modules, known, (*enclosing, unit.module)[0]) as stand_ins,
              own_random_numbers(self._device, (self._seed + index) % 2**64), torch.no_grad()):
            for module in lacking:
                self._initialize(module)
            made = {p: stand_ins[id(p)].data for p in unit.parameters.values()}
        for name, parameter in unit.parameters.items():
            if id(parameter) not in self._sources and _has_gaps(made[parameter]):
                self._refuse_gaps(unit, name, parameter)
        return made

    def _refuse_gaps(self, unit: Unit, name: str, parameter: nn.Parameter) -> NoReturn:
        owner = next((m for m in unit.modules if any(p is parameter for p in m._parameters.values())), unit.module)
        kind = type(owner).__name__
        left_by = f"reset_parameters() of its {kind}" if self._initialize is default_initialize else "initialize=..."
        raise _hoist.UsageError(f"parameter '{name}' is on the meta device, and {left_by} leaves elements of it without values: "
                                f"pass initialize=..., a function that sets each parameter of a {kind} that it is called with, "
                                f"or build the {kind} outside of torch.device('meta')")


def _shows_gaps(dtype: torch.dtype) -> bool:
    """Whether _unset() marks each element, with NaN."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def _unset(like: torch.Tensor, device: str) -> torch.Tensor:
    if _shows_gaps(like.dtype):
        return torch.full(like.shape, torch.nan, dtype=like.dtype, device=device)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _has_gaps(values: torch.Tensor) -> bool:
    return values.is_meta or any(bool(part.isnan().any()) for part in values.reshape(-1).split(_PIECE))


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside and itself, each before those that contain it."""
    for child in module.children():
        yield from _inner_first(child)
    yield module


@contextlib.contextmanager
def _own_memory(modules: list[nn.Module], values: dict[int, torch.Tensor],
                outermost: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """In its context, parameters in CPU memory replace those of `modules`, with copies of `values` (by id) or NaN; and meta
    tensors replace those of the other modules inside `outermost`. Yields the replacements by the id of the original."""
    parts = [(module, "cpu") for module in modules] + [(module, "meta") for module in outermost.modules()
                                                       if module not in modules]
    own = [(module, device, name, p) for module, device in parts for name, p in module._parameters.items() if p is not None]
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for module, device, name, parameter in own:
            if id(parameter) not in stand_ins:
                known = values.get(id(parameter))
                data = _unset(parameter, device) if known is None else known.to(device, parameter.dtype, copy=True)
                stand_ins[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = stand_ins[id(parameter)]
        yield stand_ins
    finally:
        for module, _, name, parameter in own:
            module._parameters[name] = parameter


@dataclass
class NewBuffer:
    """A buffer that was on the meta device."""

    name: str  # in the model
    module: nn.Module
    key: str
    made: torch.Tensor
    version: int

    def is_unset(self) -> bool:
        """Whether it has elements that nothing has set."""
        now = self.module._buffers.get(self.key)
        if now is not self.made:
            return now is not None and now.is_meta
        if not _shows_gaps(now.dtype):
            return now._version == self.version
        return _has_gaps(now) and not (now._version != self.version and bool(now.isnan().all()))  # NaN may be meant


def materialize_buffers(model: nn.Module, initialize: Initialize | None, device: torch.device) -> list[NewBuffer]:
    """Buffers are not offloaded. Those on the meta device get memory. `initialize` fills them, and their module those that it
    leaves. Returns those that are left then: files or a commit may have their values."""
    unset: list[NewBuffer] = []
    for name, module in model.named_modules():
        buffers = module._buffers
        made = {key: _unset(b, "cpu") for key, b in buffers.items() if b is not None and b.is_meta}
        if not made:
            continue
        buffers.update(made)
        new = [NewBuffer(f"{name}.{key}" if name else key, module, key, b, b._version) for key, b in made.items()]
        fill = getattr(module, "reset_buffers", None) or _reset_of(module)
        with _own_memory([module], {}, module), own_random_numbers(device), torch.no_grad():
            if initialize is not None:
                initialize(module)
            left = {each.key for each in new if each.is_unset()}
            if left and fill is not None:
                kept = {key: b for key, b in buffers.items() if b is not None and key not in left}
                buffers.update({key: b.clone() for key, b in kept.items()})
                with signal_handlers.suppressing(Exception) if initialize is not None else contextlib.nullcontext():
                    _reset(module, fill)
                buffers.update(kept)
        unset += [each for each in new if each.is_unset() and (initialize is None or _shows_gaps(each.made.dtype))]
    return unset


def refuse_unset(buffers: Iterable[NewBuffer]) -> None:
    """Errors: UsageError for the first of these, which nothing has set."""
    for buffer in buffers:
        raise _hoist.UsageError(
            f"buffer '{buffer.name}' is on the meta device and nothing says what it holds, or not all of it: build "
            f"{type(buffer.module).__name__} outside of torch.device('meta'), or pass initialize=..., a function that also fills "
            "the buffers of a module")
