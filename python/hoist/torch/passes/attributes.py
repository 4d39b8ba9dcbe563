# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules in vertical order, where the forward passes of micro-batches take turns.

forward() may leave a mask or a part of the loss in an attribute of a module, for code that comes later in the same forward().
Each micro-batch must find its own there.
"""

from __future__ import annotations

import collections
from typing import Any

from torch import nn

from hoist import _hoist

_Place = dict[Any, Any] | list[Any]

_CONTAINERS = (list, dict, collections.OrderedDict, collections.defaultdict)
_OF_PYTORCH = set(vars(nn.Module()))  # hooks, parameters, modules
_GONE = object()  # the value of an attribute that was deleted


def _is_count_or_log(place: _Place) -> bool:
    """Whether it holds numbers and text alone. All micro-batches add to such a container."""
    values = place.values() if isinstance(place, dict) else place
    return all(value is None or isinstance(value, (int, float, complex, str)) for value in values)


class Attributes:
    """What each micro-batch finds: attributes and buffers of modules, and items of lists and dictionaries that are attributes.

    A micro-batch finds what it has set itself. For what it has not, it finds what the micro-batch before it had set when it
    looked first; later micro-batches change nothing for it. A tensor that is changed in place is the same for all.
    """

    def __init__(self, module: nn.Module, count: int):
        # By place and key, where micro-batches may differ; a list is one value.
        self._views: list[dict[tuple[int, Any], Any]] = [{} for _ in range(count)]
        self._places: list[_Place] = []
        self._before: list[_Place] = []  # copies of them, of when the turn began
        self._known: set[int] = set()  # ids of places
        for each in module.modules():
            self._add(each._parameters)  # torch.func.functional_call() replaces them while a call lasts
        self._parameters = len(self._places)  # the first ones
        for each in module.modules():
            self._add(vars(each))
            self._add(each._buffers)
        self._attributes = len(self._places)  # the others are containers
        for each in module.modules():
            for key, value in vars(each).items():
                if type(value) in _CONTAINERS and key not in _OF_PYTORCH:
                    self._add(value)
        self._before = [place.copy() for place in self._places]

    def _add(self, place: _Place) -> bool:
        if id(place) in self._known:
            return False
        self._known.add(id(place))
        self._places.append(place)
        self._before.append([] if isinstance(place, list) else {})
        return True

    def end_turn(self, micro_batch: int) -> None:
        """Notes what the micro-batch has set in its turn."""
        changed = _hoist.changed(self._places, self._before)
        for index in changed:
            place, before = self._places[index], self._before[index]
            now = self._before[index] = place.copy()
            if index >= self._attributes and _is_count_or_log(now) and _is_count_or_log(before):
                continue
            if not isinstance(now, dict) or not isinstance(before, dict):
                self._note(micro_batch, (index, None), before, now)
                continue
            for key in now.keys() | before.keys():
                value, former = now.get(key, _GONE), before.get(key, _GONE)
                if value is former:
                    continue
                self._note(micro_batch, (index, key), former, value)
                if index < self._attributes and type(value) in _CONTAINERS and self._add(value):
                    changed.append(len(self._places) - 1)

    def _note(self, micro_batch: int, at: tuple[int, Any], former: Any, value: Any) -> None:
        place, _ = at
        for other in self._views if place < self._parameters else self._views[:micro_batch]:
            other.setdefault(at, former)
        self._views[micro_batch][at] = value

    def begin_turn(self, micro_batch: int) -> None:
        """Gives modules what the micro-batch finds."""
        view = self._views[micro_batch]
        if micro_batch > 0:
            for at, value in self._views[micro_batch - 1].items():
                view.setdefault(at, value)
        for index in {index for (index, key), value in view.items() if self._set(index, key, value)}:
            self._before[index] = self._places[index].copy()

    def _set(self, index: int, key: Any, value: Any) -> bool:
        """Whether the place has changed."""
        place = self._places[index]
        if isinstance(place, list):
            place[:] = value
        elif place.get(key, _GONE) is value:
            return False
        elif value is _GONE:
            del place[key]
        else:
            place[key] = value
        return True

    def end(self) -> None:
        """Gives modules what the last micro-batch has left, as the usual order does. What backward passes set stays."""
        for (index, key), value in self._views[-1].items():
            place = self._places[index]
            if isinstance(place, list) or any(place.get(key, _GONE) is view.get((index, key), self) for view in self._views):
                self._set(index, key, value)
