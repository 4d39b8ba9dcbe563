# SPDX-License-Identifier: Apache-2.0
"""hoist.Engine, for programs with forward and backward passes of their own: two layers and a hand-written gradient."""

import json

import numpy as np
import pytest
import torch

import hoist

WIDTH = 8
TARGET = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 64 - 0.5


def config(path, **changes):
    nvme = {"device": "nvme", "nvme_path": str(path)}
    return hoist.Config.parse(json.dumps({
        "train_batch_size": 1, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "hoist": {"device_memory": "4MiB", "pinned_memory": "16MiB", "keep_steps": 1} | changes,
    }))


def declare():
    model = hoist.Model()
    units = [model.add_unit(name, [hoist.ParameterSpec(f"{name}.weight", [WIDTH, WIDTH], hoist.DType.fp32)])
             for name in ("first", "second")]
    return model, units


def values(parameter, first, out):
    out[:] = np.sin(np.arange(first, first + len(out), dtype=np.float32) + int(parameter))


def step(engine, units):
    """Both layers towards the target: loss (w - t)^2 / 2 of each."""
    engine.begin(hoist.Pass.train)
    loss = 0.0
    for unit, name in zip(units, ("first", "second"), strict=True):
        parameter = engine.parameter(f"{name}.weight")
        with engine.gather(unit) as lease:
            gradient = torch.from_dlpack(lease.view(parameter)).numpy() - TARGET
        loss += float((gradient**2).sum()) / 2
        engine.accumulate(parameter, gradient)
        engine.finish(unit)
    engine.end()
    report = engine.step(f"after {engine.step_count + 1}".encode())
    return loss, report


def test_a_program_with_its_own_passes(tmp_path):
    model, units = declare()
    engine = hoist.Engine.create(config(tmp_path), model, values)
    assert engine.restored is None
    assert [p.name for p in engine.model.parameters] == ["first.weight", "second.weight"]
    out = np.empty(5, dtype=np.float32)
    engine.read(engine.parameter("second.weight"), hoist.State.master, 3, out)
    assert np.array_equal(out, np.sin(np.arange(3, 8, dtype=np.float32) + 1))
    losses = [step(engine, units)[0] for _ in range(5)]
    engine.save("five", b"kept").wait()
    at_five = engine.digest(hoist.State.master)
    losses += [step(engine, units)[0] for _ in range(15)]
    assert losses[-1] < 0.1 * losses[0]
    engine.settle()
    at_twenty = engine.digest(hoist.State.master)
    del engine

    assert hoist.Engine.find_checkpoints(config(tmp_path)) == [("five", 5)]
    assert hoist.Engine.find_commit(config(tmp_path)) == 20
    engine = hoist.Engine.restore(config(tmp_path), model)
    assert engine.restored == (20, b"after 20")
    assert engine.digest(hoist.State.master) == at_twenty
    del engine

    engine = hoist.Engine.restore(config(tmp_path), model, "five")
    assert engine.restored == (5, b"kept")
    assert engine.digest(hoist.State.master) == at_five
    assert [step(engine, units)[0] for _ in range(15)] == losses[5:]


def test_what_the_engine_refuses_is_raised(tmp_path):
    model, units = declare()
    with pytest.raises(hoist.UsageError, match="nothing"):
        model.parameter("nothing")
    with pytest.raises(hoist.StoreError, match="no commit"):
        hoist.Engine.restore(config(tmp_path), model)
    engine = hoist.Engine.create(config(tmp_path), model, values)
    with pytest.raises(hoist.UsageError, match="begin"):
        engine.gather(units[0])
    with pytest.raises(hoist.UsageError):
        engine.write(engine.parameter("first.weight"), hoist.State.gradient, 0, np.zeros(4, dtype=np.float32))
    engine.write(engine.parameter("first.weight"), hoist.State.master, 0, np.full(4, 2.5, dtype=np.float32))
    out = np.empty(4, dtype=np.float32)
    engine.read(engine.parameter("first.weight"), hoist.State.master, 0, out)
    assert (out == 2.5).all()
    for wrong in (np.full(4, -7.0), np.full(8, -7.0, dtype=np.float32)[::2], torch.full((4,), -7.0, dtype=torch.float64)):
        with pytest.raises(TypeError):
            engine.read(engine.parameter("first.weight"), hoist.State.master, 0, wrong)
