# SPDX-License-Identifier: Apache-2.0
"""hoist's streams are late at random (hoist.chaos_seed), and nothing changes: whoever hands memory over waits for it."""

import pytest
import torch
from accelerator import random_delays
from optim_program import Program, assert_equal

import hoist.torch
from models import batches, loss_of
from training import digests, make, train


@pytest.fixture
def ended(settings):
    def run(seed, memory, program):
        memories = {"device_memory": memory, "pinned_memory": "32MiB"}
        config = settings(str(seed), gradient_accumulation_steps=2, hoist=memories | random_delays(seed))
        with hoist.torch.wrap(make(), config) as engine:
            return program(engine), digests(engine)

    return run


@pytest.mark.parametrize("memory", ["240KiB", "4MiB"])
def test_training(ended, memory):
    def program(engine):
        losses = train(engine, 3, micro_batches=2)
        with torch.no_grad():
            return losses + [loss_of(engine(inputs), targets).item() for inputs, targets in batches(2)]

    expected = ended(0, memory, program)
    for seed in (1, 2):
        assert ended(seed, memory, program) == expected


class Interrupted(Exception):
    pass


def test_passes_that_fail(ended):
    """Their gradients are dropped; the memory that they were in has other uses at once."""
    def program(engine):
        losses = []
        for step, (inputs, targets) in enumerate(batches(4)):
            def fail(*_):
                raise Interrupted

            hook = engine.module.blocks[step % 3].register_full_backward_hook(fail)
            with pytest.raises(Interrupted):
                engine.backward(loss_of(engine(inputs), targets))
            hook.remove()
            memory = [torch.full((size,), 7.0) for size in (32, 96 * 32, 32 * 32, 128, 128 * 32) for _ in range(8)]
            del memory
            losses.append(train(engine, 1, first=step, micro_batches=2))
        return losses

    expected = ended(0, "240KiB", program)
    for seed in (1, 2):
        assert ended(seed, "240KiB", program) == expected


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = torch.nn.Parameter(torch.ones(2048)), torch.nn.Parameter(torch.ones(2048, 5200))

    def forward(self, x):
        return (x * self.small) @ self.large


@pytest.mark.cpu_tensors("an accelerator's memory is not given back to the system")
def test_a_gradient_whose_memory_the_system_takes_back(settings):
    """It is so large that malloc maps it: whoever read it after the pass has failed would end the process."""
    config = settings(hoist={"device_memory": "256MiB", "pinned_memory": "1GiB", "chaos_seed": 1})
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "cpu"}
    model = Large()
    with hoist.torch.wrap(model, config) as engine:
        def fail(_):
            raise Interrupted

        hook = model.small.register_hook(fail)  # when the large one's gradient is on its way
        for _ in range(3):
            with pytest.raises(Interrupted):
                engine.backward(engine(torch.ones(2, 2048)).sum())
        hook.remove()


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_offloaded_states(dtype):
    expected = Program("AdamW", dtype).train(0, 4).bits()
    for seed in (1, 2):
        program = Program("AdamW", dtype, torch.get_default_device(), settings={"settings": random_delays(seed)},
                          offload="cpu", pinned_memory="32MiB", device_memory="16MiB")
        with program.optimizer:
            assert_equal(program.train(0, 4).bits(), expected)
