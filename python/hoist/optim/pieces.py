# SPDX-License-Identifier: Apache-2.0
"""The parameters of an optimizer as an engine takes them: large ones in pieces, and small ones together in units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hoist import _hoist
from hoist.optim.values import DTYPES, problem_of_parameter
from hoist.shared_memory import refuse_shared_memory

# Small parameters move together up to so many elements. A larger one is cut into pieces of _PIECE_ELEMENTS, because the device
# holds a few of the largest unit. Results do not depend on either.
_UNIT_ELEMENTS = 8 << 20
_PIECE_ELEMENTS = 64 << 20


@dataclass
class Piece:
    """One of the engine's parameters: a program's parameter, or elements [first, first + count) of a large one."""

    number: int
    parameter: nn.Parameter
    group: int
    name: str
    first: int
    count: int
    shape: list[int]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[self.first:self.first + self.count]

    def address_in(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() + self.first * tensor.element_size()


class CutParameters:
    """The parameters of groups, and their pieces. Errors: UsageError for those that cannot be trained."""

    def __init__(self, groups: list[dict[str, Any]]):
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.pieces: list[Piece] = []
        self.units: list[list[Piece]] = []
        self.without: list[nn.Parameter] = []  # that did not require gradients
        elements = _UNIT_ELEMENTS
        number = -1
        for index, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                number += 1
                name = group["param_names"][place] if "param_names" in group else f"parameter {number}"
                if not parameter.requires_grad:
                    self.without.append(parameter)
                    continue
                if parameter.numel() == 0:
                    continue
                refuse_unfit(name, parameter)
                self.parameters.append(parameter)
                self.names.append(name)
                for piece in _pieces_of(parameter, name, index, len(self.pieces)):
                    self.pieces.append(piece)
                    if elements + piece.count > _UNIT_ELEMENTS:
                        self.units.append([])
                        elements = 0
                    self.units[-1].append(piece)
                    elements += piece.count
        if not self.pieces:
            raise _hoist.UsageError("no parameter requires gradients: there is nothing to optimize")
        self.device = self.parameters[0].device
        for name, parameter in self.named():
            if parameter.device != self.device:
                raise _hoist.UsageError(f"'{name}' is on {parameter.device}, and '{self.names[0]}' on {self.device}: make one "
                                        "optimizer for the parameters of each device")
        refuse_shared_memory(self.named())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.parameters, strict=True)


class UnitValues:
    """Values for the engine, one unit after the other; keeps those of the last one alive."""

    def __init__(self, units: list[list[Piece]], values_of: Callable[[nn.Parameter], torch.Tensor]):
        self._units = units
        self._values_of = values_of
        self._alive: list[torch.Tensor] = []

    def __call__(self, unit: int) -> dict[int, tuple[int, _hoist.DType, int]]:
        pieces = self._units[unit]
        self._alive = [piece.of(self._values_of(piece.parameter).detach()).to("cpu") for piece in pieces]
        return {piece.number: (values.data_ptr(), DTYPES[values.dtype], values.numel())
                for piece, values in zip(pieces, self._alive, strict=True)}


def _pieces_of(parameter: nn.Parameter, name: str, group: int, number: int) -> Iterator[Piece]:
    """Rows of a large parameter, in pieces of at most 64 Mi elements, which `hoist export` joins; elements, where a row is larger
    than that."""
    elements, shape = parameter.numel(), list(parameter.shape)
    if elements <= _PIECE_ELEMENTS:
        yield Piece(number, parameter, group, name, 0, elements, shape)
        return
    row = elements // shape[0]
    if row > _PIECE_ELEMENTS:
        row, shape = 1, [elements]
    rows = _PIECE_ELEMENTS // row
    for index, first in enumerate(range(0, shape[0], rows)):
        end = min(first + rows, shape[0])
        yield Piece(number + index, parameter, group, f"{name}[{first}:{end}]", first * row, (end - first) * row,
                    [end - first, *shape[1:]])


def refuse_unfit(name: str, parameter: nn.Parameter) -> None:
    """Errors: UsageError for a parameter whose states cannot be offloaded."""
    if problem := problem_of_parameter(parameter):
        raise _hoist.UsageError(f"'{name}' {problem}")
    if parameter.dtype not in DTYPES:
        raise _hoist.UsageError(f"'{name}' is {parameter.dtype}; hoist trains only float32, bfloat16 and float16")
    if not parameter.is_contiguous():
        raise _hoist.UsageError(f"'{name}' is in another order in memory than its indices (channels_last, or transposed): "
                                "call contiguous() on its data. Offloaded states take contiguous parameters")
    shares_memory = parameter.device.type in ("cpu", torch._C._get_privateuse1_backend_name())
    if not shares_memory and parameter.device.type != "cuda":
        raise _hoist.UsageError(f"'{name}' is on {parameter.device}; hoist trains only parameters on the CPU or on CUDA")
