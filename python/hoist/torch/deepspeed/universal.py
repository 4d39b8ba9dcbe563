# SPDX-License-Identifier: Apache-2.0
"""Writes a store's commit as a universal checkpoint, which DeepSpeed continues on any number of ranks.

DeepSpeed reads a directory for each parameter, and beside them what is not a parameter's. ZeRO 1 and 2 expect other files
there than ZeRO 3 does. Memory: one parameter's values at a time.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import pickle
import re
import shutil
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

import hoist.store
from hoist import _hoist
from hoist.commit_values import from_json, read_state
from hoist.optim.groups import rates_of
from hoist.torch.checkpoint.checkpoints import io_error, sync, write_durably
from hoist.torch.checkpoint.directories import made_and_locked
from hoist.torch.deepspeed.checkpoint import KEYS, OWN_KEYS
from hoist.torch.deepspeed.files import shown

if TYPE_CHECKING:
    from hoist.torch import ConfigSource

_log = logging.getLogger("hoist")

_DEEPSPEED_VERSION = "0.19.0"  # whose files these are like; DeepSpeed asks for a version


class _LossScaler:
    """Pickled as DeepSpeed's DynamicLossScaler, which need not be installed."""

    def __init__(self, state: tuple[float, int, int], config: _hoist.Config, global_steps: int):
        scale, steps_without_overflow, hysteresis = state

        def setting(key: str, default: Any) -> Any:
            value = config.setting(f"fp16.{key}")
            return default if value is None else value

        self.cur_scale, self.cur_iter, self.cur_hysteresis = scale, global_steps, hysteresis
        self.last_overflow_iter = global_steps - steps_without_overflow - 1
        self.scale_factor, self.scale_window = 2.0, int(setting("loss_scale_window", 1000))
        self.min_scale = setting("min_loss_scale", 1)
        self.delayed_shift = int(setting("hysteresis", 2))
        self.consecutive_hysteresis = bool(setting("consecutive_hysteresis", False))
        self.raise_error_at_min_scale, self.dynamic, self.dtype = True, True, torch.float16


class _Pickler(pickle._Pickler):  # whose methods its type stubs leave out
    """Writes the name of DeepSpeed's class for a stand-in."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is not _LossScaler:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n")  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    dispatch = {**pickle._Pickler.dispatch, type: save_global}  # type: ignore[dict-item]


def _save(values: Any, *path: str) -> None:
    """Writes a file durably. Its directory is synced too, with all that is in it by then."""
    os.makedirs(os.path.join(*path[:-1]), exist_ok=True)
    pickle_module = types.SimpleNamespace(Pickler=_Pickler, __name__="pickle")
    write_durably(
        os.path.join(*path), lambda file: torch.save(values, file, pickle_module=pickle_module))


def export(store: str | os.PathLike[str], to: str | os.PathLike[str], config: ConfigSource, *, step: int | None = None,
           checkpoint: str = "", stage: int | None = None, tag: str | None = None) -> str:
    """Writes a commit of a store as DeepSpeed's universal checkpoint; returns its directory, `to`/TAG.

    DeepSpeed continues it with `"checkpoint": {"load_universal": true}` and engine.load_checkpoint(to).

    config  what DeepSpeed will continue with: optimizer, schedule and loss scale are written as it asks for them
    step    of the commit; by default the newest. checkpoint: or a named checkpoint
    stage   ZeRO stage that DeepSpeed will continue with, if the configuration does not say
    tag     by default global_stepN

    Errors: UsageError for another optimizer than Adam and AdamW, a store of hoist.optim without the model's names, a directory
    that is there already, and a `to` that another export writes into; IoError for a full drive; those of a store.
    """
    from hoist.torch import load_config
    loaded = load_config(config)
    if loaded.optimizer.kind not in ("AdamW", "Adam"):
        raise _hoist.UsageError(f"the configuration's optimizer is {loaded.optimizer.kind}, and only AdamW and Adam are "
                                "exported: pass the configuration that DeepSpeed will continue with")
    zero: Any = stage if stage is not None else loaded.setting("zero_optimization.stage")
    if zero not in (1, 2, 3):
        raise _hoist.UsageError(f"universal checkpoints are of ZeRO stages 1, 2 and 3, and the configuration says {zero}: set "
                                "zero_optimization.stage, or pass stage=... (--stage)")
    with hoist.store.open(store, step, checkpoint) as stored:
        return _Export(stored, loaded, int(zero)).write(os.fspath(to) or ".", tag)


class _Export:
    def __init__(self, stored: hoist.store.Stored, config: _hoist.Config, stage: int):
        self._stored = stored
        self._config = config
        self._stage = stage
        state = stored._model.caller_state()
        self._program = read_state(state)
        if state and not self._program:
            _log.warning("another program than hoist.torch or hoist.optim made this commit: the export has no client state, and "
                         "its learning rate and schedule are the configuration's")
        if self._program.get("scheduler") and self._program.get("schedule_lags") and not config.has_schedule:
            raise _hoist.UsageError(
                f"step {stored.step} was committed before the program's scheduler went on with it, so that the next learning "
                "rate is not known: end the run with engine.save().wait(), and export that")
        self._trained = [name for name, parameter in stored.parameters.items() if parameter.trainable]
        for name in self._trained:
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise _hoist.UsageError(shown(f"parameter '{name}' has no name that a directory could have"))
            self._refuse_made_up(name)
            self._refuse_other_states(name)

    def _refuse_made_up(self, name: str) -> None:
        """Errors: UsageError for a name that hoist.optim gave, and the model does not have."""
        if "groups" not in self._program:  # which only hoist.optim commits
            return
        if re.fullmatch(r".*\[\d+:\d+\]", name, re.DOTALL):
            raise _hoist.UsageError(shown(f"'{name}' is a piece of a large parameter, which hoist.optim stores in pieces: this "
                                          "store cannot be exported"))
        if re.fullmatch(r"parameter \d+", name):
            raise _hoist.UsageError(f"the store calls a parameter '{name}', because hoist.optim was not told its name: this "
                                    "store cannot be exported. Begin the run with model.named_parameters() in the place of "
                                    "model.parameters()")

    def _refuse_other_states(self, name: str) -> None:
        """Errors: UsageError for a parameter that lacks one of Adam's moments."""
        nothing: Any = torch.empty(0, dtype=torch.float32, device="cpu").numpy()
        try:
            for state in KEYS:
                self._stored._model.read(self._stored._index[name], state, 0, nothing)  # reads no byte
        except _hoist.UsageError as error:
            raise _hoist.UsageError(shown(f"{error}: the store is not of Adam or AdamW, and others are not exported. `hoist "
                                          "export` writes its weights alone")) from None

    def write(self, to: str, tag: str | None) -> str:
        tag = f"global_step{self._global_steps}" if tag is None else tag
        if os.path.basename(tag) != tag or tag in ("", ".", ".."):
            raise _hoist.UsageError(f"'{tag}' is no name of a directory below {to}")
        directory, partial = os.path.join(to, tag), os.path.join(to, tag + ".partial")
        with made_and_locked(to, "latest_universal.lock", "export", "call export() on one rank only"):
            if os.path.exists(directory):
                raise _hoist.UsageError(f"{directory} is there already: remove it, or name another with tag=... (--tag)")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                self._write_checkpoint(partial)
                os.rename(partial, directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            sync(to)  # the pointer must not name what a crash takes back
            write_durably(os.path.join(to, "latest_universal"), lambda file: file.write(tag.encode()))
        return directory

    def _write_checkpoint(self, directory: str) -> None:
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if self._stage == 3 else "mp_rank_00_model_states.pt"
        optimizer, model = self._optimizer(), self._model()
        self._refuse_small_drive(directory)
        self._write_parameters(os.path.join(directory, "zero"))
        _save(optimizer, directory, "zero", "optimizer_state.pt")
        _save(model, directory, name)

    def _refuse_small_drive(self, directory: str) -> None:
        """Errors: IoError if the masters and moments do not fit."""
        elements = sum(math.prod(self._stored.parameters[name].shape) for name in self._trained)
        to, need = os.path.dirname(directory), 4 * len(KEYS) * elements
        if need > (free := shutil.disk_usage(to).free):
            raise io_error(errno.ENOSPC, to, f"the checkpoint in {to} needs {_hoist.format_bytes(need)}, and "
                           f"{_hoist.format_bytes(free)} are free")

    def _write_parameters(self, directory: str) -> None:
        for name in self._trained:
            for state, key in KEYS.items():
                values = self._stored.read(name, state)
                _save(values.view(-1) if self._stage == 3 else {"param": values, "cat_dim": 0}, directory, name, f"{key}.pt")
            if self._stage != 3:
                _save(self._step, directory, name, "step.pt")

    @property
    def _global_steps(self) -> int:
        return self._stored.step + int(self._program.get("skipped_steps", 0))

    @property
    def _step(self) -> int | torch.Tensor:
        """The step count in the type that DeepSpeed's optimizer will use: an integer for its own, a tensor for PyTorch's."""
        own = isinstance(self._config.setting("optimizer.type"), str) and self._config.setting(
            "optimizer.params.torch_adam") is not True
        return self._stored.step if own else torch.tensor(float(self._stored.step), dtype=torch.float32, device="cpu")

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups with the rate of the next step; DeepSpeed takes everything else from its configuration."""
        rates = self._program.get("rates") or rates_of(self._program.get("groups", ()))  # or of hoist.optim
        rates = rates or [self._config.optimizer.learning_rate]
        return [{"lr": self._config.learning_rate(self._stored.step, float(rate))} for rate in rates]

    def _optimizer(self) -> dict[str, Any]:
        clip: Any = self._config.gradient_clipping
        state: dict[str, Any] = {"dynamic_loss_scale": False, "overflow": False, "clip_grad": clip, "zero_stage": self._stage,
                                 "partition_count": 1 if self._stage == 3 else [1], "ds_version": _DEEPSPEED_VERSION}
        if (scale := self._stored._model.loss_scale) is not None:
            state |= {"dynamic_loss_scale": True, "loss_scaler": _LossScaler(scale, self._config, self._global_steps)}
        groups = self._groups()
        if self._stage == 3:
            # DeepSpeed takes the settings of its first group for all.
            base = {"state": {0: {"step": self._step}},
                    "param_groups": [{**group, "params": [0] if index == 0 else []} for index, group in enumerate(groups)]}
            return state | {"optimizer_state_dict": base, "param_groups": groups}
        return state | {"param_groups": [{**group, "params": [index]} for index, group in enumerate(groups)]}

    def _model(self) -> dict[str, Any]:
        shapes = OrderedDict((name, torch.Size(self._stored.parameters[name].shape)) for name in self._trained)
        # One entry for each parameter group, of which a store does not know the members. DeepSpeed does not ask.
        no_others: list[Any] = [] if self._stage == 3 else [OrderedDict() for _ in self._groups()[1:]]
        schedule = from_json(self._program.get("scheduler")) or None
        if self._config.has_schedule:
            schedule = {"last_batch_iteration": self._stored.step - 1}
        section = {"scheduler": {"type": self._config.setting("scheduler.type")}} if self._config.has_schedule else {}
        program: dict[str, Any] = from_json(self._program.get("program")) or {}
        if taken := sorted(program.keys() & OWN_KEYS):
            _log.warning("%s", shown(f"the export leaves out {taken} of engine.state: DeepSpeed itself writes such entries"))
        return {
            **{key: value for key, value in program.items() if key not in OWN_KEYS},
            "module": {}, "buffer_names": [], "optimizer": None, "param_shapes": [shapes, *no_others],
            "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None, "lr_scheduler": schedule,
            "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": set(),
            "skipped_steps": self._global_steps - self._stored.step, "global_steps": self._global_steps,
            "dp_world_size": 1, "mp_world_size": 1, "ds_config": section, "ds_version": _DEEPSPEED_VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }
