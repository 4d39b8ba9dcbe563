# SPDX-License-Identifier: Apache-2.0
"""What a program gives to and takes from hoist.optim beside steps: state dicts, masters, and weights that it sets."""

import copy
import threading

import pytest
import torch
from optim_program import BUDGETS, OPTIMIZERS, Program, assert_equal, gpt, in_memory, place, train
from torch import nn

import hoist
import hoist.optim
import hoist.optim.pieces
import hoist.store

pytestmark = pytest.mark.usefixtures("small_units")


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

    monkeypatch.setattr("hoist.optim.pieces.UnitValues.__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    for _ in range(2):  # the error that it failed with, as often as it is asked
        with pytest.raises(hoist.Error, match="KeyboardInterrupt"):
            optimizer.step()
    with pytest.raises(hoist.Error, match="KeyboardInterrupt"):
        optimizer.close()


@pytest.mark.parametrize("name, call", [("_weights", lambda o, saved: o.restore("one")),
                                        ("_note_values", lambda o, saved: o.load_state_dict(saved))])
def test_a_call_that_replaces_everything_is_made_once_more_after_an_interruption(tmp_path, monkeypatch, name, call):
    """Here the states are replaced, and the parameters or the learning rates are not."""
    def interrupted(*args):
        raise KeyboardInterrupt

    bits = []
    for place_of_run, is_interrupted in (("undisturbed", False), ("interrupted", True)):
        program = Program("AdamW", **place("nvme", tmp_path, place_of_run), keep_steps=1).train(0, 1)
        optimizer, saved = program.optimizer, copy.deepcopy(program.optimizer.state_dict())
        optimizer.save("one").wait()
        if name == "_weights":
            program.train(1, 3)
        optimizer.param_groups[0]["lr"] = 0.5
        if is_interrupted:
            with monkeypatch.context() as context:
                context.setattr(f"hoist.optim.offload.Offloaded.{name}", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    call(optimizer, saved)
            for following in (optimizer.step, optimizer.save, optimizer.state_dict, optimizer.adopt_parameters,
                              lambda optimizer=optimizer, p=program.parameters[0]: optimizer.master(p)):
                with pytest.raises(hoist.UsageError, match=r"was interrupted.*Call restore\(\) or load_state_dict\(\)"):
                    following()
        call(optimizer, saved)
        bits.append(program.train(1, 3).bits())
        optimizer.close()
    assert_equal(*bits)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_load_of_another_step_forgets_the_saved_schedule(tmp_path, monkeypatch, is_interrupted):
    """Also if an interrupted load has brought that step already."""
    def interrupted(*args):
        raise KeyboardInterrupt

    def halved(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    first = Program("AdamW", **place("nvme", tmp_path))
    first.optimizer.lr_scheduler = first.scheduler = halved(first.optimizer)
    first.train(0, 2).optimizer.close()
    program = Program("AdamW", **place("nvme", tmp_path), resume=True)
    saved = copy.deepcopy(Program("AdamW").train(0, 3).optimizer.state_dict())
    for group, saved_group in zip(program.optimizer.param_groups, saved["param_groups"], strict=True):
        saved_group["lr"] = group["lr"]  # the rates alone do not show that this is another step
    if is_interrupted:
        with monkeypatch.context() as context:
            context.setattr("hoist.optim.offload.Offloaded._note_values", interrupted)
            with pytest.raises(KeyboardInterrupt):
                program.optimizer.load_state_dict(saved)
    program.optimizer.load_state_dict(saved)
    program.optimizer.lr_scheduler = schedule = halved(program.optimizer)
    assert schedule.last_epoch == 0
    program.optimizer.close()


def test_several_threads_close(tmp_path):
    for number in range(3):
        program = Program("AdamW", **place("nvme", tmp_path, f"store{number}")).train(0, 1)
        failures = []

        def close(optimizer=program.optimizer, failures=failures):
            try:
                optimizer.close()
            except hoist.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("call", [lambda o, saved: o.adopt_parameters(), lambda o, saved: o.load_state_dict(saved)])
def test_a_signal_handler_inside_a_call_is_refused_what_would_wait_for_that_call(tmp_path, monkeypatch, call):
    program = Program("AdamW", **place("nvme", tmp_path), threads=1).train(0, 1)
    optimizer, refused = program.optimizer, []
    saved = copy.deepcopy(optimizer.state_dict())
    values_of = hoist.optim.pieces.UnitValues.__call__

    def with_signal(values, unit):
        if threading.current_thread() is threading.main_thread():
            for wanted in (optimizer.save, optimizer.settle, optimizer.close, optimizer.restore):
                with pytest.raises(hoist.UsageError, match="a signal handler calls the engine") as error:
                    wanted()
                refused.append(error)
        return values_of(values, unit)

    monkeypatch.setattr("hoist.optim.pieces.UnitValues.__call__", with_signal)
    with torch.no_grad():
        for parameter in program.parameters:
            parameter.mul_(2)
    call(optimizer, saved)
    assert refused
    monkeypatch.undo()
    program.train(1, 2).optimizer.close()


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
