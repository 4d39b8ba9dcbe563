# SPDX-License-Identifier: Apache-2.0
"""Runs that DeepSpeed 0.19 began (make_deepspeed_files.py), as its tests here continue, change and refuse them."""

import copy
import os
import zipfile

import pytest
import torch

import hoist
import hoist.store
import hoist.torch
import hoist.torch.deepspeed
from make_deepspeed_files import LAST, STEPS, config_of, groups_of, has_own_scheduler, scheduler_of
from models import Tiny, loss_of, tiny_batch

STATES = (hoist.State.master, hoist.State.moment1, hoist.State.moment2)
TAG = f"global_step{STEPS}"

# Largest difference of a loss in 20 steps, of losses from 0.5 to 2.1: what gradients rounded at other places come to
# (docs/deepspeed-checkpoints.md).
BOUND = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.003}


def bound_of(cell):
    return BOUND[cell.split("-")[1]]


def config_at(cell, path):
    """The configuration that DeepSpeed had, with everything on NVMe."""
    config = copy.deepcopy(config_of(cell))
    config["zero_optimization"] |= {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)},
                                    "offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}
    return config


def wrap(cell, path, model=None, **options):
    torch.manual_seed(5)  # other weights than DeepSpeed began with
    model = Tiny() if model is None else model
    config = config_at(cell, path)
    config["train_micro_batch_size_per_gpu"] = options.pop("micro_batch", 4)
    engine = hoist.torch.wrap(model, config, groups=groups_of(model), **options)
    if has_own_scheduler(cell):
        engine.lr_scheduler = scheduler_of(engine.optimizer)
    return engine


def go_on(engine, last=LAST, rank=0, ranks=1):
    losses = []
    while engine.global_steps < last:
        part = 4 // ranks
        inputs, targets = (values[part * rank:part * (rank + 1)] for values in tiny_batch(engine.global_steps))
        loss = loss_of(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def rates_of(engine, cell):
    """The learning rates of the next step, from the scheduler or the configuration."""
    return [group["lr"] for group in engine.optimizer.param_groups] if has_own_scheduler(cell) else engine.get_lr()


def refusal(path, cell="zero2-bf16", model=None, kind=hoist.StoreError, tmp=None):
    with pytest.raises(kind) as caught:
        wrap(cell, (tmp or path.parent) / "store", model, deepspeed=path)
    return str(caught.value)


def damage(path):
    """Changes one byte of a file's largest tensor."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        tensors = [record for record in archive.infolist() if "/data/" in record.filename]
        at = content.index(archive.read(max(tensors, key=lambda record: record.file_size)))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])


def change(path, edit, **saving):
    """Rewrites a file with PyTorch's own pickling, DeepSpeed's classes left out."""
    from hoist.torch.deepspeed import files

    loaded = files.load(str(path), trusted=False)
    loaded = {key: dict(value) if isinstance(value, dict) else value for key, value in loaded.items()}
    for key in ("loss_scaler", "param_slice_mappings", "zero_stage"):
        inside = loaded.get("optimizer_state_dict", {})
        if key in inside:
            inside[key] = int(inside[key]) if key == "zero_stage" else None
    edit(loaded)
    torch.save(loaded, path.with_suffix(".new"), **saving)  # the old file is still mapped
    os.replace(path.with_suffix(".new"), path)


def values_of(checkpoint, name, state):
    out = torch.empty(checkpoint.parameters[name].numel(), device="cpu")
    checkpoint.read(name, state, 0, out)
    return out


def states_in(file):
    optimizer = file["optimizer_state_dict"]
    return optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))["state"].values()
