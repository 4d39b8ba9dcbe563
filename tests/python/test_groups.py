# SPDX-License-Identifier: Apache-2.0
"""Tensor- and pipeline-parallel jobs of processes: each sharding group has parameters of its own, and the norm, the steps and
the commits are the whole job's."""

import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hoist
import hoist.torch
from models import on_device_of_tests
from ranks import results, start, texts_of
from test_distributed import at

STEPS = 4


class Reduce(torch.autograd.Function):
    """Adds up over the tensor-parallel ranks; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Copy(torch.autograd.Function):
    """The same for every tensor-parallel rank; gradients are added up over them."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Block(nn.Module):
    """A norm, and two linear layers that are cut over the hidden features."""

    def __init__(self, part, parts, group):
        super().__init__()
        up, down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.norm, self.group = nn.LayerNorm(16), group
        self.up = nn.Parameter(up.weight.chunk(parts)[part].detach().clone())
        self.down = nn.Parameter(down.weight.chunk(parts, 1)[part].detach().clone())
        for slice_ in (self.up, self.down):
            slice_.tensor_model_parallel = parts > 1

    def forward(self, x):
        inner = self.norm(x)
        if self.group is not None:
            inner = Copy.apply(inner, self.group)
        out = F.gelu(inner @ self.up.T) @ self.down.T
        return x + (out if self.group is None else Reduce.apply(out, self.group))


class Net(nn.Module):
    def __init__(self, part=0, parts=1, group=None):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(part, parts, group) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def data(count):
    generator = torch.Generator().manual_seed(5)
    return [on_device_of_tests(torch.randn(8, 16, generator=generator, device="cpu")) for _ in range(count)]


def train(engine, share, shares, first=0, steps=STEPS):
    """Returns (losses, norms)."""
    losses, norms = [], []
    for index, batch in enumerate(data((first + steps) * shares)):
        if index >= first * shares and index % shares == share:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.step_count > len(norms) + first:
                norms.append(engine.get_global_grad_norm())
    return losses, norms


def config_of(settings, path, **changes):
    config = at(path, settings(gradient_clipping=0.5, **changes))
    config["hoist"] |= {"device_memory": "32MiB", "pinned_memory": "32MiB", "keep_steps": 1}
    return config


BEGIN = """
from test_groups import *
from torch.distributed.device_mesh import init_device_mesh
join()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
def wrap(**options):
    return hoist.torch.wrap(Net(tp, 2, mesh["tp"].get_group()), config, mesh=mesh["dp"], tensor_parallel=mesh["tp"], **options)
"""

TWO_BY_TWO = BEGIN + """
engine = wrap()
assert (engine.rank, engine.world_size) == (dp, 2)
ends = train(engine, dp, 2)
engine.save_checkpoint(directory + "/checkpoints", client_state={"by": rank})
files = engine.export(directory + "/exported")
weights = {name: value.tolist() for name, value in engine.state_dict().items()}
engine.close()
engine = wrap(resume=True)
assert engine.step_count == 4 and engine.load_checkpoint(directory + "/checkpoints")[1] == {"by": rank}
more = train(engine, dp, 2, first=4, steps=1)
print(json.dumps([tp, ends, weights, files, more]))
engine.close()
"""


def test_two_by_two_is_one_process(settings, tmp_path):
    """Two slices of the model, each of which two ranks divide and train with half of the batches, against one process that has
    the whole model and all batches. Sums over slices round in another order."""
    config = config_of(settings, tmp_path / "alone", gradient_accumulation_steps=2)
    with hoist.torch.wrap(Net(), config) as engine:
        losses, norms = train(engine, 0, 1, steps=2 * STEPS)
        weights = engine.state_dict()
        more = train(engine, 0, 1, first=2 * STEPS, steps=2)
    ranks = results(start(TWO_BY_TWO, tmp_path / "meet", config_of(settings, tmp_path / "store"), size=4))
    for rank, (tp, (their_losses, their_norms), theirs, files, their_more) in enumerate(ranks):
        assert their_losses == pytest.approx(losses[rank // 2::2], rel=1e-5)
        assert their_norms == pytest.approx(norms, rel=1e-5)
        assert their_more[0] == pytest.approx(more[0][rank // 2::2], rel=1e-5)
        for name, value in weights.items():
            if name.endswith((".up", ".down")):
                value = value.chunk(2, 1 if name.endswith("down") else 0)[tp]
            assert torch.allclose(torch.tensor(theirs[name], device="cpu"), value, rtol=1e-4, atol=1e-6), name
        if rank < 2:  # the first of each sharding group writes
            assert [str(tmp_path / "meet" / "exported" / f"group-{tp}") in file for file in files] == [True]
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"group-0", "group-1"}


STAGES = """
from test_groups import *
join()
pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
torch.manual_seed(rank % 2)
model = nn.Sequential(nn.Linear(8, 16 * (1 + rank % 2)), nn.Linear(16 * (1 + rank % 2), 1))
engine = hoist.torch.wrap(model, config, mesh=pairs[rank % 2])
for step in range(3):
    engine.backward(engine(torch.ones(2, 8) * (step + rank // 2)).square().mean() * (1e30 if step == 1 and rank == 3 else 1) ** 2)
    engine.step()
print(json.dumps([engine.step_count, engine.skipped_steps, engine.get_global_grad_norm()]))
engine.close()
"""


def test_groups_of_different_models(settings, tmp_path):
    """Groups like pipeline stages have one norm, and a step that one rank must skip is skipped by all."""
    ranks = results(start(STAGES, tmp_path / "meet", config_of(settings, tmp_path / "store"), size=4))
    assert ranks[0][:2] == [2, 1] and all(rank == ranks[0] for rank in ranks)


KILLED = BEGIN + """
engine = wrap(resume=True)
first = engine.step_count
if os.environ["KILL"] == str(rank):
    train(engine, dp, 2, first=first, steps=2)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    train(engine, dp, 2, first=first, steps=6 - first)
except (hoist.Error, RuntimeError) as error:  # of hoist, or of the program's own collectives with a rank that has gone
    print(json.dumps(["failed", type(error).__name__]))
else:
    print(json.dumps([engine.step_count, engine.digest(hoist.State.master)]))
engine.close() if os.environ["KILL"] == "none" else os._exit(0)
"""


def test_a_rank_is_killed(settings, tmp_path):
    """The others, of the other sharding group too, end with an error; then all groups go on from one step, with the bits of an
    undisturbed run."""
    undisturbed = results(start(KILLED, tmp_path / "meet", config_of(settings, tmp_path / "whole"), size=4, KILL="none"))
    config = config_of(settings, tmp_path / "store")
    processes = start(KILLED, tmp_path / "meet2", config, size=4, KILL="3")
    began = time.monotonic()
    outs = [process.communicate(timeout=120)[0] for process in processes]
    assert time.monotonic() - began < 100
    assert processes[3].returncode == -signal.SIGKILL
    assert all('"failed", ' in out for out in outs[:3]) and any("CommError" in out for out in outs), outs
    assert results(start(KILLED, tmp_path / "meet3", config, size=4, KILL="none")) == undisturbed


REFUSED = BEGIN + """
from torch.distributed.tensor import distribute_tensor, Replicate
said = []
def refused(**options):
    try:
        hoist.torch.wrap(options.pop("model", Net()), config, **options)
    except (hoist.UsageError, hoist.CommError) as error:  # its own, or that of a rank that was faster
        said.append(str(error))
refused(mesh=mesh)
refused(tensor_parallel=mesh["tp"])
refused(mesh=mesh["dp"] if rank == 0 else mesh["tp"])
model = Net()
model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh["tp"], [Replicate()]))
refused(model=model, mesh=mesh["dp"])
print(json.dumps(said))
"""


def test_refusals(settings, tmp_path):
    for said in results(start(REFUSED, tmp_path / "meet", config_of(settings, tmp_path / "store"), size=4)):
        for text, part in zip(said, ("a mesh of 2 dimensions", "needs mesh=", "do not all pass the same", "is a DTensor"),
                              strict=True):
            assert part in text


@pytest.mark.parametrize("others", ["pass", "hoist.torch.wrap(Net(), config)"])
def test_a_mesh_that_only_some_ranks_pass_is_an_error(settings, tmp_path, others):
    config = config_of(settings, tmp_path / "store")
    if others == "pass":
        config["hoist"]["comm_timeout_seconds"] = 5.0
    texts = texts_of(f"""
        from test_groups import Net
        group = dist.new_group([0, 1])
        if rank < 2:
            hoist.torch.wrap(Net(), config, mesh=group)
        else:
            {others}
    """, tmp_path / "meet", config, size=4)
    if others == "pass":
        assert texts[2:] == ["no error"] * 2
        for text in texts[:2]:
            assert text.startswith("CommError") and "rank 2, 3 did not come within 5 s (hoist.comm_timeout_seconds)" in text, text
            assert "Every rank of the job passes mesh=..." in text
        return
    for rank, text in enumerate(texts):
        assert text.startswith("UsageError"), text
        assert ("rank 2 does not pass mesh=..." if rank < 2 else "rank 0 passes mesh=...") in text
