# SPDX-License-Identifier: Apache-2.0
"""Unusual programs and models get right results, or an error: nothing that changes results is silent."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

import hoist
import hoist.torch
from hoist.torch.model.unit_tensors import CAN_REFUSE
from models import has_values, on_device_of_tests

WIDTH = 64


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class Slotted:
    __slots__ = ("parts",)

    def __init__(self, hidden):
        self.parts = {"list": [hidden]}


class Shelf:
    """Blocks leave their results here, and return nothing."""

    hidden = None


class Block(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.form = form

    def forward(self, x, shelf):
        y = x + self.down(torch.tanh(self.up(x)))
        if self.form == "shelf":
            shelf.hidden = y
            return None
        return {"tensor": lambda: y, "dataclass": lambda: Output(y), "slots": lambda: Slotted(y)}[self.form]()


class Stack(nn.Module):
    def __init__(self, form, layers=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(form) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        shelf = Shelf()
        for block in self.blocks:
            y = block(x, shelf)
            x = {Output: lambda y: y.hidden, Slotted: lambda y: y.parts["list"][0],
                 type(None): lambda _: shelf.hidden}.get(type(y), lambda y: y)(y)
        return self.head(x)


def train(engine, plain, steps=3):
    torch.manual_seed(5)
    for _ in range(steps):
        loss = engine(torch.randn(4, WIDTH)).pow(2).mean()
        loss.backward() if plain else engine.backward(loss)
        assert engine.step().applied
    return engine.digest()


def stack(settings, form, **hoist_section):
    """Each in a store of its own. By default with room for three of the seven units."""
    config = settings(form, hoist={"device_memory": "260KiB", "pinned_memory": "64MiB"} | hoist_section)
    torch.manual_seed(0)
    return hoist.torch.wrap(Stack(form), config)


@pytest.mark.parametrize("plain", [True, False], ids=["loss.backward", "engine.backward"])
@pytest.mark.parametrize("form", ["dataclass", "slots"])
def test_whatever_a_block_returns_its_weights_are_there_in_the_backward_pass(settings, form, plain):
    with stack(settings, "tensor") as engine:
        expected = train(engine, plain)
    with stack(settings, form) as engine:
        assert train(engine, plain) == expected


def test_weights_stay_up_where_a_block_returns_nothing(settings, caplog):
    with stack(settings, "tensor") as engine:
        expected = train(engine, plain=True)
    with stack(settings, "shelf", device_memory="64MiB") as engine, caplog.at_level(logging.WARNING, "hoist"):
        assert train(engine, plain=True) == expected
    said = [record.getMessage() for record in caplog.records if "returns no tensors" in record.getMessage()]
    assert len(said) == 6 and "Block" in said[0] and "'blocks.0'" in said[0]


def test_weights_that_would_have_to_stay_up_beyond_the_budget_are_an_error(settings):
    with stack(settings, "shelf") as engine, pytest.raises(hoist.BudgetError, match="hoist.device_memory"):
        train(engine, plain=True)


@pytest.mark.parametrize("end", ["close", "sleep", "a failed pass", "a failed pass and sleep", "a failed pass and close"])
def test_the_programs_own_error_leaves_the_block(settings, end):
    def fail(*_):
        raise LookupError("no such token")

    with pytest.raises(LookupError), hoist.torch.wrap(nn.Linear(8, 2), settings()) as engine:
        if "failed" in end:
            hook = engine.module.register_forward_pre_hook(fail)
            with pytest.raises(LookupError):
                engine(on_device_of_tests(torch.ones(4, 8)))
            hook.remove()
        if "sleep" in end:
            engine.sleep()
        if "close" in end:
            engine.close()
        fail()
    engine.close()


def test_a_skipped_step_is_said(settings, caplog):
    with stack(settings, "tensor") as engine, caplog.at_level(logging.WARNING, "hoist"):
        for _ in range(3):
            engine.backward(engine(torch.full((4, WIDTH), float("nan"))).sum())
            assert not engine.step().applied
    said = [record.getMessage() for record in caplog.records if "was skipped" in record.getMessage()]
    assert len(said) == 2 and "2 in a row" in said[1]  # the first, the second, the fourth, ...


def test_arguments_that_are_not_known_are_errors(settings, tmp_path):
    with stack(settings, "tensor", keep_steps=1) as engine:
        loss = engine(torch.randn(4, WIDTH)).pow(2).mean()
        with pytest.raises(TypeError, match="retain_grah"):
            engine.backward(loss, retain_grah=True)
        with pytest.raises(hoist.UsageError, match="allreduce_gradients"):
            engine.backward(loss, allreduce_gradients=False)
        engine.backward(loss, allreduce_gradients=True, release_loss=True)
        with pytest.raises(TypeError, match="closure"):
            engine.step(closure=lambda: 1)
        engine.step()
        with pytest.raises(TypeError, match="client_sate"):
            engine.save_checkpoint(tmp_path / "c", tag="t", client_sate={"epoch": 3})
        engine.save_checkpoint(tmp_path / "c", tag="t", client_state={"epoch": 3}, exclude_frozen_parameters=True)
        with pytest.raises(hoist.UsageError, match="shard_bytes_max=-1"):
            engine.export(tmp_path / "exported", shard_bytes_max=-1)


@pytest.mark.parametrize("how", ["all of it", "frozen", "an optimizer", "parameters", "the configuration's"])
def test_a_model_that_would_be_trained_without_an_optimizer_is_said(settings, caplog, how):
    """A program for DeepSpeed passes no optimizer for a reference model, and its engine then has parameters alone."""
    model = nn.Linear(WIDTH, WIDTH)
    if how == "frozen":
        model.requires_grad_(False)
    config = settings(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}, hoist={
        "device_memory": "8MiB", "pinned_memory": "32MiB"})
    if how != "the configuration's":
        config.pop("optimizer")
    passed = {"an optimizer": {"optimizer": torch.optim.SGD(model.parameters(), 0.1)},
              "parameters": {"model_parameters": model.parameters()}}.get(how, {})
    with hoist.torch.initialize(model=model, config=config, **passed)[0]:
        said = [text for text in caplog.messages if "without an optimizer" in text]
        assert len(said) == (how == "all of it")
        for text in said:
            assert f"AdamW with lr 0.001 will train {WIDTH * (WIDTH + 1)} parameters" in text and "requires_grad_(False)" in text
        assert ("optimizer states are offloaded" in caplog.text) == (how != "frozen")


class Adapted(nn.Module):
    """A base whose values come from elsewhere, and an adapter that was built with its own."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.base = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def fill_with_halves(module):
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


@pytest.mark.parametrize("initialize", [None, fill_with_halves])
def test_what_was_built_keeps_its_values_beside_what_is_on_the_meta_device(settings, initialize):
    model = nn.Sequential(Adapted(), Adapted())
    built = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    assert len(built) == 4
    with hoist.torch.wrap(model, settings(), initialize=initialize) as engine:
        for name, values in built.items():
            assert torch.equal(engine.read(name), values.cpu()), name
        base = engine.read("1.base.weight")
        assert base.isfinite().all() and (initialize is None or (base == 0.5).all())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return x @ self.weight * self.scale


def test_buffers_are_filled_and_units_that_are_down_are_not(settings):
    with torch.device("meta"):
        model = nn.Sequential(Scaled(), Scaled())

    def fill(module):
        nn.init.normal_(module.weight)
        module.scale.fill_(3)

    with hoist.torch.wrap(model, settings(), initialize=fill) as engine:
        assert all(module.scale == 3 for module in model)
        assert not any(has_values(module.weight) for module in model)
        assert engine.read("0.weight").isfinite().all()


class Resets(nn.Module):
    """Resets its children, too, and gives one of them other values than it gives itself, as nn.MultiheadAttention does."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.empty(WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.position, 0.25)
        self.first.reset_parameters()
        nn.init.constant_(self.second.weight, 0.5)

    def forward(self, x):
        return self.second(self.first(x + self.position))


@pytest.mark.parametrize("how", ["whole", "in units"])
def test_modules_on_the_meta_device_that_reset_their_children(settings, how):
    with torch.device("meta"):
        model = nn.Sequential(Resets(), Resets()) if how == "whole" else nn.Sequential(Resets())
    with hoist.torch.wrap(model, settings()) as engine:
        assert (engine.read("0.position") == 0.25).all() and (engine.read("0.second.weight") == 0.5).all()
        assert 0 < engine.read("0.first.weight").abs().max() <= WIDTH ** -0.5 + 1e-6
        assert engine.read("0.second.bias").isfinite().all()


def test_pytorchs_own_layers_may_be_on_the_meta_device(settings):
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with hoist.torch.wrap(model, settings()) as engine:
        assert not engine.read("0.self_attn.out_proj.bias").any() and engine.read("0.self_attn.in_proj_weight").isfinite().all()
        assert (engine.module[2].running_var == 1).all() and not engine.module[2].running_mean.any()
        assert engine(on_device_of_tests(torch.randn(4, WIDTH))).isfinite().all()


def test_what_nothing_fills_on_the_meta_device_is_refused(settings):
    class Copies(Resets):
        def reset_parameters(self):
            nn.init.zeros_(self.position)
            with torch.no_grad():
                self.second.weight.copy_(self.first.weight)

    class WithBuffer(nn.LayerNorm):
        def __init__(self, width):
            super().__init__(width)
            self.register_buffer("scale", torch.ones(width))

    for kind, match in ((lambda: nn.Sequential(Copies()), "reset_parameters.. of a Copies.*one unit at a time.*initialize="),
                        (lambda: nn.Sequential(WithBuffer(WIDTH)), r"buffer '0\.scale' is on the meta device and nothing says")):
        with torch.device("meta"):
            model = kind()
        with pytest.raises(hoist.UsageError, match=match):
            hoist.torch.wrap(model, settings())


class Gained(nn.Linear):
    """Its reset_parameters() is the base's, which doesn't know the gain."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x):
        return super().forward(x) * self.gain


class HalfReset(nn.Linear):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight[:1] = 1
            self.bias.zero_()


def fill_linear(module):
    """Leaves norms as their constructor makes them, as GPT-2's _init_weights does."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


@pytest.mark.parametrize(("kind", "initialize", "match"), [
    (lambda: Gained(WIDTH, WIDTH), None, r"parameter '0\.gain' .*reset_parameters\(\) of its Gained leaves.*initialize="),
    (lambda: HalfReset(WIDTH, WIDTH), None, r"parameter '0\.weight' .*of its HalfReset leaves"),
    (lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), None, r"parameter '0\.weight_g' .*of its Linear leaves"),
    (lambda: nn.LayerNorm(WIDTH), fill_linear, r"parameter '0\.weight' .*initialize=\.\.\. leaves.*each.*a LayerNorm"),
    (Scaled, lambda module: nn.init.zeros_(module.weight), r"buffer '0\.scale' .*nothing says"),
], ids=["gained", "half", "weight_norm", "norm", "buffer"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_elements_that_initialization_leaves_out_are_refused(settings, kind, initialize, match):
    """Their memory would hold what another tensor left there."""
    with torch.device("meta"):
        model = nn.Sequential(kind(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(hoist.UsageError, match=match):
        hoist.torch.wrap(model, settings(), initialize=initialize)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

    def fill(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5)

    with hoist.torch.wrap(model, settings(), initialize=fill) as engine:
        assert all((values == 0.5).all() for values in engine.state_dict().values())


def test_buffers_that_initialize_leaves_are_reset_by_their_module(settings):
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
    means = []

    def fill(module):
        nn.init.ones_(module.weight)
        nn.init.constant_(module.bias, 0.5)
        if not means:
            means.append(module.running_mean.fill_(3))

    with hoist.torch.wrap(model, settings(), initialize=fill) as engine:
        assert (model[0].running_mean == 3).all() and not model[1].running_mean.any()
        assert all((norm.running_var == 1).all() and norm.num_batches_tracked == 0 for norm in model)
        assert (engine.read("1.bias") == 0.5).all()


class ResetsByHalf(nn.Linear):
    """Sets a buffer to NaN on purpose, and cannot be reset without arguments where the buffer is left."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("best", torch.empty(1))

    def reset_parameters(self, *, deviation=None):
        if hasattr(self, "best"):
            nn.init.normal_(self.weight, std=deviation)

    def fill(self, best):
        self.weight.fill_(1)
        self.bias.zero_()
        if best is not None:
            self.best.fill_(best)


@pytest.mark.parametrize("best", [torch.nan, None])
def test_nan_that_is_meant_stays_and_a_reset_that_fails_is_not_the_error(settings, best):
    with torch.device("meta"):
        model = ResetsByHalf()
    if best is None:
        with pytest.raises(hoist.UsageError, match="buffer 'best' is on the meta device and nothing says what it holds"):
            hoist.torch.wrap(model, settings(), initialize=lambda module: module.fill(best))
    else:
        with hoist.torch.wrap(model, settings(), initialize=lambda module: module.fill(best)):
            assert model.best.isnan().all()


def test_large_persistent_buffers_are_committed_and_huge_ones_refused(settings):
    def model(features):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, features), nn.BatchNorm1d(features), nn.Linear(features, 8))

    for features in (2048, 16384):
        config = settings(str(features), hoist={"device_memory": "64MiB", "pinned_memory": "64MiB"})
        with hoist.torch.wrap(model(features), config) as engine:
            for _ in range(2):
                engine.backward(engine(torch.randn(16, 8) * 3 + 1).pow(2).mean())
                engine.step()
            mean, tracked = engine.module[1].running_mean.clone(), engine.module[1].num_batches_tracked.item()
        with hoist.torch.wrap(model(features), config, resume=True) as engine:
            assert engine.step_count == 2
            assert torch.equal(engine.module[1].running_mean, mean)
            assert engine.module[1].num_batches_tracked.item() == tracked == 2
    huge = nn.Linear(4, 4)
    huge.register_buffer("table", torch.zeros(5 << 20))
    with pytest.raises(hoist.UsageError, match="20.0 MiB.*'table'.*persistent=False"):
        hoist.torch.wrap(huge, settings())


def test_what_is_wrapped_is_not_wrapped_again(settings):
    model = Stack("tensor", layers=2)
    with hoist.torch.wrap(model, settings()) as engine:
        for again in (model, model.head):
            with pytest.raises(hoist.UsageError, match="belongs to an engine already: close.* hoist_options=.*engine.export"):
                hoist.torch.wrap(again, settings())
            assert hoist.torch.engine_of(again) is engine
        with pytest.raises(hoist.UsageError, match="not a Engine"):
            hoist.torch.wrap(engine, settings())
        with pytest.raises(hoist.UsageError, match="initialize"):
            hoist.torch.wrap(nn.Linear(2, 2), settings(), optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
        train(engine, plain=True)  # and nothing has happened to the first one
        digest = engine.digest()
    assert hoist.torch.engine_of(model) is None
    with hoist.torch.wrap(model, settings(), resume=True) as engine:
        assert engine.digest() == digest


def test_a_change_in_place_is_an_error_and_not_lost_in_silence(settings):
    with hoist.torch.wrap(Stack("tensor", layers=2), settings()) as engine:
        train(engine, plain=True)
        before = engine.digest()
        with torch.no_grad():
            refusal = "unit 'head' are not loaded.*engine.read" if CAN_REFUSE else "single memory location"
            with pytest.raises(RuntimeError, match=refusal):
                engine.module.head.weight.mul_(2)
        assert engine.digest() == before
        with pytest.raises(hoist.UsageError, match="'head.bias'"), engine.gathered(["head.weight"]), torch.no_grad():
            engine.module.head.bias.zero_()
        train(engine, plain=True)
        engine.load_state_dict(engine.state_dict())
        train(engine, plain=False)


def test_a_ranks_share_of_the_data_has_another_order_each_time():
    shares = [hoist.torch.ShuffledShare(range(20), 2, rank) for rank in (0, 1)]
    epochs = [[list(share) for share in shares] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(first + second) == list(range(20)) for first, second in epochs)


def test_autocast_around_the_whole_run_keeps_no_old_weights(settings):
    """PyTorch keeps the copies that it has cast until the outermost region ends: beyond the step that changes the weights."""
    device = torch.get_default_device().type

    def trained(name, around_run):
        torch.manual_seed(0)
        with (hoist.torch.wrap(Stack("tensor", layers=3), settings(name)) as engine,
              torch.autocast(device, torch.bfloat16, enabled=around_run)):
            for _ in range(3):
                with torch.autocast(device, torch.bfloat16):
                    loss = engine(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).float().pow(2).mean()
                engine.backward(loss)
                assert engine.step().applied
            return engine.digest()

    assert trained("run", around_run=True) == trained("forward", around_run=False)


def _inputs(count):
    generator = torch.Generator().manual_seed(7)
    return [on_device_of_tests(torch.randn(4, WIDTH, generator=generator, device="cpu")) for _ in range(count)]


def _loss(engine, inputs):
    return engine(inputs).pow(2).mean()


def _in_steps_of_4(settings, name, train_micro_batch):
    """The state after two steps; `train_micro_batch(engine, inputs, is_last)` trains one of four."""
    torch.manual_seed(0)
    with hoist.torch.wrap(Stack("tensor", layers=2), settings(name, gradient_accumulation_steps=4)) as engine:
        for index, inputs in enumerate(_inputs(8)):
            train_micro_batch(engine, inputs, index % 4 == 3)
        assert engine.step_count == 2
        return engine.digest()


def test_a_loop_that_divides_its_losses_is_refused(settings, caplog):
    """PyTorch's usual loop divides the loss, and steps after the last micro-batch: the step would divide once more."""
    def usual(engine, inputs, is_last):
        (_loss(engine, inputs) / 4).backward()
        if is_last:
            engine.step()

    def divided(engine, inputs, is_last):
        engine.backward(_loss(engine, inputs) * 0.25)
        if is_last:
            engine.step()

    for name, loop in (("usual", usual), ("divided", divided)):
        with pytest.raises(hoist.UsageError, match="mean of 4 micro-batches.*scale_wrt_gas=False"):
            _in_steps_of_4(settings, name, loop)
    with caplog.at_level(logging.WARNING, logger="hoist"):  # division may be what the program means
        caplog.clear()
        _in_steps_of_4(settings, "twice", lambda engine, inputs, _: (
            engine.backward(_loss(engine, inputs) / 4), engine.step()))
    assert len([r for r in caplog.records if "divided it by 4" in r.getMessage()]) == 1


def test_loops_that_divide_as_they_must_are_all_the_same(settings, caplog):
    def own_backward(engine, inputs, _):
        _loss(engine, inputs).backward()
        engine.step()

    def undivided(engine, inputs, is_last):
        engine.backward(_loss(engine, inputs))
        if is_last:
            engine.step()

    def own_division(engine, inputs, is_last):
        engine.backward(_loss(engine, inputs) / 4, scale_wrt_gas=False)
        if is_last:
            engine.step()

    def as_for_deepspeed(engine, inputs, _):
        engine.backward(_loss(engine, inputs))
        engine.step()

    expected = _in_steps_of_4(settings, "deepspeed", as_for_deepspeed)
    for name, loop in (("own", own_backward), ("undivided", undivided), ("sum", own_division)):
        assert _in_steps_of_4(settings, name, loop) == expected, name
    assert "divided it by" not in caplog.text


def test_only_learning_rates_change_during_a_run(settings):
    """A schedule of PyTorch's may change betas in the groups that it shares with the engine."""
    model = Stack("tensor", layers=2)
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(client, max_lr=1e-2, total_steps=20)
    with pytest.raises(hoist.UsageError, match="OneCycleLR with cycle_momentum=True.*cycle_momentum=False"):
        hoist.torch.initialize(model=model, optimizer=client, lr_scheduler=schedule, config=settings())
    engine, *_ = hoist.torch.initialize(model=model, optimizer=client, config=settings())  # the program steps the schedule
    with engine:
        engine.backward(_loss(engine, _inputs(1)[0]))
        engine.step()
        schedule.step()
        with pytest.raises(hoist.UsageError, match="'betas' of parameter group 0 was changed from"):
            engine.backward(_loss(engine, _inputs(1)[0]))
            engine.step()
        engine.zero_grad()
    model = Stack("tensor", layers=2)
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(client, max_lr=1e-2, total_steps=20, cycle_momentum=False)
    engine, *_ = hoist.torch.initialize(model=model, optimizer=client, lr_scheduler=schedule, config=settings("second"))
    with engine:
        for _ in range(3):
            engine.backward(_loss(engine, _inputs(1)[0]))
            engine.step()
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        assert engine.get_lr() != [1e-3]
        engine.optimizer.param_groups[0]["weight_decay"] = 0
        engine.backward(_loss(engine, _inputs(1)[0]))
        with pytest.raises(hoist.UsageError, match="'weight_decay' of parameter group 0 was changed from 0.01 to 0"):
            engine.step()
        engine.optimizer.param_groups[0] |= {"weight_decay": 0.01, "momentum": 0.5}
        with pytest.raises(hoist.UsageError, match="'momentum' of parameter group 0 was set to 0.5; only learning rates"):
            engine.step()
        del engine.optimizer.param_groups[0]["momentum"]
        engine.optimizer.param_groups[0]["decoupled_weight_decay"] = False
        with pytest.raises(hoist.UsageError, match="'decoupled_weight_decay' of parameter group 0 was .*to False; only learning"):
            engine.step()


def test_what_no_pass_uses_has_a_gradient_of_zeros(settings):
    """As docs/pytorch.md says, and unlike torch.optim: weight decay goes on."""
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            return self.blocks[2](self.blocks[0](x))

    torch.manual_seed(0)
    model = Gated()
    unused = model.blocks[1].weight.detach().clone()
    with hoist.torch.wrap(model, settings()) as engine:
        for inputs in _inputs(2):
            engine.backward(_loss(engine, inputs))
            assert engine.step().applied
        weights = engine.state_dict()
    assert torch.allclose(weights["blocks.1.weight"].cpu(), unused.cpu() * (1 - 1e-3 * 0.1) ** 2, rtol=1e-6, atol=0)
