# SPDX-License-Identifier: Apache-2.0
"""state_dict() and load_state_dict() of a wrapped model, and of its parts.

PyTorch asks each module for its own entries (_save_to_state_dict) and gives it its own (_load_from_state_dict). During such a
call CPU tensors with values stand in the places of the module's parameters. So hooks and overrides of modules, which rename or
convert entries, do what they do in PyTorch; and a model is loaded with the values of one module in memory at a time.

Values come from the masters, and go there. In a block of engine.gathered(), those of the modules that it has come from the
gathered weights, with the block's changes, and go there: loading is one of its changes.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hoist import _hoist
from hoist.torch.devices import outside_of_inference_mode
from hoist.torch.model.wrapped import keep_hooks

if TYPE_CHECKING:
    from hoist.torch.model.parameters import Parameters
    from hoist.torch.passes.passes import Passes


class StandIn(nn.Parameter):
    """Stands in a parameter's place. Load hooks may set another parameter there."""


class _OwnMethod:
    """Replaces a method of its class for one module. `replacement` is also given the one before, which copies have."""

    def __init__(self, module: nn.Module, name: str, replacement: Callable[..., None]):
        self._module, self._name, self._replacement = module, name, replacement
        self._before = getattr(module, name)
        self.former = vars(module).get(name)
        vars(module)[name] = self

    def __call__(self, *arguments: Any) -> None:
        self._replacement(self._module, self._before, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._before, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)  # as of any method: a pickled module finds its class's


class _Handle:
    def __init__(self, module: nn.Module, name: str):
        self._module, self._name = weakref.ref(module), name

    def remove(self) -> None:
        if (module := self._module()) is not None and isinstance(own := vars(module).pop(self._name, None), _OwnMethod):
            if own.former is not None:
                vars(module)[self._name] = own.former


@contextlib.contextmanager
def _standing_in(module: nn.Module, values: dict[str, torch.Tensor]) -> Iterator[dict[str, StandIn]]:
    own: Any = module._parameters
    former = {name: own[name] for name in values}
    stand_ins = {name: StandIn(values[name], requires_grad=former[name].requires_grad) for name in values}
    own.update(stand_ins)
    try:
        yield stand_ins
    finally:
        own.update(former)


def _gathered_values(module: nn.Module, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: p.detach().to("cpu", dtype, copy=True) for name in names if (p := module._parameters[name]) is not None}


def _converts(module: nn.Module) -> bool:
    """Whether the module does more with its entries than to copy them."""
    return (type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
            or len(module._load_state_dict_pre_hooks) > 0)


class StateDicts:
    def __init__(self, model: nn.Module, parameters: Parameters, unit_manager: _hoist.UnitManager, passes: Passes,
                 between_passes: Callable[[], None]):
        self._model = model
        self._parameters = parameters
        self._unit_manager = unit_manager
        self._passes = passes
        self._between_passes = between_passes
        self._saving: tuple[weakref.ref[Any] | None, int] = (None, 0)  # the model's last state_dict(), and its step
        for module in model.modules():
            if module is model or self._names_in(module):
                for name, replacement in (("_save_to_state_dict", self._save), ("_load_from_state_dict", self._load)):
                    _OwnMethod(module, name, replacement)
                    keep_hooks(module, _Handle(module, name))

    def _names_in(self, module: nn.Module) -> dict[str, str]:
        """The names that the module's own parameters were declared under."""
        by_id = self._parameters.by_id
        return {name: by_id[id(p)].name for name, p in module._parameters.items() if id(p) in by_id}

    @contextlib.contextmanager
    def _turn(self, module: nn.Module, call: str) -> Iterator[bool]:
        """Whether a block of gathered() has the module's weights, and keeps them."""
        self._unit_manager.require_awake()
        with self._passes.turns.of(call), outside_of_inference_mode():
            is_gathered = self._passes.in_gathered_block and self._parameters.are_held(module)
            if not is_gathered and (module is self._model or self._parameters.needs_check(module)):
                self._between_passes()  # looks at all parameters
            yield is_gathered

    def _require_same_step(self, module: nn.Module, destination: Any) -> None:
        """Errors: UsageError where another thread has made a step between the turns of two modules in one state_dict()."""
        step = self._unit_manager.step_count
        into, first = self._saving
        if module is self._model:
            self._saving = weakref.ref(destination) if isinstance(destination, OrderedDict) else None, step
        elif into is not None and into() is destination and step != first:
            raise _hoist.UsageError(f"state_dict() of the model began at step {first}, and another thread has come to step "
                                    f"{step} meanwhile: the result would have weights of both. Call it between steps, or take "
                                    "engine.state_dict(), which other threads' calls cannot come into")

    def _save(self, module: nn.Module, save: Callable[..., None], destination: Any, *arguments: Any) -> None:
        if self._parameters.release_closed():
            return save(destination, *arguments)
        with self._turn(module, "state_dict()") as is_gathered:
            if module is self._model:
                self._parameters.names_in_model()  # or says why not
            self._require_same_step(module, destination)
            names = self._names_in(module)
            values = (_gathered_values(module, names) if is_gathered else
                      {name: self._parameters.read_as_stored(own) for name, own in names.items()})
            with _standing_in(module, values):
                save(destination, *arguments)

    def _load(self, module: nn.Module, load: Callable[..., None], state_dict: dict[str, Any], prefix: str,
              metadata: dict[str, Any], *arguments: Any) -> None:
        assigned_to_closed = not self._unit_manager.is_open and metadata.get("assign_to_params_buffers", False)
        if assigned_to_closed or self._parameters.release_closed():
            return load(state_dict, prefix, metadata, *arguments)
        with self._turn(module, "load_state_dict()") as is_gathered:
            if module is self._model:  # what can be refused is refused before anything is written
                self._parameters.check_values({
                    own: values for name, own in self._parameters.names_in_model().items()
                    if (values := state_dict.get(prefix + name)) is not None
                    and isinstance(values, torch.Tensor) and values.shape == self._parameters.by_name[own].shape})
            names, converts = self._names_in(module), _converts(module)
            values = (_gathered_values(module, names, torch.float32) if is_gathered else
                      {name: self._parameters.read(own) if converts else
                       torch.empty(self._parameters.by_name[own].shape, dtype=torch.float32, device="cpu")
                       for name, own in names.items()})
            with _standing_in(module, values) as stand_ins:
                before = {name: (each._version, each.data_ptr()) for name, each in stand_ins.items()}
                load(state_dict, prefix, metadata, *arguments)
                given = {own: p.detach() for name, own in names.items() if (p := module._parameters.get(name)) is not None and (
                    converts or p is not stand_ins[name] or (p._version, p.data_ptr()) != before[name])}
            if given:
                (self._parameters.change_gathered if is_gathered else self._parameters.write_all)(given)
