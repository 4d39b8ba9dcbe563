# SPDX-License-Identifier: Apache-2.0
"""Counts the Python calls of a step: some for each unit, none for each tensor; and objects that are looked into for tensors."""

import json
import pathlib
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import hoist.torch
from hoist.torch.model.units import tensors_in
from models import batches, loss_of

PACKAGE = str(pathlib.Path(hoist.torch.__file__).parent.parent)
VOCABULARY, WIDTH = 97, 16


class Layer(nn.Module):
    """A unit of as many tensors as wanted, in one module: no call of a module tells them apart."""

    def __init__(self, tensors):
        super().__init__()
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) * 0.02) for _ in range(tensors))

    def forward(self, x):
        for shift in self.shifts:
            x = x + shift
        return x


def model_of(tensors, layers=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Layer(tensors) for _ in range(layers)),
                         nn.Linear(WIDTH, VOCABULARY))


def python_calls(engine):
    """Counts calls of the package's functions in one step."""
    counted = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counted[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

    inputs, targets = next(batches(1))
    sys.setprofile(count)
    try:
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_no_python_for_a_tensor(settings, changes):
    counts = []
    for tensors in (1, 40):
        with hoist.torch.wrap(model_of(tensors), settings(str(tensors), **changes)) as engine:
            for _ in range(3):  # the first pass of a kind is looked at more closely
                python_calls(engine)
            counts.append(python_calls(engine))
    assert counts[0] == counts[1]
    assert counts[0]["ModuleHook.before" if sys.version_info >= (3, 11) else "before"] >= 6


@pytest.mark.parametrize("what", ["calls", "gradients of inputs", "results that need no gradients"])
def test_hooks_on_inputs_are_forgotten_with_them(settings, what):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if "no gradients" in what:
        model[0].register_forward_hook(lambda *arguments: arguments[-1].detach())
    kept = torch.ones(2, 8, requires_grad=True)
    with hoist.torch.wrap(model, settings()) as engine:
        for _ in range(6):
            inputs = kept if "no gradients" in what else torch.ones(2, 8, requires_grad=True)
            result = engine(inputs)
            if "inputs" in what:
                torch.autograd.grad(result.sum(), inputs)
            del inputs, result
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the test accelerator holds the inputs of an operator until that has run
        assert sum(map(len, engine._passes.input_hooks.values())) <= 3


@pytest.mark.host_device("its batches are on the CPU")
def test_a_program_that_compiles_nothing_does_without_the_compiler(settings):
    """torch._dynamo is not imported; hooks stay outside of graphs all the same (test_training.py)."""
    program = """
import json, sys
import hoist.torch
sys.path.insert(0, sys.argv[2])
from models import Gpt, batches, loss_of
with hoist.torch.wrap(Gpt(), json.loads(sys.argv[1])) as engine:
    for inputs, targets in batches(2):
        engine.backward(loss_of(engine(inputs), targets))
        assert engine.step().applied
    engine.state_dict()
assert "torch._dynamo" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", program, json.dumps(settings()), str(pathlib.Path(__file__).parent)],
                           capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_objects_that_refer_to_each_other_are_looked_into_a_few_times():
    class Node:
        pass

    nodes = [Node() for _ in range(30)]
    for index, node in enumerate(nodes):
        node.neighbours, node.feature, node.module = nodes[index:] + nodes[:index], torch.ones(1), torch
    found = list(tensors_in(((nodes[0],), {})))
    assert {id(tensor) for tensor in found} == {id(node.feature) for node in nodes} and len(found) < 10 * len(nodes)


def test_a_tensor_near_by_is_found_after_the_long_way_to_its_object():
    near = types.SimpleNamespace(inner=types.SimpleNamespace(tensor=torch.ones(1)))
    long_way = near
    for _ in range(6):
        long_way = [long_way]
    assert len(list(tensors_in([long_way, near]))) == 1

    class Made(Mapping):  # its values live only while they are looked into
        def __len__(self):
            return 9

        def __iter__(self):
            return iter(range(9))

        def __getitem__(self, key):
            return [torch.full((1,), key)]

    assert [int(tensor) for tensor in tensors_in(Made())] == list(range(9))
