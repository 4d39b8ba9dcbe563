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
from hoist.torch.model.parameters import Parameters, dtype_of
from hoist.torch.model.units import units_of


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


def _declared(model: nn.Module, config: _hoist.Config, unit_classes: Any) -> list[_hoist.ManagedUnit]:
    cut = units_of(model, unit_classes)
    if not cut.units:
        raise _hoist.UsageError("the model has no parameters")
    return Parameters(model, cut, dtype_of(config), device_of(config, None)).declare({}, config.is_vertical)


def estimate_units(model: nn.Module, config: _hoist.Config, unit_classes: Any, world_size: int,
                   local_ranks: int) -> Estimate:
    """Predicts for a model, which may be on the meta device. Changes neither the model nor the configuration."""
    config = config.copy()
    units = _declared(model, config, unit_classes)
    found = _hoist.estimate(config, units, world_size, local_ranks)
    memories = [Memory(*memory) for memory in found.pop("memories")]
    return Estimate(world_size=world_size, memories=memories, **found)


def describe_units(model: nn.Module, config: _hoist.Config, unit_classes: Any) -> dict[str, Any]:
    """The units as a units file has them."""
    return {"units": [
        {"name": unit.name, "stable_in_pass": True, "gathered_with": unit.gathered_with,
         "own_gradient_memory": unit.own_gradient_memory,
         "parameters": [{"name": p.name, "shape": p.shape, "dtype": p.dtype.name, "trainable": p.trainable}
                        for p in unit.parameters]}
        for unit in _declared(model, config, unit_classes)]}


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
