# SPDX-License-Identifier: Apache-2.0
"""Optimizer states of any PyTorch program in pinned memory or on NVMe, whole or divided among ranks.

The program keeps its parameters and gradients. A hoist engine has the masters and moments: step() hands it the gradients of
this rank's part, it updates them on the CPU while they stream, and the new weights of all parts are written into the program's
parameters. Gradients are expected to be averaged over the ranks already, as DistributedDataParallel does it, and are clipped,
scaled and accumulated by the program.

The program's parameters decide: if the program has changed an element, its master becomes that value, unless the master rounds
to it already.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hoist import _hoist, program_end
from hoist.commit_values import to_json
from hoist.optim.groups import is_setting, options_of, rates_of, refuse_changes, settled_of
from hoist.optim.pieces import CutParameters, Piece, UnitValues, refuse_unfit
from hoist.optim.values import DTYPES, STATE_NAMES, SavedState, join_master, problem_of_gradient
from hoist.shared_memory import refuse_shared_memory
from hoist.torch.checkpoint import program_state, schedules
from hoist.torch.checkpoint.schedules import RunRates
from hoist.torch.config_files import as_json
from hoist.torch.devices import current_stream_of, dlpack_device_of
from hoist.torch.model import initial
from hoist.torch.model.casts import as_type
from hoist.torch.ranks import channels, distributed

_log = logging.getLogger("hoist")

_MOMENTS = (_hoist.State.moment1, _hoist.State.moment2)


class OffloadArguments(TypedDict, total=False):
    """Arguments that every optimizer of hoist.optim takes beside its own settings."""

    offload: Literal["cpu", "nvme"] | None  # where masters and moments are; None: beside CPU parameters, in memory
    # The store: states with "nvme", commits with either. A list: on several drives.
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    shard_over: dist.ProcessGroup | None  # ranks that divide the states; None: each rank has all of them
    pinned_memory: int | str | None  # hard budget, in bytes or as "8GiB"; None: as this machine allows
    device_memory: int | str | None  # the same, for gradients and weights on their way
    resume: bool  # continue from the newest commit in the directory, if there is one
    keep_steps: int  # steps that stay under the names that save() gives them
    commit_every: int | None  # steps from one commit to the next; None: 1 with "nvme", and only save() with "cpu"
    missing_gradients: Literal["refuse", "zeros"]  # of a parameter whose grad is None, while others have one
    settings: dict[str, Any]  # further keys of a configuration's section "hoist"
    # torch.optim's: the first three have no effect here, and the others must be False.
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    amsgrad: bool
    maximize: bool
    decoupled_weight_decay: bool  # as the optimizer's name says


def _signs_of_change(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Equal to an earlier answer unless the program has changed the values since: in place, which is a version, or by
    `parameter.data = ...`, which is another storage. Not its address: that may come again, and on some ranks only."""
    return parameter._version, StorageWeakRef(parameter.untyped_storage()), parameter.storage_offset()


def _plain_entries(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's part of a commit: rates, and the entries of schedules and of the program that JSON can hold."""
    others = {key: value for key, value in group.items() if key not in ("params", "param_names") and not is_setting(key)}
    plain = {key: value for key, value in others.items() if schedules.is_plain(value)}
    return plain | {key: float(others[key]) for key in ("lr", "initial_lr") if key in others}  # they may be tensors


class Offloaded:
    """[C] marks calls that all ranks of `shard_over` make alike; with a directory, all ranks of the job."""

    def __init__(self, groups: list[dict[str, Any]], kind: str, threads: int, *, offload: str | None = None,
                 directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
                 shard_over: dist.ProcessGroup | None = None, pinned_memory: int | str | None = None,
                 device_memory: int | str | None = None, resume: bool = False, keep_steps: int = 0,
                 commit_every: int | None = None, missing_gradients: str = "refuse",
                 settings: dict[str, Any] | None = None):
        if offload not in ("cpu", "nvme"):
            raise _hoist.UsageError(f"offload={offload!r}: choose None, \"cpu\" or \"nvme\"")
        if missing_gradients not in ("refuse", "zeros"):
            raise _hoist.UsageError(f"missing_gradients={missing_gradients!r}: choose \"refuse\" or \"zeros\"")
        if commit_every is not None and commit_every < 1:
            raise _hoist.UsageError(f"commit_every={commit_every}: choose a number of steps from 1, or None")
        if directory is not None and not directory:
            raise _hoist.UsageError(f"directory={directory!r}: name one, or several")
        if directory is None:
            for name, value in (("resume", resume), ("keep_steps", keep_steps), ("commit_every", commit_every)):
                if value:
                    raise _hoist.UsageError(f"{name}={value} needs directory=..., where commits are")
            if offload == "nvme":
                raise _hoist.UsageError('offload="nvme" needs directory=..., on the drive')
        self._kind = kind
        self._missing_gradients = missing_gradients
        self._commits_in_memory = commit_every if offload == "cpu" else None
        self.call = f"{kind}()"  # of the program's, for the errors of other ranks
        self.program_state: dict[str, Any] = {}
        self.restored = False
        self.step_was_skipped = False
        # The name of a call that began to replace states and parameters and has not finished; else empty.
        self._unfinished = ""
        self._consolidated: dict[int, Any] | None = None
        # Between load() and adopt(): the program may load the weights after the states.
        self._is_loading = False
        self._remainders: dict[int, torch.Tensor] = {}  # of bf16 parameters, by id
        self._settled = [settled_of(group) for group in groups]
        self._rates: list[float | None] = list(rates_of(groups))
        self.run_rates = RunRates(groups, "optimizer.lr_scheduler")
        self._is_divided = self._has_others = False
        self._has_store = directory is not None
        members, job = _ranks_of(shard_over, self._has_store)
        self._job = job
        with channels.start(job):
            self._start = channels.Start.current
            self._cut = CutParameters(groups)
            self._types = [parameter.dtype for parameter in self._cut.parameters]
            self._shapes = [parameter.shape for parameter in self._cut.parameters]
            self._note_values()
            own = {
                "communicator": "self", "device": "cuda" if self._cut.device.type == "cuda" else "host",
                "keep_steps": keep_steps or None, "update_threads": threads or None,
                "pinned_memory": pinned_memory, "device_memory": device_memory,
                "durability": {"every": commit_every} if offload == "nvme" and commit_every else None,
            }
            own = {key: value for key, value in own.items() if value is not None}
            for key in own.keys() & (settings or {}).keys():
                raise _hoist.UsageError(f"settings={{\"{key}\": ...}}: the optimizer sets it, by an argument of its own or as it "
                                        "must be")
            self._open(groups, offload, directory, members, job, resume, shard_over is not None,
                       {**(settings or {}), **own})

    # --- construction ------------------------------------------------------------------------------------------------

    def _signs(self) -> list[tuple[Any, ...]]:
        return [_signs_of_change(parameter) for parameter in self._cut.parameters]

    def _note_values(self) -> None:
        """The parameters' values are the masters' roundings now."""
        self._noted = self._signs()
        self._is_loading, self._remainders = False, {}

    def _open(self, groups: list[dict[str, Any]], offload: str, directory: Any, members: list[int], job: list[int], resume: bool,
              is_sharded: bool, settings: dict[str, Any]) -> None:
        place: dict[str, Any] = {"device": offload}
        if directory is not None:
            paths = [os.fspath(d) for d in ([directory] if isinstance(directory, (str, os.PathLike)) else directory)]
            if len(job) > len(members):  # each group of ranks has a store
                paths = [os.path.join(path, f"rank-{members[0]}") for path in paths]
                if isinstance(mirror := settings.get("mirror"), dict) and isinstance(mirror.get("path"), (str, os.PathLike)):
                    settings["mirror"] = {**mirror, "path": os.path.join(mirror["path"], f"rank-{members[0]}")}
            if offload == "nvme":
                place["nvme_path"] = paths if len(paths) > 1 else paths[0]
            elif len(paths) > 1:
                raise _hoist.UsageError('several directories are for offload="nvme"')
            else:
                settings["checkpoint_path"] = paths[0]
        optimizer: dict[str, Any] = {"type": self._kind}
        if self._kind == "Adam":
            optimizer["params"] = {"adam_w_mode": False}
        largest = max(sum(piece.count for piece in unit) for unit in self._cut.units)
        config = _hoist.Config.parse(as_json({
            "optimizer": optimizer, "gradient_clipping": 0.0, "hoist": settings,
            # A few units on their way at a time, and none that stays.
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place,
                                  "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 2 * largest,
                                  "stage3_prefetch_bucket_size": largest, "stage3_max_reuse_distance": 0},
        }, "settings"), "the optimizer's arguments")
        for warning in config.warnings:
            _log.warning("%s", warning)
        config.make_paths_absolute()
        config.gradients_are_reduced = True
        if self._cut.device.type == "cuda" and self._cut.device.index is not None:
            config.device_ordinal = self._cut.device.index
        options = [options_of(group, config.optimizer) for group in groups]
        self._moments = tuple(zip(_MOMENTS, STATE_NAMES[self._kind], strict=True))
        self._kept = [[state for state, kept in zip(_MOMENTS, option.moments, strict=True) if kept] for option in options]
        units = [
            _hoist.ManagedUnit(f"unit {index}", [
                _hoist.ParameterSpec(piece.name, piece.shape, DTYPES[piece.parameter.dtype], True, piece.group + 1)
                for piece in unit])
            for index, unit in enumerate(self._cut.units)
        ]
        offloaded_ref = weakref.ref(self)

        def doing() -> str:
            return getattr(offloaded_ref(), "call", "")

        self._met = distributed.MetRanks((["resume=True"] if resume else []) + ([distributed.SHARD_OVER] if is_sharded else []))
        make, size, local_place = distributed.channels_over(members, config, self._met, doing)
        make_job, job_size = None, 0
        if len(job) > len(members):
            make_job, job_size, _ = distributed.channels_over(job, config, self._met, doing)
        self._config = config
        self._is_divided = size > 1
        self._has_others = max(size, job_size) > 1
        program_end.release_dropped(config.store_directory)
        self.unit_manager = _hoist.UnitManager(config, options, units, make, size, local_place, make_job)
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731 - no unit is shown to the program
        self.unit_manager.connect(nothing, nothing, nothing, nothing, current_stream_of(self._cut.device),
                                  *dlpack_device_of(self._cut.device))
        self._at_exit = program_end.close_at_exit(self.unit_manager, config.store_directory)
        if resume and self.unit_manager.find_commit() is not None:
            self._resume(groups)
        else:
            if resume:
                distributed.refuse_stores_of_others(config.store_directory, is_of_group=len(job) > len(members))
            self._overwrite_with_rank_0()
            self.unit_manager.initialize(UnitValues(self._cut.units, lambda parameter: parameter), self._commit_state(groups))

    def _overwrite_with_rank_0(self) -> None:
        """[C] Ranks that divide the states begin with the first one's weights, as with DistributedDataParallel: each writes its
        part of the new weights into the parameters of all."""
        shapes = repr([(piece.shape, str(piece.parameter.dtype)) for piece in self._cut.pieces])
        if self._is_divided and self.unit_manager.same_on_all(shapes):  # else initialize() names the difference
            initial.overwrite_with_rank_0(self.unit_manager, (
                [(piece.name, piece.of(piece.parameter.detach())) for piece in unit] for unit in self._cut.units))
            self._note_versions()

    def _require_whole(self) -> None:
        """Errors: UsageError after a call that was interrupted in the middle of replacing the states, and in a forked process."""
        self.unit_manager.require_process()
        if self._unfinished:
            self.unit_manager.settle()  # raises the error that ended the engine, if one did
            raise _hoist.UsageError(f"{self.call} after {self._unfinished} was interrupted: states and parameters may be of "
                                    "different steps. Call restore() or load_state_dict() once more")

    def _any_unfinished(self) -> bool:
        """[C] Whether some rank was interrupted in the middle of replacing the states: all of them replace them then."""
        mine = bool(self._unfinished)
        differs = self._has_others and not self.unit_manager.same_on_all(str(mine), of_job=True)
        return mine or differs

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, groups: list[dict[str, Any]]) -> None:
        """[C] One step of all parameters, from their gradients."""
        self._require_whole()
        refuse_changes(groups, self._settled)
        gradients = self._gradients()
        has_gradients = any(gradient is not None for gradient in gradients)
        if self._has_others and not self.unit_manager.same_on_all(str(has_gradients), of_job=True):
            raise _hoist.UsageError("step() of no gradients on some ranks, and of some on others: all ranks take a step, or none "
                                    f"does. Here there are {'some' if has_gradients else 'none'}")
        if not has_gradients:
            return
        self._adopt_changes(also_after_load=True)
        self._push_rates(groups)
        self._consolidated = None
        of_parameter = {id(p): gradient for p, gradient in zip(self._cut.parameters, gradients, strict=True)}
        addresses, types = [], []
        for piece in self._cut.pieces:
            gradient = of_parameter[id(piece.parameter)]
            addresses.append(0 if gradient is None else piece.address_in(gradient))
            types.append(DTYPES[piece.parameter.dtype if gradient is None else gradient.dtype])
        report = self.unit_manager.step_tensors(addresses, types, self._weights(),
                                                self._commit_state(groups, schedule_lags=True))
        self.step_was_skipped = not report.applied
        if self.step_was_skipped:
            _log.warning("a step was skipped: a gradient was not finite, and the parameters stay as they were")
            return
        self._note_versions()
        if self._commits_in_memory and self.unit_manager.step_count % self._commits_in_memory == 0:
            self.unit_manager.save("", self._commit_state(groups, schedule_lags=True))

    def _gradients(self) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        missing = None
        for name, parameter in self._cut.named():
            gradient = parameter.grad
            if gradient is None:
                missing = missing or name
            elif problem := problem_of_gradient(parameter, gradient):
                raise _hoist.UsageError(f"'{name}' {problem}")
            gradients.append(None if gradient is None else gradient.detach().resolve_neg().contiguous())
        for parameter in self._cut.without:
            if parameter.grad is not None:
                raise _hoist.UsageError("a parameter has a gradient that required none when the optimizer was made, and so has "
                                        "no state: call requires_grad_() before")
        if missing and self._missing_gradients == "refuse" and any(gradient is not None for gradient in gradients):
            raise _hoist.UsageError(
                f"'{missing}' has no gradient, and others have. torch.optim would leave it as it is; here a step is one of all "
                'parameters. With missing_gradients="zeros" its weight decay and moments go on as with a gradient of zeros; a '
                "parameter that is never used should not require gradients when the optimizer is made")
        return gradients

    def _change_of_form(self) -> str:
        """Says how the program has changed a parameter's shape, type or device since the optimizer was made; "" if it has not."""
        for name, parameter, dtype, shape in zip(self._cut.names, self._cut.parameters, self._types, self._shapes, strict=True):
            if parameter.shape != shape:
                return (f"'{name}' had the shape {tuple(shape)} when the optimizer was made, and has {tuple(parameter.shape)}: "
                        "make a new optimizer after you change shapes")
            if parameter.device != self._cut.device or parameter.dtype != dtype:
                return (f"'{name}' was {dtype} on {self._cut.device} when the optimizer was made, and is {parameter.dtype} on "
                        f"{parameter.device}: move the model first")
        return ""

    def _weights(self) -> list[int]:
        if change := self._change_of_form():
            raise _hoist.UsageError(change)
        for name, parameter in self._cut.named():
            refuse_unfit(name, parameter)
        return [piece.address_in(piece.parameter) for piece in self._cut.pieces]

    def _push_rates(self, groups: list[dict[str, Any]]) -> None:
        rates = rates_of(groups)
        self.run_rates.before_step(rates)
        for index, rate in enumerate(rates):
            if rate != self._rates[index]:
                self.unit_manager.set_learning_rate(index + 1, rate)
                self._rates[index] = rate

    def _note_versions(self) -> None:
        """Called after the engine has written the parameters, so that autograd learns of the change."""
        torch.autograd.graph.increment_version(self._cut.parameters)
        self._note_values()

    def _adopt_changes(self, *, also_after_load: bool = False) -> None:
        """[C] Adopts the parameters if the program has changed some since they were the masters' roundings, or since load().
        Called before masters are trained, committed or shown; state_dict() cannot, because one rank may call it alone. A model
        that was moved or converted has its masters still, and step() refuses it."""
        is_changed = (also_after_load and self._is_loading) or self._noted != self._signs()
        if is_changed and not self._change_of_form():
            self.adopt()

    def adopt(self) -> None:
        """[C] Makes the parameters' present values the masters."""
        self._require_whole()
        self._weights()
        refuse_shared_memory(self._cut.named())

        def values(parameter: nn.Parameter) -> torch.Tensor:
            remainder = self._remainders.get(id(parameter))
            return parameter if remainder is None else join_master(parameter.detach().to("cpu"), remainder)

        self.unit_manager.change_masters(UnitValues(self._cut.units, values))
        self._consolidated = None
        self._note_values()

    # --- commits -----------------------------------------------------------------------------------------------------

    def _commit_state(self, groups: list[dict[str, Any]], schedule_lags: bool = False) -> bytes:
        """`schedule_lags`: the schedule will be stepped for this commit's step, but has not been yet."""
        state: dict[str, Any] = {"groups": [_plain_entries(group) for group in groups],  # first: `hoist export` looks for it
                                 "program": to_json(self.program_state, "commit_state"),
                                 "first_rates": self.run_rates.first, "world_size": self.unit_manager.world_size}
        schedule = schedules.plain_schedule(schedules.schedule_of(self.run_rates.schedule))
        if schedule is not None:
            state |= {"scheduler": schedule, "schedule_lags": schedule_lags}
        return json.dumps(state).encode()

    def save(self, groups: list[dict[str, Any]], name: str) -> _hoist.Completion:
        """[C] Commits the present state; done when it is durable."""
        if not self._has_store:
            raise _hoist.UsageError("save() needs directory=..., where commits are")
        self._require_whole()
        self._adopt_changes(also_after_load=True)
        return self.unit_manager.save(name, self._commit_state(groups))

    def restore(self, groups: list[dict[str, Any]], name: str) -> int:
        """[C] Continues from a named checkpoint or the newest commit, and fills the parameters. Returns the step."""
        with channels.start(self._job, self._start):
            if self.unit_manager.is_alive:
                self.unit_manager.require_commit(name)
            self._unfinished = "restore()"
            self._rates = [None] * len(groups)
            step, state = self.unit_manager.restore(name)
        self.unit_manager.copy_weights(self._weights())
        self._note_versions()
        self._consolidated = None
        self.run_rates.forget()
        if saved := program_state.unpack(bytes(state)):
            self.program_state = saved["program"]
            distributed.warn_of_other_world_size(saved, self.unit_manager.world_size, "commit_state")
            if len(groups) == len(saved["groups"]):
                for group, entries in zip(groups, saved["groups"], strict=True):
                    group.update(entries)
            self.run_rates.restored(saved | {"rates": rates_of(saved["groups"])})
            self.run_rates.go_back(groups)
        self.restored = True
        self._unfinished = ""
        return step

    def _resume(self, groups: list[dict[str, Any]]) -> None:
        step = self.restore(groups, "")
        _log.info("resuming at step %d with the trained parameters and their states. Buffers, such as running means, and frozen "
                  "parameters are the program's: it loads them itself", step)
        self.run_rates.resume(groups, step)

    # --- states ------------------------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor, state: _hoist.State) -> torch.Tensor:
        """[C] The values in fp32, in CPU memory."""
        values = torch.empty(parameter.numel(), dtype=torch.float32, device="cpu")
        for piece in self._pieces_of(parameter):
            self.unit_manager.read(piece.number, state, 0, piece.of(values).numpy())
        return values.view(parameter.shape)

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """[C] The fp32 value that is trained."""
        self._adopt_changes()
        return self.read(parameter, _hoist.State.master)

    def write_master(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """[C] Sets a parameter's master, and the parameter to its rounding."""
        for piece in self._pieces_of(parameter):
            self.unit_manager.write(piece.number, _hoist.State.master, 0, piece.of(values).numpy())
        index = next(i for i, p in enumerate(self._cut.parameters) if p is parameter)
        with torch.no_grad():
            parameter.copy_(as_type(values, parameter.dtype))
        self._noted[index] = _signs_of_change(parameter)
        self._remainders.pop(id(parameter), None)
        self._consolidated = None

    def _pieces_of(self, parameter: torch.Tensor) -> list[Piece]:
        self._require_whole()
        pieces = [piece for piece in self._cut.pieces if piece.parameter is parameter]
        if not pieces:
            raise _hoist.UsageError("the parameter is not trained by this optimizer")
        return pieces

    def _collect(self, groups: list[dict[str, Any]], is_wanted: bool) -> dict[int, Any]:
        """[C] The states, by the number that a parameter has in a state_dict()."""
        states: dict[int, Any] = {}
        step = self.unit_manager.step_count
        trained = {id(parameter) for parameter in self._cut.parameters}
        numbered = enumerate(p for group in groups for p in group["params"])
        group_of = {id(piece.parameter): piece.group for piece in self._cut.pieces}
        for number, parameter in numbered:
            if id(parameter) not in trained or step == 0:
                continue
            state: dict[str, Any] = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
            for moment, name in self._moments:
                if moment in self._kept[group_of[id(parameter)]]:
                    state[name] = self.read(parameter, moment)
            if parameter.dtype != torch.float32:
                state["master"] = self.read(parameter, _hoist.State.master)
            if is_wanted:
                states[number] = state
        return states

    def consolidate(self, groups: list[dict[str, Any]], to: int) -> None:
        """[C] Collects all states on rank `to`, for states()."""
        is_wanted = self.unit_manager.rank == to
        states = self._collect(groups, is_wanted)
        self._consolidated = states if is_wanted else None

    def states(self, groups: list[dict[str, Any]]) -> dict[int, Any]:
        if not self._is_divided or self.unit_manager.step_count == 0:  # before the first step there is nothing to collect
            return self._collect(groups, is_wanted=True)
        if self._consolidated is None:
            raise _hoist.UsageError("the states are divided among ranks: call consolidate_state_dict(to=RANK) on all of them "
                                    "first, and state_dict() on that rank, before the next step")
        return self._consolidated

    def load(self, groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """[C] Takes what state_dict() gave."""
        self.unit_manager.require_process()
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
            raise _hoist.UsageError("the state_dict has other parameter groups than this optimizer")
        for saved in saved_groups:
            options_of(saved, _hoist.OptimizerOptions.defaults_of(self._kind))
        refuse_changes([{**group, **{k: v for k, v in saved.items() if k in group and k != "params"}}
                        for group, saved in zip(groups, saved_groups, strict=True)], self._settled)
        before = self.unit_manager.step_count
        states, step = self._saved_states(groups, state_dict)

        accumulators = {id(p): group.get("initial_accumulator_value", 0.0) for group in groups for p in group["params"]}

        def moments(index: int) -> Callable[[nn.Parameter], torch.Tensor]:
            def of(parameter: nn.Parameter) -> torch.Tensor:
                moment = states[id(parameter)].moments[index] if states else None
                fresh = accumulators[id(parameter)] if index == 1 else 0.0
                if moment is not None:
                    return moment
                return torch.full(parameter.shape, fresh, dtype=torch.float32, device="cpu")
            return of

        def master(parameter: nn.Parameter) -> torch.Tensor:
            value = states[id(parameter)].master_of(parameter) if states else None
            return parameter if value is None else value

        changed = [group | copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
                   for group, saved in zip(groups, saved_groups, strict=True)]
        was_interrupted = self._any_unfinished()
        # Otherwise nothing was trained yet, and set_master() may have set exact masters.
        if states or before > 0 or was_interrupted:
            for name, parameter in self._cut.named():
                _refuse_not_finite(name, parameter, states.get(id(parameter)))
            unfinished, self._unfinished = self._unfinished, "load_state_dict()"
            masters, *both_moments = (UnitValues(self._cut.units, of) for of in (master, moments(0), moments(1)))
            try:
                self.unit_manager.replace_state(step, masters, both_moments[0], both_moments[1], self._commit_state(changed))
            except _hoist.UsageError:  # nothing has changed
                self._unfinished = unfinished
                raise
            self._note_values()
            self._is_loading = True
            self._remainders = {key: saved.remainder for key, saved in states.items() if saved.remainder is not None}
        # Loading what it has, as accelerate's prepare() does, is no reason to forget a schedule that was saved. After an
        # interruption, `before` may be the step that is loaded.
        is_present = (not was_interrupted and step == before
                      and [group["lr"] for group in groups] == [group["lr"] for group in changed])
        self._consolidated = None
        for group, after in zip(groups, changed, strict=True):
            group.update(after)
        self._settled = [settled_of(group) for group in groups]
        if not is_present:
            self.run_rates.forget()
        self._unfinished = ""

    def _saved_states(self, groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> tuple[dict[int, SavedState], int]:
        """The states by id of the parameter, and the step count of all of them: none, and 0, before the first step."""
        trained = {id(parameter): name for name, parameter in self._cut.named()}
        keeps_none = {id(piece.parameter) for piece in self._cut.pieces if not self._kept[piece.group]}  # as SGD may
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        states: dict[int, SavedState] = {}
        lacking = None
        for number, parameter in zip(numbers, (p for group in groups for p in group["params"]), strict=True):
            if id(parameter) not in trained:
                continue
            name = trained[id(parameter)]
            saved = SavedState.of(self._kind, parameter, state_dict["state"].get(number, {}))
            if saved is not None:
                states[id(parameter)] = saved
            elif id(parameter) not in keeps_none:
                lacking = lacking or name
        if not states:
            return {}, self.unit_manager.step_count if keeps_none == set(trained) else 0
        if lacking is not None:
            raise _hoist.UsageError(f"the state_dict has no state of '{lacking}', which had no gradient yet: here all parameters "
                                    "have made the same steps")
        for key in keeps_none - states.keys():
            states[key] = SavedState(None, (None, None), None, None)
        steps = {saved.step for saved in states.values() if saved.step is not None} or {max(1, self.unit_manager.step_count)}
        if len(steps) > 1:
            raise _hoist.UsageError(f"the parameters of the state_dict have made different numbers of steps ({sorted(steps)}): "
                                    "here all have made the same")
        return states, steps.pop()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._met.told_of_error():
            self.unit_manager.close()
        self._at_exit.cancel()

    def abandon(self, error: BaseException | None) -> None:
        if why := program_end.reason_of(error):
            self.unit_manager.abandon(why)


def _refuse_not_finite(name: str, parameter: torch.Tensor, saved: SavedState | None) -> None:
    """Errors: UsageError for values that a later commit would refuse. torch.optim goes on with them."""
    values = {f"'{name}'": parameter.detach()}  # its own master, or a part of it
    if saved is not None:
        first, second = saved.moments
        values |= {f"the {what} of '{name}' in the state_dict": value for what, value in (
            ("first moment", first), ("second moment", second), ("master", saved.master)) if value is not None}
        if second is not None and second.lt(0).any():
            raise _hoist.UsageError(f"the second moment of '{name}' in the state_dict is negative in places, which no optimizer "
                                    "makes: the state_dict was changed")
    for what, tensor in values.items():
        if not tensor.isfinite().all():
            raise _hoist.UsageError(f"{what} is not finite: a gradient was too large once. Load a state from before, and clip "
                                    "gradients")


def _ranks_of(shard_over: dist.ProcessGroup | None, has_store: bool) -> tuple[list[int], list[int]]:
    """The ranks that divide the states, and those whose commits are one: with a store, the job's."""
    if not channels.is_joined():
        if shard_over is not None:
            raise _hoist.UsageError("shard_over=... before torch.distributed.init_process_group()")
        if has_store and distributed.launched_size() > 1:
            raise _hoist.UsageError(f"{distributed.launched_size()} processes were launched, and each would commit alone into "
                                    "one directory: call torch.distributed.init_process_group() first")
        return [0], [0]
    job = list(range(dist.get_world_size()))
    members = [dist.get_rank()] if shard_over is None else list(dist.get_process_group_ranks(shard_over))
    if dist.get_rank() not in members:
        raise _hoist.UsageError(f"rank {dist.get_rank()} is not in the process group of shard_over")
    return members, job if has_store else members
