# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that DeepSpeed 0.19 wrote (make_deepspeed_files.py) go on here as they went on there, and stores go back."""

import io
import json
import logging
import os
import pickle
import shutil
import signal

import pytest
import torch
from deepspeed_runs import BOUND, STATES, TAG, bound_of, change, config_at, damage, go_on, rates_of, refusal, wrap

import hoist
import hoist.store
import hoist.torch
import hoist.torch.deepspeed
from hoist.torch.deepspeed.__main__ import main as command
from make_deepspeed_files import CELLS, LAST, RANKS, STEPS, config_of, groups_of
from models import Tiny
from ranks import output_of, results, start


@pytest.fixture(scope="session")
def expected(checkpoints):
    return json.loads((checkpoints / "losses.json").read_text())


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


def test_files_are_found_from_another_directory(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoints)
    checkpoint = hoist.torch.deepspeed.open("zero3-bf16-universal")
    monkeypatch.chdir(tmp_path)
    with wrap("zero3-bf16", tmp_path, deepspeed=checkpoint) as engine:
        assert engine.global_steps == STEPS


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
        if "zero3" in cell:
            parts = [torch.load(checkpoints / cell / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
                     ["frozen_param_fragments"]["fixed.weight"] for rank in range(RANKS)]
            fixed = torch.cat(parts)
        else:
            fixed = torch.load(checkpoints / cell / TAG / "mp_rank_00_model_states.pt")["module"]["fixed.weight"].view(-1)
        assert torch.equal(engine.read("fixed.weight").view(-1), fixed.float()[:checkpoint.frozen["fixed.weight"].numel()])
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


@pytest.mark.parametrize("second, expected", [
    ("other", "the ranks have different checkpoints"), ("damaged", "is damaged"),
    (None, "rank 0 passes deepspeed=..., and rank 1 does not: pass it on every rank")])
def test_ranks_that_begin_with_different_or_damaged_files(checkpoints, spoil, tmp_path, second, expected):
    copy = spoil("zero1-bf16")
    files = [str(checkpoints / "zero1-bf16"), second and str(copy)]
    if second == "damaged":
        damage(copy / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
        files = [str(copy)] * 2
    else:
        change(copy / "mp_rank_00_model_states.pt", lambda model: model.update(epoch=7))
    program = """
    from test_deepspeed_checkpoints import wrap
    join()
    try:
        wrap("zero1-bf16", directory, deepspeed=config["files"][rank], micro_batch=2)
    except hoist.Error as error:
        print(json.dumps(str(error)), flush=True)
    """
    texts = results(start(program, tmp_path, {"files": files}))
    assert all(expected in text for text in texts)


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
    output_of("""
        import sys
        from test_deepspeed_checkpoints import die_in_the_middle
        die_in_the_middle(sys.argv[1], sys.argv[2], "zero2-bf16", int(sys.argv[3]))
    """, tmp_path, files, calls, ends_with=-signal.SIGKILL)
    assert hoist.store.steps(tmp_path).commits == []
    with wrap("zero2-bf16", tmp_path, deepspeed=files, resume=True) as engine:
        assert engine.step_count == STEPS


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


def test_groups_of_a_model_on_the_meta_device_are_those_of_the_files(spoil, caplog):
    path = spoil("zero2-bf16")
    rates = iter([0.25, 0.5] * 2)
    edit_groups(path, lambda group: group.update(lr=next(rates)))
    with torch.device("meta"):
        model = Tiny()
    model.calls = torch.zeros(1)
    with (caplog.at_level(logging.WARNING, "hoist"),
          wrap_without_schedule("zero2-bf16", path.parent / "store", 0.005, model, groups=groups_of(model),
                                deepspeed=path) as engine):
        assert engine.get_lr() == [0.25, 0.5], caplog.text
    assert "weight_decay" not in caplog.text


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


def rates_by_parameter(path, groups, caplog, with_scheduler):
    """What parameters go on with: the rate, and the rate that the scheduler began with. And the warnings."""
    model = Tiny()
    names = {id(p): name for name, p in model.named_parameters()}
    named = [[names[id(p)] for p in group["params"]] for group in groups(model)]
    caplog.clear()
    with (caplog.at_level(logging.WARNING, "hoist"),
          wrap_without_schedule("zero2-bf16", path.parent / "store", 0.005, model, groups=groups(model),
                                deepspeed=path) as engine):
        if with_scheduler:
            engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
        bases = engine.lr_scheduler.base_lrs if with_scheduler else [0.005] * 2
        found = {name: (group["lr"], base) for of_group, group, base in zip(
            named, engine.optimizer.param_groups, bases, strict=True) for name in of_group}
    shutil.rmtree(path.parent / "store")
    return found, caplog.text


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_rates_go_to_the_groups_that_had_them(spoil, caplog, with_scheduler):
    """Whatever the order of the groups is. Groups of other parameters have no rates there."""
    path = spoil("zero2-bf16")
    rates = iter([0.25, 0.5] * 2)
    edit_groups(path, lambda group: group.update(lr=next(rates)))
    change(path / "mp_rank_00_model_states.pt", lambda file: file.update(lr_scheduler=file["lr_scheduler"] | {
        "base_lrs": [1.0, 2.0], "_last_lr": [0.25, 0.5], "last_epoch": 7}))

    def other(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        return [{"params": trained[:2]}, {"params": trained[2:]}]

    same, _ = rates_by_parameter(path, groups_of, caplog, with_scheduler)
    assert {rate for rate, _ in same.values()} == {0.25, 0.5}
    reverse, _ = rates_by_parameter(path, lambda model: groups_of(model)[::-1], caplog, with_scheduler)
    assert reverse == same
    differ, text = rates_by_parameter(path, other, caplog, with_scheduler)
    assert set(differ.values()) == {(0.005, 0.005)}
    assert "had come to [0.25, 0.5], and the groups here have other parameters: [0.005, 0.005]" in text
    assert "its scheduler has other rates for each parameter group" in text and "groups=..." in text
    rates = iter([0.25] * 4)  # nothing depends on the groups then
    edit_groups(path, lambda group: group.update(lr=next(rates)))
    change(path / "mp_rank_00_model_states.pt", lambda file: file["lr_scheduler"].update(base_lrs=[1.0] * 2, _last_lr=[0.25] * 2))
    alike, text = rates_by_parameter(path, other, caplog, with_scheduler)
    assert {rate for rate, _ in alike.values()} == {0.25} and "other parameters" not in text


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
