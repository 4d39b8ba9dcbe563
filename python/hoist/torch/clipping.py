# SPDX-License-Identifier: Apache-2.0
"""torch.nn.utils.clip_grad_norm_ for wrapped models: it finds no gradients in their parameters, so their engine is asked.

Without this a training loop that clips by itself would go on, and silently clip nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hoist import _hoist

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

_Given = torch.Tensor | Iterable[torch.Tensor]
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def clip_through(engine: Engine) -> None:
    """From now on PyTorch's functions that clip gradients know the engine's parameters, until it is closed."""
    _engines.add(engine)


def _replace_functions() -> None:
    """Programs import these functions by name, so every module that has one gets the other in its place."""
    replacements: dict[Any, Callable[..., Any]] = {torch.nn.utils.clip_grad_norm_: _clip_norm}
    for name in ("clip_grad_value_", "clip_grads_with_norm_"):
        if (original := getattr(torch.nn.utils, name, None)) is not None:  # the second one is newer
            replacements[original] = _refuse(name)
    if (total := getattr(torch.nn.utils, "get_total_norm", None)) is not None:  # it takes gradients: of a wrapped model, none
        replacements[total] = lambda _, tensors, *args, **kwargs: total(tensors, *args, **kwargs)
    others = {id(original): _for_engines(original, of_engine) for original, of_engine in replacements.items()}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in others and name != "_get_total_norm":  # PyTorch's clip_grad_norm_ calls that
                setattr(module, name, others[id(value)])


def _for_engines(original: Callable[..., Any], of_engine: Callable[..., Any]) -> Any:
    first = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if not args and first not in kwargs:
            return original(**kwargs)  # its own error
        parameters: _Given = args[0] if args else kwargs.pop(first)
        args = args[1:]
        taken = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not taken and any(engine._passes.due for engine in _engines if engine._unit_manager.is_open):
            raise _hoist.UsageError(f"{original.__name__.lstrip('_')}() of no tensors, and a wrapped model's step is due: its "
                                    "parameters have no grad, because hoist has taken it. Call clip_grad_norm_() with all of the "
                                    "model's parameters, or engine.clip_grad_norm_(max_norm): both return the norm")
        engine = _engine_of(taken)
        return original(taken, *args, **kwargs) if engine is None else of_engine(engine, taken, *args, **kwargs)

    return clip


def _engine_of(parameters: list[torch.Tensor]) -> Engine | None:
    """The open engine that has one of the parameters. Errors: UsageError for those of several."""
    ids = {id(parameter) for parameter in parameters}

    def has_one(engine: Engine) -> bool:
        return any(id(p) in ids for p in (*engine._parameters.trainable, *engine._parameters.replaced.keys()))

    engines = [engine for engine in _engines if engine._unit_manager.is_open and has_one(engine)]
    if len(engines) > 1:
        raise _hoist.UsageError("gradients of two wrapped models are to be clipped together: call it for each by itself")
    return engines[0] if engines else None


def _clip_norm(engine: Engine, parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0,
               error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
    ids = {id(engine._parameters.replaced.get(parameter, parameter)) for parameter in parameters}
    if any(id(parameter) not in ids for parameter in engine._parameters.trainable):
        raise _hoist.UsageError("clip_grad_norm_() of some parameters of a wrapped model: hoist takes the norm of all that are "
                                "trained together")
    own = {id(parameter) for parameter in engine._parameters.trainable}
    if any(parameter.grad is not None for parameter in parameters if id(parameter) not in own):
        raise _hoist.UsageError("clip_grad_norm_() of a wrapped model's parameters together with others: call it for each "
                                "by itself")
    return engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise _hoist.UsageError(f"{name}() of a wrapped model's parameters: hoist has taken the gradients, and can scale them "
                                "to a norm only (clip_grad_norm_(), or gradient_clipping in the configuration). A function of "
                                "PyTorch's that was put into a functools.partial or a default argument before hoist.torch was "
                                "imported ends here, too: call torch.nn.utils.clip_grad_norm_ by its name")

    return refuse


_replace_functions()
