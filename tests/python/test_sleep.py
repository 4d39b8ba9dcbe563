# SPDX-License-Identifier: Apache-2.0
"""sleep() gives all memory back, and wake() continues with the same bits."""

import os

import accelerator
import pytest
import torch

import hoist
import hoist.torch
from models import batches, loss_of
from ranks import results, start
from test_distributed import at
from training import digests, make, train

HALVES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}},
          "fp16": {"fp16": {"enabled": True, "initial_scale_power": 28, "loss_scale_window": 3, "hysteresis": 1}}}


def placed(settings, tmp_path, placement, **changes):
    config = settings(**changes)
    if placement == "nvme":
        at(tmp_path / "store", config)
    else:
        place = {"device": "cpu"} if placement == "cpu" else {"device": "none"}
        config["zero_optimization"] |= {"offload_param": dict(place), "offload_optimizer": dict(place)}
        config["hoist"] |= {"checkpoint_path": str(tmp_path / "commits"), "device_memory": "32MiB"}
    return config


def resources():
    with open("/proc/self/statm") as file:
        mapped, resident = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:2])
    return {"mapped": mapped, "resident": resident, "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task"))}


@pytest.mark.parametrize("placement", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("weights", HALVES)
def test_nothing_changes(settings, tmp_path, placement, weights):
    changes = HALVES[weights] | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 6}}}
    with hoist.torch.wrap(make(), placed(settings, tmp_path / "awake", placement, **changes)) as engine:
        expected = train(engine, 9)
        end = digests(engine)
    with hoist.torch.wrap(make(), placed(settings, tmp_path / "asleep", placement, **changes)) as engine:
        losses = train(engine, 3)
        for first in (3, 6):
            before = engine.step_count, engine.skipped_steps, engine.optimizer.loss_scale
            engine.sleep()
            assert engine.is_asleep
            engine.wake()
            assert not engine.is_asleep
            assert (engine.step_count, engine.skipped_steps, engine.optimizer.loss_scale) == before
            assert sum(before[:2]) == first and (weights != "fp16" or engine.skipped_steps > 0)
            losses += train(engine, 3, first=first)
        assert losses == expected
        assert digests(engine) == end


def test_a_programs_learning_rates(settings, tmp_path):
    """A rate that the program has set still applies after waking, before the program sets it again."""
    ends = []
    for sleeps in (False, True):
        with hoist.torch.wrap(make(), placed(settings, tmp_path / str(sleeps), "nvme")) as engine:
            schedule = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1], gamma=0.1)
            train(engine, 1)
            schedule.step()
            train(engine, 1, first=1)
            if sleeps:
                engine.sleep()
                engine.wake()
            assert engine.get_lr() == pytest.approx([1e-4])
            train(engine, 2, first=2)
            ends.append(digests(engine))
    assert ends[0] == ends[1]


def test_refusals(settings, tmp_path):
    model = make()
    with hoist.torch.wrap(model, settings(gradient_accumulation_steps=2)) as engine:
        with pytest.raises(hoist.UsageError, match=r"wake\(\) belongs after sleep\(\)"):
            engine.wake()
        (inputs, targets), *_ = batches(1)
        engine.backward(loss_of(engine(inputs), targets))
        with pytest.raises(hoist.UsageError):  # gradients would be lost
            engine.sleep()
        assert not engine.is_asleep
        engine.step()
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        assert engine.step_count == 1
        engine.sleep()
        for call in (engine.sleep, engine.checkpoints, lambda: engine(inputs), engine.state_dict,
                     lambda: engine.digest(hoist.State.master), lambda: engine.save("name")):
            with pytest.raises(hoist.UsageError, match=r"the engine sleeps.*wake\(\)"):
                call()
        with pytest.raises(hoist.UsageError):  # its weights are still the engine's
            hoist.torch.wrap(model, settings())
        engine.wake()
        train(engine, 1, first=1, micro_batches=2)


def test_without_a_store(settings, tmp_path):
    """Without a store, sleep() is refused with the remedy, and training goes on."""
    config = placed(settings, tmp_path, "cpu")
    del config["hoist"]["checkpoint_path"]
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 1)
        with pytest.raises(hoist.Error, match="checkpoint_path"):
            engine.sleep()
        assert not engine.is_asleep
        train(engine, 1, first=1)


def test_the_store_has_moved_on(settings, tmp_path):
    """If another program has trained the same store meanwhile, wake() says so, and restore() accepts that state."""
    config = settings()
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 2)
        engine.sleep()
        with hoist.torch.wrap(make(), config, resume=True) as other:
            train(other, 1, first=2)
            end = digests(other)
        with pytest.raises(hoist.StoreError, match="step 2.*step 3"):
            engine.wake()
        assert engine.is_asleep
        assert engine.restore() == 3
        assert not engine.is_asleep and digests(engine) == end
        train(engine, 1, first=3)


def test_a_restore_that_fails_leaves_it_asleep(settings):
    config = settings()
    config["hoist"]["keep_steps"] = 1
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 1)
        end = digests(engine)
        engine.sleep()
        with pytest.raises(hoist.StoreError, match="another name"):
            engine.restore("another name")
        assert engine.is_asleep
        engine.wake()
        assert digests(engine) == end


@pytest.mark.parametrize("call", ["load_checkpoint", "restore"])
def test_an_interruption_as_the_engine_falls_asleep(settings, tmp_path, monkeypatch, call):
    """Then wake() names two calls that help: restore(), which wakes the engine, and load_checkpoint() after it."""
    config = settings()
    config["hoist"]["keep_steps"] = 1
    with hoist.torch.wrap(make(), config) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "c")
        end = digests(engine)
        sleep = engine._unit_manager.sleep

        def interrupted(state):
            sleep(state)
            raise KeyboardInterrupt

        with monkeypatch.context() as context:
            context.setattr(type(engine._unit_manager), "sleep", lambda _, state: interrupted(state))
            with pytest.raises(KeyboardInterrupt):
                engine.sleep()
        assert engine.is_asleep
        with pytest.raises(hoist.UsageError, match=r"sleep\(\) was interrupted.*load_checkpoint\(\).*after restore\(\)"):
            engine.wake()
        with pytest.raises(hoist.UsageError, match=r"sleeps: call restore\(\) before"):
            engine.load_checkpoint(tmp_path / "c")
        assert engine.is_asleep
        engine.restore()
        if call == "load_checkpoint":
            assert engine.load_checkpoint(tmp_path / "c")[0]
        assert digests(engine) == end
        train(engine, 1, first=1)


def test_closed_in_its_sleep(settings):
    model = make()
    with hoist.torch.wrap(model, settings()) as engine:
        train(engine, 1)
        end = digests(engine)
        engine.sleep()
    with pytest.raises(hoist.UsageError, match="closed"):
        engine.wake()
    with hoist.torch.wrap(make(), settings(), resume=True) as engine:
        assert digests(engine) == end


def test_everything_is_given_back(settings, tmp_path):
    """sleep() gives back all of 41 MB of state in host memory, and 30 sleeps leak nothing."""
    config = placed(settings, tmp_path, "cpu")
    config["hoist"]["pinned_memory"] = "128MiB"
    with hoist.torch.wrap(make(width=256), config) as engine:
        train(engine, 2)
        held = sum(tier["peak_bytes"] for name, tier in engine.statistics()["tiers"].items()
                   if name != "device" or not accelerator.ON_GPU)
        assert held > 40 * 2**20
        asleep = []
        for sleep in range(30):
            awake = resources()
            engine.sleep()
            asleep.append(resources())
            engine.wake()
            if sleep < 3:  # later ones follow each other: what PyTorch keeps of a step differs by megabytes from step to step
                train(engine, 1)
        last = asleep[-1]
        assert last["resident"] < awake["resident"] - 0.9 * held
        assert last["mapped"] < awake["mapped"] - held or accelerator.ON_GPU  # CUDA maps memory of its own meanwhile
        assert last["threads"] < awake["threads"] and last["files"] < awake["files"]
        assert last["files"] == asleep[10]["files"] and last["threads"] == asleep[10]["threads"]
        assert last["resident"] < asleep[10]["resident"] + 2**20


PROGRAM = """
join()
engine = hoist.torch.wrap(make(), config)
losses = train_share(engine, rank, size, 3)
if os.environ["SLEEPS"] == "1":
    engine.sleep()
    dist.barrier()
    engine.wake()
losses += train_share(engine, rank, size, 3, first=3)
print(json.dumps([losses, engine.digest(hoist.State.master), engine.digest(hoist.State.moment2)]))
engine.close()
"""


def test_two_ranks(settings, tmp_path):
    ends = []
    for sleeps in "01":
        config = at(tmp_path / sleeps / "store", settings())
        config["hoist"]["device_memory"] = "16MiB"
        ends.append(results(start(PROGRAM, tmp_path / sleeps, config, SLEEPS=sleeps)))
    assert ends[0] == ends[1]


NO_MEMORY = """
import resource
join()
engine = hoist.torch.wrap(make(), config)
train_share(engine, rank, size, 2)
end = digests(engine)
engine.sleep()
dist.barrier()
limits = resource.getrlimit(resource.RLIMIT_AS)
if rank == 1:  # 400 MiB of addresses are left, and the host device needs 1 GiB
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 400 * 2**20, limits[1]))
began = time.monotonic()
try:
    engine.wake()
except hoist.Error as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
assert engine.is_asleep and time.monotonic() - began < 60
dist.barrier()
engine.wake()
print(json.dumps([digests(engine) == end, said]))
engine.close()
"""


def test_one_rank_lacks_memory(settings, tmp_path):
    """The others are told why, at once, and all may wake up later."""
    config = at(tmp_path / "store", settings())
    config["hoist"] |= {"device_memory": "1GiB", "pinned_memory": "64MiB"}
    for woke, said in results(start(NO_MEMORY, tmp_path / "meet", config)):
        assert woke and "memory" in said.lower(), said
