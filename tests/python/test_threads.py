# SPDX-License-Identifier: Apache-2.0
"""Calls of several threads at once, and calls that Ctrl-C ends: refused by name, and a new engine continues."""

import asyncio
import concurrent.futures
import signal
import sys
import threading
import time
import types

import pytest
import torch

import hoist
import hoist.torch
from hoist.torch.model.unit_tensors import CAN_REFUSE, UnitTensors
from hoist.torch.passes.turns import Turns
from models import batches, loss_of
from training import digests, make, train


class Held(torch.nn.Module):
    """Stands in a forward pass until it is let go, or raises."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        self.raises = None

    def forward(self, x):
        self.entered.set()
        assert self.let_go.wait(30)
        if self.raises is not None:
            raise self.raises
        return self.inner(x)


def held_model():
    model = make()
    model.blocks[1] = Held(model.blocks[1])
    return model


def test_a_call_while_another_thread_has_one_is_refused_by_name(settings):
    with hoist.torch.wrap(held_model(), settings()) as engine:
        train(engine, 1)
        held = engine.module.blocks[1]
        held.entered.clear()
        held.let_go.clear()
        losses = []
        inputs, targets = next(iter(batches(1)))

        def compute():
            losses.append(loss_of(engine(inputs), targets))

        thread = threading.Thread(target=compute, name="the-first")
        thread.start()
        assert held.entered.wait(30)
        for call, name in ((engine.step, "step"), (engine.settle, "settle"), (lambda: engine(inputs), "forward"),
                           (engine.state_dict, "state_dict"), (engine.optimizer.zero_grad, "zero_grad"),
                           (engine.restore, "restore"),
                           (lambda: engine.load_checkpoint("none"), "load_checkpoint")):
            with pytest.raises(hoist.UsageError, match=rf"{name}\(\) in thread 'MainThread' while forward\(\) is under way in "
                                                       r"thread 'the-first'"):
                call()
        held.let_go.set()
        thread.join()
        engine.backward(losses[0])  # the refused calls have changed nothing
        engine.step()
        train(engine, 1, first=2)
        assert engine.step_count == 3


def test_close_waits_for_the_call_of_another_thread(settings):
    engine = hoist.torch.wrap(held_model(), settings())
    train(engine, 1)
    held = engine.module.blocks[1]
    held.entered.clear()
    held.let_go.clear()
    inputs, targets = next(iter(batches(1)))
    losses = []
    threads = [threading.Thread(target=lambda: losses.append(loss_of(engine(inputs), targets).item())),
               threading.Thread(target=engine.close)]
    threads[0].start()
    assert held.entered.wait(30)
    threads[1].start()
    time.sleep(0.1)
    assert threads[1].is_alive() and engine.step_count == 1
    held.let_go.set()
    for thread in threads:
        thread.join(30)
    assert losses
    with pytest.raises(hoist.UsageError, match="the engine was closed"):
        engine(inputs)


def test_close_does_not_wait_for_a_forward_pass_that_another_thread_was_interrupted_in(settings):
    engine = hoist.torch.wrap(held_model(), settings())
    engine.module.blocks[1].raises = asyncio.CancelledError()
    inputs = next(iter(batches(1)))[0]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert isinstance(threads.submit(lambda: engine(inputs)).exception(), asyncio.CancelledError)
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_a_call_that_was_interrupted_before_it_could_be_watched_is_left_behind():
    turns = Turns(lambda: None)
    turns.begin("step()")
    turns.interrupt("step() was interrupted")
    with turns.outside("load_checkpoint()"), turns.outside("restore()"):
        turns.leave_interrupted()
        assert turns.under_way == "load_checkpoint()"
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(turns.begin, "step()").result()


def test_a_call_in_whose_middle_close_is_refused_goes_on(settings, monkeypatch):
    """As a signal handler calls close(), while the thread is in the extension."""
    def refused():
        raise hoist.UsageError("in the middle of another call")

    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 1)
        with monkeypatch.context() as context, engine._passes.turns.of("step()"):
            context.setattr(engine, "_unit_manager", types.SimpleNamespace(close=refused))
            with pytest.raises(hoist.UsageError, match="in the middle"):
                engine.close()
            assert engine._passes.turns.under_way == "step()"
        train(engine, 1, first=1)


def test_another_thread_may_read_while_the_engine_is_restored_or_sleeps(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 1)
        engine.settle()
        ended, counts, refused = threading.Event(), set(), set()

        def read():
            while not ended.is_set():
                for value in (lambda: engine.step_count, lambda: engine.committed_step, engine.statistics, engine.describe):
                    try:
                        counts.add(str(value())[:1])
                    except Exception as error:
                        refused.add(str(error))

        thread, before = threading.Thread(target=read), sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            thread.start()
            for _ in range(10):
                engine.restore()
                engine.sleep()
                engine.wake()
        finally:
            sys.setswitchinterval(before)
            ended.set()
            thread.join()
        assert "1" in counts
        assert all("the engine sleeps" in text or "the engine is being restored" in text for text in refused), refused


def test_threads_may_take_turns(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        for step in range(2):
            thread = threading.Thread(target=train, args=(engine, 1, step))
            thread.start()
            thread.join()
        assert engine.step_count == 2


def test_after_an_interrupted_forward_pass_the_engine_says_what_helps(settings):
    config = settings()
    with hoist.torch.wrap(held_model(), config) as engine:
        train(engine, 2)
        engine.module.blocks[1].raises = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1, first=2)
        engine.module.blocks[1].raises = None
        for _ in range(2):
            with pytest.raises(hoist.UsageError, match="interrupted.*resume=True.*restore"):
                train(engine, 1, first=2)
        with pytest.raises(hoist.UsageError, match="interrupted"):
            engine.save()
    with hoist.torch.wrap(held_model(), config, resume=True) as engine:
        assert engine.step_count == 2
        train(engine, 1, first=2)


@pytest.mark.parametrize("call", ["read", "step", "save", "zero_grad", "state_dict", "load_state_dict", "restore",
                                  "load_checkpoint"])
def test_a_call_of_the_engine_inside_of_forward_is_refused_and_no_more(settings, call):
    arguments = {"read": ["norm.weight"], "load_state_dict": [{}, False], "load_checkpoint": ["none"]}.get(call, [])
    memory = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    with hoist.torch.wrap(make(), settings(zero_optimization=memory)) as undisturbed:
        train(undisturbed, 3)
        expected = digests(undisturbed)
    with hoist.torch.wrap(make(), settings(zero_optimization=memory)) as engine:
        train(engine, 2)
        callee = engine.module if "state_dict" in call else engine
        hook = engine.module.norm.register_forward_hook(lambda *_: getattr(callee, call)(*arguments) and None)
        for _ in range(2):
            with pytest.raises(hoist.UsageError, match=rf"{call}\(\) inside of forward\(\): call it when"):
                train(engine, 1, first=2)
        hook.remove()
        train(engine, 1, first=2)
        assert digests(engine) == expected


def interrupted_in(engine, monkeypatch, name, raised):
    """One step, with a signal right after the extension's `name` has returned, whose handler raises `raised`, once."""
    def handler(*_):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise raised

    manager = engine._unit_manager

    class Interrupting:
        def __getattr__(self, attribute):
            value = getattr(manager, attribute)
            if attribute != name:
                return value

            def call(*args):
                value(*args)
                signal.raise_signal(signal.SIGALRM)

            return call

    monkeypatch.setattr(engine, "_unit_manager", Interrupting())
    monkeypatch.setattr(engine._passes, "_unit_manager", Interrupting())
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(raised):
            train(engine, 1, first=engine.step_count)
    finally:
        signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()


def test_after_an_interrupted_forward_pass_a_checkpoint_is_loaded(settings, tmp_path):
    def config():
        return settings(hoist={"device_memory": "240KiB", "pinned_memory": "32MiB", "keep_steps": 2})

    with hoist.torch.wrap(held_model(), config()) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "c", client_state={"epoch": 2})
        train(engine, 1, first=2)
        engine.module.blocks[1].raises = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            train(engine, 1, first=3)
        engine.module.blocks[1].raises = None
        assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
        with pytest.raises(hoist.StoreError, match="has no named checkpoint 'other'"):
            engine.load_checkpoint(tmp_path / "c", tag="other")
        with pytest.raises(hoist.UsageError, match="interrupted"):
            train(engine, 1, first=3)
        assert engine.load_checkpoint(tmp_path / "c")[1] == {"epoch": 2} and engine.step_count == 2
        train(engine, 2, first=2)
        found = digests(engine)
    with hoist.torch.wrap(held_model(), undisturbed(config())) as engine:
        train(engine, 4)
        assert digests(engine) == found


def undisturbed(config):
    """A configuration of another store."""
    config["zero_optimization"]["offload_param"]["nvme_path"] += "-undisturbed"
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] += "-undisturbed"
    return config


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("name", ["step", "end_backward"])
def test_after_an_interrupted_step_the_engine_is_restored(settings, monkeypatch, name, raised):
    """Also in place: what follows is bit for bit what an undisturbed run computes."""
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 2)
        interrupted_in(engine, monkeypatch, name, raised)
        with pytest.raises(hoist.UsageError, match=f"interrupted by {raised.__name__}.*restore"):
            train(engine, 1)
        step = engine.restore()
        assert step == (3 if name == "step" else 2)
        train(engine, 4 - step, first=step)
        found = digests(engine)
    with hoist.torch.wrap(make(), undisturbed(settings())) as engine:
        train(engine, 4)
        assert digests(engine) == found


def interrupted(call, at, before):
    """`call`, with what a signal handler raises at the begin or end of its use number `at`."""
    def call_and_raise(*args):
        nonlocal at
        at -= 1
        if before and at == 0:
            raise KeyboardInterrupt
        call(*args)
        if at == 0:
            raise KeyboardInterrupt

    return call_and_raise


@pytest.mark.parametrize("name, at", [("bind", 1), ("bind", 3), ("open", 1), ("open", 9), ("close", 1), ("close", 5)])
@pytest.mark.parametrize("before", [False, True])
def test_an_interruption_while_weights_come_or_go_is_not_lost(settings, monkeypatch, name, at, before):
    with monkeypatch.context() as context:
        context.setattr(UnitTensors, name, interrupted(getattr(UnitTensors, name), at, before))
        engine = hoist.torch.wrap(make(), settings())
        with pytest.raises(KeyboardInterrupt):
            train(engine, 3)
    step = engine.restore()
    train(engine, 3 - step, first=step)
    found = digests(engine)
    for module in engine.module.children():
        for parameter in module.parameters():
            if CAN_REFUSE:
                with pytest.raises(RuntimeError, match="not loaded"):
                    parameter.sum()
    engine.close()
    with hoist.torch.wrap(make(), undisturbed(settings())) as engine:
        train(engine, 3)
        assert digests(engine) == found


def test_an_interrupted_close_gives_all_memory_back(settings, monkeypatch):
    engine = hoist.torch.wrap(make(), settings())
    train(engine, 1)
    units = engine._parameters.tensors._units

    def show(_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(units[0], "show", show)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert all(unit.storage is None and unit.shown is unit.absent for unit in units)


def test_a_signal_handler_may_call_the_engine_while_its_own_thread_notes_a_call():
    turns = Turns(lambda: None)

    def call():
        with turns._lock:
            turns.begin("save()")
            turns.end()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
