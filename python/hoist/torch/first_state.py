# SPDX-License-Identifier: Apache-2.0
"""Where training begins: at a commit of the store, at a checkpoint of DeepSpeed's, with files of weights, or with new values."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoist import _hoist, program_end
from hoist.torch.checkpoint import program_state
from hoist.torch.deepspeed.adoption import Adoption
from hoist.torch.deepspeed.checkpoint import Checkpoint
from hoist.torch.deepspeed.checkpoint import open as open_checkpoint
from hoist.torch.deepspeed.files import shown
from hoist.torch.deepspeed.whole_files import check_together
from hoist.torch.model import initial, weight_files
from hoist.torch.model.initial import Initialize, NewBuffer, Source
from hoist.torch.optimizer import Grouping
from hoist.torch.ranks import distributed

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

_log = logging.getLogger("hoist")


@dataclass(frozen=True)
class FirstState:
    """What wrap() was asked to begin with."""

    resume: bool
    load_later: bool
    weights: str | os.PathLike[str] | None
    deepspeed: str | os.PathLike[str] | Checkpoint | None
    initialize: Initialize | None
    seed: int

    def __post_init__(self) -> None:
        if self.deepspeed is not None and self.weights is not None:
            raise _hoist.UsageError("deepspeed=... brings its own weights: leave out weights=...")

    def arguments(self, has_mesh: bool) -> list[str]:
        """This rank's, of those that all ranks pass or none."""
        passed = {"resume=True": self.resume, "load_later=True": self.load_later,
                  "weights=...": self.weights is not None and not has_mesh,  # with a mesh, not of every group's layers
                  "deepspeed=...": self.deepspeed is not None and not has_mesh}
        return [argument for argument, is_passed in passed.items() if is_passed]

    def begin(self, engine: Engine, sources: dict[int, Source], grouping: Grouping) -> bool:
        """[C] Gives the engine its state. Returns whether the store holds a run that load_checkpoint() is to continue: then the
        engine has none yet. `sources`: values that the parameters were built with, by id."""
        unset = initial.materialize_buffers(engine.module, self.initialize, engine.device)
        is_found = self._find_run(engine)
        may_come = is_found or self.weights is not None or self.deepspeed is not None  # with a commit, or in files
        persistent = dict(engine._parameters.persistent_buffers()) if may_come else {}
        initial.refuse_unset(each for each in unset if each.name not in persistent)
        if is_found:
            return not self.resume
        checkpoint = self.deepspeed
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(checkpoint)
        check_together([] if checkpoint is None else checkpoint.files, engine._unit_manager)
        if checkpoint is not None:
            _adopt(engine, checkpoint, sources, grouping)
        elif self.weights is not None:
            _read_weights(engine, os.fspath(self.weights), unset)
        else:
            self._make_values(engine, sources)
        return False

    def _find_run(self, engine: Engine) -> bool:
        """Whether the store holds a run, which `resume` continues and `load_later` leaves to load_checkpoint()."""
        if not (self.resume or self.load_later):
            return False
        store = engine.config.store_directory
        if self.resume and not store:
            raise _hoist.UsageError("resume=True, and nothing is ever committed: all state is in memory. Set \"hoist\": "
                                    "{\"checkpoint_path\": ...} and call engine.save(), or put state on NVMe")
        if engine._unit_manager.find_commit() is None:
            if self.resume:
                distributed.refuse_stores_of_others(store, is_of_group=engine._is_part_of_job)
                _log.info("%s holds no commit: beginning at step 0", store)
            return False
        if self.load_later:
            program_end.refuse_second_use(store)
        if self.resume:
            step, state = engine._unit_manager.restore()
            engine._load_commit_state(step, bytes(state))
            _log.info("resuming at step %d", step)
        return True

    def _make_values(self, engine: Engine, sources: dict[int, Source]) -> None:
        units = engine._cut.units
        seed = initial.agree_on_initial_values(engine._unit_manager, units, sources, int(self.seed) % 2**64)
        engine._unit_manager.initialize(initial.InitialValues(
            units, sources, engine._parameters.number_of, self.initialize or initial.default_initialize, seed, engine.device))


def _read_weights(engine: Engine, path: str, unset: list[NewBuffer]) -> None:
    parameters = engine._parameters
    others, fill = weight_files.read_buffers(path, engine.module, dict(parameters.persistent_buffers(False)),
                                             dict(parameters.empty()))
    initial.refuse_unset(each for each in unset if each.name not in others)
    names = {*parameters.by_name, *engine._cut.aliases}
    if os.path.exists(os.path.join(path, "adapter_config.json")) and names.isdisjoint(_hoist.tensors_in(path)):
        raise _hoist.SafetensorsError(
            f"{path} has PEFT's adapters and no weight of the model: load the model below them, then the adapters with "
            "PeftModel.from_pretrained(model, DIR, is_trainable=True), and leave out weights=...")
    engine._unit_manager.initialize_from(path, engine._cut.aliases, others)
    fill()


def _adopt(engine: Engine, checkpoint: Checkpoint, sources: dict[int, Source], grouping: Grouping) -> None:
    """Begins where DeepSpeed's run was, as if its last step had been committed here."""
    parameters, first_rates = engine._parameters, engine._run_rates.first
    adoption = Adoption(checkpoint, engine._cut, parameters.number_of, sources, [engine.config.optimizer, *grouping.options],
                        grouping.group_of)
    state = adoption.program_state(engine.config, dict(parameters.persistent_buffers()), first_rates)
    packed = program_state.pack(state["program"], state["schedule"], state["rates"], state["buffers"], schedule_lags=False,
                                world_size=engine.world_size, skipped_steps=state["skipped_steps"], first_rates=first_rates)
    engine._unit_manager.begin_at(adoption, checkpoint.step, checkpoint.loss_scale, packed)
    engine._load_commit_state(checkpoint.step, packed)
    _log.info("continuing from step %d of %s", checkpoint.step, shown(checkpoint.path))
