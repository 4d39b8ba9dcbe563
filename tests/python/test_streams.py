# SPDX-License-Identifier: Apache-2.0
"""Programs that compute on several streams of an accelerator: with the bits that they end in on one.

Each program orders its own streams, as it must for PyTorch's sake; hoist's copies have to follow. hoist's streams are delayed at
random, and the program's where a missing wait would show.
"""

import contextlib
import itertools
import os

import accelerator
import pytest
import torch
from torch import nn

import hoist.torch
from models import batches, loss_of
from training import digests, make, train

if not os.environ.get("HOIST_TEST_ACCELERATOR"):
    pytest.skip("CPU tensors have no streams: HOIST_TEST_ACCELERATOR=1 runs this file", allow_module_level=True)

DEVICE = torch.get_default_device()
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
    """The same, in its own time."""

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
    return [torch.randn(2, 8, WIDTH, generator=made) for _ in range(STEPS)]


MODELS = {"twin": Twin, "aside": sequence, "in turns": InTurns}


def ended(settings, path, kind, streams, seed, **memory):
    nvme = {"device": "nvme", "nvme_path": str(path)}
    config = settings(zero_optimization={"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
                      hoist={"pinned_memory": "32MiB", "chaos_seed": seed} | memory)
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


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_a_program_on_a_stream_of_its_own(settings, tmp_path, order):
    """The default stream, which is late here and for which nothing waits, is never used in its place."""
    def keep_default_busy(*_):
        with DEFAULT:
            accelerator.sleep(20)

    ends = []
    for stream in (None, torch.Stream(DEVICE)):
        nvme = {"device": "nvme", "nvme_path": str(tmp_path / str(stream is None))}
        config = settings(gradient_accumulation_steps=2, hoist={
            "device_memory": "400KiB", "pinned_memory": "32MiB", "micro_batch_order": order, "chaos_seed": 3},
            zero_optimization={"stage": 3, "offload_param": nvme, "offload_optimizer": nvme})
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
