# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that DeepSpeed 0.19 wrote (make_deepspeed_files.py) go on here as they went on there, and stores go back."""

import copy
import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile

import pytest
import torch

import hoist
import hoist.store
import hoist.torch
import hoist.torch.deepspeed
from hoist.torch.deepspeed.__main__ import main as command
from make_deepspeed_files import CELLS, LAST, RANKS, STEPS, config_of, groups_of, has_own_scheduler, scheduler_of
from models import Gpt, Tiny, loss_of, tiny_batch
from ranks import results, start

STATES = (hoist.State.master, hoist.State.moment1, hoist.State.moment2)
TAG = f"global_step{STEPS}"

# Largest difference of a loss in 20 steps, of losses from 0.5 to 2.1: what gradients rounded at other places come to
# (docs/deepspeed-checkpoints.md).
BOUND = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.003}


def bound_of(cell):
    return BOUND[cell.split("-")[1]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(os.path.join(os.path.dirname(__file__), "deepspeed_files.tar.xz")) as tar:
        tar.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="session")
def expected(checkpoints):
    return json.loads((checkpoints / "losses.json").read_text())


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


# --- in --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["", "-universal"])
@pytest.mark.parametrize("cell", CELLS)
def test_goes_on_as_in_deepspeed(checkpoints, expected, tmp_path, cell, form):
    engine = wrap(cell, tmp_path, deepspeed=checkpoints / (cell + form))
    assert engine.restored and engine.global_steps == STEPS
    assert engine.state == {"epoch": 3, "name": "tiny"}
    assert engine.module.calls.item() == STEPS
    losses = go_on(engine)
    there = expected[cell]["losses"][STEPS:]
    worst = max(abs(a - b) for a, b in zip(losses, there, strict=True))
    assert worst < bound_of(cell), (losses, there)
    assert engine.skipped_steps == expected[cell]["skipped"]
    assert engine.optimizer.loss_scale == expected[cell]["scale"]
    engine.close()


@pytest.mark.parametrize("lost", ["moment1", "moment2", "step"])
def test_the_bound_notices_what_is_lost(checkpoints, expected, tmp_path, lost):
    cell = "zero3-bf16"
    checkpoint = hoist.torch.deepspeed.open(checkpoints / cell)
    if lost == "step":
        checkpoint.step = 1
    engine = wrap(cell, tmp_path, deepspeed=checkpoint)
    for name, shape in checkpoint.parameters.items() if lost != "step" else ():
        engine.write(name, torch.zeros(shape), getattr(hoist.State, lost))
    losses = go_on(engine)
    engine.close()
    worst = max(abs(a - b) for a, b in zip(losses, expected[cell]["losses"][STEPS:], strict=True))
    assert worst > bound_of(cell), lost


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero3-fp16"])
def test_holds_what_the_files_hold(checkpoints, tmp_path, cell):
    checkpoint = hoist.torch.deepspeed.open(checkpoints / cell, TAG)
    assert (checkpoint.ranks, checkpoint.tag) == (RANKS, TAG)
    with wrap(cell, tmp_path, deepspeed=checkpoint) as engine:
        for name, shape in checkpoint.parameters.items():
            for state in STATES:
                values = torch.empty(shape.numel())
                checkpoint.read(name, state, 0, values)
                assert torch.equal(engine.read(name, state).view(-1), values.cpu()), (name, state)
        fixed = torch.load(checkpoints / cell / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
                           if "zero3" in cell else checkpoints / cell / TAG / "mp_rank_00_model_states.pt")
        if "zero2" in cell:
            assert torch.equal(engine.read("fixed.weight"), fixed["module"]["fixed.weight"].float())
        assert torch.equal(checkpoint.master("fixed.weight"), engine.read("fixed.weight"))
        assert rates_of(engine, cell) == pytest.approx([group["lr"] for group in checkpoint.groups])


def test_without_the_run_s_own_memory(checkpoints, expected, tmp_path):
    """A model on the meta device has no values of its own."""
    with torch.device("meta"):
        model = Tiny()
    model.calls = torch.zeros(1)
    engine = wrap("zero3-fp32", tmp_path, model, deepspeed=checkpoints / "zero3-fp32")
    there = expected["zero3-fp32"]["losses"][STEPS:]
    assert max(abs(a - b) for a, b in zip(go_on(engine), there, strict=True)) < BOUND["fp32"]
    engine.close()


def continue_on_a_rank(directory, files, cell, rank, size):
    engine = wrap(cell, directory, deepspeed=files, micro_batch=4 // size)
    losses = go_on(engine, rank=rank, ranks=size)
    engine.close()
    return losses


@pytest.mark.parametrize("cell", ["zero1-bf16", "zero3-fp32"])
def test_on_two_ranks(checkpoints, expected, tmp_path, cell):
    program = f"""
    from test_deepspeed_checkpoints import continue_on_a_rank
    join()
    print(json.dumps(continue_on_a_rank(directory, config["files"], {cell!r}, rank, size)), flush=True)
    """
    ranks = results(start(program, tmp_path, {"files": str(checkpoints / cell)}))
    losses = [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]
    assert max(abs(a - b) for a, b in zip(losses, expected[cell]["losses"][STEPS:], strict=True)) < bound_of(cell)
    with hoist.store.open(tmp_path) as stored:
        assert (stored.step, stored.world_size) == (LAST, 2)


def test_resume_continues_the_store_once_there_is_one(checkpoints, tmp_path):
    there = checkpoints / "zero1-fp16"
    engine = wrap("zero1-fp16", tmp_path, deepspeed=there, resume=True)
    scale, step = engine.optimizer.loss_scale, engine.step_count
    engine.close()
    engine = wrap("zero1-fp16", tmp_path, deepspeed=there, resume=True)  # right after: all is in the first commit
    assert (engine.step_count, engine.optimizer.loss_scale, engine.global_steps) == (step, scale, STEPS)
    assert engine.state["epoch"] == 3 and engine.module.calls.item() == STEPS
    losses = go_on(engine, STEPS + 3)
    engine.close()
    engine = wrap("zero1-fp16", tmp_path, deepspeed=there, resume=True)
    assert engine.global_steps == STEPS + 3
    losses += go_on(engine)
    engine.close()
    with pytest.raises(hoist.StoreError, match="continue it"):
        wrap("zero1-fp16", tmp_path, deepspeed=there)
    engine = wrap("zero1-fp16", tmp_path / "other", deepspeed=there)
    assert go_on(engine) == losses
    engine.close()


def die_in_the_middle(directory, files, cell, calls):
    from hoist.torch.deepspeed import checkpoint

    read = checkpoint.Checkpoint.read

    def read_and_die(self, *arguments):
        nonlocal calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        read(self, *arguments)

    checkpoint.Checkpoint.read = read_and_die
    wrap(cell, directory, deepspeed=files)


@pytest.mark.parametrize("calls", [1, 20, 39])
def test_a_killed_import_leaves_nothing(checkpoints, tmp_path, calls):
    files = checkpoints / "zero2-bf16"
    program = ("import sys; sys.path.insert(0, sys.argv[1])\n"
               "from test_deepspeed_checkpoints import *\n"
               "die_in_the_middle(sys.argv[2], sys.argv[3], 'zero2-bf16', int(sys.argv[4]))")
    died = subprocess.run([sys.executable, "-c", program, os.path.dirname(__file__), str(tmp_path), str(files), str(calls)],
                          capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert hoist.store.steps(tmp_path).commits == []
    with wrap("zero2-bf16", tmp_path, deepspeed=files, resume=True) as engine:
        assert engine.step_count == STEPS


# --- and what is not taken -------------------------------------------------------------------------------------------

@pytest.fixture
def spoil(checkpoints, tmp_path):
    """A copy of a checkpoint, to be changed."""
    def copied(cell):
        shutil.copytree(checkpoints / cell, tmp_path / "copy")
        return tmp_path / "copy" / TAG

    return copied


def refusal(path, cell="zero2-bf16", model=None, kind=hoist.StoreError, tmp=None):
    with pytest.raises(kind) as caught:
        wrap(cell, (tmp or path.parent) / "store", model, deepspeed=path)
    return str(caught.value)


def test_a_rank_s_file_is_missing(spoil):
    path = spoil("zero3-bf16")
    (path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    text = refusal(path, "zero3-bf16")
    assert "is of 2 ranks, and has no *_optim_states.pt of rank 1" in text and str(path) in text
    (path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "run without ZeRO (stage 0), or the files were not all copied" in refusal(path, "zero3-bf16")


def test_a_file_is_cut_short(spoil):
    path = spoil("zero2-bf16") / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-200])
    text = refusal(path.parent)
    assert str(path) in text and "copy it once more" in text


def test_files_of_the_old_format(checkpoints, spoil):
    """With "checkpoint_serialization": false DeepSpeed writes files that cannot be mapped: they are read."""
    path = spoil("zero3-fp16")
    for file in path.glob("*.pt"):
        change(file, lambda _: None, _use_new_zipfile_serialization=False)
    before, after = hoist.torch.deepspeed.open(checkpoints / "zero3-fp16"), hoist.torch.deepspeed.open(path)
    for name in before.parameters:
        assert torch.equal(values_of(after, name, hoist.State.moment1), values_of(before, name, hoist.State.moment1))
    hoist.torch.deepspeed.open(path, trusted=True)
    file = next(path.glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(hoist.StoreError, match="copy it once more"):
        hoist.torch.deepspeed.open(path)


def test_another_model(checkpoints, tmp_path):
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(width=16), tmp=tmp_path)
    assert "parameter 'token.weight' is (16, 8), and (16, 16) here" in text
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(layers=3), tmp=tmp_path)
    assert "is of another model: it lacks ['blocks.2.norm.weight'" in text and "weights=" in text
    text = refusal(checkpoints / "zero2-bf16", model=Gpt(width=8, layers=1), tmp=tmp_path)
    assert "parameter 'token.weight' is (16, 8), and (97, 8) here" in text
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(layers=1), tmp=tmp_path)
    assert "and has ['blocks.1.down.bias'" in text


def test_another_optimizer(checkpoints, tmp_path, spoil):
    model = Tiny()
    config = config_at("zero2-bf16", tmp_path / "store") | {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}
    with pytest.raises(hoist.UsageError, match="Lion cannot continue with Adam's moments"):
        hoist.torch.wrap(model, config, deepspeed=checkpoints / "zero2-bf16")
    path = spoil("zero2-bf16")
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: [
            state.update(momentum_buffer=state.pop("exp_avg")) for state in states_in(file)])
    assert "of another optimizer than Adam: its states are exp_avg_sq, momentum_buffer, step" in refusal(path)


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


def test_parameters_that_deepspeed_aligned(checkpoints, spoil):
    """With "parameter_alignment" each parameter of ZeRO 1 and 2 begins at a multiple of 16 bytes."""
    path = spoil("zero2-bf16")
    before = hoist.torch.deepspeed.open(checkpoints / "zero2-bf16")
    paths = [path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    paddings, parts = [], []
    for group in range(len(before.groups)):
        names = [name for name in before.parameters if before.group_of[name] == group]
        after = [-before.parameters[name].numel() % 8 for name in names[:-1]] + [0]
        flat = [torch.cat([torch.nn.functional.pad(values_of(before, name, state), (0, padding))
                           for name, padding in zip(names, after, strict=True)]) for state in STATES]
        part = -(-len(flat[0]) // 4) * 2
        parts.append([[values[rank * part:(rank + 1) * part].clone() for values in flat] for rank in range(2)])
        paddings.append(after)
    assert sum(map(sum, paddings)) > 0

    def align(file, rank):
        optimizer = file["optimizer_state_dict"]
        optimizer["param_alignment_paddings"] = paddings
        for group, (state, of_ranks) in enumerate(zip(states_in(file), parts, strict=True)):
            optimizer["single_partition_of_fp32_groups"][group], state["exp_avg"], state["exp_avg_sq"] = of_ranks[rank]

    for rank in range(2):
        change(paths[rank], lambda file, rank=rank: align(file, rank))
    after = hoist.torch.deepspeed.open(path)
    for name in before.parameters:
        for state in STATES:
            assert torch.equal(values_of(after, name, state), values_of(before, name, state)), (name, state)
    for wrong in ([[-8] * len(paddings[0]), *paddings[1:]], [[2**70, *paddings[0][1:]], *paddings[1:]], [[0], *paddings[1:]],
                  paddings[:1]):
        change(paths[0], lambda file, wrong=wrong: file["optimizer_state_dict"].update(param_alignment_paddings=wrong))
        with pytest.raises(hoist.StoreError):
            hoist.torch.deepspeed.open(path)


def states_in(file):
    return file["optimizer_state_dict"]["base_optimizer_state"]["state"].values()


def test_states_that_were_left_out(spoil):
    path = spoil("zero3-fp32")
    for rank in range(2):
        change(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
               lambda file: file["optimizer_state_dict"]["optimizer_state_dict"].update(state={}))
    assert "holds no optimizer states, and the run had made 20 steps" in refusal(path, "zero3-fp32")
    (path / "offloaded_tensors").mkdir()
    assert 'offload_optimizer {"device": "cpu"}' in refusal(path, "zero3-fp32")


def test_files_of_two_steps(spoil):
    path = spoil("zero2-bf16")
    change(path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda file: [
        state.update(step=torch.tensor(19.0)) for state in states_in(file)])
    assert "is of step 20 of the optimizer, and" in refusal(path)


def test_a_step_that_deepspeed_s_own_adam_counts(spoil):
    """The step count is an integer, or, in older versions, in the parameter group."""
    path = spoil("zero2-bf16")
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: [
            state.update(step=20) for state in states_in(file)])
    assert hoist.torch.deepspeed.open(path).step == 20
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: (
            [state.pop("step") for state in states_in(file)],
            [group.update(step=21) for group in file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]]))
    assert hoist.torch.deepspeed.open(path).step == 21


@pytest.mark.parametrize("name, reason", [
    ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture of experts"),
    ("layer_03-model_00-model_states.pt", "pipeline-parallel"),
    ("mp_rank_01_model_states.pt", "tensor- or pipeline-parallel"),
    ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "two files of rank 1"),
])
def test_parallel_in_another_way(spoil, name, reason):
    path = spoil("zero2-bf16")
    (path / name).write_bytes(b"")
    text = refusal(path)
    assert reason in text and name in text


def test_no_checkpoint_there(tmp_path, spoil):
    assert "there is no directory" in refusal(tmp_path / "nowhere", tmp=tmp_path)
    (tmp_path / "empty").mkdir()
    assert "Name the directory with the file `latest`" in refusal(tmp_path / "empty", tmp=tmp_path)
    (tmp_path / "empty" / "latest").write_text("../../etc")
    assert "not the name of a checkpoint beside it" in refusal(tmp_path / "empty", tmp=tmp_path)
    path = spoil("zero2-bf16-universal")
    (path / "zero" / "blocks.1.up.bias" / "exp_avg.pt").unlink()
    text = refusal(path)
    assert "blocks.1.up.bias/exp_avg.pt is missing" in text


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero3-fp16", "zero2-bf16-universal"])
def test_whatever_a_file_holds_is_read_or_refused(checkpoints, spoil, cell, monkeypatch):
    from hoist.torch.deepspeed import files

    path = spoil(cell)
    load, source = files.load, random.Random(7)
    monkeypatch.setattr(files, "load", lambda path, trusted: disturbed(load(path, trusted), source))
    for attempt in range(150):
        try:
            hoist.torch.deepspeed.open(path)
        except hoist.StoreError as error:
            assert "\x1b" not in str(error), attempt


def disturbed(value, source, depth=6):
    """The same, with something of another kind at one place or more."""
    if source.random() < 0.02:
        return source.choice([None, -1, 2**70, float("nan"), "\x1b[2J", [], {}, {"a": 1}, [None, 3], torch.zeros(2, 3),
                              torch.tensor(1j)])
    if isinstance(value, dict) and depth > 0:
        return {key: disturbed(held, source, depth - 1) for key, held in value.items() if source.random() > 0.01}
    if isinstance(value, list) and depth > 0:
        return [disturbed(held, source, depth - 1) for held in value]
    return value


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("the-pickle-was-run",)


def test_nothing_in_a_file_is_run(spoil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = spoil("zero2-bf16")
    model = path / "mp_rank_00_model_states.pt"
    change(model, lambda file: file.update(rng=Malicious()))
    text = refusal(path)
    assert "holds objects of" in text and "mkdir" in text and "trusted=True" in text and str(model) in text
    assert not os.path.exists("the-pickle-was-run")
    hoist.torch.deepspeed.open(path, trusted=True)  # as the program asks for
    assert os.path.exists("the-pickle-was-run")


def test_names_from_files_do_not_reach_the_terminal(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file["param_shapes"][1].update({"\x1b[2Jforged": torch.Size([0])}))
    text = refusal(path)
    assert "\x1b" not in text and "x1b[2Jforged" in text
    (path.parent / "latest").write_text("\x1b[2J/")
    assert "\x1b" not in refusal(path.parent)


def test_client_state_that_json_cannot_hold(spoil, caplog):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file.update(order=torch.arange(4)))
    with caplog.at_level(logging.WARNING, "hoist"), wrap("zero2-bf16", path.parent / "store", deepspeed=path) as engine:
        assert engine.state == {"epoch": 3, "name": "tiny"}
    assert "client state ['order']" in caplog.text
    assert torch.equal(hoist.torch.deepspeed.open(path).client_state["order"].cpu(), torch.arange(4, device="cpu"))


def test_settings_that_differ_are_said(checkpoints, tmp_path, caplog):
    model = Tiny()
    config = config_at("zero1-bf16", tmp_path)
    config["optimizer"]["params"] |= {"weight_decay": 0.3, "betas": [0.9, 0.95]}
    del config["scheduler"]
    with caplog.at_level(logging.WARNING, "hoist"):
        hoist.torch.wrap(model, config, deepspeed=checkpoints / "zero1-bf16").close()
    assert "weight_decay of 'token.weight' was 0.1 in DeepSpeed, and is 0.3 from here on" in caplog.text
    assert "betas of 'token.weight' was (0.9, 0.99) in DeepSpeed, and is (0.9, 0.95)" in caplog.text
    assert "had section `scheduler`, and this configuration has none" in caplog.text


def edit_groups(path, edit):
    """Changes the parameter groups of a checkpoint of ZeRO 1 or 2."""
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: [
            edit(group) for group in file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]])


def warnings_of(path, caplog, optimizer=None, **params):
    model = Tiny()
    config = config_at("zero2-bf16", path.parent / "store")
    config["optimizer"] = {"type": optimizer or "AdamW", "params": config["optimizer"]["params"] | params}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hoist"):
        hoist.torch.wrap(model, config, groups=groups_of(model), deepspeed=path).close()
    shutil.rmtree(path.parent / "store")
    return caplog.text


def test_another_kind_of_decay_is_said(spoil, caplog):
    path = spoil("zero2-bf16")
    assert "adam_w_mode" not in warnings_of(path, caplog)
    text = warnings_of(path, caplog, "Adam", adam_w_mode=False)
    assert "adam_w_mode of 'token.weight' was True in DeepSpeed, and is False from here on" in text
    edit_groups(path, lambda group: group.update(decoupled_weight_decay=False))  # torch.optim.Adam
    assert "adam_w_mode" not in warnings_of(path, caplog, "Adam", adam_w_mode=False)
    assert "adam_w_mode of 'token.weight' was False in DeepSpeed, and is True" in warnings_of(path, caplog)
    edit_groups(path, lambda group: group.pop("decoupled_weight_decay"))  # DeepSpeed's own: its type says, or nothing does
    assert "adam_w_mode of 'token.weight' was True in DeepSpeed, and is False" in warnings_of(
        path, caplog, "Adam", adam_w_mode=False)
    edit_groups(path, lambda group: group.update(weight_decay=0.0))
    assert "adam_w_mode" not in warnings_of(path, caplog, "Adam", adam_w_mode=False, weight_decay=0.0)


def test_another_bias_correction_is_said(spoil, caplog):
    path = spoil("zero2-bf16")
    assert "bias_correction" not in warnings_of(path, caplog)
    assert "bias_correction of 'token.weight' was True in DeepSpeed, and is False" in warnings_of(
        path, caplog, bias_correction=False)
    edit_groups(path, lambda group: group.update(bias_correction=False))
    assert "bias_correction of 'token.weight' was False in DeepSpeed, and is True from here on" in warnings_of(path, caplog)


def wrap_without_schedule(cell, path, rate, model=None, **options):
    """As wrap(), with this learning rate and no scheduler."""
    model = Tiny() if model is None else model
    config = config_at(cell, path)
    config.pop("scheduler", None)
    config["optimizer"]["params"]["lr"] = rate
    return hoist.torch.wrap(model, config, **options)


@pytest.mark.parametrize("cell", ["zero1-bf16", "zero3-fp16-universal"])
def test_rates_go_on_without_a_scheduler(checkpoints, tmp_path, caplog, cell):
    """As in DeepSpeed, which restores them with the optimizer's state; after a resume as well."""
    there = [group["lr"] for group in hoist.torch.deepspeed.open(checkpoints / cell).groups]
    assert 0.005 not in there
    for resume in (False, True, True):
        model = Tiny()
        caplog.clear()
        with (caplog.at_level(logging.WARNING, "hoist"),
              wrap_without_schedule(cell.removesuffix("-universal"), tmp_path, 0.005, model, groups=groups_of(model),
                                    deepspeed=checkpoints / cell, resume=resume) as engine):
            assert [group["lr"] for group in engine.optimizer.param_groups] == there
            assert (f"had come to {there}" in caplog.text and "asks for [0.005, 0.005]" in caplog.text) == (
                not resume and "zero1" in cell), caplog.text  # the other has the state of a scheduler
            assert engine.get_lr() == there
            go_on(engine, engine.global_steps + 1)
            assert engine.get_lr() == there


def test_a_rate_of_two_groups_for_one(checkpoints, spoil, tmp_path, caplog):
    with wrap_without_schedule("zero1-bf16", tmp_path / "same", 0.005, deepspeed=checkpoints / "zero1-bf16") as engine:
        assert [group["lr"] for group in engine.optimizer.param_groups] == [
            hoist.torch.deepspeed.open(checkpoints / "zero1-bf16").groups[0]["lr"]]
    path = spoil("zero2-bf16")
    rates = iter([0.25, 0.5] * 2)
    edit_groups(path, lambda group: group.update(lr=next(rates)))
    with (caplog.at_level(logging.WARNING, "hoist"),
          wrap_without_schedule("zero2-bf16", tmp_path / "other", 0.005, deepspeed=path) as engine):
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.005]
    assert "[0.25, 0.5]" in caplog.text and "[0.005]" in caplog.text and "groups=..." in caplog.text
    edit_groups(path, lambda group: group.update(lr=float("nan")))
    assert "learning rate" in refusal(path)


def test_rates_of_a_configuration_s_schedule_begin_with_the_configuration(checkpoints, tmp_path, caplog):
    """The first commit has the base rates, as the commits after it, and its export has the rate of the next step."""
    cell = "zero3-bf16"
    wrap(cell, tmp_path / "store", deepspeed=checkpoints / cell).close()
    back = hoist.torch.deepspeed.open(hoist.torch.deepspeed.export(tmp_path / "store", tmp_path / "out", config_of(cell)))
    there = hoist.torch.deepspeed.open(checkpoints / cell)
    assert [group["lr"] for group in back.groups] == pytest.approx([group["lr"] for group in there.groups])
    wrap(cell, tmp_path / "again", deepspeed=back).close()
    assert "section `scheduler`" not in caplog.text  # it had one before and after


def test_an_optimizer_of_the_program_s_takes_the_rates(checkpoints, tmp_path):
    model = Tiny()
    config = config_at("zero1-bf16", tmp_path)
    del config["scheduler"], config["optimizer"]
    client = torch.optim.AdamW(groups_of(model), lr=0.005, betas=(0.9, 0.99), weight_decay=0.1)
    engine, *_ = hoist.torch.initialize(model=model, optimizer=client, config=config, deepspeed=checkpoints / "zero1-bf16")
    there = [group["lr"] for group in hoist.torch.deepspeed.open(checkpoints / "zero1-bf16").groups]
    assert [group["lr"] for group in client.param_groups] == there
    engine.close()


def test_what_newer_versions_write_is_no_client_state(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file.update(
        checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 1}))  # 0.19.6
    assert hoist.torch.deepspeed.open(path).client_state == {"epoch": 3, "name": "tiny"}


def test_weights_that_are_trained_here_and_were_frozen_there(checkpoints, tmp_path):
    model = Tiny()
    model.fixed.weight.requires_grad_(True)
    assert "'fixed.weight' was frozen, and has no moments" in refusal(checkpoints / "zero2-bf16", model=model, tmp=tmp_path)


def test_frozen_weights_that_the_checkpoint_leaves_out(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: [file["module"].pop("fixed.weight"), file.update(
        frozen_param_shapes=None, frozen_param_fragments=None)])
    model = Tiny()
    fixed = model.fixed.weight.detach().clone()
    with wrap("zero2-bf16", path.parent / "store", model, deepspeed=path) as engine:
        assert torch.equal(engine.read("fixed.weight"), fixed.cpu().bfloat16().float())


def test_load_checkpoint_says_how(checkpoints, tmp_path):
    model = Tiny()
    engine, *_ = hoist.torch.initialize(model=model, config=config_at("zero2-bf16", tmp_path / "a"))
    with pytest.raises(hoist.UsageError, match="initialize\\(..., deepspeed=...\\)"):
        engine.load_checkpoint(checkpoints / "zero2-bf16")
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text("global_step4")  # as DeepSpeed's converter leaves it
    with pytest.raises(hoist.UsageError, match="initialize\\(..., deepspeed=...\\)"):
        engine.load_checkpoint(tmp_path / "universal")
    engine.close()
    model = Tiny()
    engine, *_ = hoist.torch.initialize(model=model, config=config_at("zero2-bf16", tmp_path / "b"),
                                        deepspeed=checkpoints / "zero2-bf16")
    assert engine.global_steps == STEPS
    engine.close()


# --- out -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cell", ["zero1-bf16", "zero2-fp16", "zero3-fp16"])
def test_goes_back(checkpoints, tmp_path, cell):
    """The export has all that DeepSpeed reads, as its own converter writes it, and is imported again bit by bit."""
    engine = wrap(cell, tmp_path / "store", deepspeed=checkpoints / cell)
    scale = engine.optimizer.loss_scale
    engine.save().wait()  # its scheduler is where the step is
    there = {name: [engine.read(name, state) for state in STATES] for name in
             hoist.torch.deepspeed.open(checkpoints / cell).parameters}
    rates = rates_of(engine, cell)
    engine.close()
    written = hoist.torch.deepspeed.export(tmp_path / "store", tmp_path / "out", config_of(cell))
    assert written == str(tmp_path / "out" / TAG)
    own = checkpoints / f"{cell}-universal" / TAG
    for name in there:
        files = set(os.listdir(own / "zero" / name))
        assert set(os.listdir(os.path.join(written, "zero", name))) == files
        for file in files:
            mine, theirs = (torch.load(os.path.join(place, "zero", name, file)) for place in (written, own))
            assert type(mine) is type(theirs)
            if isinstance(mine, dict):
                assert torch.equal(mine["param"], theirs["param"]) and mine["cat_dim"] == theirs["cat_dim"]
            else:
                assert torch.equal(mine, theirs)
    back = hoist.torch.deepspeed.open(tmp_path / "out")
    theirs = hoist.torch.deepspeed.open(checkpoints / f"{cell}-universal")
    assert (back.step, back.global_steps, back.loss_scale) == (theirs.step, theirs.global_steps, theirs.loss_scale)
    assert [group["lr"] for group in back.groups] == pytest.approx([group["lr"] for group in theirs.groups])
    assert back.scheduler == theirs.scheduler and back.client_state == theirs.client_state
    engine = wrap(cell, tmp_path / "again", deepspeed=back)
    assert engine.optimizer.loss_scale == scale and rates_of(engine, cell) == pytest.approx(rates)
    for name, values in there.items():
        assert all(torch.equal(engine.read(name, state), held) for state, held in zip(STATES, values, strict=True))
    engine.close()


def test_the_loss_scale_is_deepspeed_s_own_class(checkpoints, tmp_path):
    wrap("zero2-fp16", tmp_path / "store", deepspeed=checkpoints / "zero2-fp16").close()
    written = hoist.torch.deepspeed.export(tmp_path / "store", tmp_path / "out", config_of("zero2-fp16"))
    mine, theirs = (loss_scaler_in(os.path.join(place, "zero", "optimizer_state.pt")) for place in
                    (written, checkpoints / "zero2-fp16-universal" / TAG))
    assert type(mine).__module__ == "deepspeed.runtime.fp16.loss_scaler" and type(mine) is type(theirs)
    assert mine.__dict__.keys() == theirs.__dict__.keys()
    for key in theirs.__dict__.keys() - {"cur_iter", "last_overflow_iter"}:  # of which the difference counts
        assert getattr(mine, key) == getattr(theirs, key), key


def loss_scaler_in(path):
    from hoist.torch.deepspeed import files

    return files.load(path, trusted=False)["loss_scaler"]


def test_export_by_command(checkpoints, tmp_path, capsys):
    wrap("zero1-bf16", tmp_path / "store", deepspeed=checkpoints / "zero1-bf16").close()
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(config_of("zero1-bf16")))
    arguments = ["export", str(tmp_path / "store"), "--to", str(tmp_path / "out"), "--config", str(config)]
    assert command(arguments) == 0
    assert f"wrote {tmp_path / 'out' / TAG}" in capsys.readouterr().out
    assert (tmp_path / "out" / "latest_universal").read_text() == TAG
    assert command(arguments) == 2
    assert "is there already" in capsys.readouterr().err
    assert command([*arguments, "--stage", "3", "--tag", "for-zero-3"]) == 0
    assert torch.load(tmp_path / "out" / "for-zero-3" / "zero" / "token.weight" / "fp32.pt").dim() == 1


def test_inspect(checkpoints, capsys, tmp_path):
    assert command(["inspect", str(checkpoints / "zero1-fp16")]) == 0
    out = capsys.readouterr().out
    step = hoist.torch.deepspeed.open(checkpoints / "zero1-fp16").step
    assert "ZeRO stage 1, written by 2 ranks" in out and f"{step} optimizer steps (20 with skipped ones)" in out and step < 20
    assert "13 trained parameters of 550 elements, 1 frozen of 64, 2 groups, 1 buffers" in out
    assert "loss scale" in out and "client state: epoch, name" in out
    assert command(["inspect", str(tmp_path)]) == 2
    assert "latest" in capsys.readouterr().err


def test_an_unknown_next_rate_is_refused(checkpoints, tmp_path):
    """A step's own commit is made before the program's scheduler goes on."""
    engine = wrap("zero2-bf16", tmp_path / "store", deepspeed=checkpoints / "zero2-bf16")
    go_on(engine, STEPS + 1)
    engine.close()
    with pytest.raises(hoist.UsageError, match="engine.save\\(\\).wait\\(\\)"):
        hoist.torch.deepspeed.export(tmp_path / "store", tmp_path / "out", config_of("zero2-bf16"))
    assert not (tmp_path / "out").exists()


def test_pickles_are_torch_s_own(tmp_path):
    """The pickler differs from Python's in one class alone."""
    from hoist.torch.deepspeed import universal

    for values in ({"a": torch.Size([2, 3]), "b": [1.5, "x", None, set()]}, torch.float16):
        stream = io.BytesIO()
        universal._Pickler(stream, 2).dump(values)
        assert pickle.loads(stream.getvalue()) == values
