# SPDX-License-Identifier: Apache-2.0
"""Which parameters are refused because they share memory: any two that have an element of memory in common without being one
parameter, if one of them is trained. Each would get a master of its own, and be trained apart. Parts of one tensor that have no
element in common are apart already."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hoist import _hoist


def refuse_shared_memory(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Pre: they have memory. Errors: UsageError that names two."""
    before: list[tuple[int, str, nn.Parameter]] = []  # with their ends: those that may reach beyond the next one's begin
    for begin, name, parameter in sorted(((p.data_ptr(), name, p) for name, p in parameters if p.numel()), key=lambda p: p[0]):
        before = [other for other in before if other[0] > begin]
        for _, other_name, other in before:
            if other is parameter:
                raise _hoist.UsageError(f"a parameter is listed twice, as '{other_name}' and as '{name}': list it once")
            trains = parameter.requires_grad or other.requires_grad
            if trains and parameter.device == other.device and _share_elements(other, parameter):
                raise _hoist.UsageError(f"parameters '{other_name}' and '{name}' share memory (parameter.data = ...), and would "
                                        "be trained apart: make them one parameter, as `head.weight = embedding.weight` does")
        before.append((begin + _span(parameter) * parameter.element_size(), name, parameter))


def _span(tensor: torch.Tensor) -> int:
    """Elements from its first one to its last one in memory."""
    return 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Pre: the second one begins between the first one's first and last element."""
    distance, size = second.data_ptr() - first.data_ptr(), first.element_size()
    if size != second.element_size() or distance % size:
        return True
    taken = torch.zeros(max(_span(first), distance // size + _span(second)), dtype=torch.bool, device="cpu")
    taken.as_strided(first.shape, first.stride()).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), distance // size).any())
