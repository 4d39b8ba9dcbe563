# SPDX-License-Identifier: Apache-2.0
"""Loops as people write them for PyTorch: each trains as it does there, or is refused in the words of PyTorch's interface.
Nothing goes untrained, and no state is lost, without an error."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils import clip_grad_norm_ as other_name
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import hoist
import hoist.torch
from models import on_device_of_tests

WIDTH, STEPS, RATE = 16, 6, 1e-2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(5)
    drawn = on_device_of_tests(torch.randn(count, 2, 4, WIDTH, generator=generator, device="cpu"))
    return [tuple(pair) for pair in drawn]


@pytest.fixture
def wrapped(settings, tmp_path):
    """A new engine; each with a store of its own."""
    count = iter(range(100))

    def make(model=None, scheduler_section=None, memory="1MiB", **arguments):
        config = settings(optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
                          hoist={"device_memory": memory, "pinned_memory": "32MiB"})
        if scheduler_section:
            config["scheduler"] = scheduler_section
        place = str(tmp_path / f"store-{next(count)}")
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] = place
        return hoist.torch.wrap(model or model_of(), config, **arguments)

    return make


def reference_of(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def close_to(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)


def trained(model, count=STEPS):
    """Losses of a model that torch.optim trains, and the model."""
    optimizer, losses = reference_of(model), []
    for inputs, targets in batches(count):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(engine, count=STEPS):
    losses = []
    for inputs, targets in batches(count):
        loss = F.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- zero_grad -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["engine", "optimizer"])
def test_zero_grad_may_stand_between_the_loss_and_its_backward_pass(wrapped, whose):
    expected = trained(model_of())
    with wrapped() as engine:
        losses = []
        for inputs, targets in batches():
            loss = F.mse_loss(engine(inputs), targets)
            (engine if whose == "engine" else engine.optimizer).zero_grad()
            loss.backward()
            engine.optimizer.step()
            losses.append(loss.item())
    close_to(losses, expected)


def test_zero_grad_still_drops_what_a_backward_pass_has_made(wrapped):
    expected = trained(model_of())
    with wrapped() as engine:
        losses = []
        for inputs, targets in batches():
            F.mse_loss(engine(targets), inputs).backward()
            engine.optimizer.zero_grad()
            loss = F.mse_loss(engine(inputs), targets)
            engine.optimizer.zero_grad()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    close_to(losses, expected)


def test_gradients_from_before_wrapping_are_dropped(wrapped):
    expected = trained(model_of())
    model = model_of()
    model(batches()[0][0]).sum().backward()  # as a search for the learning rate does
    with wrapped(model) as engine:
        assert all(p.grad is None for p in engine.parameters())
        losses = run(engine)
    close_to(losses, expected)


@pytest.mark.parametrize("at", ["before forward", "before step", "in a hook of step"])
@pytest.mark.parametrize("whose", ["engine", "optimizer", "model"])
def test_a_grad_that_the_program_sets_is_refused_and_zero_grad_drops_it(wrapped, at, whose):
    with wrapped() as undisturbed:
        expected = run(undisturbed, 2)
    with wrapped() as engine:
        def set_grad(*_):
            engine.module[2].weight.grad = torch.ones(WIDTH, WIDTH)

        (inputs, targets), _ = batches(2)
        if at == "before forward":
            set_grad()
            with pytest.raises(hoist.UsageError, match=r"'2\.weight' has a grad that the program has set"):
                engine(inputs)
        else:
            engine.backward(F.mse_loss(engine(inputs), targets))
            hook = engine.optimizer.register_step_pre_hook(set_grad) if at == "in a hook of step" else set_grad()
            with pytest.raises(hoist.UsageError, match=r"'2\.weight' has a grad that the program has set"):
                engine.step()
            if hook is not None:
                hook.remove()
        {"engine": engine, "optimizer": engine.optimizer, "model": engine.module}[whose].zero_grad()
        assert run(engine, 2) == expected
        assert all(p.grad is None for p in engine.parameters())


# --- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["by its name", "by another name", "from torch", "of the engine"])
def test_a_loop_clips_by_itself(wrapped, call):
    reference = model_of()
    optimizer, expected, norms = reference_of(reference), [], []
    for inputs, targets in batches():
        loss = F.mse_loss(reference(inputs), targets)
        loss.backward()
        norms.append(clip_grad_norm_(reference.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    with wrapped() as engine:
        losses = []
        clip = {"by its name": clip_grad_norm_, "by another name": other_name,
                "from torch": lambda parameters, most: torch.nn.utils.clip_grad_norm_(parameters, max_norm=most),
                "of the engine": lambda _, most: engine.clip_grad_norm_(most)}[call]
        for (inputs, targets), norm in zip(batches(), norms, strict=True):
            loss = F.mse_loss(engine(inputs), targets)
            loss.backward()
            found = clip(engine.module.parameters(), 0.05)
            assert found.item() == pytest.approx(norm, rel=1e-5) and norm > 0.05
            assert found.device == engine.device
            engine.optimizer.step()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
            losses.append(loss.item())
    close_to(losses, expected)
    assert expected[-1] != pytest.approx(trained(model_of())[-1], rel=1e-3)  # clipping made a difference


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="PyTorch before 2.6 has no get_total_norm")
def test_functions_that_clip_take_their_first_argument_by_name():
    """For parameters of any program, also one that wraps no model."""
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert torch.nn.utils.get_total_norm(tensors=[parameter.grad]) == 6
    assert torch.nn.utils.get_total_norm([parameter.grad]) == 6
    assert torch.nn.utils.clip_grad_norm_(parameters=[parameter], max_norm=3.0) == 6
    torch.nn.utils.clip_grads_with_norm_(parameters=parameter, max_norm=1.0, total_norm=torch.tensor(4.0))
    torch.nn.utils.clip_grad_value_(parameters=parameter, clip_value=0.25)
    assert torch.equal(parameter.grad, torch.full((4,), 0.25))
    with pytest.raises(TypeError):
        torch.nn.utils.clip_grad_norm_(max_norm=1.0)


def test_a_limit_is_that_steps_alone(wrapped):
    with wrapped() as engine:
        for index, (inputs, targets) in enumerate(batches(4)):
            engine.backward(F.mse_loss(engine(inputs), targets))
            if index % 2 == 0:
                clip_grad_norm_(engine.parameters(), 0.05)
            if index == 2:
                engine.zero_grad()
                engine.backward(F.mse_loss(engine(inputs), targets))
            assert (engine.step().clip_factor < 1) == (index == 0)


def test_clipping_that_cannot_be_done_is_refused(wrapped, settings):
    with wrapped() as engine:
        inputs, targets = batches(1)[0]
        with pytest.raises(hoist.UsageError, match=r"clip_grad_norm_\(\) needs a backward pass before it"):
            clip_grad_norm_(engine.module.parameters(), 1)
        engine.backward(F.mse_loss(engine(inputs), targets))
        every = list(engine.module.parameters())
        with pytest.raises(hoist.UsageError, match="of some parameters"):
            clip_grad_norm_(every[:-1], 1)
        with pytest.raises(hoist.UsageError, match="of order inf"):
            clip_grad_norm_(every, 1, norm_type=float("inf"))
        with pytest.raises(hoist.UsageError, match="to a norm of -1"):
            clip_grad_norm_(every, -1)
        with pytest.raises(hoist.UsageError, match=r"clip_grad_value_\(\).*to a norm only"):
            clip_grad_value_(every[0], 1)
        with pytest.raises(hoist.UsageError, match=r"clip_grads_with_norm_\(\)"):
            torch.nn.utils.clip_grads_with_norm_(every, 1, torch.tensor(2.0))
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        with pytest.raises(hoist.UsageError, match="together with others"):
            clip_grad_norm_([*every, other], 1)
        assert clip_grad_norm_(other, 1).item() == pytest.approx(2 ** 0.5)
        assert other.grad.norm().item() == pytest.approx(1, rel=1e-5)
        assert engine.step().clip_factor == 1  # none of these has clipped

        engine.backward(F.mse_loss(engine(inputs * float("inf")), targets))
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip_grad_norm_(every, 1, error_if_nonfinite=True)
        assert not torch.isfinite(clip_grad_norm_(every, 1))
        assert not engine.step().applied
    assert clip_grad_norm_(every, 1) == 0  # of a model without an engine, as PyTorch does


def test_micro_batches_that_the_batch_sizes_imply_are_those_of_a_step(settings):
    inputs, targets = batches(1)[0]
    with hoist.torch.wrap(model_of(), settings(train_batch_size=16, train_micro_batch_size_per_gpu=4)) as engine:
        assert engine.gradient_accumulation_steps() == 4
        for micro_batch in range(4):
            engine.backward(F.mse_loss(engine(inputs), targets))
            assert engine.is_gradient_accumulation_boundary() == (micro_batch == 3)
        assert engine.step().applied
        assert engine.step_count == 1


def test_clipping_waits_for_the_last_micro_batch_and_the_updates_of_mode_backward_cannot(settings):
    inputs, targets = batches(1)[0]
    with hoist.torch.wrap(model_of(), settings(gradient_accumulation_steps=2)) as engine:
        engine.backward(F.mse_loss(engine(inputs), targets))
        with pytest.raises(hoist.UsageError, match="after micro-batch 1 of 2"):
            clip_grad_norm_(engine.module.parameters(), 1)
        engine.backward(F.mse_loss(engine(inputs), targets))
        clip_grad_norm_(engine.module.parameters(), 1e-3)
        assert engine.step().clip_factor < 1
    backward = settings(gradient_clipping=0, hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"})
    for part in ("offload_param", "offload_optimizer"):
        backward["zero_optimization"][part]["nvme_path"] += "-2"
    with hoist.torch.wrap(model_of(), backward) as engine:
        engine.backward(F.mse_loss(engine(inputs), targets))
        with pytest.raises(hoist.UsageError, match='update mode "backward"'):
            clip_grad_norm_(engine.module.parameters(), 1)
        assert engine.step().applied


# --- trainable parameters ---------------------------------------------------------------------------------------------


def test_a_parameter_that_is_frozen_after_wrapping_is_refused_and_the_step_can_be_made_up_for(wrapped):
    expected = trained(model_of())
    with wrapped() as engine:
        bias = engine.module[0].up.bias
        losses = []
        for inputs, targets in batches():
            loss = F.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            bias.requires_grad_(False)
            with pytest.raises(hoist.UsageError, match=r"'0\.up\.bias' was frozen after .*lr to 0"):
                engine.step()
            bias.requires_grad_(True)
            engine.step()
            losses.append(loss.item())
    close_to(losses, expected)


def test_a_group_whose_rate_is_0_is_frozen(wrapped):
    """The remedy that the error names."""
    model = model_of()
    frozen = list(model[0].parameters())
    rest = [p for p in model.parameters() if not any(p is f for f in frozen)]
    with wrapped(model, groups=[{"params": frozen}, {"params": rest}]) as engine:
        run(engine, 2)
        before = {name: engine.read(name) for name in ("0.up.weight", "1.up.weight")}
        engine.optimizer.param_groups[0]["lr"] = 0.0
        run(engine, 2)
        assert torch.equal(engine.read("0.up.weight"), before["0.up.weight"])
        assert not torch.equal(engine.read("1.up.weight"), before["1.up.weight"])


def test_a_parameter_that_is_thawed_after_wrapping_is_refused(wrapped):
    model = model_of()
    model[2].weight.requires_grad_(False)
    with wrapped(model) as engine:
        run(engine, 1)
        engine.module[2].weight.requires_grad_(True)
        with pytest.raises(hoist.UsageError, match=r"'2\.weight' was frozen when the model was wrapped"):
            run(engine, 1)


def test_a_trainable_parameter_cannot_come_into_a_wrapped_model(wrapped):
    expected = trained(model_of())
    with wrapped() as engine:
        model = engine.module
        for change in (lambda: model.append(nn.Linear(WIDTH, WIDTH)), lambda: model.__setitem__(1, Block()),
                       lambda: setattr(model[2], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
                       lambda: model[0].register_parameter("scale", nn.Parameter(torch.ones(WIDTH))),
                       lambda: setattr(model[0], "adapter", nn.Linear(WIDTH, 2))):
            with pytest.raises(hoist.UsageError, match="after the model was wrapped, and would not be trained"):
                change()
        # Nothing to train comes with these, and modules may hold the model's own modules.
        model[0].note = nn.Identity()
        model[0].teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        model[0].none = None
        nn.ModuleList([model[1]])
        close_to(run(engine), expected)
    model.append(nn.Linear(WIDTH, WIDTH))  # the engine is closed


def test_groups_have_the_models_parameters_and_each_once(wrapped):
    model = model_of()
    for groups, what in (([{"params": model.parameters()}, {"params": nn.Linear(3, 5).parameters()}],
                          r"group 1 .*\(5, 3\) that is not the model's"),
                         ([{"params": model.parameters()}, {"params": model[1].parameters()}],
                          r"'1\..*' is in the groups 0 and 1")):
        with pytest.raises(hoist.UsageError, match=what):
            wrapped(model, groups=groups)
    with wrapped(model, groups=[{"params": model.parameters()}]) as engine:  # it is as it was
        close_to(run(engine), trained(model_of()))


def test_parameters_may_come_with_their_names(settings, tmp_path):
    expected = trained(model_of())
    adamw = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}
    hoist_section = {"device_memory": "1MiB", "pinned_memory": "32MiB"}
    model = model_of()
    with hoist.torch.wrap(model, settings(optimizer=adamw, hoist=hoist_section),
                          groups=[{"params": model.named_parameters(), "lr": RATE}]) as engine:
        close_to(run(engine), expected)
    config = settings(optimizer=adamw, hoist=hoist_section)
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part]["nvme_path"] = str(tmp_path / "second")
    model = model_of()
    engine, _, _, _ = hoist.torch.initialize(model=model, model_parameters=list(model.named_parameters()), config=config)
    with engine:
        close_to(run(engine), expected)


def test_initialize_does_not_train_what_model_parameters_leaves_out(settings):
    model = model_of()
    with pytest.raises(hoist.UsageError, match=r"'0\..*' requires gradients and is not in model_parameters"):
        hoist.torch.initialize(model=model, model_parameters=model[2].parameters(), config=settings())
    model[:2].requires_grad_(False)
    engine, *_ = hoist.torch.initialize(model=model, model_parameters=model[2].parameters(), config=settings())
    engine.close()


# --- learning rates --------------------------------------------------------------------------------------------------


def test_a_schedule_of_another_optimizer_is_refused(wrapped, settings):
    model = model_of()
    schedule = lr_scheduler.StepLR(reference_of(model), 1)
    with pytest.raises(hoist.UsageError, match="StepLR sets the rates of another optimizer"):
        wrapped(model, scheduler=schedule)
    with wrapped(model) as engine:
        with pytest.raises(hoist.UsageError, match="engine.optimizer"):
            engine.lr_scheduler = schedule
        engine.lr_scheduler = lr_scheduler.SequentialLR(engine.optimizer, [
            lr_scheduler.ConstantLR(engine.optimizer, 0.5, 2), lr_scheduler.StepLR(engine.optimizer, 1)], [2])
        run(engine, 4)
        assert engine.get_lr() == pytest.approx([RATE / 100])  # of the next step
        engine.optimizer.param_groups[0]["lr"] = 0.5
        assert engine.get_lr() == [0.5]


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": RATE, "warmup_num_steps": 3}}


def make_none(optimizer):
    raise RuntimeError("the program's own error")


@pytest.mark.parametrize(("failing", "error", "message"), [
    ({"scheduler": make_none}, RuntimeError, "the program's own"),
    ({"scheduler": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, RATE)}, ValueError, "total_steps"),
    ({"groups": []}, ValueError, "empty parameter list"),
], ids=["a factory that raises", "a wrong argument", "no groups"])
def test_a_model_keeps_its_weights_where_its_schedule_or_groups_are_refused(wrapped, failing, error, message):
    model = model_of()
    if "groups" in failing:
        model.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        wrapped(model, **failing)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    model.requires_grad_(True)
    with wrapped(model) as engine:
        close_to(run(engine), trained(model_of()))


def test_buffers_keep_their_type_where_a_schedule_is_refused(settings):
    model = model_of()
    model.register_buffer("scale", torch.tensor([1.23456]))
    with pytest.raises(RuntimeError, match="the program's own"):
        hoist.torch.wrap(model, settings(bf16={"enabled": True}), scheduler=make_none)
    assert torch.equal(model.scale, torch.tensor([1.23456]))


@pytest.mark.parametrize(("section", "of_another", "message"), [
    (None, True, "StepLR sets the rates of another optimizer"),
    ("WarmupLR", False, "StepLR beside the configuration's scheduler")])
def test_a_model_keeps_its_weights_where_initialize_refuses_its_schedule(settings, section, of_another, message):
    config = settings(optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}, zero_optimization={"stage": 3},
                      hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
    model = model_of()
    optimizer = reference_of(model)
    schedule = lr_scheduler.StepLR(reference_of(model) if of_another else optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hoist.UsageError, match=message):
        hoist.torch.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule,
                               config=config | ({"scheduler": WARMUP} if section else {}))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert optimizer.param_groups[0]["lr"] == RATE
    engine, *_ = hoist.torch.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        close_to(run(engine), trained(model_of()))


@pytest.mark.parametrize("with_groups", [False, True])
def test_rates_have_one_source(wrapped, with_groups):
    model = model_of()
    groups = {"groups": [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.5}]} if with_groups else {}
    with wrapped(model, scheduler_section=WARMUP, **groups) as engine:
        with pytest.raises(hoist.UsageError, match="StepLR beside the configuration's scheduler"):
            engine.lr_scheduler = lr_scheduler.StepLR(engine.optimizer, 1)
        run(engine, 2)
        assert [group["lr"] for group in engine.optimizer.param_groups] == engine.get_lr() and 0.5 not in engine.get_lr()
        engine.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(hoist.UsageError, match="'lr' of parameter group 0 was changed.*the configuration's scheduler"):
            run(engine, 1)


def test_the_rates_of_an_optimizer_that_was_passed_give_way_to_the_configurations_scheduler(settings):
    model = model_of()
    client = torch.optim.AdamW(model.parameters(), lr=0.5)
    engine, optimizer, _, _ = hoist.torch.initialize(model=model, optimizer=client, config=settings(scheduler=WARMUP))
    with engine:
        run(engine, 2)
        assert client.param_groups[0]["lr"] == engine.get_lr()[0] != 0.5


def test_a_group_with_a_rate_of_0_and_a_scheduler_that_would_train_it_are_refused(wrapped):
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}
    for section in (WARMUP, cosine):
        model = model_of()
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1:].parameters()}]
        if section is WARMUP:
            with pytest.raises(hoist.UsageError, match="parameter group 0 has lr 0.*WarmupLR"):
                wrapped(model, scheduler_section=section, groups=groups)
            continue
        with wrapped(model, scheduler_section=section, groups=groups) as engine:  # a share of each group's rate
            before = engine.read("0.up.weight"), engine.read("1.up.weight")
            run(engine, 3)
            assert torch.equal(engine.read("0.up.weight"), before[0]) and not torch.equal(engine.read("1.up.weight"), before[1])


def test_a_group_cannot_be_added_after_wrapping(wrapped):
    with wrapped() as engine, pytest.raises(hoist.UsageError, match=r"wrap\(groups=\.\.\.\)"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize("how", ["wrap", "attribute"])
def test_a_schedule_may_be_made_by_a_function(wrapped, how):
    """A schedule of PyTorch's needs the optimizer, which wrap() makes."""
    def schedule_of(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    with wrapped(**({"scheduler": schedule_of} if how == "wrap" else {})) as engine:
        if how == "attribute":
            engine.lr_scheduler = schedule_of
        assert isinstance(engine.lr_scheduler, lr_scheduler.LambdaLR)
        for count, (x, y) in enumerate(batches(3), start=1):
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()
            assert engine.get_lr() == pytest.approx([RATE / (1 + count)])


def test_forward_of_the_engine_is_a_call_of_the_model(wrapped):
    """As of DeepSpeed's engine, which is a module; here also where the model has parameters of its own."""
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.shift = model_of(), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x, scale=1.0):
            return self.layers(x + self.shift) * scale

    losses = []
    for call in (lambda engine, x: engine(x, scale=2.0), lambda engine, x: engine.forward(x, scale=2.0)):
        with wrapped(Root()) as engine:
            for x, y in batches(3):
                loss = F.mse_loss(call(engine, x), y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_a_schedule_that_the_program_steps_raises_no_false_warning(wrapped):
    with wrapped() as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for _ in range(2):
            run(engine, 1)
            schedule.step()
        assert engine.optimizer.param_groups[0]["lr"] == RATE / 4


def test_a_schedule_of_the_optimizer_that_was_taken_over_raises_no_false_warning(settings):
    model = model_of()
    client = reference_of(model)
    schedule = lr_scheduler.StepLR(client, 1, 0.5)
    config = settings(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
    with hoist.torch.initialize(model=model, optimizer=client, config=config)[0] as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(engine, 1)
        schedule.step()
        assert engine.get_lr() == [RATE / 2]


def test_a_schedule_that_needs_metrics_is_refused_before_the_step(wrapped):
    with wrapped() as engine:
        engine.lr_scheduler = lr_scheduler.ReduceLROnPlateau(engine.optimizer)
        with pytest.raises(hoist.UsageError, match=r'step\(\) of ReduceLROnPlateau needs more.*lr_kwargs=\{"metrics"'):
            run(engine, 1)
        assert engine.step_count == 0
        assert engine.step(lr_kwargs={"metrics": 1.0}).applied and engine.step_count == 1


# --- the optimizer's state -------------------------------------------------------------------------------------------


def test_a_state_dict_with_moments_of_another_step_is_refused(wrapped):
    model = model_of()
    trained(model, 1)
    with wrapped() as engine:
        run(engine, 2)
        saved = engine.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.5
        engine.optimizer.load_state_dict(saved)
        assert engine.optimizer.param_groups[0]["lr"] == 0.5
        other = {"param_groups": [*saved["param_groups"], {"lr": 0.1}]}
        other["param_groups"][0] = {"lr": 0.1}
        with pytest.raises(hoist.UsageError, match="the state_dict has 2 parameter groups, and this optimizer has 1"):
            engine.optimizer.load_state_dict(other)
        assert engine.optimizer.param_groups[0]["lr"] == 0.5
        optimizer = reference_of(model)
        F.mse_loss(model(batches()[0][0]), batches()[0][1]).backward()
        optimizer.step()
        with pytest.raises(hoist.UsageError, match="has moments.*resume=True"):
            engine.optimizer.load_state_dict(optimizer.state_dict())
    with wrapped() as engine, pytest.raises(hoist.UsageError, match="of step 2, and this engine is at 0.*resume=True"):
        engine.optimizer.load_state_dict(saved)


def test_grad_scaler_is_refused_by_name(wrapped):
    scaler = torch.amp.GradScaler("cpu")
    with wrapped() as engine:
        inputs, targets = batches()[0]
        scaler.scale(F.mse_loss(engine(inputs), targets)).backward()
        with pytest.raises(hoist.UsageError, match="GradScaler.*fp16"):
            scaler.step(engine.optimizer)


# --- hooks of the optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("whose", ["engine", "optimizer"])
def test_hooks_of_the_optimizer_are_called_once_a_step_and_before_the_schedule(settings, whose, micro_batches):
    calls = []
    with hoist.torch.wrap(model_of(), settings(gradient_accumulation_steps=micro_batches)) as engine:
        def note(what):
            return lambda *_: calls.append((what, engine.step_count, engine.lr_scheduler.last_epoch))

        engine.optimizer.register_step_pre_hook(note("before"))
        engine.optimizer.register_step_post_hook(note("after"))
        engine.lr_scheduler = lr_scheduler.StepLR(engine.optimizer, 2)
        of_all = register_optimizer_step_post_hook(note("after any optimizer's"))
        for inputs, targets in batches(4):
            engine.backward(F.mse_loss(engine(inputs), targets))
            (engine if whose == "engine" else engine.optimizer).step()
        of_all.remove()
    assert calls == [call for step in range(4 // micro_batches) for call in (
        ("before", step, step), ("after", step + 1, step), ("after any optimizer's", step + 1, step))]


# --- the model -------------------------------------------------------------------------------------------------------


def test_a_wrapped_model_is_not_copied(wrapped):
    with wrapped() as engine:
        for copies in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
            with pytest.raises(hoist.UsageError, match=r"engine\.state_dict\(\)"):
                copies(engine.module)
        with pytest.raises(hoist.UsageError, match=r"engine\.save\(\)"):
            copy.deepcopy(engine.optimizer)


def test_a_change_of_gathered_weights_is_refused_at_once(wrapped):
    with wrapped() as engine:
        run(engine, 1)
        with pytest.raises(hoist.UsageError, match=r"'2\.weight' was changed inside of gathered.*engine\.write"):
            with engine.gathered(["2.weight"]), torch.no_grad():
                engine.module[2].weight.clamp_(-0.01, 0.01)
        run(engine, 1)


def test_the_second_backward_pass_of_one_forward_pass_says_what_to_do(wrapped):
    with wrapped() as engine:
        result = engine(batches()[0][0])
        engine.backward(result.sum(), retain_graph=True)
        with pytest.raises(hoist.UsageError, match="add the losses"):
            engine.backward(result.pow(2).sum())


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
def test_a_model_whose_engine_was_closed_has_no_values(wrapped):
    with wrapped() as engine:
        model = engine.module
    for use in (lambda: model[0].up.weight.sum(), lambda: wrapped(model)):
        with pytest.raises(RuntimeError, match=r"After close\(\) the model has no values: .*resume=True"):
            use()


def test_data_parallel_modules_are_refused(wrapped):
    with pytest.raises(hoist.UsageError, match=r"DataParallel.*model\.module"):
        wrapped(nn.DataParallel(model_of()))


# --- torch.func ------------------------------------------------------------------------------------------------------


class Transformed(nn.Module):
    """Calls its block inside of a transformation."""

    def __init__(self, transformation, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.transformation = transformation

    def forward(self, x):
        for block in self.blocks:
            x = x + self.transformation(block, x)
        return x


def jvp(block, x):
    value, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    return value + 0.1 * tangent


TRANSFORMATIONS = {
    "grad": lambda block, x: torch.func.grad(lambda y: block(y).pow(2).sum())(x),
    "vjp": lambda block, x: torch.func.vjp(block, x)[1](torch.ones_like(x))[0],
    "jvp": jvp,
    "jacrev": lambda block, x: torch.func.jacrev(lambda y: block(y).sum(0))(x).sum(0),
    "vmap": lambda block, x: torch.func.vmap(block)(x),
    "grad of each sample": lambda block, x: torch.func.vmap(torch.func.grad(lambda y: block(y).sum()))(x),
}


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_modules_may_be_called_inside_of_transformations(wrapped, name):
    expected = trained(Transformed(TRANSFORMATIONS[name]))
    with wrapped(Transformed(TRANSFORMATIONS[name])) as engine:
        close_to(run(engine), expected)


def test_units_inside_of_vmap_come_and_go(wrapped):
    """The device holds three of the six blocks at a time."""
    expected = trained(Transformed(TRANSFORMATIONS["vmap"], count=6))
    with wrapped(Transformed(TRANSFORMATIONS["vmap"], count=6), memory="40KiB") as engine:
        close_to(run(engine), expected)
