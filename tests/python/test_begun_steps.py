# SPDX-License-Identifier: Apache-2.0
"""Update mode "backward", in which backward() begins a step that only step() can end: how such a step is given up, and that no
call drops its gradients."""

import contextlib
import resource
import sys
import time

import pytest
import torch.nn.functional as F
from loops import batches, model_of, run

import hoist
import hoist.torch


@pytest.fixture
def updated_in_backward(settings):
    def make(model=None, store="store", **arguments):
        config = settings(store, hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"})
        return hoist.torch.wrap(model or model_of(), config, **arguments)

    return make


@pytest.mark.parametrize("end", ["an error", "an error in the backward pass", "sys.exit", "the block's end", "the program's end"])
def test_a_step_that_backward_has_begun_is_given_up_at_the_end(updated_in_backward, end, capfd):
    def fail(_):
        raise LookupError("no such token")

    engine = updated_in_backward()
    run(engine, 2)
    inputs, targets = batches(1)[0]
    outcome = {"an error": LookupError, "an error in the backward pass": LookupError, "sys.exit": SystemExit}.get(end)
    with pytest.raises(outcome) if outcome else contextlib.nullcontext():
        with contextlib.nullcontext() if end == "the program's end" else engine:
            if "backward" in end:  # when the later layers are being updated
                engine.module[0].up.weight.register_hook(fail)
            loss = F.mse_loss(engine(inputs), targets)
            try:
                engine.backward(loss)
            finally:
                assert engine._unit_manager.has_begun_step
            if end == "an error":
                fail(None)
            if end == "sys.exit":
                sys.exit(0)
    if end == "the program's end":
        engine._at_exit.call()
    engine.close()
    said = capfd.readouterr().err
    assert "not committed" not in said and "step 3 was begun by backward()" in said, said
    with updated_in_backward(resume=True) as resumed:
        assert resumed.step_count == 2


def test_a_drive_that_failed_is_said_at_the_end_though_a_step_was_begun(updated_in_backward):
    for attempt in range(8):
        engine = updated_in_backward(store=f"store{attempt}")
        run(engine, 2)
        engine.settle()
        inputs, targets = batches(1)[0]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(hoist.IoError, match="File too large"):
                for _ in range(5):
                    engine.backward(F.mse_loss(engine(inputs), targets))
                    time.sleep(0.2 * 2**attempt)  # by then updates have been written, as a rule: the next call says the error
                    engine.step()
            was_begun = engine._unit_manager.has_begun_step
            with pytest.raises(hoist.IoError, match="File too large"):
                engine.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with updated_in_backward(store=f"store{attempt}", resume=True) as resumed:
            assert resumed.step_count == 2
        if was_begun:
            return
    pytest.fail("no step failed between backward() and step()")


@pytest.mark.parametrize("call", ["drop_gradients", "zero_grad", "model.zero_grad", "another backward pass", "save"])
def test_gradients_that_have_updated_weights_are_not_dropped(updated_in_backward, call):
    with updated_in_backward() as engine:
        run(engine, 1)
        engine.zero_grad()  # as at the beginning of a loop's body
        loss = F.mse_loss(engine(batches()[0][0]), batches()[0][1])
        engine.zero_grad()
        engine.backward(loss)
        calls = {"model.zero_grad": engine.module.zero_grad, "another backward pass": lambda: engine(batches()[0][0])}
        with pytest.raises(hoist.UsageError) as error:
            calls.get(call, getattr(engine, call, None))()
        assert "step()" in str(error.value) and "call engine.drop_gradients" not in str(error.value)
        assert call == "save" or '"update_mode": "backward"' in str(error.value) and "restore()" in str(error.value)
        assert engine.step().step == 2
        engine.zero_grad()
        engine.drop_gradients()
        run(engine, 1)


def test_gradients_of_earlier_micro_batches_are_dropped_in_mode_backward_too(settings):
    config = settings(gradient_accumulation_steps=2, hoist={
        "device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"})
    with hoist.torch.wrap(model_of(), config) as engine:
        engine.backward(F.mse_loss(engine(batches()[0][0]), batches()[0][1]))
        engine.drop_gradients()
        for inputs, targets in batches(2):
            engine.backward(F.mse_loss(engine(inputs), targets))
            report = engine.step()
        assert report.step == 1
