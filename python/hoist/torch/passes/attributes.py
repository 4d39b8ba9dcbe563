# SPDX-License-Identifier: Apache-2.0
"""Attributes of modules in vertical order, where the forward passes of micro-batches take turns.

forward() may leave a mask or a part of the loss in an attribute of a module, for code that comes later in the same forward().
Each micro-batch must find its own there.
"""

from __future__ import annotations

import collections
import logging
import sys
from typing import Any

from torch import nn

from hoist import _hoist
from hoist.torch.passes.turns import is_in_functional_call

_log = logging.getLogger("hoist")

_Place = dict[Any, Any] | list[Any]
_At = tuple[int, Any]  # the number of a place, and the key; a list is one value, with the key None

_CONTAINERS = (list, dict, collections.OrderedDict, collections.defaultdict)
_OF_PYTORCH = set(vars(nn.Module()))  # hooks, parameters, modules
_FLAGS = (bool, str, type(None))  # one object for each value: that a module sets the same value once more cannot be seen
_GONE = object()  # the value of an attribute that was deleted
_warned: set[str] = set()  # attributes


def _is_shared(before: _Place, now: _Place) -> bool:
    """Whether all micro-batches add to the container: a dictionary of counts, or a list of numbers and text that has grown."""
    if isinstance(now, dict):
        return all(type(value) is int for value in now.values())
    return _are_alike(now[:len(before)], before) and all(isinstance(value, (int, float, str)) for value in now)


def _are_alike(one: Any, other: Any) -> bool:
    """Compares without ==, which gives a tensor for tensors."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return one is other or (isinstance(one, (int, float)) and isinstance(other, (int, float)) and one == other)


class Attributes:
    """What each micro-batch finds: attributes and buffers of modules, and items of lists and dictionaries that were attributes
    when the pass began. A tensor that is changed in place is the same for all micro-batches.

    At each turn a micro-batch finds what it has set itself. If it has not set a value, it inherits the one of the micro-batch
    before it, as far as that one has come. That is right for what a module sets and uses at one place, such as a cache or a
    running value; require_final() refuses the rest. Flags (true, false, None, text) are not inherited.
    """

    def __init__(self, module: nn.Module, count: int):
        self._views: list[dict[_At, Any]] = [{} for _ in range(count)]  # where micro-batches may differ
        self._inherited: list[dict[_At, Any]] = [{} for _ in range(count)]
        self._inherited_now: set[_At] = set()  # in this turn
        self._set_at_once: set[_At] = set()  # by a micro-batch in the turn in which it has inherited them
        self._places: list[_Place] = []
        self._names: list[str] = []  # of places, with a dot at the end
        self._private: set[int] = set()  # containers that not all micro-batches share any more
        known: set[int] = set()

        def add(name: str, place: _Place) -> None:
            if id(place) not in known:
                known.add(id(place))
                self._places.append(place)
                self._names.append(f"{name}." if name else "")

        named = list(module.named_modules())
        for name, each in named:
            add(name, each._parameters)  # torch.func.functional_call() replaces them, and buffers, while a call lasts
        self._first_buffers = len(self._places)
        for name, each in named:
            add(name, each._buffers)
        self._first_attributes = len(self._places)
        for name, each in named:
            add(name, vars(each))
            add(name, each._modules)
        self._first_container = len(self._places)
        for name, each in named:
            for key, value in vars(each).items():
                if type(value) in _CONTAINERS and key not in _OF_PYTORCH:
                    add(f"{name}.{key}" if name else key, value)
        self._known = known
        self._before = [place.copy() for place in self._places]  # when the turn began
        self._first = self._before.copy()  # when the pass began

    def end_turn(self, micro_batch: int, in_backward: bool = False) -> None:
        """Notes what the micro-batch has set in its turn."""
        for index in _hoist.changed(self._places, self._before):
            place, before = self._places[index], self._before[index]
            now = self._before[index] = place.copy()
            if index >= self._first_container and index not in self._private:
                if _is_shared(before, now):
                    continue
                self._private.add(index)
            for_all = in_backward or index < self._first_buffers or (
                index < self._first_attributes and is_in_functional_call(sys._getframe()))
            if not isinstance(now, dict) or not isinstance(before, dict):
                self._note(micro_batch, (index, None), before, now, for_all)
                continue
            for key in now.keys() | before.keys():
                value, former = now.get(key, _GONE), before.get(key, _GONE)
                if value is not former:
                    self._note(micro_batch, (index, key), former, value, for_all)

    def _note(self, micro_batch: int, at: _At, former: Any, value: Any, for_all: bool) -> None:
        for other in self._views if for_all else self._views[:micro_batch]:
            other.setdefault(at, former)
        self._views[micro_batch][at] = value
        if at in self._inherited_now:
            self._set_at_once.add(at)

    def begin_turn(self, micro_batch: int) -> None:
        """Gives modules what the micro-batch finds in its turn of the forward pass."""
        self._inherited_now.clear()
        if micro_batch > 0:
            view = self._views[micro_batch]
            for at, value in self._views[micro_batch - 1].items():
                if at not in view:
                    self._inherit(micro_batch, at, value)
        self.show(micro_batch)

    def _inherit(self, micro_batch: int, at: _At, value: Any) -> None:
        if isinstance(value, _FLAGS):
            self._views[micro_batch][at] = self._at_first(at)
            return
        if type(value) in _CONTAINERS and at[0] < self._first_container and id(value) not in self._known:
            value = value.copy()  # made in this pass, by the micro-batch before
        self._views[micro_batch][at] = self._inherited[micro_batch][at] = value
        self._inherited_now.add(at)

    def show(self, micro_batch: int) -> None:
        """Gives modules what the micro-batch has; a recomputation in the backward pass reads it."""
        for index in {at[0] for at, value in self._views[micro_batch].items() if self._set(at, value)}:
            self._before[index] = self._places[index].copy()

    def _set(self, at: _At, value: Any) -> bool:
        """Whether the place has changed."""
        index, key = at
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

    def require_final(self) -> None:
        """After the forward passes. A micro-batch that inherited a value must have inherited the one that the micro-batch before
        it has at its end; otherwise that one set the value for a part of its forward() and set it again later.
        Errors: UsageError. Warns of cases that cannot be told apart: a flag that may have been set to the value that it had,
        and a new value that may have been computed from the former one."""
        doubts = {at: "is another one after forward(), and each micro-batch began with that from before the step"
                  for at, value in self._views[0].items() if isinstance(value, (bool, str)) and value is not self._at_first(at)}
        for earlier, inherited in zip(self._views, self._inherited[1:], strict=False):
            for at, value in inherited.items():
                if _are_alike(earlier[at], value) or type(earlier[at]) in _CONTAINERS:
                    continue
                if at in self._set_at_once:
                    doubts[at] = "changes several times within forward(): if it goes on from its former value, changes are lost"
                    continue
                raise _hoist.UsageError(
                    f"'{self._name(at)}' is set for a part of forward() and set again after it (a flag, or a cache that is "
                    "emptied). In vertical order micro-batches take turns within forward(), and the next one has found the value "
                    'of that part: use "micro_batch_order": "horizontal" for this model')
        for at, doubt in doubts.items():
            if (name := self._name(at)) not in _warned:
                _warned.add(name)
                _log.warning("in vertical order, where micro-batches take turns within forward(), '%s' %s", name, doubt)

    def _at_first(self, at: _At) -> Any:
        index, key = at
        first = self._first[index]
        return first.get(key, _GONE) if isinstance(first, dict) else first

    def _name(self, at: _At) -> str:
        index, key = at
        return self._names[index].removesuffix(".") if key is None else f"{self._names[index]}{key}"

    def forget(self, micro_batch: int) -> None:
        """The backward pass of the micro-batch has ended: what it has left keeps no memory any more."""
        if micro_batch + 1 < len(self._views):
            self._views[micro_batch].clear()
        self._inherited[micro_batch].clear()

    def end(self) -> None:
        """Gives modules what the last micro-batch has left, as the usual order does."""
        self.show(len(self._views) - 1)

    def undo(self) -> None:
        """After an error: gives modules what they had when the pass began, but for what has changed in place."""
        self.end_turn(0, in_backward=True)  # notes what the turn that failed has set
        for at in set().union(*self._views):
            self._set(at, self._at_first(at))

    def clear(self) -> None:
        for each in (*self._views, *self._inherited):
            each.clear()
