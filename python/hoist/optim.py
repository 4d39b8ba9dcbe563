# SPDX-License-Identifier: Apache-2.0
"""The CPU optimizers on their own, as torch.optim optimizers over CPU tensors in memory.

bf16 parameters are trained with an exact fp32 master: a 16-bit remainder beside each weight, 2 bytes instead of the 4 of
a copy. `master` gives the fp32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT

from hoist import _hoist

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

_DTYPES = {torch.float32: _hoist.DType.fp32, torch.bfloat16: _hoist.DType.bf16, torch.float16: _hoist.DType.fp16}


class _Optimizer(torch.optim.Optimizer):
    _kind: str

    def __init__(self, params: ParamsT, threads: int, settings: dict[str, Any]):
        self._pool = _hoist.UpdatePool(threads)
        super().__init__(params, settings)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = options_of(group, _hoist.OptimizerOptions.defaults_of(self._kind))
            by_step: dict[int, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._state_of(parameter, options)
                    state["step"] += 1
                    by_step.setdefault(int(state["step"]), []).append(parameter)
            for step, parameters in by_step.items():
                self._update(options, step, parameters)
        return loss

    def _state_of(self, parameter: torch.nn.Parameter, options: _hoist.OptimizerOptions) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if state:
            return state
        if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
            raise _hoist.UsageError(f"a parameter is {parameter.dtype} on {parameter.device}; float32 and bfloat16 CPU "
                                    "tensors are updated here")
        if not parameter.is_contiguous():
            raise _hoist.UsageError("a parameter is not dense: its elements do not stand one after the other")
        first, second = options.moments
        state["step"] = 0
        if first:
            state["exp_avg"] = torch.zeros(parameter.shape)
        if second:
            state["exp_avg_sq"] = torch.full(parameter.shape, options.initial_accumulator)
        if parameter.dtype == torch.bfloat16:
            state["remainder"] = torch.zeros(parameter.shape, dtype=torch.int16)
        return state

    def _update(self, options: _hoist.OptimizerOptions, step: int, parameters: list[torch.nn.Parameter]) -> None:
        gradients = [p.grad.contiguous() for p in parameters if p.grad is not None]  # alive until the update is done
        arrays = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            remainder, first, second = (state[key].data_ptr() if key in state else 0
                                        for key in ("remainder", "exp_avg", "exp_avg_sq"))
            arrays.append(_hoist.Arrays(parameter.data_ptr(), remainder, first, second, gradient.data_ptr(),
                                        _DTYPES[parameter.dtype], _DTYPES[gradient.dtype], parameter.numel()))
        self._pool.update(options, step, 1.0, arrays)
        torch.autograd.graph.increment_version(parameters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # PyTorch gives every state its parameter's type, which moments and remainders of bf16 parameters have not.
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][key] = value.clone() if isinstance(value, torch.Tensor) else value

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The fp32 value that is trained."""
        if parameter.dtype == torch.float32 or parameter not in self.state:
            return parameter.detach().float().clone()
        values = torch.empty(parameter.shape)
        _hoist.join_master(parameter.data_ptr(), self.state[parameter]["remainder"].data_ptr(), values.data_ptr(),
                           parameter.numel())
        return values

    def set_master(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Makes `values` the fp32 master, and its rounding the parameter."""
        values = values.detach().float().contiguous()
        if values.shape != parameter.shape:
            raise _hoist.UsageError(f"the parameter is {tuple(parameter.shape)}, the values {tuple(values.shape)}")
        if parameter.dtype == torch.float32:
            with torch.no_grad():
                parameter.copy_(values)
            return
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        state = self._state_of(parameter, options_of(group, _hoist.OptimizerOptions.defaults_of(self._kind)))
        _hoist.split_master(values.data_ptr(), parameter.data_ptr(), state["remainder"].data_ptr(), parameter.numel())


# Names in torch.optim's parameter groups -> the engine's.
_SETTINGS = {
    "lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay", "bias_correction": "bias_correction",
    "momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "lr_decay": "learning_rate_decay",
    "initial_accumulator_value": "initial_accumulator",
}


def options_of(group: dict[str, Any], defaults: _hoist.OptimizerOptions) -> _hoist.OptimizerOptions:
    """A parameter group's settings over others."""
    options = _hoist.OptimizerOptions(defaults)
    for key, name in _SETTINGS.items():
        if key in group:
            setattr(options, name, type(getattr(options, name))(group[key]))
    if "betas" in group:
        options.beta1, options.beta2 = (float(beta) for beta in group["betas"])
    for key in ("amsgrad", "maximize"):
        if group.get(key):
            raise _hoist.UsageError(f"{key}=True is not among the optimizers' settings here")
    return options


class AdamW(_Optimizer):
    """Adam with decoupled weight decay."""

    _kind = "AdamW"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, bias_correction: bool = True, threads: int = 0):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                           "bias_correction": bias_correction})


class Adam(AdamW):
    """Adam, with weight decay added to the gradient (L2)."""

    _kind = "Adam"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, bias_correction: bool = True, threads: int = 0):
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, threads)


class Adagrad(_Optimizer):
    _kind = "Adagrad"

    def __init__(self, params: ParamsT, lr: float = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, threads: int = 0):
        super().__init__(params, threads, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
                                           "initial_accumulator_value": initial_accumulator_value, "eps": eps})


class Lion(_Optimizer):
    """Chen et al., arXiv 2302.06675."""

    _kind = "Lion"

    def __init__(self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
                 threads: int = 0):
        super().__init__(params, threads, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class SGD(_Optimizer):
    _kind = "SGD"

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, threads: int = 0):
        super().__init__(params, threads, {"lr": lr, "momentum": momentum, "dampening": dampening,
                                           "weight_decay": weight_decay, "nesterov": nesterov})
