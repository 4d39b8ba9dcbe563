# SPDX-License-Identifier: Apache-2.0
"""Begins an engine with the state of a DeepSpeed checkpoint: finds each parameter of the model in the checkpoint, and checks
that they match."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hoist import _hoist
from hoist.optim.groups import rates_of
from hoist.torch.checkpoint.schedules import is_plain
from hoist.torch.deepspeed.checkpoint import Checkpoint
from hoist.torch.deepspeed.files import refuse, shown
from hoist.torch.model.initial import Source, values_of
from hoist.torch.model.units import Model

_log = logging.getLogger("hoist")

# A rate is the schedule's.
_SETTINGS = {"weight_decay": "weight_decay", "eps": "epsilon", "betas": "betas", "bias_correction": "bias_correction"}


class Adoption:
    """Supplies the values of every element to `begin_at(values=...)`."""

    def __init__(self, checkpoint: Checkpoint, cut: Model, number_of: Callable[[nn.Parameter], int], sources: dict[int, Source],
                 options_of_group: Sequence[_hoist.OptimizerOptions], group_of: dict[int, int]):
        """`number_of`: the engine's number of a parameter; `sources`: values that the model was built with."""
        self._checkpoint = checkpoint
        self._name: dict[int, str] = {}  # the engine's number of a parameter -> its name in the checkpoint
        self._built: dict[int, torch.Tensor] = {}  # of frozen ones that the checkpoint leaves out
        self._differences: set[str] = set()
        self._group_count = max(1, len(options_of_group) - 1)
        self._pairs: set[tuple[int, int]] = set()  # a group here, a group of the checkpoint with some of its parameters
        self._match(cut, number_of, sources, options_of_group, group_of)

    def __call__(self, parameter: int, state: _hoist.State, first: int, out: torch.Tensor) -> None:
        if (built := self._built.get(parameter)) is not None:
            out.copy_(built.view(-1)[first:first + out.numel()])
        elif state == _hoist.State.master or self._checkpoint.has_moments:
            self._checkpoint.read(self._name[parameter], state, first, out)
        else:
            out.zero_()

    # --- the model ---------------------------------------------------------------------------------------------------

    def _match(self, cut: Model, number_of: Callable[[nn.Parameter], int], sources: dict[int, Source],
               options_of_group: Sequence[_hoist.OptimizerOptions], group_of: dict[int, int]) -> None:
        checkpoint = self._checkpoint
        names: dict[str, list[str]] = {}  # of each parameter, all that it has
        for alias, name in cut.aliases.items():
            names.setdefault(name, []).append(alias)
        used: set[str] = set()
        missing = []
        for unit in cut.units:
            for name, parameter in unit.parameters.items():
                here = [name, *names.get(name, ())]
                there = next((known for n in here for known in (n, checkpoint.tied.get(n)) if known in checkpoint.spans), None)
                if there is None and (parameter.requires_grad or id(parameter) not in sources):
                    missing.append(name)
                    continue
                number = number_of(parameter)
                if there is None:
                    self._built[number] = values_of(sources[id(parameter)]).detach().to("cpu").contiguous()
                    continue
                used.add(there)
                self._name[number] = there
                group = group_of.get(id(parameter), -1)
                self._compare(name, there, parameter, options_of_group[group + 1])
                if parameter.requires_grad:
                    self._pairs.add((max(0, group), checkpoint.group_of[there]))
        unknown = sorted(name for name, shape in (checkpoint.parameters | checkpoint.frozen).items()
                         if name not in used and not (name in cut.empty and shape.numel() == 0))
        if missing or unknown:
            refuse(f"{checkpoint.path} is of another model: it lacks {missing[:5] or 'nothing'}"
                   f"{' and others' if len(missing) > 5 else ''}, and has {unknown[:5] or 'nothing'}"
                   f"{' and others' if len(unknown) > 5 else ''} that this one does not. Build the model as the DeepSpeed run "
                   "did (names count), or begin with weights alone (weights=...)")
        if self._built:
            _log.info("%d frozen parameters are not in %s, and keep the values that the model was built with", len(self._built),
                      shown(checkpoint.path))

    def _compare(self, name: str, there: str, parameter: torch.nn.Parameter, options: _hoist.OptimizerOptions) -> None:
        checkpoint = self._checkpoint
        shape = (checkpoint.parameters | checkpoint.frozen)[there]
        if shape != parameter.shape:
            refuse(f"{checkpoint.path}: parameter '{there}' is {tuple(shape)}, and {tuple(parameter.shape)} here: it is of "
                   "another model")
        if not parameter.requires_grad:
            return
        if there not in checkpoint.parameters:
            refuse(f"{checkpoint.path}: parameter '{there}' was frozen, and has no moments; here it requires gradients. Freeze "
                   "it (requires_grad_(False)), or begin with weights alone (weights=...)")
        if options.kind not in ("AdamW", "Adam"):
            raise _hoist.UsageError(f"{options.kind} cannot continue with Adam's moments: configure AdamW or Adam, or begin "
                                    "with weights alone (weights=...)")
        self._compare_settings(there, options)

    def _compare_settings(self, there: str, options: _hoist.OptimizerOptions) -> None:
        """Warns once of the checkpoint's settings that differ from the configuration's. The configuration's apply."""
        checkpoint = self._checkpoint
        group = checkpoint.groups[checkpoint.group_of[there]]
        for key, name in _SETTINGS.items():
            here: Any = (options.beta1, options.beta2) if key == "betas" else getattr(options, name)
            # torch.optim's Adam always corrects the bias, and has no such setting.
            before = group.get(key, True if key == "bias_correction" and "foreach" in group else None)
            self._say_difference(key, there, tuple(before) if isinstance(before, (list, tuple)) else before, here)
        if group.get("weight_decay") or options.weight_decay:
            self._say_difference("adam_w_mode", there, self._decouples_decay(group), options.kind == "AdamW")

    def _say_difference(self, key: str, there: str, before: Any, here: Any) -> None:
        if before is not None and before != here and key not in self._differences:
            self._differences.add(key)
            _log.warning("%s", shown(f"{key} of '{there}' was {before} in DeepSpeed, and is {here} from here on"))

    def _decouples_decay(self, group: dict[str, Any]) -> bool | None:
        """Whether DeepSpeed's run decayed weights separately from the gradient. None if the checkpoint does not say: DeepSpeed's
        own Adam keeps no adam_w_mode."""
        decouples = group.get("decoupled_weight_decay")  # of torch.optim's
        if isinstance(decouples, bool):
            return decouples
        optimizer = self._checkpoint.ds_config.get("optimizer")
        kind = optimizer.get("type") if isinstance(optimizer, dict) else None
        return True if isinstance(kind, str) and kind.lower() == "adamw" else None

    # --- what is not a parameter's -----------------------------------------------------------------------------------

    def program_state(self, config: _hoist.Config, buffers: dict[str, torch.Tensor], asked: list[float]) -> dict[str, Any]:
        """The program's state in the form that program_state.pack() takes, as a commit made by hoist would have it. `asked`:
        the rates that this program asks for."""
        checkpoint = self._checkpoint
        kept = {key: value for key, value in checkpoint.client_state.items() if is_plain(value)}
        if left := sorted(checkpoint.client_state.keys() - kept.keys()):
            _log.warning("%s", shown(
                f"client state {left[:5]} of {checkpoint.path} is no JSON, and is not in engine.state: "
                "hoist.torch.deepspeed.open(...).client_state has it"))
        found = {}
        for name, buffer in buffers.items():
            if name not in checkpoint.buffers:
                _log.warning("buffer '%s' is not in %s, and keeps its value", name, shown(checkpoint.path))
            elif checkpoint.buffers[name].shape != buffer.shape:
                refuse(f"{checkpoint.path}: buffer '{name}' is {tuple(checkpoint.buffers[name].shape)}, and "
                       f"{tuple(buffer.shape)} here: it is of another model")
            else:
                found[name] = checkpoint.buffers[name]
        schedule = self._schedule(config)
        rates = asked if config.has_schedule else self._rates(asked, has_scheduler=schedule is not None)
        return {"program": kept, "rates": rates, "schedule": schedule, "buffers": found,
                "skipped_steps": max(0, checkpoint.global_steps - checkpoint.step)}

    def _order(self) -> list[int] | None:
        """The checkpoint's group for each group here, by their parameters; None if no order makes them the same. Pre: there are
        as many."""
        checkpoint, there_of = self._checkpoint, dict(self._pairs)
        if checkpoint.ranks == 0 and set(checkpoint.group_of.values()) <= {0}:
            return list(range(self._group_count))  # exports of hoist do not record the groups of parameters
        if not len(self._pairs) == len(there_of) == len(set(there_of.values())):
            return None
        others = iter(sorted(set(range(self._group_count)) - set(there_of.values())))  # of no trained parameter
        return [there_of[here] if here in there_of else next(others) for here in range(self._group_count)]

    def _rates(self, asked: list[float], has_scheduler: bool) -> list[float]:
        """The checkpoint's rates, as DeepSpeed restores them. Warns of a difference if no scheduler will set others."""
        checkpoint = self._checkpoint
        try:
            rates = rates_of(checkpoint.groups)
        except (KeyError, TypeError, ValueError, RuntimeError):
            rates = [math.nan]
        if not all(0 <= rate < math.inf for rate in rates):
            refuse(f"{checkpoint.path}: a parameter group has no learning rate to continue with: the files were changed")
        if len(asked) == 1 and len(set(rates)) == 1:
            rates = rates[:1]
        if len(rates) != len(asked):
            _log.warning("%s: the learning rates of its parameter groups had come to %s, and there are %d groups here: %s, which "
                         "this program asks for, count. Pass groups=... as the DeepSpeed run did", shown(checkpoint.path), rates,
                         len(asked), asked)
            return asked
        if len(set(rates)) > 1:
            if (order := self._order()) is None:
                _log.warning("%s: the learning rates of its parameter groups had come to %s, and the groups here have other "
                             "parameters: %s, which this program asks for, count. Pass groups=... as the DeepSpeed run did",
                             shown(checkpoint.path), rates, asked)
                return asked
            rates = [rates[there] for there in order]
        if rates != asked and not has_scheduler:
            _log.warning("learning rates: the DeepSpeed run had come to %s, and these count, as in DeepSpeed; this program asks "
                         "for %s. To change them, set 'lr' in engine.optimizer.param_groups", rates, asked)
        return rates

    def _schedule(self, config: _hoist.Config) -> dict[str, Any] | None:
        """The state of a scheduler that the program made. A scheduler of the configuration needs only the step."""
        checkpoint = self._checkpoint
        scheduler = checkpoint.scheduler
        own = isinstance(checkpoint.ds_config.get("scheduler"), dict)
        if own != config.has_schedule:
            _log.warning("%s", shown(
                f"{checkpoint.path}: the DeepSpeed run {'had' if own else 'had no'} section `scheduler`, and this configuration "
                + ("has one: it sets the rate" if config.has_schedule else "has none: the rate stays as it is")))
        if not config.has_schedule:
            if own or scheduler is None:
                return None
            if self._group_count != len(checkpoint.groups):
                _log.warning("%s: its scheduler is of %d parameter groups, and there are %d here: a scheduler begins anew. Pass "
                             "groups=... as the DeepSpeed run did", shown(checkpoint.path), len(checkpoint.groups),
                             self._group_count)
                return None
            order = self._order()
            if order is None and _differs_by_group(scheduler):
                _log.warning("%s: its scheduler has other rates for each parameter group, and the groups here have other "
                             "parameters: a scheduler begins anew. Pass groups=... as the DeepSpeed run did",
                             shown(checkpoint.path))
                return None
            return scheduler if order is None else _in_order(scheduler, order)
        at = (scheduler or {}).get("last_batch_iteration")
        if own and isinstance(at, int) and at + 1 != checkpoint.step:
            _log.warning("%s: its schedule had made %d steps and its optimizer %d: the schedule goes on from the latter",
                         shown(checkpoint.path), at + 1, checkpoint.step)
        return None


# What PyTorch's schedulers have a list of, with an entry for each parameter group.
_OF_GROUPS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas")


def _differs_by_group(state: Any) -> bool:
    """Whether the state of a scheduler, or of one inside of it, has different entries for parameter groups."""
    if isinstance(state, dict):
        return any(any(entry != value[0] for entry in value) if key in _OF_GROUPS and isinstance(value, list) else
                   _differs_by_group(value) for key, value in state.items())
    return isinstance(state, (list, tuple)) and any(map(_differs_by_group, state))


def _in_order(state: Any, order: list[int]) -> Any:
    """The state of a scheduler with its parameter groups in another order."""
    if isinstance(state, dict):
        return {key: [value[there] for there in order] if key in _OF_GROUPS and isinstance(value, list)
                and len(value) == len(order) else _in_order(value, order) for key, value in state.items()}
    return [_in_order(each, order) for each in state] if isinstance(state, (list, tuple)) else state
