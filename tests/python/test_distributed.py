# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of torch.distributed (gloo, on CPUs), against one process that sees the same batches."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import hoist
import hoist.torch
from models import Gpt, batches, loss_of

STATES = (hoist.State.master, hoist.State.moment1, hoist.State.moment2)
STEPS = 8

BEGIN = """
import json, os, signal, sys, time
import hoist.torch
import torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_distributed import *
directory, config = sys.argv[1], json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join():
    dist.init_process_group("gloo", init_method=f"file://{{directory}}/meet", rank=rank, world_size=size)
"""


def make(**options):
    torch.manual_seed(0)
    return Gpt(**options)


def digests(engine):
    return [engine.digest(state) for state in STATES]


def train_share(engine, rank, size, steps=STEPS, first=0):
    """This rank's micro-batch of each step: number `rank` of its `size`."""
    losses = []
    for index, (inputs, targets) in enumerate(batches((first + steps) * size)):
        if index >= first * size and index % size == rank:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def start(program, directory, config, size=2, **environment):
    text = BEGIN.format(tests=os.path.dirname(__file__)) + textwrap.dedent(program)
    os.makedirs(directory, exist_ok=True)
    return [
        subprocess.Popen([sys.executable, "-c", text, str(directory), json.dumps(config)], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)} | environment)
        for rank in range(size)
    ]


def results(processes, timeout=240):
    """What every rank printed last, as JSON."""
    ended = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=timeout)
            assert process.returncode == 0, error
            ended.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return ended


def one_process(config, path, accumulation=2):
    """A step of as many micro-batches as there are ranks elsewhere."""
    for part in config["zero_optimization"].values():
        if isinstance(part, dict):
            part["nvme_path"] = str(path)
    config["gradient_accumulation_steps"] = accumulation
    losses = []
    with hoist.torch.wrap(make(), config) as engine:
        for inputs, targets in batches(STEPS * accumulation):
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, digests(engine)


TRAIN = """
join()
engine = hoist.torch.wrap(make(), config)
assert engine.world_size == size and engine.rank == rank
losses = train_share(engine, rank, size)
tiers = engine.books()["tiers"]
assert all(t["peak_bytes"] <= t["budget_bytes"] for t in tiers.values()), tiers
assert engine.books()["links"]["wire"] > 0
print(json.dumps([losses, digests(engine)]))
engine.close()
dist.destroy_process_group()
"""


def with_room(settings, **changes):
    """Ranks need staging for what they reduce, 4 MiB each."""
    return settings(hoist={"device_memory": "6MiB", "pinned_memory": "32MiB"}, **changes)


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_two_ranks_are_one_process_with_two_micro_batches(settings, tmp_path, stage):
    """fp32: losses, masters and moments, bit for bit. Both add the two gradients in fp32 and halve the sum."""
    def config():
        made = with_room(settings, gradient_clipping=0.5)
        if stage < 3:
            made["zero_optimization"] = {"stage": stage,
                                         "offload_optimizer": made["zero_optimization"]["offload_optimizer"]}
        return made

    ranks = results(start(TRAIN, tmp_path / "meet", config()))
    losses, ends = one_process(config(), tmp_path / "alone")
    assert [ranks[0][0], ranks[1][0]] == [losses[0::2], losses[1::2]]
    assert ranks[0][1] == ranks[1][1] == ends


def test_bf16_gradients_are_rounded_once_more(settings, tmp_path):
    """Two ranks send gradients as bf16, and their mean is rounded to it; micro-batches of one process add up in fp32. That
    is one rounding to 8 bits of a gradient, and losses stay within 1 % of each other."""
    ranks = results(start(TRAIN, tmp_path / "meet", with_room(settings, bf16={"enabled": True})))
    losses, _ = one_process(with_room(settings, bf16={"enabled": True}), tmp_path / "alone")
    assert ranks[0][1] == ranks[1][1]
    ours = [loss for pair in zip(ranks[0][0], ranks[1][0], strict=True) for loss in pair]
    assert ours[:2] == losses[:2] and ours == pytest.approx(losses, rel=0.01)


def test_state_of_several_ranks(settings, tmp_path):
    """Kept steps, checkpoints, state dicts and exports are collective; rank 0 writes what is one file. Then one process
    goes on with the two ranks' state."""
    config = with_room(settings)
    config["hoist"]["keep_steps"] = 1
    ranks = results(start("""
        join()
        engine = hoist.torch.wrap(make(), config)
        first = train_share(engine, rank, size, 3)
        engine.save_checkpoint(directory + "/checkpoints", client_state={"steps": 3})
        at_three = digests(engine)
        train_share(engine, rank, size, 2, first=3)
        path, client = engine.load_checkpoint(directory + "/checkpoints")
        assert client == {"steps": 3} and digests(engine) == at_three
        train_share(engine, rank, size, 2, first=3)
        files = engine.export(directory + "/weights")
        assert len(files) == (1 if rank == 0 else 0)
        weights = engine.state_dict()
        total = float(sum(w.double().sum() for w in weights.values()))
        print(json.dumps([digests(engine), total]))
        engine.close()
    """, tmp_path / "meet", config))
    assert ranks[0] == ranks[1]
    with hoist.torch.wrap(make(), config, resume=True) as engine:
        assert engine.step_count == 5 and digests(engine) == ranks[0][0]
        assert float(sum(w.double().sum() for w in engine.state_dict().values())) == ranks[0][1]
        train_share(engine, 0, 1, 1)


def test_torchrun_and_initialize(settings, tmp_path):
    """As DeepSpeed's programs are started: nobody calls init_process_group, and the data is dealt out."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(f"""
        import json, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        from test_distributed import *
        data = [(torch.full((16,), i), torch.full((16,), i)) for i in range(16)]
        engine, _, loader, _ = hoist.torch.initialize(
            model=make(), training_data=data, config=json.loads({json.dumps(json.dumps(with_room(settings)))}))
        seen = []
        for inputs, targets in loader:
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()
            seen += inputs[:, 0].tolist()
        with open({str(tmp_path)!r} + f"/seen-{{engine.rank}}", "w") as file:
            json.dump([engine.world_size, seen, digests(engine)], file)
        engine.close()
    """))
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                   check=True, capture_output=True, text=True, timeout=240)
    first, second = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2))
    assert first[0] == second[0] == 2 and first[2] == second[2]
    assert sorted(first[1] + second[1]) == list(range(16))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_dies_is_an_error_on_the_other(settings, tmp_path, how):
    """Killed: its connections end. Stopped: nothing comes for as long as the configuration allows."""
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 5.0
    processes = start(f"""
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        if rank == 1:
            print("ready", flush=True)
            os.kill(os.getpid(), {int(signal.SIGKILL if how == "killed" else signal.SIGSTOP)})
        began = time.monotonic()
        try:
            train_share(engine, rank, size, 50, first=2)
        except hoist.Error as error:
            print(json.dumps([type(error).__name__, str(error), time.monotonic() - began]), flush=True)
            os._exit(0)
    """, tmp_path / "meet", config)
    try:
        out, error = processes[0].communicate(timeout=120)
        assert processes[0].returncode == 0, error
        kind, text, seconds = json.loads(out.splitlines()[-1])
        assert kind == "CommError", text
        assert "torch.distributed" in text and "on rank 0 of 2" in text
        assert seconds < 30
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_ranks_go_back_after_their_channel_failed(settings, tmp_path):
    """One rank stays away until the other has given it up. Both go back to a kept step, by channels made anew."""
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 1, "comm_timeout_seconds": 3.0}
    ranks = results(start("""
        join()
        def wait_for(name):
            while not os.path.exists(f"{directory}/{name}"):
                time.sleep(0.05)
        engine = hoist.torch.wrap(make(), config)
        first = train_share(engine, rank, size, 2)
        engine.save("two").wait()
        first = train_share(engine, rank, size, 2, first=2)
        failures = 0
        if rank == 1:
            wait_for("failed-0")
        for _ in range(2):  # it is the channel that failed, and stays so
            try:
                engine.kept()
            except hoist.CommError:
                failures += 1
        open(f"{directory}/failed-{rank}", "w").close()
        wait_for("failed-1")
        assert engine.restore("two") == 2
        again = train_share(engine, rank, size, 2, first=2)
        print(json.dumps([failures, again == first, digests(engine)]))
        engine.close()
    """, tmp_path / "meet", config))
    assert ranks[0] == ranks[1] and ranks[0][:2] == [2, True]


def test_processes_that_would_train_alone_are_refused(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(hoist.UsageError, match="init_process_group"):
        hoist.torch.wrap(make(), settings())
    config = settings()
    config["hoist"]["communicator"] = "self"
    with hoist.torch.wrap(make(), config) as engine:
        assert engine.world_size == 1
