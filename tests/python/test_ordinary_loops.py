# SPDX-License-Identifier: Apache-2.0
"""Loops as people write them for PyTorch: each trains as it does there, or is refused in the words of PyTorch's interface.
Nothing goes untrained, and no state is lost, without an error."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from loops import RATE, WIDTH, Block, batches, close_to, engines, model_of, reference_of, run, trained
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import hoist
import hoist.torch
from models import on_device_of_tests


@pytest.fixture
def wrapped(settings):
    return engines(settings)


# --- zero_grad -------------------------------------------------------------------------------------------------------


def drops_gradients(engine, inputs):
    """The model's own zero_grad() does."""
    engine.backward(engine(inputs).sum())
    engine.module.zero_grad()
    with pytest.raises(hoist.UsageError, match="needs a backward pass before it"):
        engine.step()


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


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("whose", ["optimizer", "module"])
def test_zero_grad_still_drops_what_a_backward_pass_has_made(wrapped, whose, evaluates):
    expected = trained(model_of())
    with wrapped() as engine:
        losses, owner = [], getattr(engine, whose)
        for inputs, targets in batches():
            F.mse_loss(engine(targets), inputs).backward()
            if evaluates:  # as a loop of two models that train against each other does
                with torch.no_grad():
                    engine(targets)
            owner.zero_grad()
            loss = F.mse_loss(engine(inputs), targets)
            owner.zero_grad()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    close_to(losses, expected)


def test_zero_grad_of_a_part_cannot_drop_gradients_that_wait(wrapped):
    """PyTorch drops the part's alone; the engine has them all."""
    expected = trained(model_of())
    with wrapped() as engine:
        losses, part = [], engine.module[0]
        for inputs, targets in batches():
            part.zero_grad()
            loss = F.mse_loss(engine(inputs), targets)
            part.norm.zero_grad()
            engine.backward(loss)
            with pytest.raises(hoist.UsageError, match=r"zero_grad\(\) of '0.up', a part.* of the engine or of the whole model"):
                part.up.zero_grad()
            engine.step()
            part.zero_grad()
            losses.append(loss.item())
    close_to(losses, expected)


def test_zero_grad_of_a_part_that_is_frozen_does_nothing_and_of_all_that_trains_drops_all(wrapped):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), model_of())
    inputs, targets = batches()[0]
    with wrapped(model) as engine:
        engine.backward(F.mse_loss(engine(inputs), targets))
        model[0].zero_grad()
        assert engine.step().applied
        engine.backward(F.mse_loss(engine(inputs), targets))
        model[1].zero_grad()
        with pytest.raises(hoist.UsageError, match="needs a backward pass before it"):
            engine.step()


def test_a_modules_own_zero_grad_gets_the_arguments_that_it_takes(wrapped):
    class Own(nn.Linear):
        def zero_grad(self):
            called.append(self)

    called, model = [], nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(WIDTH, WIDTH))
    with wrapped(model):
        model[1].zero_grad()
        model.zero_grad(set_to_none=False)
        model.zero_grad(True)
    assert called == [model[1]]
    model = model_of()
    model.zero_grad, model[0].zero_grad = model[1].zero_grad, called.clear  # the program's, which stay
    with wrapped(model):
        model[0].zero_grad()
    with pytest.raises(hoist.UsageError, match="closed"):
        wrapped(model)
    assert called == [] and vars(model)["zero_grad"].__self__ is model[1] and vars(model[0])["zero_grad"] == called.clear
    assert "zero_grad" not in vars(model[1])


def test_zero_grad_of_a_part_is_refused_for_gradients_of_the_next_micro_batch(settings):
    """One whose loss forward() does not return has left its gradients, after a step() that waits for it."""
    with hoist.torch.wrap(model_of(), settings(gradient_accumulation_steps=2)) as engine:
        features, model = [], engine.module
        handle = model[0].register_forward_hook(lambda _, __, output: features.append(output))
        inputs, targets = batches()[0]
        engine.backward(F.mse_loss(engine(inputs), targets))
        engine.step()
        engine(inputs)
        features[-1].sum().backward()
        with pytest.raises(hoist.UsageError, match=r"zero_grad\(\) of '2'"):
            model[2].zero_grad()
        handle.remove()
        engine.drop_gradients()


def test_modules_without_weights_are_still_copied_and_pickled(wrapped):
    with wrapped(nn.Sequential(*model_of(), nn.Sequential(nn.Dropout(0.25)))) as engine:
        part = engine.module[-1]
        for copied in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            assert copied[0].p == 0.25
            engine.backward(engine(batches()[0][0]).sum())
            part.zero_grad()
            copied.zero_grad()
            engine.step()


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


def test_gradients_that_autograd_gives_the_program_are_no_backward_pass(wrapped):
    with wrapped() as engine:
        inputs, targets = batches(1)[0]
        weight = engine.module[2].weight
        weight.grad, = torch.autograd.grad(F.mse_loss(engine(inputs), targets), [weight])
        with pytest.raises(hoist.UsageError, match=r"'2\.weight' has a grad that the program has set"):
            engine.optimizer.step()


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
            with pytest.raises(hoist.UsageError, match="was set after the model was wrapped.*If a trainer adds this"):
                change()
        # Nothing to train comes with these, and modules may hold the model's own modules.
        model[0].note = nn.Identity()
        model[0].teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        model[0].none = None
        nn.ModuleList([model[1]])
        close_to(run(engine), expected)
    model.append(nn.Linear(WIDTH, WIDTH))  # the engine is closed


def test_groups_have_the_models_parameters_and_each_once(wrapped):
    model, empty = model_of(), nn.Parameter(torch.zeros(0))
    for groups, what in (([{"params": model.parameters()}, {"params": nn.Linear(3, 5).parameters()}],
                          r"group 1 .*\(5, 3\) that is not the model's"),
                         ([{"params": model.parameters()}, {"params": model[1].parameters()}],
                          r"'1\..*' is in the groups 0 and 1"),
                         ([{"params": [*model.parameters(), empty]}, {"params": [empty]}],
                          r"parameter of shape \(0,\) is in the groups 0 and 1")):
        with pytest.raises(hoist.UsageError, match=what):
            wrapped(model, groups=groups)
    with wrapped(model, groups=[{"params": model.parameters()}]) as engine:  # it is as it was
        close_to(run(engine), trained(model_of()))


def test_parameters_may_come_with_their_names(settings):
    expected = trained(model_of())
    adamw = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}}
    hoist_section = {"device_memory": "1MiB", "pinned_memory": "32MiB"}
    model = model_of()
    with hoist.torch.wrap(model, settings(optimizer=adamw, hoist=hoist_section),
                          groups=[{"params": model.named_parameters(), "lr": RATE}]) as engine:
        close_to(run(engine), expected)
    config = settings("second", optimizer=adamw, hoist=hoist_section)
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


def test_adam_that_decouples_weight_decay_is_adamw(settings):
    """PyTorch's AdamW is such an Adam. One formula holds for all groups."""
    expected, model = trained(model_of()), model_of()
    try:
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=0.1, decoupled_weight_decay=True)
    except TypeError:
        pytest.skip("PyTorch before 2.7 has no Adam(decoupled_weight_decay)")
    engine, *_ = hoist.torch.initialize(model=model, optimizer=optimizer, config=settings())
    with engine:
        close_to(run(engine), expected)
    model = model_of()
    optimizer = torch.optim.Adam([{"params": model[:2].parameters(), "decoupled_weight_decay": True},
                                  {"params": model[2].parameters()}], lr=RATE, weight_decay=0.1)
    with pytest.raises(hoist.UsageError, match="AdamW decouples weight decay in every group, and Adam adds it"):
        hoist.torch.initialize(model=model, optimizer=optimizer, config=settings("second"))


def test_a_group_cannot_be_added_after_wrapping(wrapped):
    with wrapped() as engine, pytest.raises(hoist.UsageError, match=r"wrap\(groups=\.\.\.\)"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


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


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copied", "pickled"])
def test_a_layer_of_a_gathered_unit_is_copied_alone(settings, copies):
    """For an average of a head's weights, or to export a layer."""
    with hoist.torch.wrap(model_of(), settings(), unit_classes=[Block]) as engine:
        layer, stored = engine.module[0].up, engine.state_dict()
        with engine.gathered():
            copied = copies(layer)
        state = {name: values.clone() for name, values in copied.state_dict().items()}
        assert sorted(state) == ["bias", "weight"]
        assert all(torch.equal(values.cpu(), stored[f"0.up.{name}"]) for name, values in state.items())
        copied.load_state_dict({name: values + 1 for name, values in state.items()})
        assert torch.equal(copied.weight, state["weight"] + 1)
        assert torch.equal(layer.state_dict()["weight"], stored["0.up.weight"])
    with hoist.torch.wrap(copied, settings("copied")) as engine:
        drops_gradients(engine, on_device_of_tests(torch.ones(2, WIDTH)))


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


def test_a_change_of_gathered_weights_is_refused_at_once(wrapped):
    with wrapped() as engine:
        run(engine, 1)
        with pytest.raises(hoist.UsageError, match=r"'2\.weight' was changed inside of gathered.*engine\.write"):
            with engine.gathered(["2.weight"]), torch.no_grad():
                engine.module[2].weight.clamp_(-0.01, 0.01)
        run(engine, 1)


@pytest.mark.parametrize("call", ["save", "digest", "settle", "sleep", "read", "save_checkpoint", "model.state_dict", "export"])
def test_state_is_saved_after_a_backward_pass_that_failed(settings, tmp_path, call):
    """As loops do in an `except` block, also where PyTorch's own backward() was called."""
    def fail(_):
        raise LookupError("no such token")

    config = settings(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "keep_steps": 1})
    with hoist.torch.wrap(model_of(), config) as engine:
        run(engine, 1)
        before = engine.digest()
        inputs, targets = batches(1)[0]
        handle = engine.module[0].up.weight.register_hook(fail)
        with pytest.raises(LookupError):
            F.mse_loss(engine(inputs), targets).backward()
        handle.remove()
        arguments = {"read": ["0.up.weight"], "save_checkpoint": [tmp_path / "saved"], "export": [tmp_path / "exported"]}
        {"model.state_dict": engine.module.state_dict}.get(call, getattr(engine, call, None))(*arguments.get(call, []))
        if call == "sleep":
            engine.wake()
        assert engine.digest() == before
        run(engine, 1)
        assert engine.step_count == 2


@pytest.mark.parametrize("whose", ["its own thread", "another thread"])
def test_state_is_not_read_in_the_middle_of_a_backward_pass(wrapped, whose):
    with wrapped() as engine:
        inputs, targets = batches(1)[0]
        refusals = []

        def read():
            with pytest.raises(hoist.UsageError) as error:
                engine.digest()
            refusals.append(str(error.value))

        def read_here(_):
            thread = threading.Thread(target=read) if whose == "another thread" else None
            if thread is None:
                return read()
            thread.start()
            thread.join()

        handle = engine.module[0].up.weight.register_hook(read_here)
        F.mse_loss(engine(inputs), targets).backward()
        handle.remove()
        assert len(refusals) == 1 and "call it when the backward pass has ended" in refusals[0]
        assert engine.step().applied


def test_the_second_backward_pass_of_one_forward_pass_says_what_to_do(wrapped):
    with wrapped() as engine:
        result = engine(batches()[0][0])
        loss = result.sum()
        engine.backward(loss, retain_graph=True)
        for other in (result.pow(2).sum(), loss):
            with pytest.raises(hoist.UsageError, match="Add the losses"):
                engine.backward(other)
        assert engine.step().applied and engine.step_count == 1  # with the first one's gradients


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
def test_a_model_whose_engine_was_closed_has_no_values(wrapped):
    with wrapped() as engine:
        model = engine.module
    with pytest.raises(RuntimeError, match=r"After close\(\) the model has no values: .*resume=True"):
        model[0].up.weight.sum()
    with pytest.raises(hoist.UsageError, match="has no values: the engine that had this model was closed.*resume=True"):
        wrapped(model)


@pytest.mark.parametrize("how", ["assign", "to_empty", "to_empty and reset"])
def test_a_model_whose_engine_was_closed_can_be_given_values_for_pytorch_alone(wrapped, how):
    x = on_device_of_tests(torch.ones(2, WIDTH))
    with wrapped() as engine:
        run(engine, 2)
        model, state = engine.module, {name: on_device_of_tests(values) for name, values in engine.state_dict().items()}
    for call in (lambda: model.load_state_dict(state), model.state_dict, lambda: model[2].load_state_dict({}, strict=False)):
        with pytest.raises(hoist.UsageError, match=r"engine was closed.*assign=True"):
            call()
    with pytest.raises(hoist.UsageError, match="not copied or pickled: it has no values"):
        copy.deepcopy(model)
    model.load_state_dict({"2.bias": state["2.bias"]}, assign=True, strict=False)  # a part of the values is not enough
    with pytest.raises(hoist.UsageError, match="engine was closed"):
        model(x)
    if how == "assign":
        model.load_state_dict(state, assign=True)
    else:
        model.to_empty(device=x.device)
        if how == "to_empty and reset":
            for each in model.modules():
                getattr(each, "reset_parameters", lambda: None)()
        else:
            model.load_state_dict(state)
    plain = model_of()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))
    copies = model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    assert all(vars(module).keys() == vars(nn.Linear(1, 1)).keys() for each in copies for module in (each[0].up, each[2]))
    for each in (plain, *copies):
        each.zero_grad()
        each(x).sum().backward()
        torch.testing.assert_close(each[2].weight.grad, plain[2].weight.grad)
        reference_of(each).step()
    with pytest.raises(hoist.UsageError, match=r"restore\(\) of an engine that was closed"):
        engine.restore()
    for each in copies:
        with wrapped(each) as again:
            assert torch.equal(again.read("2.weight"), plain[2].weight.detach().cpu())
            run(again, 1)
            drops_gradients(again, x)


def test_a_pass_after_close_is_refused_though_gradients_wait(wrapped):
    engine = wrapped()
    engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
    engine.close()
    for call in (engine.step, lambda: engine(torch.randn(2, WIDTH))):
        with pytest.raises(hoist.UsageError, match="the engine was closed"):
            call()


def test_data_parallel_modules_are_refused(wrapped):
    with pytest.raises(hoist.UsageError, match=r"DataParallel.*model\.module"):
        wrapped(nn.DataParallel(model_of()))
