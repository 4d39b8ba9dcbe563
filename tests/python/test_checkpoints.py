# SPDX-License-Identifier: Apache-2.0
"""Steps that stay under a name: kept, gone back to, and saved and loaded as DeepSpeed's programs do."""

import copy
import logging
import os
import random
import time

import pytest
import torch

import hoist
import hoist.torch
from models import batches, has_values, loss_of
from training import digests, make, train


def keeping(settings, count, **changes):
    config = settings(**changes)
    config["hoist"]["keep_steps"] = count
    return config


# --- named checkpoints ------------------------------------------------------------------------------------------------------


def test_a_kept_step_is_gone_back_to_in_a_running_program(settings):
    """Losses, masters and moments after going back are bit for bit those of the first time."""
    with hoist.torch.wrap(make(), keeping(settings, 2)) as engine:
        train(engine, 4)
        engine.save("four", state={"note": 4})
        at_four = digests(engine)
        first = train(engine, 5, first=4)
        at_nine = digests(engine)
        engine.save("nine").wait()
        assert engine.checkpoints() == {"four": 4, "nine": 9}
        assert engine.restore("four") == 4
        assert engine.step_count == 4 and engine.state == {"note": 4} and digests(engine) == at_four
        assert train(engine, 5, first=4) == first
        assert digests(engine) == at_nine
        train(engine, 1, first=9)
        assert engine.checkpoints() == {"four": 4, "nine": 9}
        assert engine.restore("nine") == 9
        assert digests(engine) == at_nine


def test_steps_that_were_given_up_are_not_counted_in_later_warnings(settings, caplog):
    def skip_one(engine):
        inputs, targets = next(batches(1))
        engine.backward(loss_of(engine(inputs), targets) * float("nan"))
        assert not engine.step().applied

    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine, caplog.at_level(logging.WARNING, "hoist"):
        train(engine, 1)
        engine.save("one").wait()
        skip_one(engine)
        engine.restore("one")
        skip_one(engine)
        train(engine, 1, first=1)
        assert engine.was_step_applied()
        engine.restore("one")
        assert not engine.was_step_applied()
    assert [text.split(":")[0] for text in caplog.messages if "skipped" in text] == ["step 2 was skipped, 1 in a row"] * 2


def test_a_change_of_directory_leads_to_no_other_runs_files(settings, tmp_path, monkeypatch):
    """Two runs in directories of their own, with the same relative paths."""
    def begin(name, seed):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        config = keeping(settings, 1)
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] = ["nvme", "further"]
        config["hoist"] |= {"mirror": {"path": "mirror"}, "metrics": "metrics.jsonl", "trace": "trace.json"}
        return hoist.torch.wrap(make(seed), config)

    def files(name):
        return {path: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}

    with begin("other", seed=1) as engine:
        train(engine, 2)
        engine.save("mine").wait()
    others = files("other")
    with begin("own", seed=0) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path / "tags", "mine")
        at_three = digests(engine)
        losses = train(engine, 1, first=3)
        monkeypatch.chdir(tmp_path / "other")
        assert engine.checkpoints() == {"mine": 3}
        for go_back in (lambda: engine.restore("mine"), lambda: engine.load_checkpoint(tmp_path / "tags")):
            go_back()
            assert digests(engine) == at_three
            assert train(engine, 1, first=3) == losses
        engine.sleep()
        engine.wake()
        assert engine.restore() == 4
    assert files("other") == others
    assert {path.relative_to(tmp_path / "own").parts[0] for path in files("own")} == {
        "nvme", "further", "mirror", "metrics.jsonl", "metrics.jsonl.prom", "trace.json"}


def test_the_last_ones_stay(settings):
    with hoist.torch.wrap(make(), keeping(settings, 2)) as engine:
        for step in range(4):
            train(engine, 1, first=step)
            engine.save(f"s{step + 1}")
        engine.settle()
        assert engine.checkpoints() == {"s3": 3, "s4": 4}
        with pytest.raises(hoist.StoreError, match=r"'s1'.*'s3' \(step 3\), 's4' \(step 4\)"):
            engine.restore("s1")
        train(engine, 1, first=4)  # a refusal leaves the engine as it was
        assert engine.step_count == 5
        engine.save("s3").wait()
        assert engine.checkpoints() == {"s4": 4, "s3": 5}


def test_a_checkpoint_that_is_not_kept_any_more_leaves_nothing_behind(settings, tmp_path):
    """Only what save_checkpoint() has written itself is removed."""
    saved = tmp_path / "saved"
    with hoist.torch.wrap(make(), keeping(settings, 2)) as engine:
        for step in range(4):
            train(engine, 1, first=step)
            engine.save_checkpoint(saved, client_state={"epoch": step})
            if step == 1:
                (saved / "global_step2" / "notes.txt").write_text("the program's own")
        assert engine.checkpoints() == {"global_step3": 3, "global_step4": 4}
        assert sorted(p.name for p in saved.iterdir()) == ["global_step2", "global_step3", "global_step4", "latest"]
        assert [p.name for p in (saved / "global_step2").iterdir()] == ["notes.txt"]
        assert engine.load_checkpoint(saved, "global_step3")[1] == {"epoch": 2}


def test_files_of_ranks_that_were_killed_do_not_stay(settings, tmp_path):
    """Neither beside a newer step of their tag, nor when their step is given up."""
    saved = tmp_path / "saved"
    with initialize(keeping(settings, 1))[0] as engine:
        for step in range(3):
            train(engine, 1, first=step)
            if step == 1:
                for name in ("client_state-2-rank-1.pt.partial", "client_state-1.pt.partial"):
                    (saved / "a" / name).touch()
            engine.save_checkpoint(saved, tag="ab"[step == 2])
            if step == 1:
                assert os.listdir(saved / "a") == ["client_state-2.pt"]
                (saved / "a" / "client_state-2-rank-1.pt.partial").touch()
        assert sorted(os.listdir(saved)) == ["b", "latest"]


def test_a_later_program_goes_back_too(settings):
    config = keeping(settings, 1)
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 3)
        engine.save("three")
        expected = train(engine, 4, first=3)
    with hoist.torch.wrap(make(seed=3), config, resume=True) as engine:
        assert engine.step_count == 7 and engine.checkpoints() == {"three": 3}
        assert engine.restore("three") == 3
        assert train(engine, 4, first=3) == expected


@pytest.mark.parametrize("where, name", [("memory", ""), ("memory", "x"), ("checkpoint_path", ""), ("checkpoint_path", "x"),
                                         ("nvme", "x"), ("backward", "x")])
def test_a_restore_of_what_is_not_there_gives_up_nothing(settings, tmp_path, where, name):
    """Without a store, before the first commit, or by a name that is not kept: the run goes on."""
    config = settings()
    if where == "backward":
        config["hoist"]["update_mode"] = "backward"
    elif where != "nvme":
        config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    if where == "checkpoint_path":
        config["hoist"]["checkpoint_path"] = str(tmp_path / "store")
    with hoist.torch.wrap(make(), copy.deepcopy(config)) as engine:
        train(engine, 2)
        before = digests(engine)
        refusal = {"memory": "all state is in memory"}.get(where, "no named checkpoint 'x'" if name else "holds no commit yet")
        with pytest.raises(hoist.Error, match=refusal):
            engine.restore(name)
        assert engine.step_count == 2 and digests(engine) == before
        inputs, targets = next(batches(1))
        loss = loss_of(engine(inputs), targets)  # a pass under way
        with pytest.raises(hoist.Error, match=refusal):
            engine.restore(name)
        engine.backward(loss)
        with pytest.raises(hoist.Error, match=refusal):
            engine.restore(name)
        assert engine.step().applied and engine.step_count == 3


def test_weights_that_are_up_do_not_outlive_a_restore(settings):
    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine:
        train(engine, 1)
        engine.save("one")
        before = engine.state_dict()
        inputs, targets = next(batches(1))
        train(engine, 2, first=1)
        abandoned = loss_of(engine(inputs), targets)  # a forward pass under way
        engine.restore("one")
        assert not has_values(engine.module.blocks[0].up.weight)
        with pytest.raises((hoist.UsageError, RuntimeError)):
            engine.backward(abandoned)
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert len(train(engine, 2, first=1)) == 2


# --- schedules -------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "recursive": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "closed": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4), torch.optim.lr_scheduler.StepLR(o, 2)], [4]),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_back_to_where_it_was(settings, kind):
    config = keeping(settings, 1)
    rates, losses = [], []
    with hoist.torch.wrap(make(), config) as engine:
        engine.lr_scheduler = SCHEDULES[kind](engine.optimizer)
        for step in range(10):
            if step == 5:
                engine.save("five")
            losses += train(engine, 1, first=step)
            rates.append(engine.optimizer.param_groups[0]["lr"])
    with hoist.torch.wrap(make(seed=4), config, resume=True) as engine:
        engine.restore("five")
        engine.lr_scheduler = SCHEDULES[kind](engine.optimizer)
        assert engine.optimizer.param_groups[0]["lr"] == rates[4]
        for step in range(5, 10):
            assert train(engine, 1, first=step) == losses[step:step + 1]
            assert engine.optimizer.param_groups[0]["lr"] == rates[step]
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = SCHEDULES[kind](plain)
    for rate in rates:
        plain.step()
        schedule.step()
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)


def test_a_save_between_the_update_and_the_schedule(settings):
    """As a signal handler makes it in step(): the schedule is stepped when the run goes back to it."""
    config = keeping(settings, 1)
    with hoist.torch.wrap(make(), config) as engine:
        engine.lr_scheduler = SCHEDULES["closed"](engine.optimizer)
        engine.optimizer.register_step_post_hook(lambda *_: engine.step_count == 2 and engine.save("two").wait())
        losses = train(engine, 4)
    with hoist.torch.wrap(make(seed=4), config, resume=True) as engine:
        engine.restore("two")
        engine.lr_scheduler = SCHEDULES["closed"](engine.optimizer)
        assert engine.lr_scheduler.last_epoch == 2
        assert train(engine, 2, first=2) == losses[2:]


# --- in DeepSpeed's shape --------------------------------------------------------------------------------------------


def generators():
    """What has the states of all random numbers: of the CPU, and of the default device."""
    device = torch.get_default_device()
    return [torch.random] if device.type == "cpu" else [torch.random, torch.get_device_module(device)]


def random_batch():
    tokens = torch.randint(0, 97, (4, 17))
    return tokens[:, :-1], tokens[:, 1:]


def train_at_random(engine, steps):
    """Data, and what is dropped, come from the global generators: only a program that restores it repeats a run."""
    losses = []
    for _ in range(steps):
        inputs, targets = random_batch()
        loss = loss_of(torch.nn.functional.dropout(engine(inputs), 0.1), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def initialize(config, seed=0):
    model = make(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return hoist.torch.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)


def test_saved_and_loaded_as_by_deepspeeds_programs(settings, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    engine, optimizer, _, _ = initialize(settings())
    torch.manual_seed(11)
    random.seed(5)
    train_at_random(engine, 3)
    assert engine.save_checkpoint(checkpoints, client_state={
        "epoch": 2, "random": [each.get_rng_state() for each in generators()], "python": random.getstate(),
        "best": torch.tensor([1.5])})
    drawn = random.random()
    expected = train_at_random(engine, 4)
    rate = optimizer.param_groups[0]["lr"]
    expected_digests = digests(engine)
    engine.close()
    assert (checkpoints / "latest").read_text() == "global_step3"
    assert os.listdir(checkpoints / "global_step3") == ["client_state-3.pt"]

    engine, optimizer, _, _ = initialize(settings(), seed=8)
    with pytest.raises(hoist.StoreError, match="load_checkpoint"):
        engine(random_batch()[0])
    with pytest.raises(hoist.StoreError, match="load_checkpoint"):
        engine.state_dict()
    path, client = engine.load_checkpoint(checkpoints)
    assert path == str(checkpoints / "global_step3")
    assert client["epoch"] == 2 and client["best"].item() == 1.5
    assert engine.global_steps == 3
    for generator, state in zip(generators(), client["random"], strict=True):
        generator.set_rng_state(state)
    random.setstate(client["python"])
    assert random.random() == drawn
    assert train_at_random(engine, 4) == expected
    assert digests(engine) == expected_digests
    assert optimizer.param_groups[0]["lr"] == rate
    engine.close()


def test_a_second_engine_of_one_store_is_told_so_when_it_is_made(settings):
    """An actor and a critic that have one configuration. What the store holds is the first one's run."""
    engine, *_ = initialize(settings())
    with pytest.raises(hoist.StoreError, match="in use by another engine of this process.*nvme_path .*of its own"):
        initialize(settings())
    train(engine, 1)
    with pytest.raises(hoist.StoreError, match="in use by another engine of this process"):
        hoist.torch.wrap(make(), settings(), load_later=True)
    engine.sleep()  # gives the store back
    other, *_ = initialize(settings())
    other.restore()
    assert other.step_count == 1
    other.close()
    engine.wake()
    train(engine, 1, first=1)
    engine.close()


def test_loading_without_the_schedule(settings, tmp_path):
    engine, optimizer, _, _ = initialize(settings())
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "c", tag="three")
    assert optimizer.param_groups[0]["lr"] == 5e-4
    engine.close()
    engine, optimizer, _, _ = initialize(settings())
    engine.load_checkpoint(tmp_path / "c", load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 5e-4  # the optimizer's
    train(engine, 1)
    engine.close()


def test_rates_that_the_program_sets_itself_come_back(settings):
    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine:
        for step in range(4):
            engine.optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            train(engine, 1, first=step)
            if step == 1:
                engine.save("two")
        engine.restore("two")
        assert engine.optimizer.param_groups[0]["lr"] == 5e-4
        train(engine, 1, first=2)
        assert engine.get_lr() == [5e-4]


@pytest.mark.parametrize("tag", ["", "latest", "latest/a", ".", "./a", "../a", "a/..", "/a", "a\nb", "x" * 48, "x" * 300])
def test_a_tag_that_cannot_be_kept_is_refused_before_anything_is_written(settings, tmp_path, tag):
    engine, *_ = initialize(keeping(settings, 1))
    with engine:
        engine.save_checkpoint(tmp_path / "c", tag="first")
        before = sorted((tmp_path / "c").rglob("*"))
        with pytest.raises(hoist.UsageError, match="save_checkpoint"):
            engine.save_checkpoint(tmp_path / "c", tag=tag)
        assert sorted((tmp_path / "c").rglob("*")) == before and sorted(engine.checkpoints()) == ["first"]


def test_what_was_not_saved_is_not_loaded(settings, tmp_path, caplog):
    engine, *_ = initialize(settings())
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    assert "latest" in caplog.text
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "c", tag="a")
    train(engine, 1, first=1)
    engine.save_checkpoint(tmp_path / "c", tag="b", save_latest=False)
    assert (tmp_path / "c" / "latest").read_text() == "a"
    with pytest.raises(hoist.StoreError, match=r"'a'.*'b' \(step 2\)"):  # one stays, where the configuration does not say
        engine.load_checkpoint(tmp_path / "c", tag="a")
    with pytest.raises(hoist.StoreError, match=r"'a'.*'b' \(step 2\)"):  # 'b' was not saved there
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "latest").write_text("a")
        engine.load_checkpoint(tmp_path / "f")
    with pytest.raises(hoist.StoreError, match="another one"):  # the name is kept, of another directory's step
        (tmp_path / "d" / "b").mkdir(parents=True)
        (tmp_path / "d" / "b" / "client_state-1.pt").touch()
        engine.load_checkpoint(tmp_path / "d", tag="b")
    (tmp_path / "e" / "global_step7").mkdir(parents=True)
    (tmp_path / "e" / "global_step7" / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(hoist.UsageError, match="moments and all: wrap"):
        engine.load_checkpoint(tmp_path / "e", tag="global_step7")
    with pytest.raises(hoist.UsageError, match="whole"):
        engine.load_checkpoint(tmp_path / "c", load_module_only=True)
    assert engine.load_checkpoint(tmp_path / "c", tag="b")[0] is not None
    assert engine.step_count == 2
    engine.close()
    engine, *_ = initialize(settings(store="other"))
    with pytest.raises(hoist.StoreError, match=r"other/hoist has no named checkpoint 'a': a run begins there\. The model"):
        engine.load_checkpoint(tmp_path / "c")
    engine.close()


def test_without_room_for_kept_steps_saving_is_refused(settings, tmp_path):
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 1)
        with pytest.raises(hoist.UsageError, match="hoist.*keep_steps"):
            engine.save_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_saving_after_a_step_does_not_wait_for_the_next_pass(settings, tmp_path):
    """In update mode "forward" a step's update waits 5 seconds for the next pass to ask for it."""
    config = keeping(settings, 3)
    config["hoist"]["update_mode"] = "forward"
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 2)
        seconds = []
        for step in range(3):  # a busy machine may delay one of them, what waits for the pass delays all
            began = time.monotonic()
            engine.save_checkpoint(tmp_path / f"c{step}")
            seconds.append(time.monotonic() - began)
            train(engine, 1, first=2 + step)
        assert min(seconds) < 4, seconds


def test_the_first_tag_that_goes_is_said(settings, tmp_path, caplog):
    """DeepSpeed keeps all tags; here as many stay as the configuration has room for, one if it does not say."""
    engine, _, _, _ = initialize(settings())
    for step in range(3):
        train(engine, 1, first=step)
        engine.save_checkpoint(tmp_path / "c")
    assert engine.checkpoints() == {"global_step3": 3}
    engine.close()
    said = [record.getMessage() for record in caplog.records if "made room" in record.getMessage()]
    assert len(said) == 1 and "'global_step1' made room for 'global_step2': the last 1 stay" in said[0]
