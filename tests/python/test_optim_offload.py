# SPDX-License-Identifier: Apache-2.0
"""hoist.optim with offloaded states: the bits of the optimizers in memory, wherever states are and however they are divided."""

import copy
import gc
import json
import signal
import weakref

import pytest
import torch
import torch.distributed as dist
from optim_program import BUDGETS, OPTIMIZERS, Program, assert_equal, gpt, in_memory, place, scheduler_of, train
from test_processes import run_program
from torch import nn

import hoist
import hoist.optim
import hoist.optim.pieces
import hoist.store
from models import batches, loss_of

pytestmark = pytest.mark.usefixtures("small_units")


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


@pytest.mark.parametrize("kind, settings", [each for each in OPTIMIZERS if each[0] != "Lion"])
def test_a_model_trains_as_with_pytorchs(kind, settings):
    ours, theirs = gpt(), gpt()
    optimizer = getattr(hoist.optim, kind)(ours.parameters(), **settings, offload="cpu", **BUDGETS)
    expected = train(theirs, getattr(torch.optim, kind)(theirs.parameters(), **settings), 0, 10)
    for a, b in zip(train(ours, optimizer, 0, 10), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    optimizer.close()


@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
@pytest.mark.parametrize("momenta", [(0.9, 0.9), (0.9, 0.0), (0.0, 0.0)], ids=str)
def test_states_of_pytorchs_sgd_which_count_no_steps(tmp_path, momenta, offload):
    """Also into an optimizer, and a store, that has made more steps than one."""
    device = None if offload else "cpu"  # in memory, hoist.optim takes CPU tensors
    parameters = [nn.Parameter(torch.ones(300, device=device)) for _ in range(4)]
    theirs, ours = ([{"params": [p], "momentum": momentum} for p, momentum in zip(pair, momenta, strict=True)]
                    for pair in (parameters[:2], parameters[2:]))

    def step(optimizer, count):
        for _ in range(count):
            for parameter in parameters:
                parameter.grad = torch.linspace(-1, 1, 300, device=device)
            optimizer.step()

    reference = torch.optim.SGD(theirs, lr=0.1)
    optimizer = hoist.optim.SGD(ours, lr=0.1, **place(offload, tmp_path) if offload else {})
    step(reference, 4)
    step(optimizer, 3)
    for to, value in zip(parameters[2:], parameters, strict=False):
        to.data.copy_(value.data)
    optimizer.load_state_dict(reference.state_dict())
    assert offload is None or optimizer.step_count == 3
    step(reference, 2)
    step(optimizer, 2)
    torch.testing.assert_close(parameters[2:], parameters[:2])
    if offload:
        optimizer.close()


def test_states_that_no_commit_can_hold_are_refused():
    """torch.optim goes on with an infinite moment."""
    theirs, ours = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    reference = torch.optim.AdamW([theirs])
    with hoist.optim.AdamW([ours], offload="cpu", **BUDGETS) as optimizer:
        for each, parameter in ((reference, theirs), (optimizer, ours)):
            parameter.grad = torch.full_like(parameter, 3e21 if each is reference else 1.0)
            each.step()
            each.step()
        before, weights = optimizer.state_dict()["state"][0], ours.detach().clone()
        with pytest.raises(hoist.UsageError, match="second moment of 'parameter 0' in the state_dict is not finite"):
            optimizer.load_state_dict(reference.state_dict())
        changed = optimizer.state_dict()
        changed["state"][0]["exp_avg_sq"] = changed["state"][0]["exp_avg_sq"] * -1
        with pytest.raises(hoist.UsageError, match="second moment of 'parameter 0' in the state_dict is negative"):
            optimizer.load_state_dict(changed)
        with torch.no_grad():
            ours[2] = torch.nan
        with pytest.raises(hoist.UsageError, match="'parameter 0' is not finite"):
            optimizer.load_state_dict(optimizer.state_dict())
        with torch.no_grad():
            ours.copy_(weights)
        with pytest.raises(hoist.UsageError, match=r"save\(\) needs directory="):
            optimizer.save()
        after = optimizer.state_dict()["state"][0]
        assert all(torch.equal(after[key], before[key]) for key in ("exp_avg", "exp_avg_sq"))
        optimizer.step()
        assert optimizer.step_count == 3 and ours.isfinite().all()


@pytest.mark.parametrize("remedy", ["start anew", "restore the last commit or start anew"])
def test_an_infinite_state_ends_the_run(tmp_path, remedy):
    parameter = nn.Parameter(torch.ones(4))
    directory = str(tmp_path / "store") if "restore" in remedy else None
    optimizer = hoist.optim.AdamW([parameter], offload="cpu", directory=directory, **BUDGETS)
    parameter.grad = torch.full_like(parameter, 3e21)
    optimizer.step()
    for call in (optimizer.step, optimizer.close):
        with pytest.raises(hoist.Error, match=f"step 1 made a parameter or moment .* lower the learning rate, and {remedy}"):
            call()


# --- commits -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_killed_run_continues_with_the_same_bits(tmp_path, dtype):
    expected = Program("AdamW", dtype).train(0, 12).bits()
    arguments = place("nvme", tmp_path)
    killed = run_program("""
        import json, os, sys
        import hoist.optim, hoist.optim.pieces
        import torch
        from optim_program import Program
        hoist.optim.pieces._UNIT_ELEMENTS, hoist.optim.pieces._PIECE_ELEMENTS = 5000, 3000
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
def test_a_step_that_was_refused_can_be_taken_again(tmp_path, offload):
    """Its commit_state was too large. Until then the states can be saved."""
    expected = Program("AdamW", torch.bfloat16).train(0, 4).bits()
    arguments = place(offload, tmp_path) | {"directory": str(tmp_path / "store")}
    program = Program("AdamW", torch.bfloat16, torch.get_default_device(), **arguments).train(0, 2)
    program.optimizer.commit_state["seen"] = list(range(20000))
    for _ in range(2):
        with pytest.raises(hoist.UsageError, match="raise hoist.caller_state_max"):
            program.optimizer.step() if program.parameters[0].grad is not None else program.train(2, 3)
    program.optimizer.commit_state.clear()
    program.optimizer.save().wait()
    assert program.optimizer.step_count == 2
    program.optimizer.step()
    program.scheduler.step()
    program.optimizer.zero_grad()
    assert_equal(program.train(3, 4).bits(), expected)
    program.optimizer.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_a_change_of_directory_leads_to_no_other_runs_store(tmp_path, monkeypatch, offload):
    """Two runs in directories of their own, with the same relative path."""
    def begin(name):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        arguments = place(offload, tmp_path) | {"directory": "store", "keep_steps": 1}
        return Program("AdamW", torch.bfloat16, torch.get_default_device(), **arguments)

    other = begin("other").train(0, 2)
    other.optimizer.save("mine").wait()
    other.optimizer.close()
    own = begin("own").train(0, 3)
    own.optimizer.save("mine").wait()
    at_three = own.bits()
    own.train(3, 4)
    monkeypatch.chdir(tmp_path / "other")
    assert own.optimizer.checkpoints() == {"mine": 3}
    assert own.optimizer.restore("mine") == 3
    assert_equal(own.bits(), at_three)
    own.optimizer.close()


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("has_store, name, match", [(False, "", "all state is in memory"), (False, "x", "all state is in memory"),
                                                    (True, "", "holds no commit yet"), (True, "x", "no named checkpoint 'x'")])
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
        assert optimizer._offloaded.unit_manager.statistics()["tiers"]["pinned"]["peak_bytes"] < need - 3_000_000


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
        from optim_program import Program
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


def test_ranks_that_do_not_meet_divide_the_machine_as_if_all_were_here():
    """Processes that no launcher announces, each with an optimizer of its own."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def place_of():
        with hoist.optim.AdamW(nn.Linear(8, 8).named_parameters(), lr=1e-3, offload="cpu") as optimizer:
            unit_manager = optimizer._offloaded.unit_manager
            return unit_manager.local_rank, unit_manager.statistics()["tiers"]["pinned"]["budget_bytes"]

    alone = place_of()
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=1, world_size=2)
    try:
        second = place_of()
    finally:
        dist.destroy_process_group()
    assert (alone[0], second[0]) == (0, 1) and 1.5 * second[1] < alone[1]
