# SPDX-License-Identifier: Apache-2.0
"""Predicts how much memory training a model takes, and whether this machine has it, before anything is taken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hoist import _hoist
from hoist.torch.devices import device_of
from hoist.torch.parameters import Parameters, dtype_of
from hoist.torch.units import units_of


@dataclass(frozen=True)
class Memory:
    """The memory that all ranks of this machine take together, in bytes."""

    name: str  # "host memory", "NVMe at /data/hoist"
    least: int
    held: int  # the least where that does not fit
    free: int


@dataclass(frozen=True)
class Estimate:
    """str() of it is a report."""

    parameters: int
    world_size: int
    device_bytes: int  # of a rank; this and the next two
    pinned_bytes: int
    nvme_bytes: int
    step: _hoist.StepBytes  # bytes that a rank moves in a step
    fits: bool
    problems: list[str]  # why it does not fit: sentences, the limiting memory first
    memories: list[Memory]
    choices: list[tuple[str, str, str]]  # what the configuration left to this machine: (key, value, reason)

    def __str__(self) -> str:
        text = _hoist.format_bytes
        lines = [f"{self.parameters} parameters on {self.world_size} rank{'s' if self.world_size > 1 else ''}; each holds "
                 f"{text(self.device_bytes)} of device memory, {text(self.pinned_bytes)} of pinned memory and "
                 f"{text(self.nvme_bytes)} on NVMe"]
        lines += [f"{key}: {value}, because {reason}" for key, value, reason in self.choices]
        lines += [f"{m.name}: {text(m.held)} on this machine, of {text(m.free)} free" for m in self.memories]
        lines += self.problems
        return "\n".join([*lines, "fits this machine" if self.fits else "does not fit this machine"])


def estimate_units(model: nn.Module, config: _hoist.Config, unit_classes: Any, world_size: int,
                   local_ranks: int) -> Estimate:
    """Predicts for a model, which may be on the meta device. Changes neither the model nor the configuration."""
    config = config.copy()
    cut = units_of(model, unit_classes)
    if not cut.units:
        raise _hoist.UsageError("the model has no parameters")
    units = Parameters(model, cut, dtype_of(config), device_of(config, None), lambda: None).declare(
        {}, config.is_vertical)
    config.micro_batches_max = max(config.micro_batches_max, config.micro_batches(world_size))
    found = _hoist.estimate(config, units, world_size, local_ranks)
    memories = [Memory(*memory) for memory in found.pop("memories")]
    return Estimate(world_size=world_size, memories=memories, **found)


_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def describe_units(model: nn.Module, config: _hoist.Config, unit_classes: Any) -> dict[str, Any]:
    """The units as a units file has them. Errors: UsageError for types that are not trained here."""
    dtype = dtype_of(config)

    def described(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        own = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        if own not in _TYPE_NAMES:
            raise _hoist.UsageError(f"parameter '{name}' is {own}; float32, bfloat16 and float16 are trained here")
        return {"name": name, "shape": list(parameter.shape), "dtype": _TYPE_NAMES[own], "trainable": parameter.requires_grad}

    units = units_of(model, unit_classes).units
    if not units:
        raise _hoist.UsageError("the model has no parameters")
    return {"units": [{"name": unit.name, "parameters": [described(*named) for named in unit.parameters.items()]}
                      for unit in units]}


def model_of(model: nn.Module | str | os.PathLike[str] | Any) -> nn.Module:
    """A module: as it is, or made on the meta device by a configuration of transformers, or the directory of one."""
    if isinstance(model, nn.Module):
        return model
    import transformers  # only where it is needed

    if isinstance(model, (str, os.PathLike)):
        model = transformers.AutoConfig.from_pretrained(os.fspath(model))
    names = getattr(model, "architectures", None) or []
    make = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    made: nn.Module
    with torch.device("meta"):
        if make is not None:
            made = make(model)
        else:
            try:
                made = transformers.AutoModelForCausalLM.from_config(model)
            except ValueError:  # not a language model
                made = transformers.AutoModel.from_config(model)
    return made
