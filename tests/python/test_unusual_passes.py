# SPDX-License-Identifier: Apache-2.0
"""Passes of unusual, but legitimate programs: each trains as with torch.optim in memory, or is refused by name and can go on."""

import threading

import pytest
import torch
import torch.nn.functional as F
from small_models import WIDTH, Block, batch, close_to, losses_in_memory, mean_square, model_of, seeded, step_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch

# --- negative views: what conjugates make, whose memory has the other sign ------------------------------------------------

class Phase(nn.Module):
    def __init__(self):
        super().__init__()
        self.phase, self.linear = nn.Parameter(torch.full((1,), 0.3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * (torch.complex(torch.ones_like(self.phase), self.phase).conj() * (1 + 2j)).real


@pytest.mark.cpu_tensors("it has no complex numbers")
def test_gradients_and_values_may_be_negative_views(wrap):
    expected = losses_in_memory(seeded(Phase), [batch(i) for i in range(3)])
    model = seeded(Phase)
    weight = model.linear.weight.detach().clone()
    model.linear.weight.data = torch._neg_view(-weight)
    with wrap(model) as engine:
        assert torch.equal(engine.read("linear.weight"), weight)
        engine.write("linear.weight", torch._neg_view(weight))
        assert torch.equal(engine.read("linear.weight"), -weight)
        engine.write("linear.weight", weight)
        close_to([step_of(engine, batch(i)) for i in range(3)], expected)


# --- higher-order operators: flex_attention, torch.cond, scan ------------------------------------------------------------

class FlexAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distances = nn.Embedding(2 * len(batch(0)), 1)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention  # imports torch._dynamo

        def plus_distance(score, _, __, i, j):
            return score + self.distances.weight[i - j + len(x), 0]

        q, k, v = (part.view(1, 1, -1, WIDTH) for part in self.inputs(x).chunk(3, -1))
        return self.out(flex_attention(q, k, v, score_mod=plus_distance))[0, 0]


@pytest.mark.cpu_tensors("flex_attention knows the devices of PyTorch")
@pytest.mark.skipif(not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
                    reason="this PyTorch runs no higher-order operator under a dispatch mode")
def test_a_model_with_flex_attention_is_called(wrap):
    model = seeded(FlexAttention)
    with torch.no_grad():
        expected = model(batch(0))
        with wrap(model) as engine:
            for _ in range(2):
                torch.testing.assert_close(engine(batch(0)), expected)
            engine.module.inputs.requires_grad_(False)  # PyTorch refuses gradients of flex_attention on CPUs
            with torch.enable_grad(), pytest.raises(hoist.UsageError, match="uses tensors that need gradients"):
                engine(batch(0))


# --- before the first step -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["called", "gathered", "restored", "wrapped"])
def test_inference_mode_comes_before_training(wrap, settings, how):
    expected = losses_in_memory(seeded(model_of), [batch(i) for i in range(3)])
    model = seeded(model_of)
    with torch.inference_mode(how == "wrapped"):
        engine = wrap(model)
    with engine:
        if how == "restored":
            engine.save().wait()
            engine.restore()
        with torch.inference_mode():
            if how == "gathered":
                with engine.gathered():
                    engine.module[0].up.weight.sum()
            else:
                engine(batch(0))
        close_to([step_of(engine, batch(i)) for i in range(3)], expected)
        with torch.inference_mode():
            engine(batch(0))


# --- weights that are needed longer, or again ----------------------------------------------------------------------------

class Checkpointed(nn.Module):
    def __init__(self, make_block=Block, reentrant=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([make_block() for _ in range(3)]), nn.Linear(WIDTH, 1)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def with_gradient_of_input(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    return slope.pow(2).mean() + u.pow(2).mean()


def with_second_derivative(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    slope, = torch.autograd.grad(u.sum(), x, create_graph=True)
    bend, = torch.autograd.grad(slope.pow(2).sum(), x, create_graph=True)
    return bend.pow(2).mean() + u.pow(2).mean()


class Scaled(nn.Module):
    """Does something after its last layer."""

    def __init__(self):
        super().__init__()
        self.layers = model_of()

    def forward(self, x):
        return self.layers(x) * 1.5


class Forces(nn.Module):
    """Its forward() returns a gradient with respect to its input, too."""

    def __init__(self):
        super().__init__()
        self.energy = Checkpointed()

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = self.energy(x)
        forces, = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, forces


def of_forces(model, x):
    energy, forces = model(x)
    return forces.pow(2).mean() + energy.pow(2).mean()


@pytest.mark.parametrize("make, loss_of", [(model_of, with_gradient_of_input), (Checkpointed, with_gradient_of_input),
                                           (model_of, with_second_derivative), (Checkpointed, with_second_derivative),
                                           (Scaled, with_second_derivative),
                                           (Forces, of_forces)])
@pytest.mark.parametrize("nodes_before", [0, 10000])
def test_losses_of_gradients_of_the_input(wrap, make, loss_of, nodes_before):
    """Autograd prefers nodes with high numbers, and each thread counts its own: on an accelerator those of the input's gradient
    come before or after forward()'s, as it happens."""
    inputs = [batch(i) for i in range(4)]
    expected = losses_in_memory(seeded(make), inputs, loss_of)
    number = torch.zeros(1, requires_grad=True)
    for _ in range(nodes_before):
        number + 1
    with wrap(seeded(make)) as engine:
        close_to([step_of(engine, x, loss_of) for x in inputs], expected)


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
def test_second_derivatives_of_more_layers_than_fit_say_so(wrap):
    with wrap(seeded(model_of), memory="8KiB") as engine:
        step_of(engine, batch(0))
        with pytest.raises(RuntimeError, match=r"gradients of gradients .* need all layers .*: raise hoist\.device_memory"):
            step_of(engine, batch(1), with_second_derivative)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.mask = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return torch.tanh(F.linear(self.linear(x), self.mask * self.mask.sigmoid())) * self.frozen.exp()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_are_computed_before_an_input_is_used(wrap, plain, recompute, caplog):
    """The gradient of an input that begins a graph is complete while the weights are still needed."""
    def make():
        return Checkpointed(Normed, reentrant=True) if recompute else nn.Sequential(Normed(), Normed())

    inputs = [batch(i).requires_grad_() for i in range(4)]
    expected = losses_in_memory(seeded(make), inputs, others=inputs)
    with wrap(seeded(make)) as engine:
        close_to([step_of(engine, x, plain=plain) for x in inputs], expected)
    assert "stays gathered" not in caplog.text


class Modulated(nn.Module):
    """A block of a diffusion transformer: what follows from the condition is computed before the first input is used."""

    def __init__(self, adapted):
        super().__init__()
        self.modulation, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) if adapted else None

    def forward(self, x, condition):
        x = x * (1 + self.modulation(torch.tanh(condition)))
        y = self.down(torch.tanh(self.up(x)))
        return y if self.adapter is None else y + x @ self.adapter


class IgnoresCondition(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH).requires_grad_(False), shared

    def forward(self, x, _condition):
        return torch.tanh(self.linear(x) * self.shared)


class Encloses(nn.Module):
    """Its own weights are needed after those of the layer that it encloses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x, condition):
        return torch.tanh(self.linear(torch.tanh(x @ self.first))) @ self.last + condition @ self.last


class Conditioned(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.condition = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        shared = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList({
            "modulated": lambda: [Modulated(adapted=False) for _ in range(3)],
            "adapted": lambda: [Modulated(adapted=True) for _ in range(3)],
            "ignoring": lambda: [IgnoresCondition(shared) for _ in range(24)],
            "enclosing": lambda: [Encloses()],
        }[kind]())

    def forward(self, x):
        condition, x = self.condition(x), self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, condition, use_reentrant=True)
        return x + condition


@pytest.mark.parametrize("kind", ["modulated", "adapted", "ignoring", "enclosing"])
@pytest.mark.parametrize("plain", [False, True])
def test_recomputed_blocks_whose_frozen_weights_are_needed_after_the_gradient_of_an_input(wrap, kind, plain, caplog):
    """The last gradient of an input ends such a block, and the end of its backward pass if an input gets none."""
    inputs = [batch(i) for i in range(4)]
    expected = losses_in_memory(seeded(lambda: Conditioned(kind)), inputs)
    with wrap(seeded(lambda: Conditioned(kind)), memory="40KiB") as engine:
        close_to([step_of(engine, x, plain=plain) for x in inputs], expected)
    assert "stays gathered" not in caplog.text


class ScaledLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        scale = torch.tanh(self.scale)
        return self.linear(x) * scale


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_that_is_called_on_another_thread_than_made_its_input(wrap, plain):
    def on_a_thread(model, x):
        for _ in range(100):  # autograd numbers the nodes of each thread apart, from 0
            given = x * 1
        outputs = []
        thread = threading.Thread(target=lambda: outputs.append(model(given)))
        thread.start()
        thread.join()
        return outputs[0].square().mean()

    inputs = [batch(i).requires_grad_() for i in range(4)]
    expected = losses_in_memory(seeded(lambda: nn.Sequential(ScaledLast(), ScaledLast())), inputs, on_a_thread, others=inputs)
    with wrap(seeded(lambda: nn.Sequential(ScaledLast(), ScaledLast()))) as engine:
        close_to([step_of(engine, x, on_a_thread, plain=plain) for x in inputs], expected)


class Styled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.scale, self.block = nn.Embedding(9, WIDTH), nn.Parameter(torch.randn(WIDTH)), Block()

    def forward(self, style):
        words = self.embedding(torch.arange(4, device=style.device))
        return self.block(torch.tanh(words * self.scale) + style)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_that_is_used_late(wrap, frozen):
    def make():
        model = Styled()
        model.embedding.weight.requires_grad_(not frozen)
        model.scale.requires_grad_(not frozen)
        return model

    style = batch(1).requires_grad_()
    expected = losses_in_memory(seeded(make), [style] * 4, others=[style])
    with wrap(seeded(make)) as engine:
        close_to([step_of(engine, style, plain=True) for _ in range(4)], expected)
        engine.backward(mean_square(engine, style))
        assert len(style._backward_hooks) <= 2, "hooks pile up on an input that is used again"


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model_of()

    def forward(self, x):
        self.loss = self.layers(x).pow(2).mean()


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_model_that_returns_nothing_may_be_called_while_an_error_is_handled(wrap, evaluates):
    def loss_of(model, x):
        try:
            raise KeyError("this batch is not cached")
        except KeyError:
            with torch.set_grad_enabled(not evaluates):
                model(x)
        if evaluates:
            model(x)
        return kept.loss

    inputs = [batch(i) for i in range(3)]
    kept = seeded(Keeps)
    expected = losses_in_memory(kept, inputs, loss_of)
    kept = seeded(Keeps)
    with wrap(kept) as engine:
        close_to([step_of(engine, x, loss_of) for x in inputs], expected)


class InHalves(nn.Module):
    """Returns two views of one tensor, which the model changes in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        return y[:, :32], y[:, 32:]


class ChangesViews(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList([InHalves() for _ in range(8)]), recompute

    def layer(self, block, x):
        left, right = block(x)
        left += x[:, :32]
        return torch.tanh(torch.cat([left, right], dim=-1))

    def forward(self, x):
        for block in self.blocks:
            x = self.layer(block, x) if self.recompute is None else checkpoint(
                self.layer, block, x, use_reentrant=self.recompute == "reentrant")
        return x


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("recompute", [None, "reentrant", "with hooks"])
def test_views_that_a_block_returns_may_be_changed_in_place(wrap, plain, recompute, caplog):
    """In memory for a few blocks: the views' own nodes are not in the graph then, and the block's backward pass is seen still."""
    def make():
        return ChangesViews(recompute)

    inputs = [batch(i, 64).requires_grad_() for i in range(3)]
    expected = losses_in_memory(seeded(make), inputs, others=inputs)
    with wrap(seeded(make), "96KiB") as engine, caplog.at_level("WARNING", "hoist"):
        close_to([step_of(engine, x, plain=plain) for x in inputs], expected)
    assert "used by a backward pass" not in caplog.text


def test_a_model_that_calls_itself(wrap):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, tree):
            if isinstance(tree, torch.Tensor):
                return torch.tanh(self.leaf(tree))
            return torch.tanh(self.join(torch.cat([self(tree[0]), self(tree[1])], dim=-1)))

    trees = [[batch(1), [batch(2), batch(3)]], [[batch(4), batch(5)], batch(6)], [batch(8), batch(9)]]
    expected = losses_in_memory(seeded(Tree), trees)
    with wrap(seeded(Tree)) as engine:
        close_to([step_of(engine, tree) for tree in trees], expected)


# --- passes that are given up --------------------------------------------------------------------------------------------

class Fails(RuntimeError):
    pass


def fails_in_forward(engine):
    def fail(*_):
        raise Fails

    handle = engine.module[1].register_forward_hook(fail)
    with pytest.raises(Fails):
        engine(batch(9))
    handle.remove()


def fails_in_backward(engine):
    def fail(*_):
        raise Fails

    loss = mean_square(engine, batch(9))
    handle = engine.module[0].up.weight.register_hook(fail)  # the last one: other units' gradients are finished
    with pytest.raises(Fails):
        loss.backward()
    handle.remove()


def is_not_used(engine):
    mean_square(engine, batch(9))


def reads_state(engine):
    mean_square(engine, batch(9))
    engine.state_dict()


@pytest.mark.parametrize("give_up", [fails_in_forward, is_not_used, reads_state])
def test_earlier_micro_batches_outlive_a_pass_that_is_given_up(wrap, give_up):
    """As long as none of its gradients has been added to theirs."""
    inputs = [batch(i) for i in range(4)]
    expected = losses_in_memory(seeded(model_of), inputs, micro_batches=2)
    with wrap(seeded(model_of), gradient_accumulation_steps=2) as engine:
        losses = []
        for x in inputs:
            loss = mean_square(engine, x)
            engine.backward(loss)
            losses.append(loss.item())
            if len(losses) in (1, 3):
                give_up(engine)
            engine.step()
        assert engine.step_count == 2
        close_to(losses, expected)


def test_a_backward_pass_that_fails_drops_the_step_and_says_so(wrap, caplog):
    with wrap(seeded(model_of), gradient_accumulation_steps=2) as engine:
        engine.backward(mean_square(engine, batch(0)))
        fails_in_backward(engine)
        close_to([step_of(engine, batch(i)) for i in range(2)],
                 losses_in_memory(seeded(model_of), [batch(0), batch(1)], micro_batches=2))
        assert engine.step_count == 1
    assert "those of 1 earlier micro-batches of the step are dropped, too" in caplog.text


# --- refused -------------------------------------------------------------------------------------------------------------

def test_parts_that_are_recomputed_outside_of_the_model_are_refused(wrap):
    with wrap(seeded(lambda: nn.ModuleList([Block(), Block()]))) as engine:
        x = batch(0).requires_grad_()
        for block in engine.module:
            x = checkpoint(block, x, use_reentrant=True)
        with pytest.raises(hoist.UsageError, match="use_reentrant=False"):
            engine.backward(x.pow(2).mean())


def test_parameter_groups_stay_as_they_are(wrap):
    with wrap(seeded(model_of)) as engine:
        step_of(engine, batch(0))
        groups = engine.optimizer.param_groups
        parameters = groups[0]["params"]
        for change, undo, said in (
            (lambda: groups[0].update(params=[]), lambda: groups[0].update(params=parameters), "group 0 were changed"),
            (lambda: groups.append({"params": [], "lr": 1.0}), lambda: groups.pop(), "there are 2"),
        ):
            change()
            with pytest.raises(hoist.UsageError, match=said):
                step_of(engine, batch(1))
            undo()
            engine.zero_grad()
        assert step_of(engine, batch(1)) > 0


def test_sparse_gradients_are_refused_when_the_model_is_wrapped(wrap):
    with pytest.raises(hoist.UsageError, match="sparse=False"):
        wrap(nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)))


def test_a_stale_loss_scale_is_not_taken_for_another_loss(wrap):
    with wrap(seeded(model_of), fp16={"enabled": True, "loss_scale": 1024}) as engine:
        engine.scale(engine(batch(0).half()).float().pow(2).mean())
        with pytest.raises(hoist.UsageError, match="loss scale"):
            engine(batch(1).half()).float().pow(2).mean().backward()


@pytest.mark.parametrize("count, sizes", [(1, {"gradient_accumulation_steps": 1}), (3, {"gradient_accumulation_steps": 3}),
                                          (4, {"train_batch_size": 16})])
def test_the_boundary_of_accumulation_is_deepspeeds(wrap, count, sizes):
    with wrap(seeded(model_of), **sizes) as engine:  # of micro-batches of 4
        assert engine.gradient_accumulation_steps() == count
        for index in range(2 * count):
            is_last = index % count == count - 1
            assert engine.is_gradient_accumulation_boundary() == is_last
            loss = mean_square(engine, batch(0))
            assert engine.is_gradient_accumulation_boundary() == is_last
            engine.backward(loss)
            assert engine.is_gradient_accumulation_boundary() == is_last
            engine.step()
            assert engine.step_count == (index + 1) // count


def test_resuming_what_is_never_committed_is_refused(settings):
    config = settings(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part] = {"device": "cpu"}
    with pytest.raises(hoist.UsageError, match="checkpoint_path"):
        hoist.torch.wrap(seeded(model_of), config, resume=True)
