# SPDX-License-Identifier: Apache-2.0
"""Parameters as tensors over hoist's device memory, readable only while their unit is gathered.

Each unit has a place in that memory, which other units use at other times. So its tensors are made once, and views of them
that autograd saves stay right; but outside of the unit's uses they must not be read. PyTorch 2.13 and newer refuse every
access to a storage that is marked, through views as well, with a message that names the unit. In older versions a parameter
without its memory is NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from hoist import _hoist
from hoist.torch.devices import current_stream_of, dlpack_device_of, outside_of_inference_mode

_mark: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_unmark: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
CAN_REFUSE = _mark is not None and _unmark is not None
_DisableFuncTorch: Any = torch._C._DisableFuncTorch
_DisableTorchDispatch: Any = torch._C._DisableTorchDispatch

_without_memory = WeakTensorKeyDictionary()  # by parameter: the storage that it shows while its unit has no memory


def lost_its_values(parameter: nn.Parameter) -> bool:
    """Whether it belonged to an engine that was closed, and has been given nothing since."""
    storage = _without_memory.get(parameter)
    return storage is not None and parameter.untyped_storage()._cdata == storage._cdata


def showing(parameter: nn.Parameter) -> Callable[[], None]:
    """Returns a function that gives the parameter the memory that it has now; lost_its_values() then says what it says now."""
    data, storage = parameter.data, _without_memory.get(parameter)

    def show_again() -> None:
        parameter.data = data
        if storage is not None:
            _without_memory[parameter] = storage

    return show_again


class _Unit:
    def __init__(self, name: str, device: torch.device):
        self.refusal = (f"the weights of unit '{name}' are not loaded: hoist gathers them for the forward and backward passes "
                        "of their module. engine.read(name) and engine.gathered(names) give them at other times, and "
                        "engine.write(name, values) changes them; a loss that needs them is computed inside of a module's "
                        "forward(). If forward() has just used them for the first time without a call of their module, call it "
                        "again: hoist finds the use then; in a backward pass, engine.backward(loss) finds it, and "
                        "loss.backward() does not. In torch.autograd.grad(), gradients of gradients (create_graph=True twice) "
                        "need all layers that they lead through on the device at once: raise hoist.device_memory and "
                        "stage3_max_live_parameters. After close() the model has no values: the next "
                        "wrap() needs them (resume=True, or weights=...), and model.load_state_dict(state, assign=True) gives it "
                        "some for PyTorch alone")
        self.parameters: list[tuple[nn.Parameter, int]] = []  # with the offset in the unit's memory, in bytes
        self.absent: list[torch.Tensor] = []  # what each parameter is while the unit has no memory
        self.views: list[torch.Tensor] = []  # what it is over the unit's memory
        self.shown = self.absent  # what it is now
        self.given_another: nn.Parameter | None = None  # a parameter that the program had given another tensor
        self.storage: torch.UntypedStorage | None = None  # of that memory
        # All bits set: NaN in every type. A storage of its own tells the unit's parameters from others.
        self.nan = torch.full((2,), -1, dtype=torch.int16, device=device)
        self.mark(self.nan.untyped_storage())

    def mark(self, storage: torch.UntypedStorage) -> None:
        if CAN_REFUSE:
            _mark(storage._cdata, self.refusal)

    def show(self, tensors: list[torch.Tensor]) -> None:
        self.look()
        self.shown = tensors
        for (parameter, _), tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def look(self) -> None:
        """Notes a parameter that shows other memory than show() gave it."""
        others = [p for (p, _), own in zip(self.parameters, self.shown, strict=True)
                  if p.untyped_storage()._cdata != own.untyped_storage()._cdata or p.storage_offset() != own.storage_offset()]
        if others and self.given_another is None:
            self.given_another = others[0]


class UnitTensors:
    """The UnitManager calls bind, open, close and unbind."""

    def __init__(self, names: list[str], device: torch.device):
        self._device = device
        self._units = [_Unit(name, device) for name in names]
        self._unit_of = {unit.nan.untyped_storage()._cdata: index for index, unit in enumerate(self._units)}

    def connect(self, unit_manager: _hoist.UnitManager) -> None:
        me = weakref.ref(self)  # hooks of the parameters own the UnitManager, which must not own the parameters

        def calling(method: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                alive = me()
                if alive is not None and CAN_REFUSE and method in (UnitTensors.open, UnitTensors.close):
                    method(alive, *args)  # at every use of a unit; makes no tensors
                elif alive is not None:
                    # A module may be called inside of torch.func.grad() or jvp(). Tensors that are made there belong to that
                    # call, and using them later ends the process. Those of torch.inference_mode() could never be trained.
                    # Watch must not take what is done here for a use of the unit's weights.
                    with _DisableFuncTorch(), outside_of_inference_mode(), _DisableTorchDispatch():
                        method(alive, *args)
            return call

        device_type, device_id = dlpack_device_of(self._device)
        unit_manager.connect(calling(UnitTensors.bind), calling(UnitTensors.open), calling(UnitTensors.close),
                             calling(UnitTensors.unbind), current_stream_of(self._device), device_type, device_id)

    def absent(self, index: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that a parameter shows before its unit has memory."""
        return self._units[index].nan.view(dtype)[:1].expand(shape.numel()).view(shape)

    def add(self, index: int, parameter: nn.Parameter, offset: int) -> None:
        """Pre: `parameter.data` is what absent() made."""
        unit = self._units[index]
        unit.parameters.append((parameter, offset))
        unit.absent.append(parameter.data)
        _without_memory[parameter] = unit.nan.untyped_storage()

    def given_another(self) -> nn.Parameter | None:
        """A parameter to which the program has given other memory (`parameter.data = ...`), if any. It has its own again."""
        for unit in self._units:
            unit.look()
        changed = [unit for unit in self._units if unit.given_another is not None]
        first = changed[0].given_another if changed else None
        for unit in changed:
            unit.show(unit.shown)
            unit.given_another = None
        return first

    def unit_of(self, tensor: torch.Tensor) -> int | None:
        """The unit whose memory a tensor shows, if any."""
        return self._unit_of.get(tensor.untyped_storage()._cdata)

    def parameter_of(self, tensor: torch.Tensor) -> nn.Parameter:
        """The parameter that a tensor shows, or the first one of several. Pre: unit_of(tensor) is a unit."""
        unit = self._units[self._unit_of[tensor.untyped_storage()._cdata]]
        place = tensor.storage_offset() * tensor.element_size()
        ends = [view.storage_offset() * view.element_size() + view.nbytes for view in unit.views]
        return next((p for (p, _), end in zip(unit.parameters, ends, strict=True) if place < end), unit.parameters[0][0])

    def bind(self, index: int, memory: Any) -> None:
        unit = self._units[index]
        data = torch.from_dlpack(memory)
        if unit.storage is not None:
            self._unit_of.pop(unit.storage._cdata, None)  # not there if an interrupted call has done this
        unit.storage = data.untyped_storage()
        self._unit_of[unit.storage._cdata] = index
        unit.views = []
        for (_, offset), absent in zip(unit.parameters, unit.absent, strict=True):
            part = data[offset:offset + absent.numel() * absent.element_size()]
            unit.views.append(part.view(absent.dtype).view(absent.shape))
        if CAN_REFUSE:
            unit.show(unit.views)

    def open(self, index: int) -> None:
        unit = self._units[index]
        assert unit.storage is not None
        if CAN_REFUSE:
            _unmark(unit.storage._cdata)
        else:
            unit.show(unit.views)

    def close(self, index: int) -> None:
        unit = self._units[index]
        assert unit.storage is not None
        if CAN_REFUSE:
            unit.mark(unit.storage)
        else:
            unit.show(unit.absent)

    def unbind(self) -> None:
        for unit in self._units:
            if unit.storage is None:
                continue
            unit.mark(unit.storage)  # for views that the program has
            self._unit_of.pop(unit.storage._cdata, None)
            unit.show(unit.absent)
            unit.views = []
            unit.storage = None  # last: an interrupted call is made once more
