# SPDX-License-Identifier: Apache-2.0
"""Learning rates: schedules of PyTorch's and of the configuration, what is refused, and what comes back with a run."""

import contextlib
import copy
import gc
import json
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from loops import RATE, batches, close_to, engines, model_of, reference_of, run, trained
from torch.optim import lr_scheduler

import hoist
import hoist.torch
from hoist import program_end
from hoist.torch.checkpoint import program_state, schedules
from training import make, train


@pytest.fixture
def wrapped(settings):
    return engines(settings)


class DataWithoutOrder(torch.utils.data.IterableDataset):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter(range(4))


def test_a_wrap_that_fails_late_leaves_neither_an_engine_nor_a_changed_model(settings, monkeypatch):
    """A schedule's constructor runs when the engine and the hooks are there, and may use the model."""
    model = make()
    model.register_buffer("seen", torch.zeros(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def schedule(optimizer):
        with torch.no_grad():
            model(torch.zeros(2, 8, dtype=torch.long))
        model.seen += 1
        raise ValueError("the program's own")

    def unmade(optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=9)

    def interrupted(*_):
        raise KeyboardInterrupt

    def fails(kind, **options):
        with pytest.raises(kind):
            hoist.torch.wrap(model, settings(), resume=True, **options)
        assert hoist.torch.engine_of(model) is None
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    fails(ValueError, scheduler=schedule)
    fails(hoist.UsageError, scheduler=unmade)
    with monkeypatch.context() as patched:
        patched.setattr(program_end, "close_at_exit", interrupted)
        fails(KeyboardInterrupt)
    for data in (iter([]), [], DataWithoutOrder()):
        with pytest.raises((TypeError, ValueError)):
            hoist.torch.initialize(model=model, config=settings(), training_data=data)
    began = time.monotonic()
    with hoist.torch.wrap(model, settings(), resume=True) as engine:
        assert time.monotonic() - began < 5  # nothing holds the store
        assert all(torch.equal(engine.read(name), value.float().cpu()) for name, value in before.items() if name != "seen")


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


@contextlib.contextmanager
def unchanged(model):
    before = copy.deepcopy(model.state_dict())
    yield
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert not any({"forward", "zero_grad"} & vars(module).keys() for module in model.modules())


@pytest.mark.parametrize(("failing", "error", "message"), [
    ({"scheduler": make_none}, RuntimeError, "the program's own"),
    ({"scheduler": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, RATE)}, ValueError, "total_steps"),
    ({"groups": []}, ValueError, "empty parameter list"),
], ids=["a factory that raises", "a wrong argument", "no groups"])
def test_a_model_keeps_its_weights_where_its_schedule_or_groups_are_refused(wrapped, failing, error, message):
    model = model_of()
    if "groups" in failing:
        model.requires_grad_(False)
    with unchanged(model), pytest.raises(error, match=message):
        wrapped(model, **failing)
    model.requires_grad_(True)
    with wrapped(model) as engine:
        close_to(run(engine), trained(model_of()))


def test_buffers_keep_their_type_where_a_schedule_is_refused(settings):
    model = model_of()
    model.register_buffer("scale", torch.tensor([1.23456]))
    with unchanged(model), pytest.raises(RuntimeError, match="the program's own"):
        hoist.torch.wrap(model, settings(bf16={"enabled": True}), scheduler=make_none)


@pytest.mark.parametrize(("section", "of_another", "message"), [
    (None, True, "StepLR sets the rates of another optimizer"),
    ("WarmupLR", False, "StepLR beside the configuration's scheduler")])
def test_a_model_keeps_its_weights_where_initialize_refuses_its_schedule(settings, section, of_another, message):
    config = settings(optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}, zero_optimization={"stage": 3},
                      hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
    model = model_of()
    optimizer = reference_of(model)
    schedule = lr_scheduler.StepLR(reference_of(model) if of_another else optimizer, 1)
    with unchanged(model), pytest.raises(hoist.UsageError, match=message):
        hoist.torch.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule,
                               config=config | ({"scheduler": WARMUP} if section else {}))
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


@pytest.mark.parametrize("how", ["groups", "initialize"])
def test_a_rate_that_is_a_tensor_is_followed(wrapped, settings, how):
    """Schedules change it in place."""
    def optimizer_of(model):
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(RATE, device="cpu"), weight_decay=0.1)

    def trained_by(optimizer, model, backward):
        schedule = lr_scheduler.StepLR(optimizer, 1, 0.1)
        for x, y in batches(3):
            backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    model = model_of()
    if how == "groups":
        engine = wrapped(model, groups=optimizer_of(model).param_groups)
    else:
        config = settings(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
        engine = hoist.torch.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    expected = model_of()
    trained_by(optimizer_of(expected), expected, torch.Tensor.backward)
    with engine:
        trained_by(engine.optimizer, engine, engine.backward)
        for name, values in expected.state_dict().items():
            assert torch.allclose(engine.read(name), values.cpu(), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD"])
def test_the_optimizer_has_the_settings_where_schedules_look_for_them(settings, kind):
    """Some read optimizer.defaults; all of PyTorch's optimizers have those in their groups, too."""
    own = {"AdamW": {"betas": (0.8, 0.9), "eps": 1e-7}, "Adagrad": {}, "SGD": {"momentum": 0.5}}
    params = {"lr": 0.02, "weight_decay": 0.2} | own[kind]
    expected = getattr(torch.optim, kind)(model_of().parameters(), **params).defaults
    config = settings(optimizer={"type": kind, "params": params}, hoist={"device_memory": "1MiB", "pinned_memory": "32MiB"})
    with hoist.torch.wrap(model_of(), config) as engine:
        defaults = engine.optimizer.defaults
        assert defaults == {key: value for key, value in expected.items() if key in defaults}
        assert defaults.keys() >= params.keys()
        assert engine.optimizer.param_groups[0] == defaults | {"params": engine.optimizer.param_groups[0]["params"]}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step()")
@pytest.mark.parametrize(("steps_schedule", "warnings_count"), [("at each micro-batch", 1), ("at each step", 0)])
def test_a_schedule_that_is_stepped_within_a_step_is_warned_of(settings, caplog, steps_schedule, warnings_count):
    with hoist.torch.wrap(model_of(), settings(gradient_accumulation_steps=2)) as engine:
        schedule = lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for x, y in batches(6):
            engine.backward(F.mse_loss(engine(x), y))
            if engine.step() or steps_schedule == "at each micro-batch":
                schedule.step()
    assert sum("changed between two micro-batches" in message for message in caplog.messages) == warnings_count


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_mode_backward_updates_with_the_rates_of_the_programs_schedule(settings, micro_batches):
    states = []
    for mode in ("forward", "backward"):
        config = settings(mode, gradient_accumulation_steps=micro_batches, hoist={
            "device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": mode}, gradient_clipping=0.0)
        with hoist.torch.wrap(model_of(), config) as engine:
            schedule = lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
            for _ in range(3):
                run(engine, micro_batches)
                schedule.step()
            states.append(engine.digest())
            if mode == "backward":
                x, y = batches(1)[0]
                for _ in range(micro_batches):
                    engine.backward(F.mse_loss(engine(x), y))
                schedule.step()
                with pytest.raises(hoist.UsageError, match="'lr' of parameter group 0.*between backward.*set 'lr' to.*pre_hook"):
                    engine.step()
                engine.optimizer.param_groups[0]["lr"] *= 2
                assert engine.step().applied and engine.step_count == 4
    assert states[0] == states[1]


@pytest.mark.parametrize("when", ["before backward()", "after a pass that is not used", "in loss_of()"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_mode_backward_takes_rates_that_are_set_after_the_forward_pass(settings, when, micro_batches):
    states = []
    for mode in ("forward", "backward"):
        order = {"micro_batch_order": "vertical"} if when == "in loss_of()" else {}
        config = settings(mode, gradient_accumulation_steps=micro_batches, hoist={
            "device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": mode} | order)
        with hoist.torch.wrap(model_of(), config) as engine:
            def loss_of(batch, engine=engine):
                loss = F.mse_loss(engine(batch[0]), batch[1])
                if when != "after a pass that is not used":
                    engine.set_lr(0.9 * engine.get_lr()[0])
                return loss

            for _ in range(3):
                if order:
                    engine.train_batch(batches(micro_batches), loss_of)
                    continue
                for inputs, targets in batches(micro_batches):
                    if when == "after a pass that is not used":
                        loss_of((inputs, targets))
                        engine.set_lr(0.9 * engine.get_lr()[0])
                    loss_of((inputs, targets)).backward() if micro_batches == 1 else engine.backward(loss_of((inputs, targets)))
                    engine.step()
            states.append(engine.digest())
    assert states[0] == states[1]


def test_mode_backward_takes_the_rate_of_a_step_of_fewer_micro_batches(settings):
    config = settings(gradient_accumulation_steps=2, hoist={
        "device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"})
    with hoist.torch.wrap(model_of(), config) as engine:
        inputs, targets = batches(1)[0]
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.set_lr(0.25)  # nothing is updated yet
        assert engine.step().applied


@pytest.mark.parametrize("how", ["engine.lr_scheduler", "by itself"])
def test_a_schedule_that_changes_beta1_is_told_to_leave_it(wrapped, how):
    with wrapped() as engine:
        betas = engine.optimizer.param_groups[0]["betas"]
        schedule = lr_scheduler.OneCycleLR(engine.optimizer, RATE, total_steps=9)
        if how == "by itself":
            with pytest.raises(hoist.UsageError, match=r"'betas' of.*was changed.*set it back to \(0\.9, 0\.9.*need cycle_mom"):
                run(engine, 1)
            engine.optimizer.param_groups[0]["betas"] = betas
            assert engine.step().applied
        else:
            with pytest.raises(hoist.UsageError, match="pass cycle_momentum=False"):
                engine.lr_scheduler = schedule
        engine.lr_scheduler = lr_scheduler.OneCycleLR(engine.optimizer, RATE, total_steps=9, cycle_momentum=False)
        run(engine, 1)
        assert engine.step_count == (2 if how == "by itself" else 1)


def test_a_state_dict_brings_rates_and_leaves_settings_to_the_configuration(wrapped):
    """As with another weight_decay in the configuration of a run that is resumed."""
    with wrapped() as engine:
        saved = engine.optimizer.state_dict()
    saved["param_groups"][0] |= {"lr": torch.tensor(0.5), "initial_lr": 0.5, "weight_decay": 0.25, "betas": (0.5, 0.5)}
    with wrapped() as engine:
        group, settings_before = engine.optimizer.param_groups[0], engine.optimizer.state_dict()["param_groups"][0]
        engine.optimizer.load_state_dict(saved)
        assert engine.optimizer.state_dict()["param_groups"][0] == settings_before | {"lr": 0.5, "initial_lr": 0.5}
        kept = engine.optimizer.state_dict()
        group["lr"].mul_(0.5)  # as schedules change it
        assert saved["param_groups"][0]["lr"] == 0.5 and kept["param_groups"][0]["lr"] == 0.5
        run(engine, 1)
        assert engine.step_count == 1


def test_a_schedule_that_needs_metrics_is_refused_before_the_step(wrapped):
    with wrapped() as engine:
        engine.lr_scheduler = lr_scheduler.ReduceLROnPlateau(engine.optimizer)
        with pytest.raises(hoist.UsageError, match=r'step\(\) of ReduceLROnPlateau needs more.*lr_kwargs=\{"metrics"'):
            run(engine, 1)
        assert engine.step_count == 0
        assert engine.step(lr_kwargs={"metrics": 1.0}).applied and engine.step_count == 1


# --- resumed -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_was_dropped_with_its_schedule_gives_the_store_back(settings):
    """The two refer to each other, so that Python frees them when it collects garbage."""
    for count in range(3):
        engine = hoist.torch.wrap(make(), settings(), resume=True)
        assert engine.step_count == count
        engine.lr_scheduler = lr_scheduler.StepLR(engine.optimizer, 1)
        train(engine, 1)
        del engine
    gc.collect()


def test_a_dropped_engine_gives_the_store_back_by_another_name_and_to_one_that_wakes(settings):
    for name in ("store", "store/../store", "store"):
        engine = hoist.torch.wrap(make(), settings(name), resume=True)
        engine.lr_scheduler = lr_scheduler.StepLR(engine.optimizer, 1)
        engine.save().wait()
        del engine
    gc.collect()
    engine = hoist.torch.wrap(make(), settings(), resume=True)
    train(engine, 1)
    engine.sleep()
    other = hoist.torch.wrap(make(), settings(), resume=True)
    other.lr_scheduler = lr_scheduler.StepLR(other.optimizer, 1)
    del other
    engine.wake()
    assert engine.step_count == 1
    engine.close()


class Scaled(lr_scheduler.LRScheduler):
    """A program's own, with state that JSON does not hold as it is."""

    def __init__(self, optimizer):
        self.factors = {step: 1 / (1 + step) for step in range(30)}
        self.left_out = torch.zeros(2)
        self.function = len
        super().__init__(optimizer)

    def get_lr(self):
        self.left_out += 1
        return [rate * self.factors.pop(self.last_epoch) for rate in self.base_lrs]


SCHEDULES = {
    "to 0": lambda o: lr_scheduler.LinearLR(o, end_factor=0.0, total_iters=10),  # to -5e-20
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [4, 9, 10]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [6])], [3]),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(o, [4, 9], 0.5), lr_scheduler.ConstantLR(o, 0.1, total_iters=8)]),
    "in each other": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.1, total_iters=8), (
        lr_scheduler.SequentialLR(o, [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [3, 6])], [3]))]),
    "the program's": Scaled,
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step()")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_ended(settings, kind, caplog):
    """Schedules within schedules, and state with integer keys: the rates are those of PyTorch's own optimizer."""
    reference = SCHEDULES[kind](torch.optim.SGD(make().parameters(), lr=1e-3))
    expected = []
    for _ in range(12):
        reference.optimizer.step()
        reference.step()
        expected.append(reference.optimizer.param_groups[0]["lr"])
    rates = []
    for resume in (False, True):
        with hoist.torch.wrap(make(), settings(), resume=resume) as engine:
            engine.lr_scheduler = SCHEDULES[kind](engine.optimizer)
            for _ in range(6):
                train(engine, 1)
                rates.append(engine.optimizer.param_groups[0]["lr"])
            if kind == "multi":
                assert engine.lr_scheduler.milestones == reference.milestones  # still a Counter
    assert rates == expected
    left_out = [record.getMessage() for record in caplog.records if "commits leave out" in record.getMessage()]
    assert len(left_out) == (kind == "the program's") and all("'left_out'" in text for text in left_out)


def test_a_schedule_that_the_program_steps_and_sets_back_on_resume_is_warned_of(settings, caplog):
    for how in ("begins", "kept", "lost"):
        caplog.clear()
        with hoist.torch.wrap(make(), settings(), resume=how != "begins") as engine:
            schedule = lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5 ** step)
            if how == "kept":
                schedule.load_state_dict(engine.state["schedule"])
                engine.optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
            train(engine, 1)
            schedule.step()
            engine.state["schedule"] = schedule.state_dict()
            engine.save().wait()
        assert ("had come to [0.00025], and the program has set [0.001]" in caplog.text) == (how == "lost")
        assert ("engine.lr_scheduler is set to it" in caplog.text) == (how == "lost")


@pytest.mark.parametrize("sets", ["at once", "after a step", "never"])
def test_a_saved_schedule_goes_on_with_its_own_rates_where_others_are_asked_for(settings, caplog, sets):
    """Not after a step: what was saved belongs to an earlier one then."""
    def begin(rate, resume):
        config = settings()
        config["optimizer"]["params"]["lr"] = rate
        return hoist.torch.wrap(make(), config, resume=resume)

    def halved(optimizer):
        return lr_scheduler.ExponentialLR(optimizer, 0.5)

    with begin(0.5, resume=False) as engine:
        engine.lr_scheduler = halved
        train(engine, 3)
    with begin(0.25, resume=True) as engine:
        assert "learning rates" not in caplog.text
        if sets == "at once":
            engine.lr_scheduler = halved
        train(engine, 1)
        if sets == "after a step":
            engine.lr_scheduler = halved
        assert engine.get_lr() == [0.5 ** 5 if sets == "at once" else 0.25]
        assert ("began with [0.5], and this program asks for [0.25]. Its schedule goes on" in caplog.text) == (sets == "at once")
        assert ("had come to [0.125], and the program has set [0.25]" in caplog.text) == (sets != "at once")


def test_a_run_of_initialize_goes_on_with_the_rates_of_the_configurations_scheduler(settings):
    config = settings(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8,
                                                                "warmup_type": "linear"}})
    rates = []
    for resume in (False, True):
        engine, *_ = hoist.torch.initialize(model=make(), config=config, resume=resume, load_later=False)
        for _ in range(3):
            rates += engine.get_lr()
            train(engine, 1)
            assert engine.lr_scheduler.get_last_lr() == [group["lr"] for group in engine.optimizer.param_groups]
        engine.close()
    assert rates == [0.0, *(0.01 * step / 8 for step in range(5))]


def test_a_schedule_that_was_made_first_is_compared_by_what_it_began_with(settings, caplog):
    """Its rate at the first step is 0 whatever the program asks for."""
    for resume, rate in ((False, 0.01), (True, 0.02), (True, 0.01)):
        caplog.clear()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        engine, *_ = hoist.torch.initialize(model=model, config=settings(), resume=resume, load_later=False, optimizer=optimizer,
                                            lr_scheduler=lr_scheduler.LambdaLR(optimizer, lambda step: step / 10))
        train(engine, 2)
        engine.close()
        assert ("began with [0.01], and this program asks for [0.02]. Its schedule goes on" in caplog.text) == (rate == 0.02)
        assert ("learning rates" in caplog.text) == (rate == 0.02)


@pytest.mark.parametrize("how", ["resume", "restore"])
def test_a_schedule_of_other_groups_is_not_continued(settings, caplog, how):
    for again in (False, True):
        model = make()
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.25}] if again else [{"params": parameters}]
        with hoist.torch.wrap(model, settings(), groups=groups, resume=again and how == "resume",
                              load_later=again and how == "restore") as engine:
            engine.lr_scheduler = lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5)
            if again and how == "restore":
                engine.restore()
            train(engine, 2)
    assert "had 1 parameter groups, and this program has 2" in caplog.text
    assert engine.get_lr() == [0.25e-3, 0.0625]


def test_a_schedule_in_a_store_that_was_written_before(settings):
    """Then whole entries were left out, and integer keys with them."""
    state = {"base_lrs": [1e-3], "last_epoch": 4, "gamma": 0.1, "_step_count": 5, "_last_lr": [1e-3]}
    saved = program_state.unpack(json.dumps({"program": {}, "rates": [1e-3], "schedule_lags": True, "scheduler": state}).encode())
    optimizer = torch.optim.SGD(make().parameters(), lr=1e-3)
    schedule = lr_scheduler.MultiStepLR(optimizer, [5])
    optimizer.step()
    schedules.continue_schedule(saved, schedule, optimizer.param_groups)
    assert schedule.last_epoch == 5 and optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_load_that_fails_leaves_what_the_commit_says_of_a_schedule(settings, tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    with hoist.torch.wrap(make(), settings(), scheduler=schedule) as engine:
        train(engine, 3)
        count = engine.lr_scheduler.last_epoch
    with hoist.torch.wrap(make(), settings(), resume=True) as engine:
        with pytest.raises(hoist.StoreError, match="has no named checkpoint 'missing'"):
            engine.load_checkpoint(tmp_path / "c", tag="missing", load_lr_scheduler_states=False)
        engine.lr_scheduler = schedule
        assert engine.lr_scheduler.last_epoch == count > 0


@pytest.mark.parametrize("how", ["wrap", "initialize"])
def test_rates_that_the_program_sets_itself_come_back_with_the_run(settings, how, caplog):
    def begin(rate, resume):
        config = settings()
        if how == "wrap":
            config["optimizer"]["params"]["lr"] = rate
            return hoist.torch.wrap(make(), config, resume=resume)
        model = make()
        return hoist.torch.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=rate), config=config,
                                      resume=resume, load_later=False)[0]

    def run(engine, steps, schedule_state=None):
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)  # the program's own, which hoist does not know
        if schedule_state is not None:
            schedule.load_state_dict(schedule_state)
        rates = []
        for _ in range(steps):
            train(engine, 1, first=engine.step_count)
            rates += engine.get_lr()
            schedule.step()
        return rates, schedule.state_dict()

    first, state = [], {}
    with begin(1e-3, resume=False) as engine:
        first, state = run(engine, 5)
        assert first == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]
    with begin(1e-3, resume=True) as engine:
        rates, _ = run(engine, 4, state)
        assert rates == [2.5e-4, 1.25e-4, 1.25e-4, 6.25e-5]
        assert "learning rates" not in caplog.text
    with begin(2e-3, resume=True) as engine:  # another one is asked for: that one counts, and is said
        train(engine, 1, first=engine.step_count)
        assert engine.get_lr() == [2e-3]
        assert "began with [0.001] and had come to [6.25e-05]; this program asks for [0.002]" in caplog.text
