# SPDX-License-Identifier: Apache-2.0
"""Which modules are wrapped: a module belongs to one engine at a time, and gets no new parameters meanwhile."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hoist import _hoist
from hoist.torch.model.graphs import outside_of_graphs

if TYPE_CHECKING:
    from hoist.torch.engine import Engine


class Removable(Protocol):
    def remove(self) -> None: ...


# Hooks of the last engine that a module, or a parameter, belonged to.
_hooks_of_modules: weakref.WeakKeyDictionary[nn.Module, list[Removable]] = weakref.WeakKeyDictionary()
_own_forwards: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # the functions of OwnForwards
_hooks_of_parameters = WeakTensorKeyDictionary()
_SHARDING = ("FullyShardedDataParallel", "FSDPModule")
_engine_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that a model, or a module of it, belongs to; None if there is none, or it was closed."""
    engine = _engine_of.get(model, lambda: None)()
    return engine if engine is not None and engine._unit_manager.is_open else None


def open_engines() -> set[Engine]:
    return {engine for of in list(_engine_of.values()) if (engine := of()) is not None and engine._unit_manager.is_open}


def refuse_model(model: object) -> None:
    """Errors: UsageError for what cannot be wrapped, or is wrapped already."""
    if not isinstance(model, nn.Module):
        raise _hoist.UsageError(f"a torch.nn.Module is wrapped, not a {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise _hoist.UsageError(f"{type(model).__name__} is not wrapped: the engine averages gradients over ranks itself. "
                                "Wrap the model inside of it (model.module)")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise _hoist.UsageError(f"'{name}' is a lazy module's and has no shape before the first call: call the model with a "
                                    "batch first, and wrap it then")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise _hoist.UsageError(f"module '{name}' makes sparse gradients, and dense ones are added up here: set "
                                    f"{type(module).__name__}(sparse=False)")
        if any(kind.__name__ in _SHARDING and kind.__module__.startswith("torch.distributed.") for kind in type(module).__mro__):
            raise _hoist.UsageError(f"module '{name or type(module).__name__}' is divided by FSDP: hoist divides the state among "
                                    "the ranks itself. Wrap the model without FSDP")
        if engine_of(module) is not None:
            raise _hoist.UsageError(f"module '{name or type(module).__name__}' belongs to an engine already: close() that one "
                                    "first (hoist.torch.engine_of(model), or trainer.engine), and give the next one values: "
                                    "resume=True or weights=DIR, for a Trainer hoist_options={\"weights\": DIR}, where "
                                    "engine.export(DIR) of the first engine wrote them")
    owners = open_engines()
    for name, parameter in model.named_parameters():
        if any(id(parameter) in engine._parameters.by_id for engine in owners):
            raise _hoist.UsageError(f"parameter '{name}' belongs to an engine of another model: an engine trains its parameters "
                                    "alone. Wrap one model that contains both, or give this one a copy")


def keep_hooks(of: nn.Module | nn.Parameter, *handles: Removable) -> None:
    """Keeps hooks of the engine that is being made. remove_hooks() removes them after its close, or before the next engine is
    made."""
    kept: Any = _hooks_of_parameters if isinstance(of, nn.Parameter) else _hooks_of_modules
    kept.setdefault(of, []).extend(handles)


class OwnForwards:
    """torch.compile asks whether a module has a forward of its own before it reuses a graph, and not whether it has hooks. So
    each module with hooks has one, its class's, and takes no graph of a model of that class that was compiled without hooks."""

    def __init__(self) -> None:
        self._of_class: dict[type[nn.Module], Any] = {}
        self._modules: list[nn.Module] = []

    def add(self, module: nn.Module) -> None:
        if "forward" not in vars(module) and isinstance(module.forward, types.MethodType):
            self._modules.append(module)
            self._set(module)

    def _set(self, module: nn.Module) -> None:
        self._of_class[type(module)] = type(module).forward
        _own_forwards[module] = getattr(module.forward, "__func__", module.forward)
        vars(module)["forward"] = module.forward

    @outside_of_graphs
    def follow_classes(self) -> list[nn.Module]:
        """Takes the forward that the program has given a class since. Returns the modules that have another one now."""
        if all(kind.forward is forward for kind, forward in self._of_class.items()):
            return []
        changed = [module for module in self._modules
                   if type(module).forward is not self._of_class.get(type(module)) and _drop_own_forward(module)]
        for module in changed:
            self._set(module)
        self._of_class = {kind: kind.forward for kind in self._of_class}
        return changed


def _drop_own_forward(module: nn.Module) -> bool:
    """False where the program has set another one."""
    kept, own = _own_forwards.pop(module, None), vars(module).get("forward")
    if kept is None or getattr(own, "__func__", own) is not kept:
        return False
    del vars(module)["forward"]
    return True


def _drop_own_methods(module: nn.Module) -> None:
    """Removes those of claim() and generate_together(), and the methods of its class that an unpickled module has in their place.
    Methods that the program has set stay."""
    for function in (zero_grad, generate):
        name = function.__name__
        own = vars(module).get(name)
        if (isinstance(own, types.MethodType) and own.__self__ is module
                and own.__func__ in (function, getattr(type(module), name, None))):
            del vars(module)[name]


def remove_hooks(model: nn.Module) -> None:
    """Removes the hooks and methods of an engine that was closed."""
    for module in model.modules():
        for handle in _hooks_of_modules.pop(module, []):
            handle.remove()
        _drop_own_forward(module)
        _drop_own_methods(module)
        for parameter in module._parameters.values():
            for handle in _hooks_of_parameters.pop(parameter, []) if parameter is not None else ():
                handle.remove()


def claim(model: nn.Module, engine: Engine) -> None:
    """From now on all modules of the model belong to the engine."""
    for module in model.modules():
        _engine_of[module] = weakref.ref(engine)
        vars(module).setdefault("zero_grad", types.MethodType(zero_grad, module))
    _watch_additions()


def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The engine has the gradients that the program means to drop. By this name, a pickled module finds its class's method."""
    engine = engine_of(module)
    if engine is not None:
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        if module is engine.module or (trained and trained.issuperset(map(id, engine._parameters.trainable))):
            engine.zero_grad()
        elif trained and engine._passes.has_gradients_to_drop:
            _refuse_zero_grad(engine, module)
    type(module).zero_grad(module, *args, **kwargs)


def _refuse_zero_grad(engine: Engine, module: nn.Module) -> NoReturn:
    name = next((name for name, each in engine.module.named_modules() if each is module), type(module).__name__)
    raise _hoist.UsageError(f"zero_grad() of '{name}', a part of the wrapped model, while gradients wait for step(): the "
                            "engine drops those of the whole model together. Call zero_grad() of the engine or of the whole "
                            "model; a part that is not to be trained for a while needs a group of its own, whose lr is 0")


@functools.cache  # once in a process
def _watch_additions() -> None:
    def added(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        engine = engine_of(module)
        if engine is not None:
            engine._parameters.refuse_addition(module, name, value)

    register_module_parameter_registration_hook(added)
    register_module_module_registration_hook(added)


def generate_together(model: nn.Module) -> None:
    """For ranks that divide the weights. transformers' generate() returns when this rank's texts have ended, and others would
    wait for its part of the weights; with synced_gpus, all ranks go on until the last one has ended."""
    for module in model.modules():
        own = getattr(type(module), "generate", None)
        if own is not None and "synced_gpus" in inspect.signature(own).parameters:
            vars(module).setdefault("generate", types.MethodType(generate, module))


def generate(module: nn.Module, *args: Any, **settings: Any) -> Any:
    """By this name, as with zero_grad(), a pickled module finds its class's method."""
    engine = engine_of(module)
    if engine is not None and not engine._passes.in_gathered_block:  # inside of gathered(), one rank may generate alone
        settings["synced_gpus"] = True
    own: Any = getattr(type(module), "generate")  # noqa: B009 - Module has none
    return own(module, *args, **settings)
