# SPDX-License-Identifier: Apache-2.0
"""Layers whose parts the program calls by itself, so that no call of the layer shows when its weights are needed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoist.torch
from models import VOCABULARY, batches, loss_of

WIDTH, STEPS = 32, 5


def parts():
    return {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name, part in parts().items():
            setattr(self, name, part)

    def forward(self, x):
        raise AssertionError("nobody calls it")


class Net(nn.Module):
    """With a head that shares the embedding's weights."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) if kind == "dict" else Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            norm, up, down = (block[name] if self.kind == "dict" else getattr(block, name) for name in ("norm", "up", "down"))
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


@pytest.mark.parametrize("kind", ["dict", "block"])
@pytest.mark.parametrize("placement", ["nvme", "cpu"])
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_parts_that_are_called_one_by_one(settings, kind, placement, order):
    model = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for inputs, targets in batches(STEPS):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    config = settings(optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}})
    config["hoist"] |= {"micro_batch_order": order, "device_memory": "96KiB"}  # less than the weights, 144 KiB
    if placement == "cpu":
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "cpu"}
    losses = []
    with hoist.torch.wrap(Net(kind), config) as engine:
        for batch in batches(STEPS):
            if order == "vertical":
                losses.append(engine.train_batch([batch], lambda batch: loss_of(engine(batch[0]), batch[1])).item())
                continue
            loss = loss_of(engine(batch[0]), batch[1])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            assert torch.isfinite(engine(next(batches(1))[0])).all()
        weights = sum(4 * p.numel() for p in Net(kind).parameters())
        assert engine.statistics()["links"]["host_to_device"] > 1.5 * STEPS * weights, "no unit was evicted within a pass"
    assert losses == pytest.approx(expected, rel=2e-6)
