# SPDX-License-Identifier: Apache-2.0
"""Weights of fp16 and a scaled loss, against fp32 masters and torch.optim.AdamW in memory with DeepSpeed's rule for the scale."""

import copy
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import hoist
import hoist.torch
from models import batches, loss_of
from training import digests, make, train

STEPS = 30
FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 8, "hysteresis": 1}
# A loss is a number of fp16 made from numbers of fp16: three units in its last place. Where PyTorch splits its sums differs
# from machine to machine, and moves it by two.
LOSS_BOUND = 3 * 2.0**-10
TOO_HIGH = FP16 | {"initial_scale_power": 28}  # of a loss near 5: gradients are infinite at first


class Scale:
    """DeepSpeed's rule, without consecutive_hysteresis."""

    def __init__(self, initial_scale_power, loss_scale_window, hysteresis, **_):
        self.value, self.window, self.hysteresis = 2.0**initial_scale_power, loss_scale_window, hysteresis
        self.left, self.step, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow):
        if overflow:
            if self.left == 1:
                self.value = max(self.value / 2, 1.0)
            else:
                self.left -= 1
            self.last_overflow = self.step
        elif (stable := self.step - self.last_overflow - 1) > 0 and stable % self.window == 0:
            self.value *= 2
            self.left = self.hysteresis
        self.step += 1


class Reference:
    """Mixed precision as programs write it by hand: half weights, fp32 masters, the scale taken out before the step."""

    def __init__(self, model, fp16, micro_batches=1):
        self.master = copy.deepcopy(model)
        self.model = copy.deepcopy(model).half()
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        self.scale = Scale(**fp16)
        self.micro_batches = micro_batches
        self.skipped = 0

    def step(self, data):
        pairs = list(zip(self.model.parameters(), self.master.parameters(), strict=True))
        sums = [torch.zeros_like(master) for _, master in pairs]
        losses = []
        for inputs, targets in data:
            loss = loss_of(self.model(inputs), targets)
            (loss.float() * self.scale.value).backward()
            for (parameter, _), total in zip(pairs, sums, strict=True):
                total += parameter.grad.float()
                parameter.grad = None
            losses.append(loss.item())
        overflow = not all(total.isfinite().all() for total in sums)
        if overflow:
            self.skipped += 1
        else:
            with torch.no_grad():
                for (_, master), total in zip(pairs, sums, strict=True):
                    master.grad = total / (self.scale.value * self.micro_batches)
                self.optimizer.step()
                for parameter, master in pairs:
                    parameter.copy_(master)
        self.scale.update(overflow)
        return losses


def in_memory(config):
    config["zero_optimization"] = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return config


def movement_apart(engine, reference, before):
    """By how much masters differ, as a part of the way that their tensor has gone."""
    ours = engine.state_dict(torch.float32)
    apart = {}
    for name, value in reference.master.state_dict().items():
        way = (value - before[name]).norm().cpu()
        apart[name] = ((ours[name] - value.cpu()).norm() / way).item()
    return apart


def test_inputs_are_cast_where_the_file_says_so(settings):
    """As DeepSpeed's engine does it: floating-point inputs only, inside of lists and dictionaries too."""

    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, rows, *, more):
            assert more["at"].dtype == torch.int64
            return self.layer(rows[0]) + self.layer(more["rows"])

    rows = torch.randn(4, 8)
    for cast in (True, False):
        model = Takes()
        weight, bias = (p.detach().half().float() for p in model.layer.parameters())
        config = in_memory(settings(fp16={"enabled": True, "auto_cast": cast}))
        with hoist.torch.wrap(model, config) as engine, torch.no_grad():
            engine.eval()
            arguments = {"rows": [rows.to(engine.device)],
                         "more": {"rows": rows.to(engine.device), "at": torch.arange(4, device=engine.device)}}
            if not cast:
                with pytest.raises(RuntimeError):
                    engine(**arguments)
                continue
            found = engine(**arguments)
            assert found.dtype == torch.float16
            torch.testing.assert_close(found.float().cpu(), (2 * (rows @ weight.T + bias)).cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("where", ["nvme", "memory"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_half_weights_train_as_with_fp32_masters(settings, where, micro_batches):
    model = make()
    reference = Reference(model, FP16, micro_batches)
    before = {name: value.clone() for name, value in reference.master.state_dict().items()}
    config = settings(fp16=FP16, gradient_accumulation_steps=micro_batches)
    with hoist.torch.wrap(model, in_memory(config) if where == "memory" else config) as engine:
        assert model.head.weight.dtype == torch.float16
        data = batches(STEPS * micro_batches)
        for step in range(STEPS):
            rows = [next(data) for _ in range(micro_batches)]
            losses = []
            assert engine.optimizer.loss_scale == reference.scale.value
            for inputs, targets in rows:
                loss = loss_of(engine(inputs), targets)
                engine.backward(loss)
                report = engine.step()
                losses.append(loss.item())
            assert report.applied and report.loss_scale == reference.scale.value
            expected = reference.step(rows)
            assert losses == pytest.approx(expected, rel=0 if step == 0 else LOSS_BOUND), step
        assert engine.optimizer.loss_scale == 2.0**13  # 30 steps of windows of 8
        apart = movement_apart(engine, reference, before)
        assert max(apart.values()) < 2e-3, apart


def test_an_overflow_skips_the_step(settings):
    """No state changes and no schedule goes on until the scale has come down; from then on it is training as always."""
    model = make()
    reference = Reference(model, TOO_HIGH)
    config = settings(fp16=TOO_HIGH)
    engine, optimizer, _, scheduler = hoist.torch.initialize(
        model=model, config=config, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)))
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and optimizer.dynamic_loss_scale
    begin = digests(engine)
    rates = []
    for index, (inputs, targets) in enumerate(batches(16)):
        scale = optimizer.cur_scale
        assert scale == reference.scale.value
        rates.append(scheduler.get_last_lr()[0])
        for group in reference.optimizer.param_groups:
            group["lr"] = rates[-1]
        engine.backward(loss_of(engine(inputs), targets))
        assert not engine.was_step_applied() or index > 0
        report = engine.step()
        reference.step([(inputs, targets)])
        skipped = reference.skipped == index + 1
        assert report.applied != skipped == optimizer.overflow == optimizer.step_was_skipped
        assert engine.was_step_applied() == report.applied
        assert engine.skipped_steps == reference.skipped
        assert engine.global_steps == index + 1 and engine.step_count == index + 1 - reference.skipped
        assert (digests(engine) == begin) == skipped
        assert optimizer.loss_scale == (scale / 2 if skipped else reference.scale.value)
        assert scheduler.last_epoch == engine.step_count
    assert 4 < reference.skipped < 14
    assert rates[reference.skipped] == 1e-3 > rates[-1]
    before = dict(make().state_dict())
    assert max(movement_apart(engine, reference, before).values()) < 2e-3
    engine.close()


def test_small_gradients_vanish_without_a_scale(settings):
    """A loss of 1e-6 has fp16 gradients that are mostly zero; with the scale they are those of fp32, but for rounding."""
    def gradient(name, changes):
        with hoist.torch.wrap(make(), settings(name, **changes)) as engine:
            inputs, targets = next(batches(1))
            engine.backward(loss_of(engine(inputs).float(), targets) * 1e-6)
            return engine.read("blocks.1.up.weight", hoist.State.gradient)

    exact = gradient("fp32", {})
    scaled = gradient("scaled", {"fp16": {"enabled": True, "loss_scale": 2**24}})
    vanished = gradient("vanished", {"fp16": {"enabled": True, "loss_scale": 1}})
    assert (scaled - exact).norm() < 0.01 * exact.norm()
    assert (vanished - exact).norm() > 0.5 * exact.norm()


def test_a_fixed_scale_and_a_backward_of_ones_own(settings):
    """engine.scale(loss).backward() is engine.backward(loss); a loss without the scale is refused, not made to vanish."""
    ends = []
    for own in (False, True):
        with hoist.torch.wrap(make(), settings(str(own), fp16={"enabled": True, "loss_scale": 1000})) as engine:
            assert engine.loss_scale() == engine.optimizer.loss_scale == 1000 and not engine.dynamic_loss_scale()
            for inputs, targets in batches(6):
                if own:
                    with pytest.raises(hoist.UsageError, match="engine.scale"):
                        loss_of(engine(inputs), targets).backward()
                    engine.scale(loss_of(engine(inputs), targets)).backward()
                else:
                    engine.backward(loss_of(engine(inputs), targets))
                assert engine.step().applied
            assert engine.optimizer.loss_scale == 1000 and engine.skipped_steps == 0
            ends.append(digests(engine))
    assert ends[0] == ends[1]


def test_killed_and_resumed(settings):
    """kill -9 after skipped steps and some that were not: scale and counters go on, and the end has the bits of a run that
    nobody disturbed. A step that was kept right after a skipped one knows of it."""
    def config(name):
        return settings(name, fp16=TOO_HIGH, hoist={"device_memory": "240KiB", "pinned_memory": "32MiB", "keep_steps": 2})

    with hoist.torch.wrap(make(), config("whole")) as engine:
        train(engine, 4)
        assert engine.skipped_steps == 4 and engine.step_count == 0
        engine.save("skipped").wait()
        losses = train(engine, 16, first=4)
        skipped, expected, scale = engine.skipped_steps, digests(engine), engine.optimizer.loss_scale
        assert 4 < skipped < 15
        engine.restore("skipped")
        assert engine.skipped_steps == 4 and engine.optimizer.loss_scale == 2.0**24 and engine.global_steps == 4
        assert train(engine, 16, first=4) == losses
        assert digests(engine) == expected and engine.optimizer.loss_scale == scale

    program = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        import accelerator
        accelerator.use_if_asked()
        from test_fp16 import make, train
        engine = hoist.torch.wrap(make(), {config("killed")!r})
        train(engine, 17)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with hoist.torch.wrap(make(seed=5), config("killed"), resume=True) as engine:
        assert engine.skipped_steps == skipped and 0 < engine.global_steps <= 17
        train(engine, 20 - engine.global_steps, first=engine.global_steps)
        assert digests(engine) == expected and engine.optimizer.loss_scale == scale


def test_what_goes_out_is_what_forward_computes_with(settings, tmp_path):
    from safetensors.torch import load_file

    model = make()
    with hoist.torch.wrap(model, settings(fp16=FP16)) as engine:
        train(engine, 3)
        whole = engine.state_dict(torch.float32)
        half = engine.state_dict()
        assert {v.dtype for v in half.values()} == {torch.float16}
        with engine.gathered():
            for name, parameter in model.named_parameters():
                assert torch.equal(half[name], parameter.cpu()) and torch.equal(half[name], whole[name].half()), name
        assert all(torch.equal(v.cpu(), half[n]) for n, v in model.state_dict().items())
        engine.export(str(tmp_path / "half"), torch.float16)
        exported = load_file(tmp_path / "half" / "model.safetensors")
        assert len(exported) == len(list(model.parameters()))
        for name, value in exported.items():
            assert value.dtype == torch.float16 and torch.equal(value, half[name]), name
        engine.write("norm.weight", torch.full((32,), 60000.0))
        engine.export(str(tmp_path / "large"), torch.float16)
        with pytest.raises(hoist.UsageError, match="norm.weight"):
            engine.write("norm.weight", torch.full((32,), 70000.0))

    with hoist.torch.wrap(make(seed=5), settings("second", fp16=FP16), weights=str(tmp_path / "half")) as engine:
        assert all(torch.equal(v, half[n]) for n, v in engine.state_dict().items())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_fp16_cannot_hold_is_not_exported_so(settings, tmp_path, dtype):
    with hoist.torch.wrap(make(), settings(**({"bf16": {"enabled": True}} if dtype == "bf16" else {}))) as engine:
        engine.write("norm.weight", torch.full((32,), 70000.0))
        with pytest.raises(hoist.UsageError, match="fp32"):
            engine.export(str(tmp_path / "half"), torch.float16)
        assert not (tmp_path / "half" / "model.safetensors").exists()


def test_half_parameters_without_a_loss_scale_are_refused(settings):
    with pytest.raises(hoist.UsageError, match="fp16.*enabled"):
        hoist.torch.wrap(make().half(), settings())


def test_a_frozen_half_base_needs_none(settings):
    """Weights only: nothing is differentiated with respect to them."""
    model = make()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
        block.up.weight.data = block.up.weight.data.half()
    before = model.blocks[0].up.weight.clone()
    with hoist.torch.wrap(model, settings()) as engine:
        assert torch.equal(engine.state_dict()["blocks.0.up.weight"], before.cpu())


def test_a_scale_that_cannot_fall_any_more_ends_the_run(settings):
    stuck = {"enabled": True, "initial_scale_power": 28, "hysteresis": 1, "min_loss_scale": 2**27}
    engine = hoist.torch.wrap(make(), settings(fp16=stuck))
    train(engine, 1)
    for failing in (lambda: train(engine, 1), engine.close):
        with pytest.raises(hoist.Error, match="smallest loss scale"):
            failing()
    engine.close()  # everything was given back the first time
