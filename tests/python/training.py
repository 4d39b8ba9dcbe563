# SPDX-License-Identifier: Apache-2.0
"""Steps of most tests with a small model: make it, train it for some steps, and compare the state that it ends in."""

import torch

import hoist
from models import Gpt, batches, loss_of

STATES = (hoist.State.master, hoist.State.moment1, hoist.State.moment2)


def make(seed=0, **options):
    torch.manual_seed(seed)
    return Gpt(**options)


def train(engine, steps, first=0, micro_batches=1):
    """Steps `first` to `first + steps` of one sequence of batches; the loss of each micro-batch, or in vertical order the mean of
    each step."""
    losses = []
    if engine.config.is_vertical:
        data = iter(list(batches((first + steps) * micro_batches))[first * micro_batches:])
        return [engine.train_batch(data, lambda batch: loss_of(engine(batch[0]), batch[1])).item() for _ in range(steps)]
    for index, (inputs, targets) in enumerate(batches((first + steps) * micro_batches)):
        if index < first * micro_batches:
            continue
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def digests(engine):
    return [engine.digest(state) for state in STATES]
