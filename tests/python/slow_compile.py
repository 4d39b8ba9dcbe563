# SPDX-License-Identifier: Apache-2.0
"""torch.compile with inductor, which makes C++ and compiles it: a minute or two, and a compiler is needed."""

import copy
import shutil

import pytest
import torch

import hoist.torch
from models import Gpt, batches, loss_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++)")


@pytest.mark.parametrize("whole", [False, True], ids=["units", "model"])
def test_inductor(settings, whole, tmp_path, monkeypatch):
    """fp32; inductor's kernels round in an order of their own, as they do for a model in memory."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(layers=2)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with hoist.torch.wrap(model, settings()) as engine:
        called = torch.compile(model) if whole else engine
        if not whole:
            engine.compile_units()
        for inputs, targets in batches(10):
            loss = loss_of(called(inputs), targets)
            engine.backward(loss)
            assert engine.step().applied
            expected = loss_of(reference(inputs), targets)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"] > 0
