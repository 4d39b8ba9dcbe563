# SPDX-License-Identifier: Apache-2.0
"""A model's parameters as the engine has them: declared once, moved into their units' memory, and from then on read and
written by the names that PyTorch gives them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from hoist import _hoist, program_end
from hoist.optim.values import DTYPES
from hoist.shared_memory import refuse_shared_memory
from hoist.torch.model import initial, weight_files
from hoist.torch.model.casts import as_type
from hoist.torch.model.state_dicts import StandIn
from hoist.torch.model.unit_tensors import UnitTensors, lost_its_values, showing
from hoist.torch.model.units import Model, Unit
from hoist.torch.model.wrapped import keep_hooks, remove_hooks

_log = logging.getLogger("hoist")
_PIECE = 1 << 20  # elements that are converted at a time


def dtype_of(config: _hoist.Config) -> torch.dtype | None:
    """The dtype of all weights, where the configuration names one."""
    types = {"bf16.enabled": torch.bfloat16, "fp16.enabled": torch.float16}
    return next((dtype for key, dtype in types.items() if config.setting(key) is True), None)


@dataclass(slots=True)  # a model may have 100,000
class Declared:
    """A parameter as the engine knows it, and as it was when it was declared."""

    name: str
    number: int  # in the engine
    unit: int
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    trains: bool  # has optimizer states
    version: int = 0  # which every change in place counts up


@dataclass
class WatchedBlock:
    """A block of gathered(), and what is called as it goes on."""

    look: Callable[[], None]  # before a call inside of the block, which may gather other units, and be watched itself
    note: Callable[[], None]  # before the block's weights are released
    settle: Callable[[], None]  # after the block: writes what it has changed, or refuses it


class Parameters:
    """Calls that read or write values belong between passes: the engine sees to it."""

    def __init__(self, module: nn.Module, cut: Model, dtype: torch.dtype | None, device: torch.device):
        self._module = module
        self._cut = cut
        self._dtype = dtype  # of all weights, where the configuration says so
        self._unit_manager: _hoist.UnitManager  # from moved() on
        self.by_name: dict[str, Declared] = {}  # in the order of their units
        self.by_id: dict[int, Declared] = {}
        self._device = device
        self.tensors: UnitTensors  # from moved() on
        self.trainable: list[nn.Parameter] = []
        self.replaced = WeakTensorKeyDictionary()  # parameters by the former ones, which programs may still have
        self.watched_units: set[int] = set()  # whose uses Watch has seen
        self.set_in_passes: set[int] = set()  # ids of those that set_() touches in each pass, to the same values
        self._has_said_clamped = False
        self.was_released = False  # release_closed() was true
        self._holders: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []  # each place in a module

    # --- declaring and moving ----------------------------------------------------------------------------------------

    def declare(self, group_of: dict[int, int], is_vertical: bool,
                counts: Callable[[nn.Parameter], bool] = lambda _: True) -> list[_hoist.ManagedUnit]:
        """`counts`: whether the gradient's norm counts a parameter on this rank."""
        units = []
        for unit, beside in zip(self._cut.units, self._cut.used_together(), strict=True):
            specs = [
                _hoist.ParameterSpec(
                    name, list(p.shape), DTYPES[self._type_of(name, p)], p.requires_grad,
                    group_of.get(id(p), -1) + 1, counts(p))
                for name, p in unit.parameters.items()
            ]
            # In horizontal order autograd adds up a parameter's gradients by itself, and they come when the last one is known.
            own_gradient_memory = is_vertical and (unit.shared or unit.encloses)
            units.append(_hoist.ManagedUnit(unit.name, specs, unit.shared, beside, own_gradient_memory))
        named = itertools.chain.from_iterable(unit.parameters.items() for unit in self._cut.units)
        # Those without strides have no values of their own: of the meta device, of a closed engine, or still in files.
        refuse_shared_memory((name, p) for name, p in named if p.numel() > 1 and any(p.stride()) and not p.is_meta)
        return units

    def _type_of(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            raise _hoist.UsageError(f"parameter '{name}' is a DTensor: hoist divides the state of ordinary tensors. Build each "
                                    "rank's slice as a tensor of its own, and pass mesh=... and tensor_parallel=...")
        if is_traceable_wrapper_subclass(parameter):
            raise _hoist.UsageError(f"parameter '{name}' is a {type(parameter).__name__}, which consists of several tensors, and "
                                    "hoist moves ordinary ones: build the model with those, and quantize the weights that "
                                    "engine.export() writes")
        if parameter.is_inference():
            raise _hoist.UsageError(f"parameter '{name}' was made under torch.inference_mode(), where PyTorch does not count how "
                                    "often the program changes a tensor: build the model outside of it, or under torch.no_grad()")
        if parameter.device.type not in ("cpu", "meta", self._device.type):
            raise _hoist.UsageError(f"parameter '{name}' is on {parameter.device}, and this engine computes on "
                                    f"{self._device.type}: set \"hoist\": {{\"device\": ...}}, or wrap the model on the CPU")
        dtype = self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype
        if dtype not in DTYPES:
            raise _hoist.UsageError(f"parameter '{name}' is {dtype}; hoist trains only float32, bfloat16 and float16. What is "
                                    "not trained can be a buffer (register_buffer)")
        if dtype == torch.float16 and self._dtype != torch.float16 and parameter.requires_grad:
            raise _hoist.UsageError(f"parameter '{name}' is float16, and its gradients need a loss scale: set \"fp16\": "
                                    "{\"enabled\": true}, or build the model in float32")
        return dtype

    @contextlib.contextmanager
    def moved(self, unit_manager: _hoist.UnitManager, device: torch.device) -> Iterator[dict[int, initial.Source]]:
        """Gives every parameter to the engine, and its memory back. For the block in which the engine takes their initial
        values, by id, and is completed: if that fails, the engine is closed, and the model as it was before."""
        own = [(module, name, parameter) for module in self._module.modules() for name, parameter in module._parameters.items()]
        former = [(p, showing(p), dict(p.__dict__)) for p in {id(p): p for _, _, p in own if p is not None}.values()]
        buffers = [(module, dict(module._buffers)) for module in self._module.modules()]
        contents = [(b, b.clone()) for b in {id(b): b for _, some in buffers for b in some.values()}.values()
                    if type(b) is torch.Tensor and not b.is_meta]
        try:
            yield self._move(unit_manager, device)
            for parameter, _, _ in former:
                parameter.grad = None
                parameter.__dict__.pop("initial_values", None)  # else a second wrap() would begin with them
        except BaseException as error:
            try:
                unit_manager.abandon(program_end.text_of(error))
                with contextlib.suppress(Exception):
                    unit_manager.close()
            finally:  # after close(), which takes the parameters' values away
                remove_hooks(self._module)
                for module, name, held in own:
                    module._parameters[name] = held
                for parameter, show_again, attributes in former:
                    show_again()
                    parameter.__dict__.update(attributes)
                for module, own_buffers in buffers:
                    module._buffers.clear()
                    module._buffers.update(own_buffers)
                with torch.no_grad():
                    for buffer, content in contents:
                        buffer.copy_(content)
            raise

    def _move(self, unit_manager: _hoist.UnitManager, device: torch.device) -> dict[int, initial.Source]:
        self._unit_manager = unit_manager
        self._device = device
        self.tensors = UnitTensors([unit.name for unit in self._cut.units], device)
        sources: dict[int, initial.Source] = {}
        for index, unit in enumerate(self._cut.units):
            for name, parameter in list(unit.parameters.items()):
                number, offset = unit_manager.place(name)
                dtype = self._type_of(name, parameter)
                absent = self.tensors.absent(index, parameter.shape, dtype)
                parameter.__dict__.pop("__deepcopy__", None)  # of from_pretrained
                built: initial.Source = (functools.partial(initial.refuse_lost, name) if lost_its_values(parameter) else
                                         parameter.data.resolve_neg())
                values = getattr(parameter, "initial_values", None if parameter.is_meta else built)
                if parameter.is_meta or not torch._has_compatible_shallow_copy_type(parameter.data, absent):
                    parameter = self._replace(unit, name, parameter, absent)
                else:
                    parameter.data = absent
                if values is not None:
                    sources[id(parameter)] = values
                self.tensors.add(index, parameter, offset)
                self.by_name[name] = self.by_id[id(parameter)] = Declared(
                    name, number, index, parameter, parameter.shape, dtype, parameter.requires_grad)
                if parameter.requires_grad:
                    self.trainable.append(parameter)
                    keep_hooks(parameter, parameter.register_post_accumulate_grad_hook(unit_manager.gradient_hook(number)))
        self._holders = [(module._parameters, name, p) for module in self._module.modules()
                         for name, p in module._parameters.items() if p is not None and id(p) in self.by_id]
        self.tensors.connect(unit_manager)
        return sources

    def _replace(self, unit: Unit, name: str, former: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
        """A parameter on the meta device, or of the CPU for an accelerator that PyTorch does not know, cannot be given memory;
        its place in every module can. The new one has the attributes that the program has set."""
        parameter = nn.Parameter(values, requires_grad=former.requires_grad)
        parameter.__dict__.update({key: value for key, value in former.__dict__.items() if key != "initial_values"})
        if former.requires_grad:
            for hook in (former._backward_hooks or {}).values():
                parameter.register_hook(hook)
            for hook in (former._post_accumulate_grad_hooks or {}).values():
                parameter.register_post_accumulate_grad_hook(hook)
        self.replaced[former] = parameter
        for module in self._module.modules():
            for key, value in module._parameters.items():
                if value is former:
                    module._parameters[key] = parameter
        unit.parameters[name] = parameter
        return parameter

    # --- changes that would be lost ------------------------------------------------------------------------------------

    def changed(self) -> None:
        """The engine has given the parameters other values: autograd refuses a graph that was kept from before."""
        torch.autograd.graph.increment_version(self.trainable)
        self.note_versions()

    def note_versions(self) -> None:
        for declared in self.by_name.values():
            declared.version = declared.parameter._version

    def _changed_in_place(self) -> list[Declared]:
        return [declared for declared in self.by_name.values() if declared.parameter._version != declared.version]

    def note_versions_of_watched_pass(self) -> None:
        """The set_() of torch.nn.utils.parametrize comes again in later passes. Any other change is refused next."""
        for declared in self.by_name.values():
            if id(declared.parameter) in self.set_in_passes:
                declared.version = declared.parameter._version

    def refuse_edits(self) -> None:
        """Errors: UsageError where the program has changed a parameter in place, or given it another tensor: its memory is
        another's by now. A change through `parameter.data` in place is not seen."""
        if not self._unit_manager.is_open:
            return
        if (given := self.tensors.given_another()) is not None:
            self._refuse_edit(self.by_id[id(given)].name, "was given another tensor (parameter.data = ...)")
        changed = self._changed_in_place()
        for declared in self._lost_of(changed):
            self._refuse_edit(declared.name, "was changed in place")
        if changed:
            self.note_versions()

    def _lost_of(self, changed: list[Declared]) -> list[Declared]:
        return [declared for declared in changed
                if id(declared.parameter) not in self.set_in_passes and declared.unit in self.watched_units]

    def needs_check(self, module: nn.Module) -> bool:
        """Whether a pass is under way, or one of the module's own parameters shows a tensor of the program's."""
        return self._unit_manager.current_pass is not None or any(
            p is not None and id(p) in self.by_id and self.tensors.unit_of(p) is None for p in module._parameters.values())

    def are_held(self, module: nn.Module) -> bool:
        """Whether the module's own weights are gathered and stay so; of one without, all of its parts'."""
        own = [p for p in module._parameters.values() if p is not None and id(p) in self.by_id]
        return all(self._unit_manager.is_held(self.by_id[id(p)].unit) for p in own or module.parameters() if id(p) in self.by_id)

    def _refuse_edit(self, name: str, how: str) -> NoReturn:
        self.note_versions()
        raise _hoist.UsageError(f"parameter '{name}' {how}, and the change is lost: weights lie in their memory only while they "
                                "are used. engine.write(name, values) changes a parameter, load_state_dict() all of them, and "
                                "engine.gathered(names, modify=True) keeps what is changed inside of it")

    def name_of(self, tensor: torch.Tensor) -> str:
        """The parameter whose gathered values a tensor shows."""
        return self.by_id[id(self.tensors.parameter_of(tensor))].name

    def say_clamped(self, tensor: torch.Tensor) -> None:
        """Once, of the first parameter that forward() clamps to bounds that it is within now."""
        if not self._has_said_clamped:
            self._has_said_clamped = True
            _log.warning("forward() clamps parameter '%s'. It is within the bounds now; where a parameter is not in a later "
                         "pass, it is clamped for that pass only, and the optimizer goes on from what it was before",
                         self.name_of(tensor))

    def drop_gradients(self) -> None:
        """Drops gradients that the program has set; autograd's are taken as they come."""
        for parameter in self.trainable:
            parameter.grad = None

    def refuse_gradients(self) -> None:
        """Errors: UsageError where the program has set a parameter's grad, which the next backward pass would add to its own."""
        for parameter in self.trainable:
            if parameter.grad is not None:
                name = self.by_id[id(parameter)].name
                raise _hoist.UsageError(f"parameter '{name}' has a grad that the program has set, and a step takes only the "
                                        "gradients that backward passes make: put it into the loss, or let zero_grad() drop it")

    def watch_block(self, names: list[str], modify: bool) -> WatchedBlock:
        """Watches what the program changes in these parameters, or others of their units, while the units are gathered. With
        `modify`, what it changes in these is kept."""
        chosen = [self.find(name) for name in names]
        units = {declared.unit for declared in chosen}
        up = {name: declared.parameter for name, declared in self.by_name.items() if declared.unit in units}
        own = {declared.name for declared in chosen} if modify else set()
        kept = dict.fromkeys(name for name in up if name in own)
        before = {name: up[name].detach().clone() for name in kept}
        prints = {name: _fingerprint(p) for name, p in up.items() if name not in kept}
        changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # which elements, and their new values
        others: list[str] = []

        def look() -> None:
            others.extend(declared.name for declared in self._lost_of(self._changed_in_place()) if declared.unit not in units)
            self.note_versions()

        def note() -> None:
            look()
            others.extend(name for name, was in prints.items() if _fingerprint(up[name]) != was)
            for name in kept:
                where = (_bits(up[name]) != _bits(before[name])).cpu().view(self.by_name[name].shape)
                if where.any():
                    changes[name] = where, up[name].detach().cpu()[where].float()
            self.tensors.given_another()
            self.note_versions()

        def changed_values(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            where, values = changes[name]
            all_values = torch.zeros(where.shape, dtype=torch.float32, device="cpu")
            all_values[where] = values
            return all_values.view(-1), where.view(-1).view(torch.uint8)  # other masters keep all of their bits

        def settle() -> None:
            if modify:
                self._change(changes, changed_values)
            for name in others:
                self._refuse_edit(name, "was changed inside of gathered()")

        return WatchedBlock(look, note, settle)

    def put_back(self) -> str | None:
        """Gives modules back the parameters that they had when they were wrapped. Returns the name of the first one that was
        replaced. refuse_addition() hears only of those that are set as attributes."""
        name = self._name_of_replaced()
        for own, key, parameter in self._holders if name is not None else ():
            if own.get(key, parameter) is not parameter:
                own[key] = parameter
        return name

    def _name_of_replaced(self) -> str | None:
        replaced = next((p for own, key, p in self._holders if own.get(key, p) is not p), None)
        return None if replaced is None else self.by_id[id(replaced)].name

    def refuse_replaced_before_pass(self) -> None:
        """Errors: UsageError where a module has another parameter in a place than when it was wrapped; it has its own again
        then."""
        if (name := self.put_back()) is not None:
            self._refuse_replaced(name, "The model has its own parameters again: repeat the step")

    def refuse_replaced_before_step(self, updates_in_backward: bool, drop_gradients: Callable[[], None]) -> None:
        """Errors: as above. The gradients of the replaced one are lost, so that all are dropped; in update mode "backward" they
        are in the weights, and the step is refused until restore()."""
        if (name := self._name_of_replaced()) is None:
            return
        made = "Backward passes made gradients of the other one"
        if updates_in_backward:
            self._refuse_replaced(name, f"{made}, and with \"update_mode\": \"backward\" they have updated weights: call "
                                        "engine.restore()")
        self.put_back()
        drop_gradients()
        self._refuse_replaced(name, f"{made}. The model has its own parameters again, and the gradients were dropped: repeat the "
                                    "step")

    def _refuse_replaced(self, name: str, remedy: str) -> NoReturn:
        raise _hoist.UsageError(
            f"parameter '{name}' was replaced in the model after the model was wrapped (module._parameters[...] = ..., or a "
            f"conversion under torch.__future__.set_overwrite_module_params_on_conversion()). {remedy}. engine.write(name, "
            "values) and load_state_dict() change weights")

    def refuse_other_trainability(self) -> None:
        """Errors: UsageError where requires_grad of a parameter is not what it was when the model was wrapped."""
        changed = next((each for each in self.by_name.values() if each.parameter.requires_grad != each.trains), None)
        if changed is None:
            return
        name = changed.name
        if changed.trains:
            raise _hoist.UsageError(f"parameter '{name}' was frozen after the model was wrapped, and its moments and weight "
                                    "decay would go on as with a gradient of zeros. Give it a parameter group of its own "
                                    "(groups=...), and set that group's lr to 0 while it is frozen; the configuration can "
                                    "then have no scheduler")
        raise _hoist.UsageError(f"parameter '{name}' was frozen when the model was wrapped, so that it has no optimizer states, "
                                "and requires gradients now. Wrap a model in which it does from the start, in a parameter group "
                                "(groups=...) whose lr is 0 until it is to be trained")

    def refuse_addition(self, module: nn.Module, name: str, added: nn.Module | nn.Parameter | None) -> None:
        """Errors: UsageError for a trainable parameter that comes into the model, or takes another one's place, now that it is
        wrapped."""
        replaced = module._parameters.get(name)
        if isinstance(replaced, StandIn):
            return
        if isinstance(added, nn.Parameter) and id(added) in self.by_id and replaced is not None and replaced is not added:
            raise _hoist.UsageError(f"'{name}' of a {type(module).__name__} was set to another parameter of the model after the "
                                    "model was wrapped: tie weights first and wrap it then")
        parameters = [added] if isinstance(added, nn.Parameter) else [] if added is None else added.parameters()
        if any(p.requires_grad and id(p) not in self.by_id for p in parameters):
            raise _hoist.UsageError(f"'{name}' of a {type(module).__name__} was set after the model was wrapped, and would not "
                                    "be trained: change the model first and wrap it then. If a trainer adds this while it "
                                    "trains, choose a setting with which it does not (of TRL's SDPO teacher_model_kind='base' "
                                    "or 'live'). engine.write(name, values) and load_state_dict() change weights")

    def names_in_model(self) -> dict[str, str]:
        """The names that parameters have in the model now, and those that they were declared under. Errors: UsageError for
        another model than the one that was wrapped, whose weights would be saved under wrong names."""
        present = {name: self.by_id[id(p)].name for name, p in self._module.named_parameters(remove_duplicate=False)
                   if id(p) in self.by_id}
        for name, own in itertools.chain(zip(self.by_name, self.by_name, strict=True), self._cut.aliases.items()):
            if present.get(name, own) != own:
                raise _hoist.UsageError(f"the model's '{name}' was '{present[name]}' when the model was wrapped: they would be "
                                        "saved under wrong names. Change the model first and wrap it then")
        if gone := self.by_name.keys() - present.values():
            raise _hoist.UsageError(f"parameter '{min(gone)}' was removed from the model after the model was wrapped, and would "
                                    "be saved with it: change the model first and wrap it then")
        return present

    def release_closed(self) -> bool:
        """Whether the engine was closed, and the program has given all parameters values since: the model is PyTorch's alone from
        now on, without hooks."""
        if self._unit_manager.is_open or any(map(lost_its_values, self._module.parameters())):
            return False
        remove_hooks(self._module)
        self.was_released = True
        return True

    # --- buffers: the program's, not the engine's --------------------------------------------------------------------

    def persistent_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._module.named_modules(remove_duplicate=remove_duplicate):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield (f"{prefix}.{name}" if prefix else name), buffer

    # --- values ------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Declared:
        """By any name that a parameter has in the model."""
        name = self._cut.aliases.get(name, name)
        if name not in self.by_name:
            raise _hoist.UsageError(f"there is no parameter '{name}'")
        return self.by_name[name]

    def number_of(self, parameter: nn.Parameter) -> int:
        return self.by_id[id(parameter)].number

    def read(self, name: str, state: _hoist.State = _hoist.State.master) -> torch.Tensor:
        declared = self.find(name)
        out = torch.empty(declared.shape.numel(), dtype=torch.float32, device="cpu")
        array: Any = out  # the extension takes every DLPack array; its stubs name NumPy's alone
        self._unit_manager.read(declared.number, state, 0, array)
        return out.view(declared.shape)

    def read_as_stored(self, name: str) -> torch.Tensor:
        """In the parameter's own type, as the forward pass uses it. Converted in pieces: more than the result is not held."""
        declared = self.find(name)
        out = torch.empty(declared.shape, dtype=declared.dtype, device="cpu")
        for first in range(0, out.numel(), _PIECE):
            part = out.view(-1)[first:first + _PIECE]
            masters: Any = torch.empty(part.numel(), dtype=torch.float32, device="cpu")  # as in read()
            self._unit_manager.read(declared.number, _hoist.State.master, first, masters)
            part.copy_(as_type(masters, out.dtype))
        return out

    def write(self, name: str, values: torch.Tensor, state: _hoist.State = _hoist.State.master) -> None:
        declared = self.find(name)
        array: Any = _as_masters(declared, values)  # as in read()
        self._unit_manager.write(declared.number, state, 0, array)

    def write_all(self, masters: dict[str, torch.Tensor], program_state: bytes | None = None) -> None:
        """In one commit, with `program_state` if that is given. Errors: as check_values(), before the first is written."""
        self.check_values(masters)
        self._change(masters, lambda name: (_as_masters(self.find(name), masters[name]), None), program_state)

    def _change(self, names: Iterable[str], values_of: Callable[[str], tuple[torch.Tensor, torch.Tensor | None]],
                program_state: bytes | None = None) -> None:
        """Writes masters in one commit, in the order of the model: all ranks write them in one. `values_of` gives the flat values
        of one, and which are written if not all are; it is called twice for each, and no more than a unit's are held."""
        in_units: dict[int, list[tuple[Declared, str]]] = {}
        for declared, name in sorted(((self.find(name), name) for name in names), key=lambda each: each[0].number):
            in_units.setdefault(declared.unit, []).append((declared, name))

        def changes(unit: int) -> list[tuple[int, _hoist.State, torch.Tensor, torch.Tensor | None]]:
            return [(declared.number, _hoist.State.master, *values_of(name)) for declared, name in in_units[unit]]

        self._unit_manager.write_units(sorted(in_units), changes, program_state)  # also of nothing: other groups may have changes

    def change_gathered(self, values_by_name: dict[str, torch.Tensor]) -> None:
        """As the block of gathered() that has them would change them. Errors: as write_all()."""
        self.check_values(values_by_name)
        for name, values in values_by_name.items():
            declared = self.find(name)
            with torch.no_grad():
                declared.parameter.copy_(as_type(_as_masters(declared, values), declared.dtype).view(declared.shape))

    def check_values(self, masters: dict[str, torch.Tensor]) -> None:
        """Errors: UsageError for values that no master can have."""
        for name, values in masters.items():
            declared = self.find(name)
            # The masters of fp32 weights have the range of bf16 as well.
            dtype = torch.float16 if declared.dtype is torch.float16 else torch.bfloat16
            for part in _as_masters(declared, values).split(_PIECE):
                if not (part.isfinite().all() and as_type(part, dtype).isfinite().all()):
                    raise _hoist.UsageError(f"'{declared.name}' is given a value that is not finite, or too large for {dtype}")

    def state_dict(self, dtype: torch.dtype | None = None, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
        self.names_in_model()
        result: dict[str, torch.Tensor] = {}
        for name, declared in self.by_name.items():
            if declared.trains or not exclude_frozen:
                result[name] = self.read_as_stored(name) if dtype is None else as_type(self.read(name), dtype)
        for alias, name in self._cut.aliases.items():
            if name in result:
                result[alias] = result[name]
        result.update({n: p.detach().clone() for n, p in self.empty()})
        result.update({n: b.detach().clone() for n, b in self.persistent_buffers(remove_duplicate=False)})
        result.update({name: module.get_extra_state() for name, module in self._with_extra_state()})
        return result

    def _with_extra_state(self) -> Iterator[tuple[str, Any]]:
        """Modules that have more to save than parameters and buffers, by the key of that."""
        for prefix, module in self._module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield (f"{prefix}._extra_state" if prefix else "_extra_state"), module

    def empty(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters without elements, which no unit has."""
        return ((n, p) for n, p in self._module.named_parameters(remove_duplicate=False) if p.numel() == 0)

    def others_in_files(self) -> dict[str, torch.Tensor]:
        """Tensors that files of weights hold beside the parameters of units."""
        empty = ((name, torch.empty_like(p, device="cpu")) for name, p in self.empty())  # also of those on the meta device
        return dict(weight_files.without_unknown(itertools.chain(empty, self.persistent_buffers())))

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool,
                        program_state_with: Callable[[dict[int, torch.Tensor]], bytes | None]) -> tuple[list[str], list[str]]:
        """Returns the names that the state lacks, and those that the model has no place for. `program_state_with`: what the
        commit is to hold beside the masters, with new values of the buffers with these ids."""
        aliases = self._cut.aliases
        buffers = dict(self.persistent_buffers(remove_duplicate=False))
        others = dict(self._with_extra_state())
        known = {*self.by_name, *aliases, *buffers, *others, *(name for name, _ in self.empty())}
        unknown = sorted(set(state) - known)
        wanted = set(self.by_name) | {name for name, _ in self.persistent_buffers()}
        missing = sorted(wanted - set(state) - {aliases[a] for a in aliases if a in state})
        if strict and (unknown or missing):
            raise _hoist.UsageError(f"state_dict of another model: missing {missing[:5]}, unknown {unknown[:5]}")
        masters = {name: values for name, values in state.items()
                   if name in self.by_name or (name in aliases and aliases[name] not in state)}
        for name in buffers.keys() & state.keys():
            if buffers[name].shape != state[name].shape:
                raise _hoist.UsageError(f"buffer '{name}' is {tuple(buffers[name].shape)}, the values are "
                                        f"{tuple(state[name].shape)}")
        loaded = [name for name in buffers if name in state]
        new_buffers = {id(buffers[name]): torch.empty_like(buffers[name], device="cpu").copy_(state[name]) for name in loaded}
        self.write_all(masters, program_state_with(new_buffers))
        for name in loaded:
            buffers[name].copy_(state[name])
        for name in others.keys() & state.keys():
            others[name].set_extra_state(state[name])
        return missing, unknown

    def export(self, directory: str, dtype: torch.dtype, shard_bytes_max: int, exclude_frozen: bool) -> list[str]:
        self.names_in_model()
        if dtype not in DTYPES:
            raise _hoist.UsageError(f"weights are exported as float32, bfloat16 or float16, not {dtype}")
        buffers, _alive = weight_files.file_tensors(self.others_in_files().items())
        return self._unit_manager.export(directory, DTYPES[dtype], shard_bytes_max, buffers, exclude_frozen)


def _as_masters(declared: Declared, values: torch.Tensor) -> torch.Tensor:
    if values.shape != declared.shape:
        raise _hoist.UsageError(f"'{declared.name}' is {tuple(declared.shape)}, the values are {tuple(values.shape)}")
    if values.is_complex():
        raise _hoist.UsageError(f"'{declared.name}' is given complex values, and has real ones")
    return values.detach().to("cpu", torch.float32).resolve_neg().contiguous().view(-1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def _fingerprint(parameter: nn.Parameter) -> int:
    """A hash of all bits and where they are: the sum of each element and its place, mixed as by SplitMix64 (Steele et al.,
    2014). Without the mixing, changes of many elements alike cancel each other."""
    bits = _bits(parameter)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, bits.numel(), _PIECE):
        part = bits[first:first + _PIECE].long()
        mixed = torch.arange(first, first + part.numel(), device=bits.device).bitwise_left_shift_(32).bitwise_xor_(part)
        for shift, factor in ((30, -0x40a7b892e31b1a47), (27, -0x6b2fb644ecceee15)):
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
    return int(total)
