# SPDX-License-Identifier: Apache-2.0
"""A module's parameters as units: what is used together, and gathered and released together.

The rule: members of a list of like modules (the blocks of a transformer) are units, whole, unless they are such lists
themselves; so is every module without children; and the parameters that stand directly in any other module form a unit of
their own. A parameter that several modules use belongs to the first of them.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_OF_ADAPTER = re.compile(r"\.(?:original_module|modules_to_save\.[^.]+)(?=\.|$)")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Unit:
    """Parameters of one unit, and the module whose calls need them."""

    name: str
    module: nn.Module
    modules: list[nn.Module]  # those that hold its parameters and buffers
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    shared: bool = False  # a module of another unit uses one of them
    encloses: bool = False  # its module contains modules with units of their own, and may use it before and after those


@dataclass
class Model:
    """The units in order, and for each module with a call of its own the indices of the units that it needs."""

    units: list[Unit]
    users: list[tuple[nn.Module, list[int]]]
    aliases: dict[str, str]  # other names of shared parameters -> the first one
    empty: set[str]  # names of parameters without elements, which no unit has

    def like(self, index: int) -> list[int]:
        """Other units beside this one, of modules of the same class: the other members of a list."""
        def kind(unit: Unit) -> tuple[type[nn.Module], str]:
            return type(unit.module), unit.name.rpartition(".")[0]

        return [i for i, unit in enumerate(self.units) if i != index and kind(unit) == kind(self.units[index])]

    def in_its_place(self, index: int) -> list[int]:
        """Other units that a program uses in this one's place: PEFT keeps a module of modules_to_save for each adapter, and the
        original."""
        places = [_OF_ADAPTER.sub(".*", unit.name) for unit in self.units]
        return [i for i, place in enumerate(places) if i != index and place == places[index]]

    def used_together(self) -> list[list[int]]:
        """For each unit the earlier ones that are always gathered when it is: a call needs its module's units, and those of every
        module that contains it."""
        together: list[set[int]] = [set() for _ in self.units]
        units_of_module = {id(module): units for module, units in self.users}
        for module, units in self.users:
            inside = {unit for inner in module.modules() for unit in units_of_module.get(id(inner), ())}
            for outer in units:
                for inner in inside - {outer}:
                    together[max(outer, inner)].add(min(outer, inner))
        return [sorted(units) for units in together]


def units_of(model: nn.Module, classes: Iterable[type[nn.Module]] = ()) -> Model:
    """Cuts a model into units; modules of `classes` are units whatever they contain."""
    classes = tuple(classes)
    units: list[Unit] = []
    users: list[tuple[nn.Module, list[int]]] = []
    owner_of: dict[int, int] = {}
    name_of: dict[int, str] = {}
    aliases: dict[str, str] = {}
    empty: set[str] = set()

    def add(name: str, module: nn.Module, modules: list[nn.Module],
            named: Iterable[tuple[str, nn.Parameter]]) -> None:
        unit = Unit(name or type(model).__name__, module, modules)
        needed: list[int] = []
        for parameter_name, parameter in named:
            if parameter.numel() == 0:
                empty.add(parameter_name)
                continue
            owner = owner_of.get(id(parameter))
            if owner is None:
                owner_of[id(parameter)] = len(units)
                name_of[id(parameter)] = parameter_name
                unit.parameters[parameter_name] = parameter
            else:
                aliases[parameter_name] = name_of[id(parameter)]
                if owner < len(units) and owner not in needed:
                    units[owner].shared = True
                    needed.append(owner)
        if unit.parameters:
            needed.insert(0, len(units))
            units.append(unit)
        if needed:
            users.append((module, needed))

    def visit(module: nn.Module, name: str, whole: bool) -> None:
        # A child that is there twice has two names; named_children() gives one.
        children = [(child_name, child) for child_name, child in module._modules.items() if child is not None]
        if not children or isinstance(module, classes) or (whole and not _is_cut_inside(module, classes)):
            named = [(_join(name, n), p) for n, p in module.named_parameters(remove_duplicate=False)]
            add(name, module, list(module.modules()), named)
            return
        add(name, module, [module], [(_join(name, n), p) for n, p in module.named_parameters(recurse=False)])
        like = Counter(type(child) for _, child in children) if isinstance(module, _LISTS) else Counter()
        for child_name, child in children:
            visit(child, _join(name, child_name), like[type(child)] > 1)

    visit(model, "", False)
    with_units = {id(user) for user, _ in users}
    for module, needed in users:
        inner = {id(child) for child in module.modules()} - {id(module)}
        encloses = not with_units.isdisjoint(inner)
        for unit in needed:
            units[unit].encloses |= encloses and units[unit].module is module
    return Model(units, users, aliases, empty)


def _has_any(values: Iterator[Any]) -> bool:
    return next(values, None) is not None


def _is_cut_inside(member: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether a member of a list of like modules is not a unit whole: it is a list of like blocks itself, or contains modules of
    `classes`. A block that is an nn.Sequential of single layers is none."""
    if type(member) in _LISTS:
        blocks = [type(child) for child in member.children() if _has_any(child.children()) and _has_any(child.parameters())]
        if any(count > 1 for count in Counter(blocks).values()):
            return True
    return any(isinstance(inner, classes) for child in member.children() for inner in child.modules())


def called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules inside that can be called: containers such as ModuleList cannot."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from called_parts(child)
        else:
            yield child


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def reads_weights_in_backward(module: nn.Module) -> bool:
    """False if the backward pass of the module's calls does without its weights: embeddings, where no class of the program's and
    no hook computes something else with them."""
    own_forward = "forward" in vars(module) or type(module).forward is not nn.Embedding.forward
    return not isinstance(module, nn.Embedding) or own_forward or module.max_norm is not None or (
        module._parameters.keys() != {"weight"})


_WITHOUT_TENSORS = (str, bytes, int, float, complex, type, type(None), nn.Module, torch.dtype, torch.device, types.ModuleType,
                    types.FunctionType)


_is_batched: Any = torch._C._functorch.is_batchedtensor
_unwrapped: Any = torch._C._functorch.get_unwrapped


def tensors_in(value: Any, depth: int = 8, seen: dict[int, tuple[int, Any]] | None = None) -> Iterable[torch.Tensor]:
    """The tensors of what a module takes or returns: in tuples, lists, sets and mappings, and in the attributes of other objects,
    such as dataclasses, down to `depth` levels. A tensor may come twice. Inside of torch.func.vmap it is the tensor of all
    samples: the one that autograd knows. `seen`: the objects that were looked into, by id, with the depth from there."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        while _is_batched(value):
            value = _unwrapped(value)
        yield value
    elif isinstance(value, _WITHOUT_TENSORS) or seen.get(id(value), (0, None))[0] >= depth:
        return
    else:
        seen[id(value)] = depth, value  # so that the object lives, and no other one gets its id
        if isinstance(value, Mapping):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, (tuple, list, set, frozenset)):
            parts = value
        else:
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            parts = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
        for part in parts:
            yield from tensors_in(part, depth - 1, seen)
