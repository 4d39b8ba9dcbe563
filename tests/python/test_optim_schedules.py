# SPDX-License-Identifier: Apache-2.0
"""Schedules of learning rates with hoist.optim: what a run that goes on, or goes back, finds of them."""

import gc

import pytest
import torch
from optim_program import BUDGETS
from torch import nn

import hoist
import hoist.optim
import hoist.optim.pieces
import hoist.store

pytestmark = pytest.mark.usefixtures("small_units")


SCHEDULES = {
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
    "LinearLR to 0": lambda o: torch.optim.lr_scheduler.LinearLR(o, end_factor=0.0, total_iters=5),  # to -1e-18
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.5, 1.0], total_steps=10, cycle_momentum=False),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)], [3]),
}


def two_groups(lr=0.1, **arguments):
    groups = [{"params": [nn.Parameter(torch.ones(10))]}, {"params": [nn.Parameter(torch.ones(10))], "lr": 0.3, "name": "head"}]
    return hoist.optim.AdamW(groups, lr=lr, **BUDGETS, **arguments)


def rates_of(optimizer, schedule, steps):
    """The rates of each step."""
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(10)
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        if schedule is not None:
            schedule.step()
    return rates


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues_where_it_was(tmp_path, name, offload):
    """Made as in the first run, and given to the resumed optimizer: after one step, and later, whoever made the commit."""
    optimizer = two_groups(offload="cpu")
    expected = rates_of(optimizer, SCHEDULES[name](optimizer), 9)
    optimizer.close()
    arguments = {"offload": offload, "directory": str(tmp_path / "store")}
    rates = []
    for count in (1, 3, 5):
        optimizer = two_groups(**arguments, resume=True)
        optimizer.lr_scheduler = schedule = SCHEDULES[name](optimizer)
        rates += rates_of(optimizer, schedule, count)
        if offload == "cpu":
            optimizer.save().wait()  # after the schedule's step
        optimizer.close()
    for ours, theirs in zip(rates, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_loading_the_state_that_is_there_keeps_the_saved_schedule(tmp_path):
    """As accelerate's prepare() does."""
    expected = rates_of(optimizer := two_groups(offload="cpu"), SCHEDULES["ExponentialLR"](optimizer), 3)
    optimizer.close()
    rates = []
    for _ in range(3):
        optimizer = two_groups(offload="nvme", directory=str(tmp_path / "store"), resume=True)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
        rates += rates_of(optimizer, schedule, 1)
        optimizer.close()
    assert rates == expected


def test_a_schedule_that_needs_metrics_is_resumed(tmp_path, caplog):
    arguments = {"offload": "nvme", "directory": str(tmp_path / "store"), "resume": True}
    for run in range(2):
        optimizer = two_groups(**arguments)
        optimizer.lr_scheduler = schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        assert ("needs more than that step" in caplog.text) == (run == 1)
        if run == 1:
            schedule.step(1.0)
        rates_of(optimizer, None, 1)
        schedule.step(1.0)
        rates_of(optimizer, None, 1)  # committed before the schedule's step
        assert [group["lr"] for group in optimizer.param_groups] == ([0.1, 0.3] if run == 0 else [0.025, 0.075])
        optimizer.close()


def test_a_schedule_goes_back_with_a_named_checkpoint(tmp_path):
    optimizer = two_groups(offload="cpu", directory=str(tmp_path / "store"), keep_steps=1)
    optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
    rates_of(optimizer, schedule, 2)
    optimizer.save("two").wait()
    after = rates_of(optimizer, schedule, 3)
    assert optimizer.restore("two") == 2 and optimizer.lr_scheduler is schedule
    assert rates_of(optimizer, schedule, 3) == after
    with pytest.raises(hoist.UsageError, match="ExponentialLR sets the rates of another optimizer"):
        optimizer.lr_scheduler = SCHEDULES["ExponentialLR"](two_groups(offload="cpu"))
    optimizer.close()


def test_a_schedule_can_be_made_for_a_later_step(tmp_path):
    """OneCycleLR reads its own entries of the groups."""
    arguments = {"offload": "cpu", "directory": str(tmp_path / "store"), "commit_every": 1}
    optimizer = two_groups(**arguments)
    expected = rates_of(optimizer, SCHEDULES["OneCycleLR"](optimizer), 3)
    optimizer.close()
    optimizer = two_groups(**arguments, resume=True)
    assert optimizer.param_groups[1]["name"] == "head"
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 1.0], total_steps=10, cycle_momentum=False,
                                        last_epoch=optimizer.step_count - 2)
    assert [group["lr"] for group in optimizer.param_groups] == expected[-1]
    optimizer.close()


def test_a_schedule_of_epochs_is_the_programs(tmp_path):
    """As docs/pytorch.md says."""
    arguments = {"offload": "cpu", "directory": str(tmp_path / "store"), "commit_every": 1}
    optimizer = two_groups(**arguments)
    schedule = SCHEDULES["LinearLR"](optimizer)
    for _ in range(2):
        optimizer.commit_state["schedule"] = schedule.state_dict()
        last = rates_of(optimizer, None, 2)[-1]
        schedule.step()
    optimizer.close()
    optimizer = two_groups(**arguments, resume=True)
    schedule = SCHEDULES["LinearLR"](optimizer)
    schedule.load_state_dict(optimizer.commit_state["schedule"])
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    assert rates_of(optimizer, None, 1) == [last]
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * 0.4, 0.3 * 0.4])
    optimizer.close()


def test_the_log_says_what_a_resumed_run_does_not_bring(tmp_path, caplog):
    """Buffers, and rates that a schedule has set anew before it could be known."""
    arguments = {"offload": "cpu", "directory": str(tmp_path / "store"), "commit_every": 1}
    optimizer = two_groups(**arguments)
    rates_of(optimizer, SCHEDULES["ExponentialLR"](optimizer), 3)
    optimizer.close()
    with caplog.at_level("INFO", logger="hoist"):
        optimizer = two_groups(**arguments, resume=True)
        assert "resuming at step 3" in caplog.text and "Buffers" in caplog.text
        caplog.clear()
        rates_of(optimizer, None, 1)
        assert "learning rates" not in caplog.text
        optimizer.close()
        optimizer = two_groups(**arguments, resume=True)
        optimizer.lr_scheduler = schedule = SCHEDULES["LinearLR"](optimizer)  # which the first run did not
        rates_of(optimizer, schedule, 1)
        assert "had come to [0.025, 0.075]" in caplog.text and "optimizer.lr_scheduler" in caplog.text
        optimizer.close()


def test_other_rates_than_the_run_began_with_count(tmp_path, caplog):
    arguments = {"offload": "cpu", "directory": str(tmp_path / "store"), "commit_every": 1}
    optimizer = two_groups(**arguments)
    schedule = SCHEDULES["ExponentialLR"](optimizer)
    rates_of(optimizer, schedule, 3)
    optimizer.close()
    optimizer = two_groups(lr=1e-3, **arguments, resume=True)
    assert "began with [0.1, 0.3] and had come to [0.025, 0.075]; this program asks for [0.001, 0.3]" in caplog.text
    assert torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1, last_epoch=0).base_lrs == [1e-3, 0.3]
    schedule = SCHEDULES["ExponentialLR"](optimizer)
    assert rates_of(optimizer, schedule, 2) == [[1e-3, 0.3], [5e-4, 0.15]]
    optimizer.close()
    optimizer = two_groups(lr=1e-3, **arguments, resume=True)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 0.15]
    optimizer.close()


@pytest.mark.parametrize("sets", [True, False])
def test_a_saved_schedule_goes_on_with_its_own_rates_where_others_are_asked_for(tmp_path, caplog, sets):
    arguments = {"offload": "cpu", "directory": str(tmp_path / "store"), "commit_every": 1}
    optimizer = two_groups(**arguments)
    optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
    rates_of(optimizer, schedule, 3)
    optimizer.close()
    optimizer = two_groups(lr=1e-3, **arguments, resume=True)
    assert "learning rates" not in caplog.text
    schedule = SCHEDULES["ExponentialLR"](optimizer)
    if sets:
        optimizer.lr_scheduler = schedule
    assert rates_of(optimizer, schedule, 2) == ([[0.0125, 0.0375], [0.00625, 0.01875]] if sets else [[1e-3, 0.3], [5e-4, 0.15]])
    assert ("began with [0.1, 0.3], and this program asks for [0.001, 0.3]. Its schedule goes on" in caplog.text) == sets
    assert ("had come to [0.025, 0.075], and the program has set [0.001, 0.3]" in caplog.text) == (not sets)
    optimizer.close()


# --- state_dict ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_was_dropped_with_its_schedule_gives_the_store_back(tmp_path):
    for count in range(3):
        optimizer = two_groups(offload="nvme", directory=tmp_path / "store", resume=True)
        assert optimizer.step_count == count
        optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
        rates_of(optimizer, schedule, 1)
        del optimizer, schedule
    gc.collect()
