# SPDX-License-Identifier: Apache-2.0
"""Training on an accelerator whose operators run later (tests/python/accelerator): every placement ends in the same bits, and
losses are those of CPU tensors.

Longer: with HOIST_TEST_ACCELERATOR=1 in the environment, any file of these tests runs on that device.
"""

import hashlib
import json

import pytest
import torch.utils.cpp_extension
from optim_program import Program, place

from hoist.torch.model.unit_tensors import CAN_REFUSE
from ranks import output_of

PROGRAM = """
import json, sys
import hoist.torch
device, recompute, configs = map(json.loads, sys.argv[1:])
if device == "slate":
    import accelerator
    accelerator.use()
import torch
from models import has_values
from training import digests, make, train
for config in configs:
    with hoist.torch.wrap(make(recompute=recompute), config) as engine:
        losses = train(engine, 4, micro_batches=config["gradient_accumulation_steps"])
        assert engine.device.type == device
        assert {p.device.type for p in engine.module.parameters()} == {device}
        assert not any(has_values(p) for p in engine.module.parameters())
        with engine.gathered(["head.weight"]), torch.no_grad():
            total = engine.module.head.weight.sum().item()
        assert abs(total - engine.read("head.weight").sum().item()) < 1e-3
        print(json.dumps([losses, digests(engine)]))
"""


def trained(device, recompute, configs):
    out = output_of(PROGRAM, *map(json.dumps, (device, recompute, configs)))
    return [json.loads(line) for line in out.splitlines() if line.startswith("[[")]


@pytest.mark.skipif(not CAN_REFUSE, reason="memory of a unit that is down can be read: PyTorch is older than 2.13")
@pytest.mark.skipif(not torch.utils.cpp_extension.is_ninja_available(), reason="ninja builds the accelerator")
@pytest.mark.parametrize("recompute, micro_batches, order", [(None, 1, "horizontal"), ("non-reentrant", 2, "horizontal"),
                                                             ("reentrant", 1, "horizontal"), ("non-reentrant", 4, "vertical")])
def test_an_accelerator_ends_in_the_same_bits_in_every_placement(settings, recompute, micro_batches, order):
    drive = settings(gradient_accumulation_steps=micro_batches)
    host = settings(gradient_accumulation_steps=micro_batches)
    roomy = settings(gradient_accumulation_steps=micro_batches, hoist={"device_memory": "8MiB", "pinned_memory": "32MiB"})
    for config in (drive, host, roomy):
        config["hoist"]["micro_batch_order"] = order
        if order == "vertical" and config is not roomy:  # gradients are fp32 sums there
            config["hoist"]["device_memory"] = "400KiB"
    for config in (host, roomy):
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "cpu"}
    (losses, bits), *others = trained("slate", recompute, [drive, host, roomy])
    assert [each[1] for each in others] == [bits, bits]
    drive["zero_optimization"] = host["zero_optimization"]
    (on_cpu, _), = trained("cpu", recompute, [drive])
    assert losses == pytest.approx(on_cpu, rel=1e-5)  # of attention there are several kernels on a CPU


def digests_of(tensors):
    """Digest of the values as fp64, on any device."""
    return [hashlib.sha256(json.dumps(values.flatten().double().tolist()).encode()).hexdigest() for values in tensors]


OPTIMIZER = """
import json, sys
import accelerator, hoist.optim.offload
accelerator.use()
import torch
from test_accelerator import digests_of
from optim_program import Program
hoist.optim.pieces._UNIT_ELEMENTS, hoist.optim.pieces._PIECE_ELEMENTS = 5000, 3000
for arguments in json.loads(sys.argv[1]):
    program = Program("AdamW", torch.bfloat16, torch.device("slate"), **arguments)
    with program.optimizer:
        bits = program.train(0, 6).bits()
        assert all(p.device.type == "slate" for p in program.parameters)
    print(json.dumps([digests_of(bits)]))
del program, bits  # the test device does not outlive its tensors
"""


@pytest.mark.skipif(not torch.utils.cpp_extension.is_ninja_available(), reason="ninja builds the accelerator")
@pytest.mark.parametrize("seed", ["1", "2"])
def test_an_optimizer_with_offloaded_states_ends_in_the_bits_of_the_cpu(tmp_path, seed):
    places = [place(offload, tmp_path) for offload in ("cpu", "nvme")]
    out = output_of(OPTIMIZER, json.dumps(places), HOIST_ACCELERATOR_SEED=seed)
    expected = [digests_of(Program("AdamW", torch.bfloat16).train(0, 6).bits())]
    assert [json.loads(line) for line in out.splitlines() if line.startswith("[[")] == [expected, expected]
