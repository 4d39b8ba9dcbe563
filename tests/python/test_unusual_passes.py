# SPDX-License-Identifier: Apache-2.0
"""Passes of unusual, but legitimate programs: each trains as with torch.optim in memory, or is refused by name and can go on."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hoist
import hoist.torch
from models import on_device_of_tests

WIDTH, RATE = 8, 1e-2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model_of():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH))


def batch(seed, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return on_device_of_tests(torch.randn(4, width, generator=generator, device="cpu"))


def seeded(make):
    torch.manual_seed(0)
    return make()


def mean_square(model, x):
    return model(x).pow(2).mean()


@pytest.fixture
def wrap(settings):
    def make(model, memory="1MiB", **changes):
        changes.setdefault("optimizer", {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}})
        changes.setdefault("hoist", {"device_memory": memory, "pinned_memory": "32MiB"})
        return hoist.torch.wrap(model, settings(**changes))

    return make


def losses_in_memory(model, inputs, loss_of=mean_square, micro_batches=1, others=()):
    optimizer, losses = torch.optim.AdamW([*model.parameters()], lr=RATE, weight_decay=0.1), []
    for index, x in enumerate(inputs):
        loss = loss_of(model, x)
        (loss / micro_batches).backward()
        losses.append(loss.item())
        if (index + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
        for other in others:
            other.grad = None
    return losses


def step_of(engine, x, loss_of=mean_square, plain=False):
    loss = loss_of(engine, x)
    loss.backward() if plain else engine.backward(loss)
    engine.step()
    return loss.item()


def close_to(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)


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


class WithAuxiliaryLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.has_loss = nn.Linear(32, 32), nn.Linear(32, 32), False

    def forward(self, x):
        y = torch.tanh(self.up(x)) + x
        self.loss = self.gate(torch.tanh(self.gate(x))).pow(2).mean() if self.has_loss else None  # its backward pass comes first
        return y


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
def test_an_auxiliary_loss_that_begins_later_fails_once_and_is_learned_then(wrap):
    """A backward pass uses weights that its first one did not, in memory for a few blocks."""
    def make():
        return nn.Sequential(*[WithAuxiliaryLoss() for _ in range(8)], nn.Linear(32, 1))

    def loss_of(model, x):
        loss = mean_square(model, x)
        return loss if blocks[2].loss is None else loss + blocks[2].loss

    def loss_in_memory(model, x):
        blocks[2].has_loss = next(steps) >= 2
        return loss_of(model, x) + 0 * sum(p.sum() for p in model.parameters())  # as the engine does without a gradient

    x, steps, blocks = batch(0, width=32), iter(range(5)), seeded(make)
    expected = losses_in_memory(blocks, [x] * 5, loss_in_memory)
    blocks = seeded(make)
    with wrap(blocks, "92KiB") as engine:
        losses = [step_of(engine, x, loss_of) for _ in range(2)]
        blocks[2].has_loss = True
        with pytest.raises(RuntimeError, match="of unit '2.*' are not loaded"):
            step_of(engine, x, loss_of)
        losses += [step_of(engine, x, loss_of) for _ in range(3)]
    close_to(losses, expected)


def test_recomputed_blocks_that_never_get_all_gradients_give_way(wrap):
    """Blocks of experts, most of which no token reaches, in memory for a few blocks."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return x + torch.tanh(self.used(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Experts() for _ in range(12)])

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    inputs = [batch(i, 64).requires_grad_() for i in range(3)]
    with wrap(seeded(Model), memory="160KiB") as engine:
        losses = [step_of(engine, x) for x in inputs]
    close_to(losses[:1], [mean_square(seeded(Model), inputs[0]).item()])
    assert losses[2] < losses[0]


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


def test_a_use_of_weights_that_is_new_is_found_when_the_call_is_made_again(wrap):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.prompts = Block(), nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
            self.late = False

        def forward(self, x):
            x = self.block(x)
            return F.linear(x, self.prompts[0].weight) if self.late else self.prompts[0](x)

    def late_from_the_second_on(model, x):
        loss = mean_square(model, x)
        model.late = True
        return loss

    expected = losses_in_memory(seeded(Late), [batch(0), batch(1), batch(1)], late_from_the_second_on)
    model, losses = seeded(Late), []
    with wrap(model) as engine:
        losses.append(step_of(engine, batch(0)))
        model.late = True
        for _ in range(2):
            try:
                losses.append(step_of(engine, batch(1)))
            except (RuntimeError, hoist.UsageError):
                pass
        losses = [loss for loss in losses if not math.isnan(loss)]  # where PyTorch cannot refuse, and the step is skipped
        assert len(losses) >= 2 and engine.step_count == len(losses)
        close_to(losses, expected[:len(losses)])


def test_a_reference_in_a_training_pass_may_use_weights_that_the_trained_calls_do_not(wrap):
    """Without gradients, between a forward pass and its backward pass: the first such call is looked at as well."""
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head, self.side = Block(), nn.Linear(WIDTH, 1), nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 1))
            self.is_reference = False

        def forward(self, x):
            return F.linear(self.block(x), (self.side[1] if self.is_reference else self.head).weight)

    def loss_of(model, x):
        y = model(x)
        own.is_reference = True
        with torch.no_grad():
            reference = model(x)
        own.is_reference = False
        return (y - reference).pow(2).mean()

    own = seeded(TwoHeads)
    expected = losses_in_memory(own, [batch(i) for i in range(3)], lambda model, x: loss_of(model, x) + 0 * sum(
        p.sum() for p in model.parameters()))
    own = seeded(TwoHeads)
    with wrap(own) as engine:
        close_to([step_of(engine, batch(i), loss_of) for i in range(3)], expected)


def test_what_is_in_the_place_of_a_trained_copy_may_be_used_in_evaluations(wrap):
    """As PEFT names them. Both calls are evaluations of the same module, and only the first one is looked at."""
    class WithCopy(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Module()
            self.head.original_module = nn.Linear(WIDTH, 1)
            self.head.modules_to_save = nn.ModuleDict({"default": nn.Linear(WIDTH, 1)})
            self.used = self.head.modules_to_save["default"]

        def forward(self, x):
            return F.linear(self.block(x), self.used.weight)

    own = seeded(WithCopy)
    heads = (own.head.modules_to_save["default"], own.head.original_module)

    def results_of(model):
        with torch.no_grad():
            for own.used in heads:
                yield model(batch(0)).clone()

    expected = list(results_of(own))
    with wrap(own) as engine:
        assert all(torch.equal(a, b) for a, b in zip(results_of(engine), expected, strict=True))


class Experts(nn.Module):
    """Calls its experts, their parts, or uses their weights, as `form` says. Each input names those that it is routed to."""

    def __init__(self, form):
        super().__init__()
        self.form, self.enter = form, nn.Linear(WIDTH, WIDTH)
        self.list = nn.ModuleList(nn.Module() for _ in range(4)) if form != "weights of modules" else nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for expert in self.list if form != "weights of modules" else ():
            if form == "weights":
                expert.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
            else:
                expert.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, routed):
        x, experts = routed
        x = self.enter(x)
        return sum(self.list[i].up(x) if self.form == "parts" else F.linear(x, self.list[i].weight) for i in experts)


ROUTES = ([0, 1], [0, 1], [2], [2, 3], [1, 2], [0, 3])


@pytest.mark.parametrize("form", ["weights", "weights of modules", "parts"])
def test_experts_that_no_token_was_routed_to_in_the_first_pass(wrap, form):
    """Experts that nothing calls: their likes are announced with the first of them. Experts that are not used have a gradient of
    zeros here, as in memory below."""
    inputs = [(batch(i), route) for i, route in enumerate(ROUTES)]
    expected = losses_in_memory(seeded(lambda: Experts(form)), inputs, lambda model, x: mean_square(model, x) + 0 * sum(
        p.sum() for p in model.parameters()))
    with wrap(seeded(lambda: Experts(form))) as engine:
        close_to([step_of(engine, x) for x in inputs], expected)


def test_where_a_use_that_was_missed_cannot_be_refused_the_step_after_the_skipped_one_finds_it(wrap, monkeypatch):
    """As with PyTorch before 2.13, where weights that are not loaded are NaN."""
    monkeypatch.setattr(hoist.torch.model.unit_tensors, "CAN_REFUSE", False)
    applied = []
    model = seeded(lambda: Experts("weights"))
    model.other = nn.Linear(WIDTH, WIDTH, bias=False)
    with wrap(model) as engine:
        for step in range(5):
            if step == 2:
                model.forward = lambda x: F.linear(model.enter(x), model.other.weight)
            engine.backward(mean_square(engine, batch(0) if step >= 2 else (batch(0), [0])))
            applied.append(engine.step().applied)
    assert applied == [True, True, False, True, True]


@pytest.mark.parametrize("called_before", [False, True])
def test_weights_that_the_model_itself_uses_in_vertical_order(wrap, called_before):
    """Found in the first micro-batch, when the others' calls have begun already, and units stay for those that come."""
    class Uncalled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.uncalled, self.last = Block(), Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.uncalled(x) if called_before else x
            return self.last(F.linear(self.first(x), self.uncalled.down.weight[:, :WIDTH]))

    class Trained(Uncalled):
        def forward(self, x):
            return super().forward(x) + 0 * self.uncalled(x)  # so that all of it has gradients

    inputs = [batch(i) for i in range(6)]
    expected = losses_in_memory(seeded(Trained), inputs, micro_batches=3)
    with wrap(seeded(Uncalled), gradient_accumulation_steps=3,
              hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "micro_batch_order": "vertical"}) as engine:
        losses = [engine.train_batch(inputs[i:i + 3], lambda x: mean_square(engine, x)).item() for i in (0, 3)]
    close_to(losses, [sum(expected[i:i + 3]) / 3 for i in (0, 3)])


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
