# SPDX-License-Identifier: Apache-2.0
"""A PyTorch module whose parameters, gradients and optimizer states hoist keeps and moves.

Hooks on the modules say when weights are needed; gradients leave as soon as autograd has them. Between its uses a
parameter cannot be read: what is gathered, and when, is decided in passes.py and in the extension, not by the model.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.optimizer import ParamsT

from hoist import _hoist, program_end
from hoist.optim.groups import rates_of
from hoist.torch.checkpoint import program_state, schedules
from hoist.torch.checkpoint.schedules import RunRates
from hoist.torch.clipping import clip_through
from hoist.torch.deepspeed.checkpoint import Checkpoint
from hoist.torch.deepspeed.engine_names import DeepSpeedNames
from hoist.torch.devices import device_of
from hoist.torch.first_state import FirstState
from hoist.torch.model.casts import cast_inputs, place_buffers
from hoist.torch.model.graphs import refuse_graphs
from hoist.torch.model.initial import Initialize
from hoist.torch.model.model_names import StandsForModel
from hoist.torch.model.parameters import Parameters, WatchedBlock, dtype_of
from hoist.torch.model.state_dicts import StateDicts
from hoist.torch.model.units import units_of
from hoist.torch.model.wrapped import claim, generate_together, refuse_model, remove_hooks
from hoist.torch.optimizer import Grouping, Optimizer, grouping_of, refuse_schedule, refuse_useless_schedule, schedule_for
from hoist.torch.passes import vertical
from hoist.torch.passes.hooks import ModuleHook
from hoist.torch.passes.passes import Passes
from hoist.torch.passes.turns import takes_turn
from hoist.torch.ranks import channels, distributed
from hoist.torch.steps import StepRecord

_log = logging.getLogger("hoist")
_Batch = TypeVar("_Batch")


def _doing_of(engine: Engine) -> Callable[[], str]:
    """Says what the program does with the engine, for the errors of other ranks."""
    engine_ref = weakref.ref(engine)

    def doing() -> str:
        alive = engine_ref()
        if alive is None or not alive._is_made:
            return "" if alive is None else "wrap()"
        return f"{alive._passes.turns.under_way} after step {alive._steps.step}".strip()
    return doing


def _log_warnings(config: _hoist.Config, trains: bool) -> None:
    for warning in config.warnings:
        if trains or not warning.startswith("optimizer states are offloaded"):  # there are none
            _log.warning("%s", warning)
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        _log.warning("PyTorch's threads spin while they wait, and take the processors from the optimizer and from "
                     "transfers: set OMP_WAIT_POLICY=PASSIVE before Python starts (or import hoist.torch before "
                     "torch), and steps may be several times faster")


class Engine(StandsForModel, DeepSpeedNames):
    """The model, and its training state on three tiers: `wrap` and `initialize` return it.

    [C] marks collective calls: every rank makes them, in the same order. Passes and step() are collective, too.
    """

    def __init__(self, model: nn.Module, config: _hoist.Config, *, groups: ParamsT | None = None,
                 unit_classes: Iterable[type[nn.Module]] = (),
                 weights: str | os.PathLike[str] | None = None,
                 initialize: Initialize | None = None, optimizer: str | None = None, seed: int = 0, resume: bool = False,
                 scheduler: Any = None, load_later: bool = False, device: torch.device | str | None = None,
                 mesh: Any = None, tensor_parallel: Any = None,
                 deepspeed: str | os.PathLike[str] | Checkpoint | None = None, client: torch.optim.Optimizer | None = None):
        refuse_model(model)
        refuse_graphs(model)
        if optimizer is not None and not isinstance(optimizer, str):
            raise _hoist.UsageError("wrap(optimizer=...) takes a name, such as \"AdamW\": pass the settings as groups=..., or "
                                    "the optimizer to hoist.torch.initialize()")
        refuse_schedule(scheduler)
        refuse_useless_schedule(scheduler, None if client is None else client.param_groups, config)
        first_state = FirstState(resume, load_later, weights, deepspeed, initialize, seed)
        cut = units_of(model, unit_classes)
        if not cut.units:
            raise _hoist.UsageError("the model has no parameters")
        grouping = grouping_of(groups, cut.units, config, optimizer, client)

        self.module = model
        self.config = config = config.copy()  # what is settled here is not for the next engine
        self.state: dict[str, Any] = {}
        self.restored = False
        self._schedule_lags = False  # while step() has taken the step, and its schedule is not stepped yet
        self._met = distributed.MetRanks(first_state.arguments(has_mesh=mesh is not None))
        _log_warnings(config, any(parameter.requires_grad for parameter in model.parameters()))
        remove_hooks(model)

        self._cut = cut
        self.device = device_of(config, device, model.parameters())
        self._parameters = Parameters(model, cut, dtype_of(config), self.device)
        self._sharding = distributed.sharding_group_of(mesh, tensor_parallel, config)
        self._start = channels.Start.current
        self._came_before_ranks = config.joins_launched_ranks and not channels.is_joined()
        self._unit_manager = self._make_unit_manager(grouping)
        self._global_rank = dist.get_rank() if channels.is_joined() else self.rank
        self._local_rank = self._unit_manager.local_rank
        self._optimizer_groups_offset = 1 if grouping.options else 0  # the engine's group 0 has the configuration's settings
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self._unit_manager.device_ordinal)
        with self._parameters.moved(self._unit_manager, self.device) as sources:
            config.settle(self.world_size)
            self._training = config.training
            self._steps = StepRecord(ordinary_skips=16 if self.fp16_enabled() and self.dynamic_loss_scale() else 0)
            self._passes = Passes(self._unit_manager, cut, self._parameters,
                                  int(config.training.gradient_accumulation_steps or 1), config.scales_losses,
                                  config.is_vertical, self._require_run, self._begin_training_pass, self._before_backward,
                                  self._add_hook)
            for group in grouping.param_groups:
                group["params"] = [self._parameters.replaced.get(p, p) for p in group["params"]]
            self._run_rates = RunRates(grouping.param_groups, "engine.lr_scheduler")
            self._waits_for_load = first_state.begin(self, sources, grouping)
            del sources
            place_buffers(model, self.device, dtype_of(config))
            self._parameters.note_versions()
            self._install_hooks()
            self.optimizer = Optimizer(self, grouping.param_groups, grouping.defaults)
            if self.restored and not config.has_schedule:
                self._run_rates.resume(self.optimizer.param_groups, self.step_count)
                self.optimizer.push_rates()
            if client is not None:
                self.optimizer.adopt(client)
            self.lr_scheduler = scheduler
            self._is_made = True
            self._register()

    # --- construction ------------------------------------------------------------------------------------------------

    def _make_unit_manager(self, grouping: Grouping) -> _hoist.UnitManager:
        """[C]"""
        config, sharding = self.config, self._sharding
        config.make_paths_absolute()
        if sharding is not None and not sharding.is_whole_job:
            config.store_in(sharding.name)
        program_end.release_dropped(config.store_directory)
        units = self._parameters.declare(grouping.group_of, config.is_vertical,
                                         (lambda _: True) if sharding is None else sharding.counts)
        config.caller_state_bytes_max += program_state.room_for(dict(self._parameters.persistent_buffers()))
        return _hoist.UnitManager(config, grouping.options, units,
                                  *distributed.channels_of_job(sharding, config, self._met, _doing_of(self)))

    def _install_hooks(self) -> None:
        users = dict(self._cut.users)
        self._hooks = [ModuleHook(self._passes, self._unit_manager, self.module, users.pop(self.module, []), is_root=True)]
        self._hooks += [ModuleHook(self._passes, self._unit_manager, module, units, is_root=False)
                        for module, units in users.items()]
        if self.config.setting("fp16.auto_cast") is True and dtype_of(self.config) is torch.float16:
            cast_inputs(self.module, torch.float16)
        StateDicts(self.module, self._parameters, self._unit_manager, self._passes, self._between_passes)

    def _register(self) -> None:
        """For functions outside of the engine that ask it: generate(), those that clip, the program's end."""
        claim(self.module, self)
        if self.world_size > 1 and not self._is_part_of_job and self.config.setting("zero_optimization.stage") in (None, 3):
            generate_together(self.module)
        clip_through(self)
        passes = weakref.ref(self._passes)

        def turn(call: str) -> contextlib.AbstractContextManager[None]:
            present = passes()
            return contextlib.nullcontext() if present is None else present.turns.last(call)

        self._at_exit = program_end.close_at_exit(self._unit_manager, self.config.store_directory,
                                                  lambda: getattr(passes(), "pass_error", ""), turn)

    def _add_hook(self, module: nn.Module, unit: int) -> ModuleHook:
        for hook in self._hooks:
            if hook.module is module:
                return hook
        self._hooks.append(ModuleHook(self._passes, self._unit_manager, module, [unit], is_root=False))
        return self._hooks[-1]

    # --- backward ----------------------------------------------------------------------------------------------------

    @takes_turn
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True,
                 allreduce_gradients: bool = True, release_loss: bool = False) -> torch.Tensor:
        """`loss.backward()`: gradients of one micro-batch. A step takes the mean over its micro-batches.

        With scale_wrt_gas=False the program has divided the loss itself, and the step takes the sum. `release_loss` is
        DeepSpeed's, and changes nothing here.
        """
        if not allreduce_gradients:
            raise _hoist.UsageError("backward(allreduce_gradients=False): gradients of all ranks are always summed here")
        divided = scale_wrt_gas or self._passes.micro_batches == 1
        if divided:
            self._passes.note_division(loss)
        self._passes.backward(loss if divided else loss * self._passes.micro_batches, retain_graph)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """As DeepSpeed's: for a program that calls backward() itself, its loss times the loss scale of fp16."""
        return self._passes.scale(loss)

    @takes_turn
    def train_batch(self, micro_batches: Iterable[_Batch], loss_of: Callable[[_Batch], torch.Tensor]) -> torch.Tensor:
        """A whole step: `loss_of(micro_batch)` computes the loss of each of gradient_accumulation_steps micro-batches with this
        engine's model; then backward passes and step(). Returns the mean of the losses.

        In vertical order ("hoist": {"micro_batch_order": "vertical"}) each layer works through all micro-batches before the
        next layer does: weights are loaded and gradients leave once a step. The activations of all micro-batches are in
        memory at once. `loss_of` is then called in a thread for each micro-batch, one of which runs at a time; random numbers
        are drawn in that order. Without that setting, the micro-batches follow each other as in a loop of backward() and
        step(). Micro-batches beyond those of a step are not taken from an iterator.
        """
        count = self._passes.micro_batches
        taken = list(itertools.islice(micro_batches, count))
        if len(taken) < count:
            raise _hoist.UsageError(f"train_batch() got {len(taken)} micro-batches; a step has {count} "
                                    "(gradient_accumulation_steps)")
        if not torch.is_grad_enabled():
            raise _hoist.UsageError("train_batch() under torch.no_grad()")
        if self._passes.micro_batch > 0:
            raise _hoist.UsageError("train_batch() takes all micro-batches of a step: call it before backward(), or call "
                                    "drop_gradients() first")
        self._passes.boundary = None  # a whole step is made
        if self.config.is_vertical:
            losses = vertical.train(self._passes, self._unit_manager, self.module, self.device, taken, loss_of)
        else:
            try:
                losses = [self.backward(loss_of(batch)).detach() for batch in taken]
            except Exception:
                if not self._unit_manager.has_begun_step:
                    self._passes.drop_gradients()
                raise
        self.step()
        return torch.stack([loss.float().reshape(()) for loss in losses]).mean()

    # --- steps -------------------------------------------------------------------------------------------------------

    @takes_turn
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """[C] Scales the gradients of the next step() down to a global norm, as torch.nn.utils.clip_grad_norm_ does, which calls
        this for parameters of a wrapped model. Returns the norm before that. The configuration's gradient_clipping counts as
        well: the smaller one.

        Errors: UsageError before the last micro-batch's backward pass, for other norms than the second, and in update mode
        "backward"; RuntimeError for a norm that is not finite, if that is wanted: step() skips it otherwise.
        """
        if float(norm_type) != 2:
            raise _hoist.UsageError(f"clip_grad_norm_() with the norm of order {norm_type}: hoist knows order 2")
        if not float(max_norm) > 0:
            raise _hoist.UsageError(f"clip_grad_norm_() to a norm of {max_norm}, which leaves no gradient: for no limit, do not "
                                    "call it")
        if not self._passes.end_for_step("clip_grad_norm_()"):
            raise _hoist.UsageError(f"clip_grad_norm_() after micro-batch {self._passes.micro_batch} of "
                                    f"{self._passes.micro_batches}: the gradients are complete after the last one")
        norm = self._unit_manager.gradient_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradients' norm is {norm}, and error_if_nonfinite=True was asked for")
        self._passes.gradient_norm_max = min(self._passes.gradient_norm_max, float(max_norm))
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    @takes_turn
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> _hoist.StepReport | None:
        """One optimizer step when all its micro-batches are done; None, and nothing, before that. `lr_kwargs` go to the
        step() of the scheduler."""
        self._steps.was_applied = False
        step_ends = self._passes.end_for_step("step()")
        self.optimizer.watch_rates(step_ends)
        if not step_ends:
            return None
        if not lr_kwargs and schedules.needs_arguments(self.lr_scheduler):
            raise _hoist.UsageError(f"the step() of {type(self.lr_scheduler).__name__} needs more than the step, such as its "
                                    'metrics: call engine.step(lr_kwargs={"metrics": ...})')
        self._schedule_lags = True
        try:
            report = self.optimizer.update()
            if report.applied and self.lr_scheduler is not None:
                schedules.step_schedule(self.lr_scheduler, **(lr_kwargs or {}))
        finally:
            self._schedule_lags = False
        return report

    def _update(self) -> _hoist.StepReport:
        """The step itself, around which the optimizer calls the program's hooks."""
        self.optimizer.refuse_changes()
        self._parameters.refuse_edits()
        self._parameters.refuse_replaced_before_step(self._updates_in_backward, self._passes.drop_gradients)
        self._parameters.refuse_gradients()
        self._parameters.refuse_other_trainability()
        self._run_rates.before_step(self.get_lr())
        if self._updates_in_backward:
            self.optimizer.refuse_late_rates()
        else:
            self.optimizer.push_rates()
        report = self._unit_manager.step(self._commit_state(schedule_lags=True), self._passes.gradient_norm_max)
        self._steps.left_out += self._passes.left_out
        self._passes.forget()
        self.optimizer.note_step()
        self._steps.note(report)
        self._schedule_lags &= report.applied
        if not report.applied:
            self._passes.uses.step_skipped()
        else:
            self.optimizer.show_rates()
            # A graph that was kept from before must not be used with the new weights: autograd checks for it.
            self._parameters.changed()
        return report

    @takes_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that no step() was called for. The gradients of a step whose micro-batches are not all done stay."""
        self._passes.zero_grad()

    @takes_turn
    def drop_gradients(self) -> None:
        """Drops the gradients of all micro-batches since the last step: the next pass is the first of a step."""
        self._passes.drop_gradients()

    @property
    def lr_scheduler(self) -> Any:
        """Stepped after every step that was applied; set to it, or to a function that makes it for the optimizer. One that is
        set after a restore continues where the saved one was."""
        return self._run_rates.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        scheduler = schedule_for(self.optimizer, scheduler)
        self._run_rates.follow(scheduler, self.optimizer.param_groups)
        if self._unit_manager.is_alive:
            self.optimizer.show_rates()

    def _begin_training_pass(self) -> None:
        if self._came_before_ranks and self.world_size == 1:
            distributed.refuse_ranks_that_train_alone()

    def _before_backward(self) -> None:
        """The pass may have begun long before, and the program may have set rates since."""
        if self._updates_in_backward and not self._unit_manager.has_begun_step:
            self._passes.refuse_held_back_update()
            self.optimizer.push_rates()

    @property
    def _updates_in_backward(self) -> bool:
        return self.config.setting("hoist.update_mode") == "backward"

    def _set_rate(self, group: int, rate: float) -> None:
        self._unit_manager.set_learning_rate(group + self._optimizer_groups_offset, rate)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied: a gradient was not finite."""
        return self._steps.last_report is not None and not self._steps.last_report.applied

    @property
    def rank(self) -> int:
        return self._unit_manager.rank

    @property
    def world_size(self) -> int:
        """Ranks that divide the state, and whose gradients are averaged."""
        return self._unit_manager.world_size

    @property
    def _is_part_of_job(self) -> bool:
        """Whether other ranks hold other parameters (mesh=...)."""
        return self._sharding is not None and not self._sharding.is_whole_job

    @property
    def _is_first_of_job(self) -> bool:
        return self.rank == 0 if self._sharding is None else self._sharding.is_first_of_job

    @property
    def step_count(self) -> int:
        """Steps applied."""
        return self._unit_manager.step_count

    @property
    def committed_step(self) -> int | None:
        """The newest step that is durable."""
        return self._unit_manager.committed_step

    @property
    def mirrored_step(self) -> int | None:
        """The newest step that this engine knows to be whole in the mirror (hoist.mirror)."""
        return self._unit_manager.mirrored_step

    # --- state -------------------------------------------------------------------------------------------------------

    def _commit_state(self, schedule_lags: bool, new_buffers: dict[int, torch.Tensor] | None = None) -> bytes:
        """`new_buffers`: values that buffers are about to get, by their ids."""
        rates = rates_of(self.optimizer.param_groups)
        new = new_buffers or {}
        buffers = {name: new.get(id(buffer), buffer) for name, buffer in self._parameters.persistent_buffers()}
        packed = program_state.pack(self.state, schedules.schedule_of(self.lr_scheduler), rates, buffers,
                                    schedule_lags=schedule_lags, first_rates=self._run_rates.first,
                                    skipped_steps=self._steps.skipped, world_size=self.world_size)
        if len(packed) > self.config.caller_state_bytes_max:
            program_state.refuse_size(len(packed), self.config.caller_state_bytes_max, buffers)
        return packed

    def _load_commit_state(self, step: int, data: bytes) -> None:
        self.restored = True
        saved = program_state.unpack(data)
        self._run_rates.restored(saved)
        self.state = saved.get("program", {})
        distributed.warn_of_other_world_size(saved, self.world_size, "engine.state or persistent buffers")
        self._steps.restored(step, saved.get("skipped_steps", 0))
        program_state.fill_buffers(saved.get("buffers", {}), self.module, self.device)

    @takes_turn
    def save(self, name: str = "", state: dict[str, Any] | None = None, mirror: bool = False) -> _hoist.Completion:
        """[C] Commits the present state; the returned completion is done when it is durable.

        With hoist.keep_steps and a name this makes a named checkpoint: the last ones stay beside the newest commit, and
        restore(name) goes back to one. A checkpoint of the same name is replaced. `mirror`: the commit is also copied to
        hoist.mirror, and the completion waits for that.
        """
        self._between_passes()
        self._passes.refuse_part_of_step("save()")
        former = self.state
        if state is not None:
            self.state = state
        try:
            return self._unit_manager.save(name, self._commit_state(self._schedule_lags), mirror)
        except _hoist.UsageError:
            self.state = former  # a call that is refused changes nothing
            raise

    @takes_turn
    def checkpoints(self) -> dict[str, int]:
        """[C] Named checkpoints and their steps, oldest first."""
        return dict(self._unit_manager.find_checkpoints())

    def restore(self, name: str = "") -> int:
        """[C] Continues from a named checkpoint, or from the newest commit; what came after it is given up. Learning rates
        come back as well. Returns the step. Also after an error that ended the engine, or a call that was interrupted."""
        with self._passes.turns.outside("restore()"), channels.start(distributed.ranks_at_start(self.config), self._start):
            if self._unit_manager.is_alive:
                self._unit_manager.require_commit(name)
            self._passes.give_up()
            return self._restore(name)

    def _restore(self, name: str) -> int:
        if self._parameters.was_released:
            raise _hoist.UsageError("restore() of an engine that was closed, and whose model has been given other weights since: "
                                    "wrap the model again, with resume=True")
        program_end.release_dropped(self.config.store_directory, self._unit_manager)
        step, state = self._unit_manager.restore(name)
        self._waits_for_load = False
        self._passes.forget()
        self._parameters.put_back()
        self._parameters.changed()
        self._parameters.tensors.given_another()  # not by the program: a call that was interrupted has shown half of a unit
        self.optimizer.forget_rates()
        self._load_commit_state(step, bytes(state))
        self._run_rates.go_back(self.optimizer.param_groups)
        self.optimizer.show_rates()
        return step

    @takes_turn
    def sleep(self) -> None:
        """[C] Commits the present state, and gives back all memory (device, pinned, huge pages), threads and the store, for
        instance while another program generates on the same GPU. Until wake() the engine cannot be used.

        Belongs between step() and the next pass. It needs a store that commits: "hoist": {"checkpoint_path": ...} where no
        state is on NVMe.
        """
        self._between_passes()
        self._passes.refuse_part_of_step("sleep()")
        self._unit_manager.sleep(self._commit_state(self._schedule_lags))

    @takes_turn
    def wake(self) -> None:
        """[C] Takes memory again and continues where sleep() ended, with the same bits. After an error, such as that memory is
        lacking, the engine sleeps on, and wake() may be called again."""
        program_end.release_dropped(self.config.store_directory, self._unit_manager)
        with channels.start(distributed.ranks_at_start(self.config), self._start):
            self._unit_manager.wake()
        self._passes.forget()
        self._parameters.changed()
        self.optimizer.tell_rates_again()

    @property
    def is_asleep(self) -> bool:
        return self._unit_manager.is_asleep

    @takes_turn
    def settle(self) -> None:
        """Returns when every update and commit under way is done."""
        self._between_passes()
        self._unit_manager.settle()

    def _require_run(self) -> None:
        if self._waits_for_load and self._unit_manager.is_open:
            raise _hoist.StoreError(
                f"{self.config.store_directory} holds a run already: load_checkpoint() or restore() continues it, as "
                "resume=True does from the start; to begin anew, choose another directory or remove it")

    def _between_passes(self) -> None:
        self._require_run()
        if not self._passes.in_gathered_block:
            self._parameters.refuse_edits()
        self._passes.end_for_state()

    @takes_turn
    def read(self, name: str, state: _hoist.State = _hoist.State.master) -> torch.Tensor:
        """One parameter's master (or moment, or gradient before step()) in fp32, from whatever tier."""
        self._between_passes()
        return self._parameters.read(name, state)

    @takes_turn
    def write(self, name: str, values: torch.Tensor, state: _hoist.State = _hoist.State.master) -> None:
        """Replaces a parameter's master or moment."""
        self._between_passes()
        self._parameters.write(name, values, state)

    @takes_turn
    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers under PyTorch's names, in memory of their own, and what get_extra_state() of
        modules gives. Commits do not hold the last: keep it in engine.state.

        Parameters have their own type, or `dtype`: torch.float32 gives the masters, bit by bit.
        """
        self._between_passes()
        return self._parameters.state_dict(dtype)

    @takes_turn
    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Replaces masters, buffers and extra state; moments stay. Returns `missing_keys` and `unexpected_keys`, as PyTorch's.

        With state on NVMe this is one commit, which holds the new buffers and engine.state: a program that is killed meanwhile
        resumes with all of the former values or all of the new ones. While gradients wait for step(), the commit holds masters
        only, and the others follow with the step. The model's own load_state_dict() makes a commit for each module. An
        interruption may end the engine with several ranks.
        """
        self._between_passes()

        def program_state_with(new_buffers: dict[int, torch.Tensor]) -> bytes | None:
            return self._commit_state(self._schedule_lags, new_buffers) if self._passes.micro_batch == 0 else None

        return _IncompatibleKeys(*self._parameters.load_state_dict(state, strict, program_state_with))

    @takes_turn
    def export(self, directory: str | os.PathLike[str], dtype: torch.dtype = torch.float32,
               shard_bytes_max: int = 5_000_000_000, exclude_frozen: bool = False) -> list[str]:
        """[C] Writes the weights as safetensors, without holding them in memory, and persistent buffers in their own types.
        Returns the files. In a job of several sharding groups (mesh=...) each writes a directory of its own, group-N, below.
        `exclude_frozen`: without the weights that are not trained."""
        if shard_bytes_max < 1:
            raise _hoist.UsageError(f"shard_bytes_max={shard_bytes_max}: choose a number of bytes from 1")
        directory = os.fspath(directory)
        if self._is_part_of_job:
            assert self._sharding is not None
            directory = os.path.join(directory, self._sharding.name)
        self._between_passes()
        return self._parameters.export(directory, dtype, shard_bytes_max, exclude_frozen)

    @contextlib.contextmanager
    def gathered(self, names: str | Iterable[str] | None = None, modify: bool = False) -> Iterator[None]:
        """[C] Gathers whole units outside of forward(): `with engine.gathered(["lm_head.weight"]): ...`. Modules may be called
        inside of the block under torch.no_grad(); step() is refused there.

        With `modify`, elements of these parameters that the block has changed are written, as by write() but in one commit: all
        ranks change them alike. Errors: UsageError at the end of the block where it has changed one without that.
        """
        chosen = list(self._parameters.by_name) if names is None else [names] if isinstance(names, str) else list(names)
        block: WatchedBlock

        def watch() -> WatchedBlock:
            nonlocal block
            block = self._parameters.watch_block(chosen, modify)
            return block

        with self._passes.turns.of("gathered()"):
            self._between_passes()
            self._passes.gather({self._parameters.find(name).unit for name in chosen}, watch)
        self._passes.gathered_blocks += 1
        try:
            yield
        finally:
            self._passes.gathered_blocks -= 1
            self._passes.end_gathered()
        with self._passes.turns.of("gathered()"):
            self._between_passes()
            block.settle()

    def close(self) -> None:
        """Completes the commit of the last step, if it has one, and gives everything back. With "durability": {"every": N} a step
        in between has none: save() makes one. In update mode "backward", a step that backward() has begun and step() has not
        taken is given up, with a warning. The module's parameters stay, without values. A call of another thread ends first.

        On several ranks, after a pass that an exception ended, or in an `except` or `finally` block: others that wait for this
        rank stop with a CommError, which says why. In a process that was forked later (os.fork, a DataLoader's worker) this does
        nothing; other calls are UsageErrors there.
        """
        self._end(self._passes.pass_error)

    def _end(self, why: str) -> None:
        """`why`: what other ranks are told, if anything."""
        if not self._passes.turns.is_of_this_process:
            return
        with self._passes.turns.last("close()"):
            if why:
                self._unit_manager.abandon(why)
            try:
                with self._met.told_of_error():
                    self._unit_manager.close()
            except _hoist.UsageError:  # nothing has ended
                raise
            except BaseException:
                self._leave_pass()
                raise
            self._leave_pass()
        self._at_exit.cancel()

    def _leave_pass(self) -> None:
        self._passes.give_up()
        self._passes.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._end(program_end.reason_of(error) or self._passes.pass_error)
        except _hoist.Error as failure:
            if error is None:
                raise
            _log.error("the engine that this error leaves did not end in order: %s", failure)

    def compile_units(self, **options: Any) -> None:
        """torch.compile for what runs inside of each unit; weights are gathered and released around it."""
        for module, _ in self._cut.users:
            if module is not self.module:
                module.forward = torch.compile(module.forward, **options)

    # --- what happened -----------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Bytes of each link, what was waited for, and each tier's budget and peak. They begin anew with restore() and wake()."""
        return self._unit_manager.statistics()

    def formula_bytes(self) -> _hoist.StepBytes:
        """The bytes that one step must move by the byte formula."""
        return self._unit_manager.formula_bytes()

    def describe(self) -> list[str]:
        lines = [f"{len(self._cut.units)} units: " + ", ".join(u.name for u in self._cut.units[:6]) +
                 (", ..." if len(self._cut.units) > 6 else "")]
        return lines + self._unit_manager.describe()

    @takes_turn
    def digest(self, state: _hoist.State = _hoist.State.master) -> str:
        self._between_passes()
        return self._unit_manager.digest(state)
