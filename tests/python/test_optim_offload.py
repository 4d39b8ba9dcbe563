# SPDX-License-Identifier: Apache-2.0
"""hoist.optim with offloaded states: the bits of the optimizers in memory, wherever states are and however they are divided."""

import copy
import gc
import json
import signal
import weakref

import accelerator
import pytest
import torch
from test_processes import run_program
from torch import nn

import hoist
import hoist.optim
import hoist.optim_pieces
import hoist.store
from models import Gpt, batches, loss_of

in_memory = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="states in memory are beside CPU tensors")
BUDGETS = {"pinned_memory": "32MiB", "device_memory": "16MiB"}
OPTIMIZERS = [
    ("AdamW", {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Lion", {"lr": 1e-3, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units, and parameters in pieces, of models that would be one unit."""
    monkeypatch.setattr(hoist.optim_pieces, "_UNIT_ELEMENTS", 5000)
    monkeypatch.setattr(hoist.optim_pieces, "_PIECE_ELEMENTS", 3000)


def place(offload, tmp_path, name="store"):
    return {"offload": offload, **BUDGETS} | ({"directory": str(tmp_path / name)} if offload == "nvme" else {})


def scheduler_of(optimizer, steps_done):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step), last_epoch=steps_done - 1)


class Program:
    """A training loop with made-up gradients: two micro-batches a step, clipped, and a schedule for each of two groups."""

    def __init__(self, optimizer, dtype=torch.float32, device=None, first=0, settings=None, **arguments):
        made = torch.Generator().manual_seed(1)
        shapes = [(70, 100), (33,), (40, 25), (), (4001,)]
        self.parameters = [nn.Parameter(torch.randn(shape, generator=made, device="cpu").to(device or "cpu", dtype))
                           for shape in shapes]
        groups = [{"params": self.parameters[::2]}, {"params": self.parameters[1::2], "lr": 3e-3}]
        self.optimizer = getattr(hoist.optim, optimizer)(groups, **(settings or {}), **arguments)
        self.scheduler = scheduler_of(self.optimizer, first)

    def train(self, first, last):
        for step in range(first, last):
            # A GPU rounds in other places than the CPU, where `expected` comes from.
            values = [nn.Parameter(p.detach().cpu()) for p in self.parameters] if accelerator.ON_GPU else self.parameters
            for micro_batch in range(2):
                made = torch.Generator().manual_seed(2 * step + micro_batch)
                for value in values:
                    noise = torch.randn(value.shape, generator=made, device="cpu").to(value.device, value.dtype)
                    gradient = (noise + 0.1 * value.detach()) / 2
                    value.grad = gradient if value.grad is None else value.grad + gradient
            torch.nn.utils.clip_grad_norm_(values, 20.0)
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.grad = value.grad.to(parameter.device)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def bits(self):
        """Weights and masters."""
        return [p.detach().cpu().clone() for p in self.parameters] + [self.optimizer.master(p) for p in self.parameters]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, settings", OPTIMIZERS)
def test_bits_are_those_in_memory(tmp_path, kind, settings, dtype):
    expected = Program(kind, dtype, settings=settings).train(0, 12).bits()
    for offload in ("cpu", "nvme"):
        program = Program(kind, dtype, torch.get_default_device(), settings=settings, **place(offload, tmp_path))
        with program.optimizer:
            assert_equal(program.train(0, 12).bits(), expected)
            assert program.optimizer.step_count == 12
            cut = program.optimizer._offloaded._cut
            assert len(cut.units) > 2 and len(cut.pieces) > len(program.parameters)


def test_fp16_weights_have_whole_masters(tmp_path):
    masters = [nn.Parameter(torch.randn(5000, device="cpu")) for _ in range(2)]
    for master in masters:
        master.data = master.half().float()
    weights = [nn.Parameter(master.detach().half().to(torch.get_default_device())) for master in masters]
    theirs = hoist.optim.AdamW(masters, lr=1e-4)
    with hoist.optim.AdamW(weights, lr=1e-4, **place("nvme", tmp_path)) as ours:
        for step in range(10):
            for weight, master in zip(weights, masters, strict=True):
                gradient = torch.randn(5000, generator=torch.Generator().manual_seed(step), device="cpu").half()
                weight.grad, master.grad = gradient.to(weight.device), gradient.float()
            ours.step()
            theirs.step()
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(ours.master(weight), master.detach())
            assert torch.equal(weight.detach().cpu(), master.detach().half())


def gpt(seed=0):
    torch.manual_seed(seed)
    return Gpt()


def train(model, optimizer, first, last):
    for index, (inputs, targets) in enumerate(batches(last)):
        if index >= first:
            loss_of(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind, settings", [each for each in OPTIMIZERS if each[0] != "Lion"])
def test_a_model_trains_as_with_pytorchs(kind, settings):
    ours, theirs = gpt(), gpt()
    optimizer = getattr(hoist.optim, kind)(ours.parameters(), **settings, offload="cpu", **BUDGETS)
    expected = train(theirs, getattr(torch.optim, kind)(theirs.parameters(), **settings), 0, 10)
    for a, b in zip(train(ours, optimizer, 0, 10), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    optimizer.close()


# --- commits -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_killed_run_continues_with_the_same_bits(tmp_path, dtype):
    expected = Program("AdamW", dtype).train(0, 12).bits()
    arguments = place("nvme", tmp_path)
    killed = run_program("""
        import json, os, sys
        import hoist.optim, hoist.optim_pieces
        import torch
        from test_optim_offload import Program
        hoist.optim_pieces._UNIT_ELEMENTS, hoist.optim_pieces._PIECE_ELEMENTS = 5000, 3000
        program = Program("AdamW", getattr(torch, sys.argv[2]), **json.loads(sys.argv[1]))
        for step in range(9):
            program.optimizer.commit_state["next"] = step + 1
            program.train(step, step + 1)
            if step == 6:
                program.optimizer.settle()
        os.kill(os.getpid(), 9)
    """, json.dumps(arguments), str(dtype).removeprefix("torch."))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.raises(hoist.StoreError, match="resume|holds"):
        Program("AdamW", dtype, **arguments)
    found = hoist.optim.AdamW([{"params": [nn.Parameter(p.detach().clone()) for p in group["params"]]}
                               for group in Program("AdamW", dtype).optimizer.param_groups], **arguments, resume=True)
    steps = found.step_count
    assert found.restored and 7 <= steps <= 9 and found.commit_state == {"next": steps}
    found.close()
    program = Program("AdamW", dtype, first=steps, resume=True, **arguments)
    assert program.optimizer.param_groups[1]["lr"] == pytest.approx(3e-3 / (1 + 0.1 * steps))
    assert_equal(program.train(steps, 12).bits(), expected)
    program.optimizer.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_steps_are_kept_by_name(tmp_path, offload):
    arguments = place(offload, tmp_path) | {"directory": str(tmp_path / "store"), "keep_steps": 1}
    program = Program("AdamW", torch.bfloat16, torch.get_default_device(), **arguments).train(0, 3)
    with pytest.raises(hoist.UsageError, match=r"commit_state\['note'\] has the type torch.Tensor"):
        program.optimizer.commit_state["note"] = torch.ones(1)
        program.optimizer.save()
    program.optimizer.commit_state = {"note": (3, {3: "three"})}
    program.optimizer.save("three").wait()
    at_three = program.bits()
    after = program.train(3, 6).bits()
    assert program.optimizer.checkpoints() == {"three": 3}
    assert program.optimizer.restore("three") == 3 and program.optimizer.commit_state == {"note": (3, {3: "three"})}
    assert_equal(program.bits(), at_three)
    program.scheduler = scheduler_of(program.optimizer, 3)
    assert_equal(program.train(3, 6).bits(), after)
    program.optimizer.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("has_store, name, match", [(False, "", "all state is in memory"), (False, "x", "all state is in memory"),
                                                    (True, "", "holds no commit yet"), (True, "x", "keeps no step 'x'")])
def test_a_restore_of_what_is_not_there_gives_up_nothing(tmp_path, offload, has_store, name, match):
    if offload == "nvme" and not (has_store and name):
        return
    arguments = {"offload": offload, **BUDGETS} | ({"directory": str(tmp_path / "store"), "keep_steps": 1} if has_store else {})
    undisturbed = Program("AdamW", offload="cpu", **BUDGETS).train(0, 4).bits()
    program = Program("AdamW", **arguments).train(0, 2)
    with pytest.raises(hoist.Error, match=match):
        program.optimizer.restore(name)
    assert_equal(program.train(2, 4).bits(), undisturbed)


def test_states_in_memory_are_committed_as_often_as_asked(tmp_path):
    arguments = place("cpu", tmp_path) | {"directory": str(tmp_path / "store"), "commit_every": 2}
    program = Program("AdamW", **arguments).train(0, 4)
    at_four = program.bits()
    program.train(4, 5).optimizer.close()
    program = Program("AdamW", **arguments, resume=True)
    assert program.optimizer.step_count == 4
    assert_equal(program.bits(), at_four)
    program.optimizer.close()


def test_the_store_has_the_parameters_names(tmp_path):
    model = gpt()
    with hoist.optim.AdamW(model.named_parameters(), **place("nvme", tmp_path)) as optimizer:
        weights = dict(zip(dict(model.named_parameters()), train(model, optimizer, 0, 2), strict=True))
    with hoist.store.open(tmp_path / "store") as stored:
        assert stored.step == 2
        large = weights.pop("token.weight")
        assert torch.equal(stored["token.weight[0:93]"], large[:93])  # rows of 32, at most 3000 elements
        assert torch.equal(stored["token.weight[93:97]"], large[93:])
        for name in (name for name in stored if "[" not in name):
            assert torch.equal(stored[name], weights[name])


# --- schedules of a run that is resumed ----------------------------------------------------------------------------------

SCHEDULES = {
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
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
    optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
    rates_of(optimizer, schedule, 3)
    optimizer.close()
    optimizer = two_groups(lr=1e-3, **arguments, resume=True)
    assert "began with [0.1, 0.3] and had come to [0.025, 0.075]; this program asks for [0.001, 0.3]" in caplog.text
    optimizer.lr_scheduler = schedule = SCHEDULES["ExponentialLR"](optimizer)
    assert rates_of(optimizer, schedule, 2) == [[1e-3, 0.3], [5e-4, 0.15]]
    optimizer.close()
    optimizer = two_groups(lr=1e-3, **arguments, resume=True)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 0.15]
    optimizer.close()


# --- state_dict ----------------------------------------------------------------------------------------------------------

def copies_of(program):
    return [p.detach().clone() for p in program.parameters]


@torch.no_grad()
def copy_weights(program, into):
    for parameter, value in zip(into.parameters, program.parameters, strict=True):
        parameter.copy_(value)


@pytest.mark.parametrize("weights_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, settings", OPTIMIZERS)
def test_a_state_dict_moves_between_all_places(tmp_path, kind, settings, dtype, weights_first):
    """From memory to pinned memory, to NVMe, and back, two steps in each; before the model's weights are loaded, and after."""
    expected = Program(kind, dtype, settings=settings).train(0, 8).bits()
    program = Program(kind, dtype, settings=settings).train(0, 2)
    for number, offload in enumerate(["cpu", "nvme", None]):
        arguments = {} if offload is None else place(offload, tmp_path, f"store{number}")
        following = Program(kind, dtype, settings=settings, **arguments)

        saved = copy.deepcopy(program.optimizer.state_dict())
        if weights_first:
            copy_weights(program, following)
        following.optimizer.load_state_dict(saved)
        if not weights_first:
            copy_weights(program, following)
        following.scheduler.load_state_dict(program.scheduler.state_dict())
        program.optimizer.close()
        program = following.train(2 + 2 * number, 4 + 2 * number)
    assert_equal(program.bits(), expected)


@pytest.mark.parametrize("kind, settings", [each for each in OPTIMIZERS if each[0] != "Lion"])
@pytest.mark.parametrize("offload", [pytest.param(None, marks=in_memory), "cpu"])
def test_a_state_dict_of_pytorchs_is_taken(tmp_path, kind, settings, offload):
    theirs, ours = gpt(), gpt(1)
    reference = getattr(torch.optim, kind)(theirs.parameters(), **settings)
    train(theirs, reference, 0, 4)
    arguments = {} if offload is None else place(offload, tmp_path)
    optimizer = getattr(hoist.optim, kind)(ours.parameters(), **settings, **arguments)
    optimizer.load_state_dict(reference.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for a, b in zip(train(ours, optimizer, 4, 8), train(theirs, reference, 4, 8), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    back = getattr(torch.optim, kind)(theirs.parameters(), **settings)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(train(ours, optimizer, 8, 10), train(theirs, back, 8, 10), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    optimizer.close()


def test_a_state_dict_before_the_last_commit_is_refused(tmp_path):
    program = Program("AdamW", offload="cpu", directory=str(tmp_path / "store"), **BUDGETS).train(0, 1)
    earlier = copy.deepcopy(program.optimizer.state_dict())
    program.train(1, 3).optimizer.save("").wait()
    with pytest.raises(hoist.UsageError, match="cannot follow step 3"):
        program.optimizer.load_state_dict(earlier)
    assert program.train(3, 4).optimizer.step_count == 4
    program.optimizer.close()


def test_an_interrupted_load_ends_the_optimizer_and_not_the_process(tmp_path, monkeypatch):
    model = nn.Linear(8, 8)
    optimizer = hoist.optim.AdamW(model.parameters(), lr=1e-3, offload="cpu", pinned_memory="64MiB")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()

    def interrupted(values, unit):
        raise KeyboardInterrupt

    monkeypatch.setattr("hoist.optim_pieces.UnitValues.__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    for _ in range(2):  # the error that it failed with, as often as it is asked
        with pytest.raises(hoist.Error, match="KeyboardInterrupt"):
            optimizer.step()
    with pytest.raises(hoist.Error, match="KeyboardInterrupt"):
        optimizer.close()


def test_a_state_dict_is_committed_with_its_rates(tmp_path):
    saved = copy.deepcopy(Program("AdamW").train(0, 2).optimizer.state_dict())
    program = Program("AdamW", **place("nvme", tmp_path))
    program.optimizer.load_state_dict(saved)
    program.optimizer.close()
    resumed = Program("AdamW", **place("nvme", tmp_path), first=2, resume=True)
    resumed.optimizer.restore("")
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [g["lr"] for g in saved["param_groups"]]
    resumed.optimizer.close()


def test_a_run_that_made_no_step_continues(tmp_path):
    Program("AdamW", **place("nvme", tmp_path)).optimizer.close()
    program = Program("AdamW", **place("nvme", tmp_path), resume=True)
    assert program.optimizer.restored and program.optimizer.step_count == 0
    assert_equal(program.train(0, 2).bits(), Program("AdamW").train(0, 2).bits())
    program.optimizer.close()


def test_what_a_state_dict_cannot_bring_is_refused():
    program = Program("AdamW", offload="cpu", **BUDGETS).train(0, 2)
    saved = program.optimizer.state_dict()
    before = program.bits()

    def refused(match, change):
        changed = copy.deepcopy(saved)
        change(changed)
        with pytest.raises(hoist.UsageError, match=match):
            program.optimizer.load_state_dict(changed)

    refused("different numbers of steps", lambda s: s["state"][1].update(step=torch.tensor(7.0)))
    refused("no state of 'parameter 0'", lambda s: s["state"].pop(0))
    refused("has the shape", lambda s: s["state"][0].update(exp_avg=torch.zeros(3)))
    refused("other parameter groups", lambda s: s["param_groups"].pop())
    refused("amsgrad=True is not among", lambda s: s["param_groups"][1].update(amsgrad=True))
    refused("maximize=True is not among", lambda s: s["param_groups"][0].update(maximize=True))
    refused("decoupled_weight_decay=False", lambda s: s["param_groups"][0].update(decoupled_weight_decay=False))
    refused("'bias_correction' of parameter group 0", lambda s: s["param_groups"][0].update(bias_correction=False))
    refused("'betas' of parameter group 0", lambda s: s["param_groups"][0].update(betas=(0.5, 0.5)))
    assert_equal(program.bits(), before)
    saved["param_groups"][0].update(name="body", max_lr=0.1, amsgrad=False, foreach=None)  # which torch.optim would also keep
    program.optimizer.load_state_dict(saved)
    group = program.optimizer.param_groups[0]
    assert (group["name"], group["max_lr"], group["params"]) == ("body", 0.1, program.parameters[::2])
    assert_equal(program.train(2, 4).bits(), Program("AdamW").train(0, 4).bits())
    program.optimizer.close()


# --- what programs do ----------------------------------------------------------------------------------------------------

def test_parameters_that_the_program_changes_count():
    """In place between steps, as load_state_dict() of a model or a copy of averaged weights does; values that come back keep the
    masters that they are the roundings of."""
    ours = Program("AdamW", torch.bfloat16, torch.get_default_device(), offload="cpu", **BUDGETS)
    theirs = Program("AdamW", torch.bfloat16)
    for program in (ours, theirs):
        program.train(0, 3)
        kept = copies_of(program)
        with torch.no_grad():
            for parameter in program.parameters:  # averaged weights, and back
                parameter.fill_(1.0)
            for parameter, value in zip(program.parameters, kept, strict=True):
                parameter.copy_(value)
        program.train(3, 5)
    assert_equal(ours.bits(), theirs.bits())
    with torch.no_grad():
        ours.parameters[0].fill_(9.0)  # of which no master is near
    ours.optimizer.param_groups[0]["lr"] = 0.0
    ours.train(5, 6)
    assert torch.equal(ours.optimizer.master(ours.parameters[0]), torch.full((70, 100), 9.0, device="cpu"))
    ours.parameters[2].data.fill_(9.0)  # which no version counts
    ours.optimizer.adopt_parameters()
    assert torch.equal(ours.optimizer.master(ours.parameters[2]), torch.full((40, 25), 9.0, device="cpu"))
    values = torch.randn(70, 100, device="cpu")
    ours.optimizer.set_master(ours.parameters[0], values)
    assert torch.equal(ours.optimizer.master(ours.parameters[0]), values)
    ours.optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_commit_has_the_weights_that_the_program_set(tmp_path, dtype):
    """In place since the last step, and after the states of another run were loaded."""
    other = Program("AdamW", dtype, offload="cpu", **BUDGETS).train(0, 3)
    saved, weights = copy.deepcopy(other.optimizer.state_dict()), other.bits()
    program = Program("AdamW", dtype, torch.get_default_device(), keep_steps=2, offload="cpu",
                      directory=str(tmp_path / "store"), **BUDGETS).train(0, 2)
    with torch.no_grad():
        for parameter in program.parameters:
            parameter.fill_(0.5)
    assert torch.equal(program.optimizer.master(program.parameters[0]), torch.full((70, 100), 0.5, device="cpu"))
    halves = program.bits()
    with torch.no_grad():
        program.parameters[0].fill_(0.25)
    program.optimizer.save("averaged").wait()
    halves[0].fill_(0.25)
    halves[5].fill_(0.25)
    program.optimizer.load_state_dict(saved)
    copy_weights(other, program)
    program.optimizer.save("loaded").wait()
    program.train(3, 5)
    for name, expected in (("averaged", halves), ("loaded", weights)):
        program.optimizer.restore(name)
        assert_equal(program.bits(), expected)
    other.optimizer.close()
    program.optimizer.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_masters_are_joined_with_what_was_loaded_last(tmp_path, offload):
    """load_state_dict() keeps remainders of bf16 masters for weights that are loaded later; set_master() and restore() bring
    masters of their own."""
    program = Program("AdamW", torch.bfloat16, torch.get_default_device(), keep_steps=1, offload=offload,
                      directory=str(tmp_path / "store"), **BUDGETS).train(0, 2)
    optimizer = program.optimizer
    optimizer.save("kept").wait()
    kept = program.bits()
    program.train(2, 4)

    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    values = torch.randn(70, 100, device="cpu")
    optimizer.set_master(program.parameters[0], values)
    optimizer.adopt_parameters()
    assert torch.equal(optimizer.master(program.parameters[0]), values)

    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.restore("kept")
    with torch.no_grad():
        program.parameters[1].mul_(1.0)
    optimizer.adopt_parameters()
    assert_equal(program.bits(), kept)
    optimizer.close()


def test_exact_masters_stay_when_nothing_is_loaded():
    """accelerate's prepare() loads an optimizer's own state_dict(), which is empty before the first step."""
    program = Program("AdamW", torch.bfloat16, torch.get_default_device(), offload="cpu", **BUDGETS)
    values = torch.randn(70, 100, device="cpu")
    program.optimizer.set_master(program.parameters[0], values)
    saved = copy.deepcopy(program.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    program.optimizer.load_state_dict(saved)
    assert program.optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(program.optimizer.master(program.parameters[0]), values)
    program.optimizer.close()


def test_masters_of_a_model_that_was_converted_stay(tmp_path):
    """A program may convert its model for an export, and save after that."""
    program = Program("AdamW", torch.bfloat16, torch.get_default_device(), keep_steps=1, offload="cpu",
                      directory=str(tmp_path / "store"), **BUDGETS).train(0, 2)
    masters = program.bits()[5:]
    for parameter in program.parameters:
        parameter.data = parameter.data.half()
    assert_equal(program.bits()[5:], masters)
    program.optimizer.save("kept").wait()
    with pytest.raises(hoist.UsageError, match="move the model first"):
        program.train(2, 3)
    for parameter in program.parameters:
        parameter.data = parameter.data.bfloat16()
    program.optimizer.restore("kept")
    assert_equal(program.bits()[5:], masters)
    program.optimizer.close()


def test_other_memory_of_a_parameter_counts_as_a_change():
    """vector_to_parameters() and `parameter.data = ...` leave the version counters as they are."""
    ours = Program("AdamW", device=torch.get_default_device(), offload="cpu", **BUDGETS)
    theirs = Program("AdamW")
    for program in (ours, theirs):
        program.train(0, 2)
        vector = torch.nn.utils.parameters_to_vector(program.parameters)
        torch.nn.utils.vector_to_parameters(vector.detach() / 2, program.parameters)
        program.train(2, 4)
        program.parameters[0].data = program.parameters[0].data.clamp(-0.1, 0.1)
        program.train(4, 6)
    assert_equal(ours.bits(), theirs.bits())
    ours.optimizer.close()


def test_missing_gradients(tmp_path):
    program = Program("AdamW", offload="cpu", **BUDGETS)
    before = program.bits()
    program.optimizer.step()  # nobody has one: nothing happens, as in torch.optim
    assert program.optimizer.step_count == 0
    program.parameters[0].grad = torch.ones_like(program.parameters[0])
    with pytest.raises(hoist.UsageError, match="'parameter 1' has no gradient|'parameter 3' has no gradient"):
        program.optimizer.step()
    assert_equal(program.bits(), before)
    program.optimizer.close()

    as_zeros = Program("AdamW", offload="cpu", missing_gradients="zeros", **BUDGETS)
    zeros = Program("AdamW")
    for each in (as_zeros, zeros):
        for number, parameter in enumerate(each.parameters):
            if number == 0 or each is zeros:
                parameter.grad = torch.full_like(parameter, 1.0 if number == 0 else 0.0)
        each.optimizer.step()
    assert_equal(as_zeros.bits(), zeros.bits())
    as_zeros.optimizer.close()


def test_a_gradient_that_is_not_finite_changes_nothing():
    program = Program("AdamW", offload="cpu", **BUDGETS).train(0, 2)
    before = program.bits()
    for parameter in program.parameters:
        parameter.grad = torch.ones_like(parameter)
    program.parameters[4].grad[4000] = float("nan")
    program.optimizer.step()
    assert program.optimizer.step_was_skipped and program.optimizer.step_count == 2
    assert_equal(program.bits(), before)
    program.optimizer.close()


@in_memory
def test_a_gradient_scaler_decides_on_steps():
    steps = []
    model, reference = gpt(), gpt()
    with hoist.optim.AdamW(model.parameters(), offload="cpu", **BUDGETS) as optimizer:
        for each, its in ((model, optimizer), (reference, hoist.optim.AdamW(reference.parameters()))):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
            for inputs, targets in batches(8):
                scaler.scale(64 * loss_of(each(inputs), targets)).backward()
                scaler.unscale_(its)
                torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                scaler.step(its)
                scaler.update()
                its.zero_grad()
            if each is model:
                steps.append(its.step_count)
        assert 0 < steps[0] < 8, "some steps overflow, and some do not"
        assert_equal([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])


def test_a_closure_is_called():
    parameter = nn.Parameter(torch.ones(10))
    with hoist.optim.SGD([parameter], lr=0.5, offload="cpu", **BUDGETS) as optimizer:
        def closure():
            optimizer.zero_grad()
            loss = parameter.sum()
            loss.backward()
            return loss.item()
        assert optimizer.step(closure) == 10
    assert torch.equal(parameter.detach().cpu(), torch.full((10,), 0.5, device="cpu"))


def test_autograd_sees_that_weights_changed():
    parameter = nn.Parameter(torch.ones(10))
    with hoist.optim.SGD([parameter], lr=0.5, offload="cpu", **BUDGETS) as optimizer:
        kept = (parameter * parameter).sum()
        parameter.grad = torch.ones(10)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


# --- refusals, and the end -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, match", [
    ({"offload": "disk"}, "choose None"),
    ({"offload": "nvme"}, "needs directory"),
    ({"offload": "cpu", "resume": True}, "needs directory"),
    ({"directory": "somewhere"}, "is for offloaded states"),
    ({"offload": "cpu", "amsgrad": True}, "amsgrad=True is not among"),
    ({"offload": "cpu", "missing_gradients": "skip"}, "choose \"refuse\""),
])
def test_arguments_that_do_not_go_together_are_refused(arguments, match):
    with pytest.raises(hoist.UsageError, match=match):
        hoist.optim.AdamW([nn.Parameter(torch.ones(3))], **arguments)


def test_parameters_that_cannot_be_trained_are_refused():
    freed = nn.Parameter(torch.ones(3))
    freed.untyped_storage().resize_(0)
    for parameter, match in [
        (nn.Parameter(torch.ones(3, dtype=torch.float64)), "float64"),
        (nn.Parameter(torch.ones(4, 6)[:, ::2]), "gaps or overlaps"),
        (nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)), "in another order.*channels_last"),
        (nn.Parameter(torch.ones(3, device="meta")), "on meta"),
        (freed, "has no memory: gather it first"),
        (nn.Parameter(torch.ones(3), requires_grad=False), "nothing to optimize"),
    ]:
        with pytest.raises(hoist.UsageError, match=match):
            hoist.optim.AdamW([("name", parameter)], offload="cpu", **BUDGETS)
    with pytest.raises(hoist.ConfigError, match="moments_dtyp"):
        hoist.optim.AdamW([nn.Parameter(torch.ones(3))], offload="cpu", settings={"moments_dtyp": "bf16"})


def test_parameters_that_share_memory_are_refused():
    """Each would have a master of its own. In memory they are PyTorch's own affair."""
    whole = torch.randn(24, 8)
    parts = [nn.Parameter(whole[first:first + 8]) for first in (0, 8, 16)]
    hoist.optim.AdamW(parts, offload="cpu", **BUDGETS).close()
    with pytest.raises(hoist.UsageError, match="'parameter 0' and 'parameter 1' share memory"):
        hoist.optim.AdamW([nn.Parameter(whole), parts[1]], offload="cpu", **BUDGETS)
    one, other = (nn.Parameter(torch.ones(())) for _ in range(2))
    with hoist.optim.SGD([one, other], offload="cpu", **BUDGETS) as optimizer:
        other.data = one.data
        one.grad, other.grad = torch.ones(()), torch.ones(())
        with pytest.raises(hoist.UsageError, match="share memory"):
            optimizer.step()


def test_calls_that_it_does_not_have_are_refused():
    program = Program("AdamW", offload="cpu", **BUDGETS).train(0, 1)
    before = program.bits()
    optimizer = program.optimizer
    with pytest.raises(hoist.UsageError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(hoist.UsageError, match="copied or pickled"):
        copy.deepcopy(optimizer)
    for parameter in program.parameters:
        parameter.grad = torch.ones_like(parameter)
    kept = program.parameters[0].data
    program.parameters[0].data = kept.half()
    with pytest.raises(hoist.UsageError, match="move the model first"):
        optimizer.step()
    program.parameters[0].data = kept
    program.parameters[0].grad = None
    program.parameters[0].data = kept.t().contiguous()
    program.parameters[0].grad = torch.ones_like(program.parameters[0])
    with pytest.raises(hoist.UsageError, match=r"'parameter 0' had the shape \(70, 100\) when the optimizer was made, and has"):
        optimizer.step()
    program.parameters[0].grad = None
    program.parameters[0].data = kept
    program.parameters[0].grad = torch.ones_like(kept)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(hoist.UsageError, match="'weight_decay' of parameter group 0"):
        optimizer.step()
    assert_equal(program.bits(), before)
    optimizer.close()
    optimizer.param_groups[0]["weight_decay"] = 0.01
    with pytest.raises(hoist.UsageError, match="closed"):
        optimizer.step()
    with pytest.raises(hoist.UsageError, match="is for offloaded states"):
        hoist.optim.AdamW(program.parameters).save("name")


def test_settings_and_budgets_are_the_engines(tmp_path):
    parameter = nn.Parameter(torch.ones(1_000_000))
    with pytest.raises(hoist.BudgetError, match=r"hoist\.pinned_memory") as refused:
        hoist.optim.AdamW([parameter], offload="cpu", pinned_memory="1MiB", device_memory="64MiB")
    need = refused.value.need_bytes
    hoist.optim.AdamW([parameter], offload="cpu", pinned_memory=need, device_memory="64MiB").close()
    with hoist.optim.AdamW([parameter], offload="cpu", pinned_memory=need - 3_000_000, device_memory="64MiB",
                           settings={"moments_dtype": "bf16"}) as optimizer:
        assert optimizer._offloaded.statistics()["tiers"]["pinned"]["peak_bytes"] < need - 3_000_000


def test_the_last_reference_gives_the_store_back(tmp_path):
    program = Program("AdamW", **place("nvme", tmp_path)).train(0, 2)
    bits = program.bits()
    gone = weakref.ref(program.optimizer)
    del program
    gc.collect()
    assert gone() is None
    program = Program("AdamW", **place("nvme", tmp_path), resume=True)
    assert program.optimizer.step_count == 2
    assert_equal(program.bits(), bits)
    program.optimizer.close()


def test_a_forked_process_is_refused(tmp_path):
    ended = run_program("""
        import json, os, sys
        import hoist
        import torch
        from test_optim_offload import Program
        from test_processes import exit_code_of_fork

        program = Program("AdamW", **json.loads(sys.argv[1])).train(0, 2)

        def in_child():
            for parameter in program.parameters:
                parameter.grad = torch.ones_like(parameter)
            for call in (program.optimizer.step, program.optimizer.state_dict, lambda: program.optimizer.save("")):
                try:
                    call()
                    os._exit(3)
                except hoist.UsageError as error:
                    assert "forked" in str(error), error
            program.optimizer.close()

        assert exit_code_of_fork(in_child) == 0
        assert program.train(2, 3).optimizer.step_count == 3
    """, json.dumps(place("nvme", tmp_path)))
    assert ended.returncode == 0, ended.stderr
