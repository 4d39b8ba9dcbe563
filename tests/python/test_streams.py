# SPDX-License-Identifier: Apache-2.0
"""A program that computes on several streams of an accelerator ends in the same bits as on one stream.

Each program orders its own streams, as it must for PyTorch's sake; hoist's copies have to follow. hoist's streams are delayed at
random, and the program's where a missing wait would show.
"""

import contextlib
import itertools
import os
import threading
import time

import accelerator
import pytest
import torch
from torch import nn

import hoist.torch
from models import batches, loss_of, on_device_of_tests
from training import digests, make, train

if not os.environ.get("HOIST_TEST_ACCELERATOR"):
    pytest.skip("CPU tensors have no streams: HOIST_TEST_ACCELERATOR=1 runs this file", allow_module_level=True)

DEVICE = torch.get_default_device()
MODULE = torch.get_device_module(DEVICE)
DEFAULT = torch.accelerator.current_stream()
WIDTH, STEPS = 64, 5


@contextlib.contextmanager
def on(stream, *inputs):
    """Computes on a stream what begins with tensors of the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.accelerator.current_stream())
    for tensor in inputs:
        tensor.record_stream(stream)
    with stream:
        yield


def joined(stream, *outputs):
    """The current stream goes on with what another one has made."""
    if stream is not None:
        torch.accelerator.current_stream().wait_stream(stream)
        for tensor in outputs:
            tensor.record_stream(torch.accelerator.current_stream())


class Twin(nn.Module):
    """The same layers for two inputs, each on a stream of its own."""

    def __init__(self, streams):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)
        self.streams = streams

    def forward(self, pair):
        ends = list(pair)
        for index, stream in enumerate(self.streams):  # both begin before either is waited for
            with on(stream, ends[index]):
                for layer in self.layers:
                    ends[index] = late(torch.tanh(layer(ends[index])))
        for stream, end in zip(self.streams, ends, strict=True):
            joined(stream, end)
        return self.head(ends[0] - ends[1]).square().mean()


class Late(torch.autograd.Function):
    """The identity, after a delay."""

    @staticmethod
    def forward(ctx, value):
        accelerator.sleep(1)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        accelerator.sleep(1)
        return gradient


late = Late.apply


class Aside(nn.Module):
    """A layer that computes on another stream, which the program's hooks do not see."""

    def __init__(self, stream):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stream = stream

    def forward(self, x):
        with on(self.stream, x):
            y = late(self.down(torch.tanh(late(self.up(x)))))
        joined(self.stream, y)
        return x + y


def sequence(streams):
    return nn.Sequential(*(Aside(streams[index % len(streams)]) for index in range(4)), nn.Linear(WIDTH, 1))


class InTurns(nn.Module):
    """Layers whose gradients come in turns, of one and of another, on two streams: more units' at once than the engine has
    memory for."""

    def __init__(self, streams):
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(4)) for _ in range(5))
        self.streams = streams

    def forward(self, x):
        for round_ in range(4):
            for index, layer in enumerate(self.layers):
                stream = self.streams[(round_ + index) % 2]
                with on(stream, x):
                    y = late(torch.tanh(x * layer[round_]))
                joined(stream, y)
                x = x + y
        return x


def pairs():
    made = torch.Generator().manual_seed(2)
    return [on_device_of_tests(torch.randn(2, 8, WIDTH, generator=made, device="cpu")) for _ in range(STEPS)]


MODELS = {"twin": Twin, "aside": sequence, "in turns": InTurns}


def ended(settings, path, kind, streams, seed, **memory):
    nvme = {"device": "nvme", "nvme_path": str(path)}
    config = settings(zero_optimization={"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
                      hoist={"pinned_memory": "32MiB"} | accelerator.random_delays(seed) | memory)
    torch.manual_seed(0)
    losses = []
    with hoist.torch.wrap(MODELS[kind](streams), config) as engine:
        for pair in pairs():
            loss = engine(pair).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, digests(engine)


@pytest.fixture
def gradients_on(monkeypatch):
    """Gradients arrive on streams of their own, as PyTorch's versions choose these in several ways. None: on the current one."""
    own = torch.Tensor.register_post_accumulate_grad_hook

    def use(streams):
        turns = itertools.cycle(streams)

        def register(parameter, hook):
            stream = next(turns)

            def arrive(tensor):
                with on(stream, tensor.grad):
                    accelerator.sleep(2)
                    tensor.grad = tensor.grad.clone()
                    hook(tensor)

            return own(parameter, arrive)

        monkeypatch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", register)

    return use


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_on_streams_of_their_own(settings, tmp_path, gradients_on, kind):
    ends = []
    for name, streams in (("one", [None]), ("several", [torch.Stream(DEVICE) for _ in range(3)])):
        gradients_on(streams)
        ends.append(ended(settings, tmp_path / name, kind, [None, None], 1, device_memory="160KiB"))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("memory", ["100KiB", "160KiB", "4MiB"])
@pytest.mark.parametrize("kind", MODELS)
def test_several_streams_end_in_the_bits_of_one(settings, tmp_path, kind, memory):
    expected = ended(settings, tmp_path / "one", kind, [None, None], 0, device_memory=memory)
    for seed in (1, 2):
        streams = [torch.Stream(DEVICE), torch.Stream(DEVICE)]
        assert ended(settings, tmp_path / str(seed), kind, streams, seed, device_memory=memory) == expected


class Marked(torch.autograd.Function):
    """Takes a while; then the stream notes the time, under one number forward and under its negative backward."""

    @staticmethod
    def forward(ctx, value, number):
        ctx.number = number
        accelerator.sleep(40)
        MODULE.extension.mark(number)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        accelerator.sleep(40)
        MODULE.extension.mark(-ctx.number)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH, bias=False), number

    def forward(self, x):
        return Marked.apply(torch.tanh(self.linear(x)), self.number)


@pytest.mark.skipif(accelerator.ON_GPU, reason="a GPU's stream does not say when it came to a place")
def test_weights_come_up_while_the_layer_before_computes(settings):
    """Forward and backward: when a layer has been computed, the copy of the next one's weights is done."""
    count = 8
    config = settings(hoist={"device_memory": "80KiB", "pinned_memory": "32MiB"})
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "cpu"}
    with hoist.torch.wrap(nn.Sequential(*(Slow(1 + index) for index in range(count))), config) as engine:
        seen, ended = [], threading.Event()

        def look():
            while not ended.wait(0.002):
                seen.append((engine.statistics()["links"]["host_to_device"], time.monotonic_ns()))

        looking = threading.Thread(target=look)
        looking.start()
        for pair in pairs()[:3]:
            MODULE.extension.take_marks()
            before = engine.statistics()["links"]["host_to_device"]
            loss = engine(pair[0]).square().mean()
            engine.backward(loss)
            marks = dict(MODULE.extension.take_marks())
            copied = engine.statistics()["links"]["host_to_device"] - before
            engine.step()
        ended.set()
        looking.join()
    unit = 4 * WIDTH * WIDTH
    again = copied // unit - count  # layers whose weights did not stay between the passes
    assert copied % unit == 0 and count - 4 <= again < count

    def copies(time_ns):
        return (max(total for total, at in seen if at <= time_ns) - before) // unit

    for number in range(1, count):
        assert copies(marks[number]) >= number + 1, number
    for number in range(again, 0, -1):  # the layers that come up again, last one first
        assert copies(marks[-(number + 1)]) >= count + again - number + 1, number


@pytest.fixture
def default_device():
    yield torch.set_default_device
    torch.set_default_device(DEVICE)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_a_program_that_leaves_the_default_device_alone(settings, default_device, order):
    """Most programs build a model on the CPU and move batches to the device."""
    def model():
        with torch.device("cpu"):
            torch.manual_seed(0)
            return nn.Sequential(Aside(None), nn.BatchNorm1d(WIDTH), Aside(None), nn.Linear(WIDTH, 1))

    ends, data = [], pairs()
    for name, device in (("the device", DEVICE), ("cpu", torch.device("cpu"))):
        default_device(device)
        config = settings(name, gradient_accumulation_steps=2, hoist={
            "device_memory": "400KiB", "pinned_memory": "32MiB", "micro_batch_order": order})
        with hoist.torch.wrap(model(), config) as engine:
            losses = [engine.train_batch((each.to(DEVICE, non_blocking=True) for each in pair.cpu()),
                                         lambda batch, engine=engine: engine(batch).square().mean()).item() for pair in data]
            engine.save().wait()
            with torch.no_grad():
                losses.append(engine.eval()(data[0][0].to(DEVICE)).mean().item())
            saved = {key: value.cpu() for key, value in engine.module.state_dict().items()}
            ends.append((losses, digests(engine), {key: value.tolist() for key, value in saved.items()}))
        with hoist.torch.wrap(model(), config, resume=True) as engine:
            assert digests(engine) == ends[-1][1]
            assert engine.module[1].running_mean.device.type == DEVICE.type
            assert engine.module[1].running_mean.tolist() == ends[-1][2]["1.running_mean"]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_autocast(settings, order):
    """The weights are fp32, and come and go while operators use bf16 copies of them."""
    ends, types = [], set()
    for memory in ("140KiB" if order == "horizontal" else "400KiB", "8MiB"):
        config = settings(memory, gradient_accumulation_steps=2, hoist={
            "device_memory": memory, "pinned_memory": "32MiB", "micro_batch_order": order})
        with hoist.torch.wrap(make(recompute="non-reentrant"), config) as engine:
            engine.module.blocks[0].up.register_forward_hook(lambda *call: types.add(call[2].dtype))
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                ends.append((train(engine, 3, micro_batches=2), digests(engine)))
    assert ends[0] == ends[1] and types == {torch.bfloat16}
    with hoist.torch.wrap(make(), settings(gradient_accumulation_steps=2)) as engine:
        assert ends[0][0] != train(engine, 3, micro_batches=2)


def test_a_step_does_not_wait_for_what_pytorch_computes(settings):
    """Each such wait (.item(), .cpu(), nonzero()) would leave a GPU without work."""
    with hoist.torch.wrap(sequence([None]), settings(gradient_accumulation_steps=2, hoist={
            "device_memory": "4MiB", "pinned_memory": "32MiB"})) as engine:
        divisor = torch.full((), 2.0)
        for step, pair in enumerate(pairs()):
            micro_batches = list(pair)
            # The first passes of a kind are watched, and shapes are inferred.
            with accelerator.without_waits() if step >= 2 else contextlib.nullcontext():
                for micro_batch in micro_batches:
                    engine.backward(engine(micro_batch).square().mean() / divisor)
                    engine.step()
        assert engine.step_count == STEPS


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_a_program_on_a_stream_of_its_own(settings, order):
    """The default stream, which is late here and for which nothing waits, is never used in its place."""
    def keep_default_busy(*_):
        with DEFAULT:
            accelerator.sleep(20)

    ends = []
    for stream in (None, torch.Stream(DEVICE)):
        config = settings(str(stream is None), gradient_accumulation_steps=2, hoist={
            "device_memory": "400KiB", "pinned_memory": "32MiB", "micro_batch_order": order} | accelerator.random_delays(3))
        with stream or contextlib.nullcontext():
            with hoist.torch.wrap(make(), config) as engine:
                if stream is not None:
                    engine.module.register_forward_pre_hook(keep_default_busy)
                losses = train(engine, 3, micro_batches=2)
                with torch.no_grad():
                    losses += [loss_of(engine(inputs), targets).item() for inputs, targets in batches(1)]
                ends.append((losses, digests(engine)))
    assert ends[0] == ends[1]


class Interrupted(Exception):
    pass


def test_an_engine_is_closed_in_the_middle_of_a_backward_pass(settings):
    """While the stream has still to add up gradients in the engine's memory, and to read its weights."""
    def fail(*_):
        accelerator.sleep(100)
        raise Interrupted

    for _ in range(3):
        config = settings(hoist={"device_memory": "4MiB", "pinned_memory": "32MiB"})
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "cpu"}
        engine = hoist.torch.wrap(InTurns([None, None]), config)
        engine.module.layers[0][0].register_post_accumulate_grad_hook(fail)
        loss = engine(pairs()[0][0]).square().mean()
        accelerator.sleep(100)
        with pytest.raises(Interrupted):
            engine.backward(loss)
        engine.close()
        del engine, loss
    torch.accelerator.synchronize()
