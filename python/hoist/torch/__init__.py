# SPDX-License-Identifier: Apache-2.0
"""PyTorch models on three tiers.

    engine = hoist.torch.wrap(model, config="ds_config.json")
    for inputs, targets in data:
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

# PyTorch's OpenMP threads would spin while they wait, and keep those that update and move data from running. They read
# this when they are loaded, so it helps whoever imports hoist.torch before torch; others are told by wrap().
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.optim.optimizer import ParamsT

from hoist import _hoist
from hoist.torch.config_files import as_json, base64_text, is_yaml, read_config
from hoist.torch.deepspeed.checkpoint import Checkpoint
from hoist.torch.devices import outside_of_inference_mode
from hoist.torch.engine import Engine
from hoist.torch.estimates import Estimate, describe_units, estimate_units, model_of
from hoist.torch.model.initial import Initialize
from hoist.torch.model.units import units_of
from hoist.torch.model.wrapped import engine_of
from hoist.torch.optimizer import Optimizer, refuse_schedule, without_names
from hoist.torch.ranks import channels, distributed

_log = logging.getLogger("hoist")
ConfigSource = str | os.PathLike[str] | dict[str, Any] | _hoist.Config

__all__ = ["Engine", "Estimate", "Optimizer", "add_config_arguments", "engine_of", "estimate",
           "initialize", "load_config", "units_of", "wrap", "write_units"]


_NO_PIPELINES = "hoist has no pipeline parallelism: pass the whole model, whose state all ranks divide"

# What the package deepspeed has besides, and what a program does here.
_ELSEWHERE = {
    "zero": "engine.gathered(names, modify=True) replaces zero.GatheredParameters. A model that zero.Init would divide is built "
            "under torch.device('meta'), and wrap(..., weights=DIR) or wrap(..., initialize=...) gives it values",
    "init_distributed": "initialize() joins the ranks that torchrun started, and torch.distributed.init_process_group() does so "
                        "earlier",
    "comm": "torch.distributed has these functions",
    "checkpointing": "torch.utils.checkpoint recomputes activations",
    "utils": "engine.read(name, state) and engine.write(name, values, state) replace safe_get_full_fp32_param(), "
             "safe_set_full_fp32_param() and the like; `hoist export` replaces zero_to_fp32",
    "ops": "the configuration names the optimizer; or pass one of torch.optim's to initialize(), such as AdamW instead of "
           "DeepSpeedCPUAdam or FusedAdam",
    "runtime": "the configuration's scheduler, or one of torch.optim.lr_scheduler, replaces runtime.lr_schedules, and "
               "engine.gathered(names, modify=True) replaces runtime.zero's GatheredParameters",
    "get_accelerator": "engine.device is where the model computes, and torch.accelerator has these functions",
    "accelerator": "engine.device is where the model computes, and torch.accelerator has these functions",
    "DeepSpeedEngine": "hoist.torch.Engine is the class of engines",
    "DeepSpeedConfig": "hoist.torch.load_config() reads a configuration",
    "OnDevice": "build the model under torch.device('meta'), and pass wrap(..., weights=DIR) or wrap(..., initialize=...)",
    "PipelineModule": _NO_PIPELINES,
    "pipe": _NO_PIPELINES,
    "moe": "hoist trains the experts of a model as its other weights, and has no layers of its own",
    "tp_model_init": "a model that is sliced by the program is passed with mesh=... and tensor_parallel=... of wrap(), or with "
                     "mpu=... of initialize()",
    "init_inference": "wrap() takes a model of which nothing is trained (requires_grad_(False)); call it, or its generate()",
}

if not TYPE_CHECKING:  # else every name would be known to type checkers
    def __getattr__(name):
        if name in _ELSEWHERE:
            raise AttributeError(f"hoist.torch has no {name}: {_ELSEWHERE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The arguments that DeepSpeed adds to a program's: --deepspeed, which has no effect, and --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="no effect: hoist.torch.initialize is called")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration of hoist.torch.initialize(args=...)")
    return parser


def load_config(config: ConfigSource, *, trains: bool = True) -> _hoist.Config:
    """A configuration from a file (DeepSpeed's JSON, or the YAML of `accelerate config`), a dictionary in its form, its text as
    base64 (as DeepSpeed takes it), or itself.

    `trains` False: a run length of "auto" is left to the trainer that will read the file.
    """
    if isinstance(config, _hoist.Config):
        return config
    if not isinstance(config, (str, os.PathLike)) or is_yaml(config):
        origin = "config" if isinstance(config, dict) else str(config)
        return _hoist.Config.parse(as_json(read_config(config), origin), origin, trains=trains)
    if (text := base64_text(config)) is not None:
        return _hoist.Config.parse(text, "config", trains=trains)
    return _hoist.Config.load(os.fspath(config), trains=trains)


def wrap(model: torch.nn.Module, config: ConfigSource, *,
         groups: ParamsT | None = None, unit_classes: Iterable[type[torch.nn.Module]] = (),
         weights: str | os.PathLike[str] | None = None, initialize: Initialize | None = None, optimizer: str | None = None,
         seed: int = 0, resume: bool = False, load_later: bool = False, scheduler: Any = None,
         device: torch.device | str | None = None, mesh: Any = None, tensor_parallel: Any = None,
         deepspeed: str | os.PathLike[str] | Checkpoint | None = None) -> Engine:
    """Moves a model's parameters and optimizer states to where the configuration wants them.

    groups         parameter groups as torch.optim takes them; settings they lack are the configuration's
    unit_classes   classes whose modules are gathered and released whole; by default the members of lists of like modules
    weights        a .safetensors file, an index or a directory to begin with; read in pieces
    initialize     initializes one module in place: for models built under torch.device("meta"), one unit at a time
    optimizer      AdamW, Adam, Adagrad, Lion or SGD, where it is not the configuration's. Of that, then, only the rate and
                   the types of the state count
    seed           random seed for `initialize`
    resume         continue from the newest commit of the store, if there is one
    load_later     where the store holds a run, do not refuse it but wait for restore() or load_checkpoint()
    scheduler      stepped after every step that was applied; or a function that makes one for the engine's optimizer
    device         where the model computes, "cpu", "cuda" or "cuda:1", if the configuration does not say; or an accelerator
                   (PrivateUse1) whose memory the CPU shares. By default, of several GPUs: the one that the model is on, or that
                   torch.cuda.set_device() chose, or the launcher's local rank
    mesh           the ranks that divide the state, where other ranks hold other parameters: a DeviceMesh of one dimension
                   (mesh["dp"]) or a process group. The norm, skipped steps and commits are those of all ranks,
                   which all pass their mesh
    tensor_parallel  the ranks that hold slices of the same parameters. Slices are marked by an attribute of the parameter,
                   tensor_model_parallel = True (or model_parallel); the norm counts the others once
    deepspeed      a checkpoint of DeepSpeed's to begin with: the directory with `latest`, a tag's own, or what
                   hoist.torch.deepspeed.open() returned. With resume=True, where the store holds no run yet
    """
    with channels.before_start():
        config = load_config(config)
    return _engine_of(model, config, groups=groups, unit_classes=unit_classes, weights=weights,
                      initialize=initialize, optimizer=optimizer, seed=seed, resume=resume, load_later=load_later,
                      scheduler=scheduler, device=device, mesh=mesh, tensor_parallel=tensor_parallel,
                      deepspeed=deepspeed)


def _engine_of(model: torch.nn.Module, config: _hoist.Config, **options: Any) -> Engine:
    """The model may be one of from_pretrained(), whose module imports transformers, which others can do without."""
    pretrained = sys.modules.get("hoist.torch.pretrained.loading")
    with contextlib.ExitStack() as stack:
        stack.enter_context(outside_of_inference_mode())
        stack.enter_context(channels.start(distributed.ranks_at_start(config)))
        if pretrained is not None:
            stack.enter_context(pretrained.reading_files(model))
        return Engine(model, config, **options)


def estimate(model: Any, config: ConfigSource, *, world_size: int = 1,
             local_ranks: int | None = None, unit_classes: Iterable[type[torch.nn.Module]] = ()) -> Estimate:
    """Predicts how much of each memory training a model takes and how much a step moves, and whether this machine has it.

    model          a module, which may be on the meta device; a configuration of transformers, or the directory of one
    world_size     ranks
    local_ranks    ranks on this machine; by default all of them
    """
    return estimate_units(model_of(model), load_config(config, trains=False), unit_classes, world_size,
                          local_ranks or world_size)


def write_units(model: Any, path: str | os.PathLike[str], config: ConfigSource | None = None, *,
                unit_classes: Iterable[type[torch.nn.Module]] = ()) -> None:
    """Describes a model unit by unit, in a file for the commands `hoist plan` and `check`: --units PATH.

    model     as for estimate()
    config    names the weights' type, where they are trained in another one than they were built in
    """
    made = load_config({} if config is None else config, trains=False)
    units = describe_units(model_of(model), made, unit_classes)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(units, file, indent=1)


def initialize(args: Any = None, model: torch.nn.Module | None = None,
               optimizer: torch.optim.Optimizer | Callable[[ParamsT], torch.optim.Optimizer] | None = None,
               model_parameters: ParamsT | None = None, training_data: torch.utils.data.Dataset[Any] | None = None,
               lr_scheduler: Any = None, distributed_port: int | None = None, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
               config: ConfigSource | None = None, mesh_param: Any = None,
               config_params: str | os.PathLike[str] | dict[str, Any] | None = None, *,
               unit_classes: Iterable[type[torch.nn.Module]] = (), weights: str | os.PathLike[str] | None = None,
               initialize: Initialize | None = None, seed: int = 0, resume: bool = False, load_later: bool = True,
               device: torch.device | str | None = None,
               deepspeed: str | os.PathLike[str] | Checkpoint | None = None,
               ) -> tuple[Engine, Optimizer, torch.utils.data.DataLoader[Any] | None, Any]:
    """Takes and returns what deepspeed.initialize does: (engine, optimizer, dataloader, scheduler).

    An optimizer's parameter groups are taken over, settings and all; its own state is not used. Ranks that torchrun
    started are joined. Where the configuration does not say how many steps stay under a name, one does, so that
    save_checkpoint() works.
    """
    if model is None:
        raise _hoist.UsageError("initialize() needs model=...")
    refuse_schedule(lr_scheduler)
    if mesh_param is not None:
        raise _hoist.UsageError("hoist has no sequence parallelism: mesh_param must be None")
    config = config if config is not None else config_params
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise _hoist.UsageError("initialize() needs config=..., a file or a dictionary")
    with channels.before_start():
        loaded = load_config(config)
        if loaded.setting("hoist.keep_steps") is None and loaded.can_keep_steps:
            loaded.keep_steps = max(1, loaded.keep_steps)
        if dist_init_required is not False and loaded.joins_launched_ranks:
            distributed.initialize_as_launched()
        groups: list[Any] | None = None
        kind: str | None = None
        ranks = distributed.ranks_at_start(loaded)
    if optimizer is None and model_parameters is None and loaded.setting("optimizer.type") is None:
        _warn_of_training(model, loaded.optimizer)
    with channels.start(ranks):
        if training_data is not None:  # what a loader refuses is refused before there is an engine
            data: Any = training_data
            order: dict[str, Any] = {"shuffle": True} if len(ranks) == 1 else {"sampler": range(len(data))}
            torch.utils.data.DataLoader(data, **order)
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model_parameters if model_parameters is not None else model.parameters())
        if optimizer is not None:
            kind = _kind_of(optimizer)
            groups = optimizer.param_groups
        elif model_parameters is not None:
            groups = without_names(model_parameters)
            if not groups or not isinstance(groups[0], dict):
                _refuse_others(model, groups)
                groups = None  # plain parameters: the configuration's settings
        engine = _engine_of(model, loaded, groups=groups, unit_classes=unit_classes, weights=weights, initialize=initialize,
                            optimizer=kind, seed=seed, resume=resume, load_later=load_later, device=device, deepspeed=deepspeed,
                            scheduler=lr_scheduler, client=optimizer, **_groups_of(mpu))
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)  # as deepspeed.initialize does: batch.cuda() is on this rank's GPU then
    if engine.lr_scheduler is None and loaded.has_schedule:
        engine.lr_scheduler = ConfiguredSchedule(engine)
    loader = None
    if training_data is not None:
        sampler = ShuffledShare(training_data, engine.world_size, engine.rank) if engine.world_size > 1 else None
        loader = torch.utils.data.DataLoader(
            training_data, batch_size=engine.train_micro_batch_size_per_gpu() or 1, collate_fn=collate_fn,
            sampler=sampler, shuffle=sampler is None, drop_last=bool(loaded.setting("dataloader_drop_last")))
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _warn_of_training(model: torch.nn.Module, default: _hoist.OptimizerOptions) -> None:
    """For a program that names no optimizer: DeepSpeed's engine then trains nothing, as for a reference model."""
    if trained := sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad):
        _log.warning("initialize() without an optimizer, in the configuration or as an argument: %s with lr %g will train %d "
                     "parameters, and has memory for their masters, moments and gradients. For a model that is only evaluated, "
                     "such as a reference or reward model, call model.requires_grad_(False) before", default.kind,
                     default.learning_rate, trained)


def _refuse_others(model: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> None:
    """Errors: UsageError where a list of parameters is another one than the model's trainable ones."""
    listed = {id(parameter) for parameter in parameters}
    for name, parameter in model.named_parameters():
        if listed and parameter.requires_grad and id(parameter) not in listed:
            raise _hoist.UsageError(f"parameter '{name}' requires gradients and is not in model_parameters: freeze what is not "
                                    "trained (requires_grad_(False)), or pass all")
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in parameters:
        if parameter.numel() > 0 and id(parameter) not in own:
            raise _hoist.UsageError(f"model_parameters has a parameter of shape {tuple(parameter.shape)} that is not the "
                                    "model's: it would not be trained. Make it a parameter of the module that is passed as model")


def _groups_of(mpu: Any) -> dict[str, Any]:
    """The process groups of Megatron's and DeepSpeed's object for model parallelism."""
    if mpu is None:
        return {}
    slices = getattr(mpu, "get_tensor_model_parallel_group", None) or getattr(mpu, "get_model_parallel_group", None)
    if slices is None or not hasattr(mpu, "get_data_parallel_group"):
        raise _hoist.UsageError("mpu has no get_data_parallel_group() and get_model_parallel_group(), as Megatron's has")
    return {"mesh": mpu.get_data_parallel_group(), "tensor_parallel": slices()}


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    for kind in ("AdamW", "Adam", "Adagrad", "SGD"):  # AdamW is an Adam to PyTorch
        known = getattr(torch.optim, kind)
        if isinstance(optimizer, known):
            # PyTorch puts its hooks around step() of a class, so the functions inside are compared.
            if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(known.step):
                raise _hoist.UsageError(f"{type(optimizer).__name__} is a torch.optim.{kind} with a step() of its own, which "
                                        f"would not be called: hoist updates by the formula of {kind}. Pass a torch.optim.{kind} "
                                        "with the same groups, if that formula is meant")
            # Adam(decoupled_weight_decay=True) is AdamW's formula.
            decouples = kind == "Adam" and all(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
            return "AdamW" if decouples else kind
    own = type(optimizer).__module__ == "hoist.optim"
    raise _hoist.UsageError(f"hoist.torch does not accept {type(optimizer).__module__}.{type(optimizer).__name__}" +
                            (", since hoist.optim is for loops without an engine" if own else "") + ": pass torch.optim's AdamW, "
                            "Adam, Adagrad or SGD; or pass no optimizer, and name one in the configuration")


class ShuffledShare(torch.utils.data.DistributedSampler[Any]):
    """This rank's share of the data, in another order each time, also where the program never calls set_epoch()."""

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):  # its generator is the CPU's, wherever the program makes its tensors
            order = super().__iter__()
        self.epoch += 1
        return order


class ConfiguredSchedule:
    """The configuration's own schedule, which the engine follows by itself."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def step(self, *_: Any) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return self._engine.get_lr()

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
