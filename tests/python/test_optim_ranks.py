# SPDX-License-Identifier: Apache-2.0
"""hoist.optim with offloaded states that ranks divide among them, beside DistributedDataParallel: the bits of one process."""

import os

import pytest
import torch
from optim_program import BUDGETS, gpt, place
from torch import nn  # noqa: F401 - for programs

import hoist
import hoist.optim
import hoist.store
from models import batches, loss_of
from ranks import results, start

pytestmark = pytest.mark.usefixtures("small_units")

RANKS = """
join()
import hoist.optim, hoist.optim.pieces
from test_optim_ranks import *
from optim_program import gpt
hoist.optim.pieces._UNIT_ELEMENTS, hoist.optim.pieces._PIECE_ELEMENTS = 5000, 3000
arguments, group = dict(config["arguments"]), None
if config["divided"]:
    arguments["shard_over"] = dist.group.WORLD
model = gpt().to(getattr(torch, config["dtype"]))
optimizer = hoist.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **arguments)
ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
"""

TRAIN = RANKS + """
train_with_ddp(ddp, optimizer, rank, size, config["first"], config["last"])
print(json.dumps(ends(model, optimizer)))
optimizer.close()
dist.destroy_process_group()
"""


def train_with_ddp(model, optimizer, rank, size, first, last, mean_of=1):
    """This rank's batch of each step; alone, the mean over several."""
    for index, (inputs, targets) in enumerate(batches(last * 2)):
        if index < first * 2 or index % 2 % size != rank:
            continue
        (loss_of(model(inputs), targets) / mean_of).backward()
        if (index + 1) % mean_of == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def ends(model, optimizer):
    """Digests of weights and masters that JSON can hold."""
    values = [p.detach().float().flatten().cpu() for p in model.parameters()]
    values += [optimizer.master(p).flatten() for p in model.parameters()]
    return [value.double().sum().item() for value in values] + [value.view(torch.int32).sum().item() for value in values]


def on_two_ranks(tmp_path, name, divided, offload="cpu", dtype="float32", first=0, last=8, program=TRAIN, **arguments):
    config = {"divided": divided, "dtype": dtype, "first": first, "last": last,
              "arguments": place(offload, tmp_path, name) | arguments}
    return results(start(program, tmp_path / f"meet-{name}-{first}", config, share_gpu=not divided))


def alone(last=8):
    model = gpt()
    arguments = {} if torch.get_default_device().type == "cpu" else {"offload": "cpu", **BUDGETS}
    with hoist.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **arguments) as optimizer:
        train_with_ddp(model, optimizer, 0, 1, 0, last, mean_of=2)
        return ends(model, optimizer)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("divided", [True, False])
def test_two_ranks_with_ddp_are_one_process_with_both_batches(tmp_path, offload, divided):
    """fp32, bit for bit: DDP halves each gradient and adds them, which one process does with halved losses."""
    mirror = {"settings": {"mirror": {"path": str(tmp_path / "mirror")}}} if offload == "nvme" else {}
    assert on_two_ranks(tmp_path, "store", divided, offload, **mirror) == [alone(), alone()]
    if mirror:
        assert sorted(os.listdir(tmp_path / "mirror")) == (["hoist"] if divided else ["rank-0", "rank-1"])


def test_dividing_bf16_states_changes_no_bit(tmp_path):
    whole = on_two_ranks(tmp_path, "whole", False, dtype="bfloat16")
    divided = on_two_ranks(tmp_path, "divided", True, "nvme", dtype="bfloat16")
    assert whole[0] == whole[1] == divided[0] == divided[1]


@pytest.mark.parametrize("divided", [True, False])
def test_two_killed_ranks_continue(tmp_path, divided):
    killed = start(RANKS + """
train_with_ddp(ddp, optimizer, rank, size, 0, 5)
optimizer.settle()
dist.barrier()
os.kill(os.getpid(), signal.SIGKILL)
""", tmp_path / "meet", {"divided": divided, "dtype": "float32", "arguments": place("nvme", tmp_path)}, share_gpu=not divided)
    assert [process.wait(timeout=240) for process in killed] == [-9, -9]
    assert on_two_ranks(tmp_path, "store", divided, "nvme", first=5, resume=True) == [alone(), alone()]


def test_one_process_continues_what_two_divided(tmp_path):
    on_two_ranks(tmp_path, "store", True, "nvme", last=5)
    model = gpt()
    with hoist.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **place("nvme", tmp_path), resume=True) as optimizer:
        assert optimizer.step_count == 5
        train_with_ddp(model, optimizer, 0, 1, 5, 8, mean_of=2)
        assert ends(model, optimizer) == alone()


@pytest.mark.parametrize("ranks_before", [1, 2])
def test_a_store_of_other_ranks_is_not_begun_anew(tmp_path, ranks_before):
    def in_one_process(**arguments):
        model = gpt()
        with hoist.optim.AdamW(model.parameters(), lr=1e-2, **place("nvme", tmp_path), **arguments) as optimizer:
            train_with_ddp(model, optimizer, 0, 1, 0, 3)

    if ranks_before == 2:
        on_two_ranks(tmp_path, "store", False, "nvme", last=3)
        with pytest.raises(hoist.StoreError, match="rank-0 holds one of step 3.* had other rank numbers"):
            in_one_process(resume=True)
        return
    in_one_process()
    assert on_two_ranks(tmp_path, "store", False, "nvme", resume=True, program="""
join()
import hoist.optim
from optim_program import gpt
try:
    hoist.optim.AdamW(gpt().parameters(), lr=1e-2, **config["arguments"])
except hoist.StoreError as error:
    print(json.dumps(str(error)))
""")[0].count("store holds one of step 6") == 1


def test_divided_states_are_consolidated_on_one_rank(tmp_path):
    ranks = on_two_ranks(tmp_path, "store", True, last=5, program=RANKS + """
optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does it before the first step
train_with_ddp(ddp, optimizer, rank, size, 0, 5)
ends(model, optimizer)  # on a device the last step's weights are on their way until someone asks for them
sent = optimizer._offloaded.unit_manager.statistics()["links"]["wire"] / 5
half = sum(p.nbytes for p in model.parameters()) / 2
assert half <= sent < 1.5 * half, (sent, half)  # this rank's new weights, and no gradients
with pytest.raises(hoist.UsageError, match="consolidate_state_dict"):
    optimizer.state_dict()
optimizer.consolidate_state_dict(to=1)
if rank == 1:
    torch.save([optimizer.state_dict(), model.state_dict()], directory + "/saved")
else:
    with pytest.raises(hoist.UsageError, match="consolidate_state_dict"):
        optimizer.state_dict()
dist.barrier()
saved, weights = torch.load(directory + "/saved")
train_with_ddp(ddp, optimizer, rank, size, 5, 7)
model.load_state_dict(weights)
optimizer.load_state_dict(saved)
assert optimizer.step_count == 5
train_with_ddp(ddp, optimizer, rank, size, 5, 8)
print(json.dumps(ends(model, optimizer)))
optimizer.close()
""")
    assert ranks == [alone(), alone()]


@pytest.mark.parametrize("divided", [True, False])
def test_all_ranks_replace_the_states_if_a_call_of_one_was_interrupted(tmp_path, divided):
    """The state_dict is of step 0, for which a rank alone would replace nothing."""
    assert on_two_ranks(tmp_path, "store", divided, "nvme", program=RANKS + """
offloaded, saved = optimizer._offloaded, optimizer.state_dict()
if rank == 0:
    def interrupted():
        del offloaded._note_versions
        raise KeyboardInterrupt
    offloaded._note_versions = interrupted
try:
    optimizer.restore("")
except KeyboardInterrupt:
    assert rank == 0
optimizer.load_state_dict(saved)
train_with_ddp(ddp, optimizer, rank, size, 0, 8)
print(json.dumps(ends(model, optimizer)))
optimizer.close()
""") == [alone(), alone()]


@pytest.mark.parametrize("end", ["optimizer", "contextlib.closing(optimizer)"])
@pytest.mark.parametrize("divided", [True, False])
def test_a_rank_that_fails_is_an_error_on_the_other(tmp_path, divided, end):
    """closing() calls close() in a `finally` block."""
    failing = start(RANKS + f"""
import contextlib
try:
    with {end}:
        train_with_ddp(ddp, optimizer, rank, size, 0, 2)
        if rank == 1:
            raise ValueError("out of data")
        optimizer.consolidate_state_dict() if config["divided"] else optimizer.save("").wait()
except (hoist.CommError, ValueError) as error:
    print(json.dumps(str(error)), flush=True)
os._exit(0)
""", tmp_path / "meet", {"divided": divided, "dtype": "float32", "arguments": place("cpu" if divided else "nvme", tmp_path)},
                    share_gpu=not divided)
    first, second = results(failing)
    assert second == "out of data" and "out of data" in first and "rank 1" in first


@pytest.mark.parametrize("divided", [True, False])
def test_a_restore_that_fails_on_one_rank_is_an_error_on_the_other(tmp_path, divided):
    failing = start(RANKS + """
train_with_ddp(ddp, optimizer, rank, size, 0, 2)
optimizer.save("one").wait()
began = time.monotonic()
try:
    optimizer.restore("one" if rank else "two")
except hoist.Error as error:
    assert time.monotonic() - began < 60
    print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
os._exit(0)
""", tmp_path / "meet", {"divided": divided, "dtype": "float32", "arguments": place("nvme", tmp_path) | {"keep_steps": 2}},
                    share_gpu=not divided)
    first, second = results(failing)
    assert first.startswith("StoreError") and "'two'" in first, first
    assert second.startswith("CommError") and "rank 0 failed: hoist.StoreError" in second, second


def test_states_that_one_rank_alone_divides_are_named(tmp_path):
    for text in results(start("""
        join()
        import hoist.optim
        divided = {"shard_over": dist.group.WORLD} if rank == 1 else {}
        try:
            hoist.optim.AdamW(make().parameters(), **config, **divided)
        except hoist.UsageError as error:
            print(json.dumps(str(error)), flush=True)
        os._exit(0)
    """, tmp_path / "meet", place("nvme", tmp_path))):
        assert text == "rank 1 passes shard_over=..., and rank 0 does not: pass it on every rank, or on none"


def test_ranks_that_make_different_calls_are_told_which(tmp_path):
    ranks = start(RANKS + """
train_with_ddp(ddp, optimizer, rank, size, 0, 1)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
try:
    optimizer.save("").wait() if rank == 1 else optimizer.step()
except hoist.CommError as error:
    print(json.dumps(str(error)), flush=True)
os._exit(0)
""", tmp_path / "meet", {"divided": True, "dtype": "float32", "arguments": place("nvme", tmp_path)})
    for text in results(ranks):
        assert "save()" in text and "step()" in text


@pytest.mark.parametrize("divided", [True, False])
def test_a_step_is_one_of_all_ranks_or_of_none(tmp_path, divided):
    """A rank without gradients, while others have some: its next step would be taken for their present one. What is too large on
    one rank is refused on all, and each can go on."""
    ranks = on_two_ranks(tmp_path, "store", divided, "nvme", program=RANKS + """
train_with_ddp(ddp, optimizer, rank, size, 0, 2)
optimizer.step()  # of no gradients, on all ranks: nothing
for parameter in model.parameters() if rank == 0 else ():
    parameter.grad = torch.ones_like(parameter)
with pytest.raises(hoist.UsageError, match="step.. of no gradients on some ranks"):
    optimizer.step()
optimizer.zero_grad()
optimizer.commit_state["seen"] = list(range(20000 * rank))
with pytest.raises(hoist.UsageError, match="raise hoist.caller_state_max"):
    train_with_ddp(ddp, optimizer, rank, size, 2, 3)
optimizer.commit_state.clear()
optimizer.save().wait()
optimizer.step()
optimizer.zero_grad()
train_with_ddp(ddp, optimizer, rank, size, 3, config["last"])
print(json.dumps(ends(model, optimizer)))
optimizer.close()
dist.destroy_process_group()
""")
    assert ranks == [alone(), alone()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_that_divide_states_begin_with_the_first_ranks_weights(tmp_path, dtype):
    """As DistributedDataParallel makes them alike: here the optimizer is made before, or without it."""
    program = """
join()
import hoist.optim
from test_optim_ranks import *
torch.manual_seed(config["seed"] + rank * config["differ"])
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(getattr(torch, config["dtype"]))
optimizer = hoist.optim.AdamW(model.parameters(), lr=1e-2, shard_over=dist.group.WORLD, **config["arguments"])
for step in range(2):
    model(torch.ones(2, 8).to(next(model.parameters()))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(ends(model, optimizer)))
optimizer.close()
dist.destroy_process_group()
"""
    alike, differing = (results(start(program, tmp_path / f"meet-{differ}", {
        "seed": 3, "differ": differ, "dtype": dtype, "arguments": place("cpu", tmp_path)})) for differ in (0, 1))
    assert differing[0] == differing[1] == alike[0] == alike[1]


def test_a_part_of_the_ranks_can_divide(tmp_path):
    """Two pairs that train alike, each with its own store, stopped and continued."""
    program = TRAIN.replace('arguments["shard_over"] = dist.group.WORLD', """
    group = arguments["shard_over"] = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]""").replace(
        "rank, size, config", "rank % 2, 2, config")

    def on_four_ranks(name, first, last, **arguments):
        config = {"divided": True, "dtype": "float32", "first": first, "last": last,
                  "arguments": place("nvme", tmp_path) | arguments}
        return results(start(program, tmp_path / name, config, size=4))

    on_four_ranks("first", 0, 4)
    assert (tmp_path / "store" / "rank-0").is_dir() and (tmp_path / "store" / "rank-2").is_dir()
    assert on_four_ranks("second", 4, 8, resume=True) == [alone()] * 4
