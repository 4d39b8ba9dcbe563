# SPDX-License-Identifier: Apache-2.0
"""Programs that edit the weights of a wrapped model: the edit has its effect, or is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from two_layers import WIDTH, batch, model_of, step

import hoist
import hoist.torch
from hoist.torch.model.parameters import Parameters


def test_a_parameter_that_is_given_another_tensor_is_refused_and_has_its_own_again(wrapped):
    with wrapped() as undisturbed:
        expected = [step(undisturbed) for _ in range(3)]
    with wrapped() as engine:
        losses = [step(engine)]
        for call in (lambda: engine(batch()[0]), lambda: engine.read("2.weight"), engine.state_dict, engine.module.state_dict):
            for parameter in engine.module.parameters():  # as averages of weights do
                parameter.data = torch.zeros(parameter.shape)
            with torch.no_grad(), pytest.raises(hoist.UsageError, match=r"'0\.weight' was given another tensor.*engine\.write"):
                call()
        with pytest.raises(hoist.UsageError, match="was changed inside of"), engine.gathered(["2.weight"]):
            engine.module[2].weight.data = torch.clamp(engine.module[2].weight.data, max=0.1)
        losses += [step(engine), step(engine)]
    assert losses == expected


def put_another(model):
    model[2]._parameters["bias"] = nn.Parameter(torch.zeros(WIDTH))


def convert(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model[2].to(next(model.parameters()).device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("at", ["before forward", "before step"])
@pytest.mark.parametrize(("replace", "name"), [(put_another, "2.bias"), (convert, "2.weight")])
def test_a_parameter_that_is_replaced_without_its_setter_is_refused_and_the_model_has_its_own_again(wrapped, replace, name, at):
    inputs, targets = batch()
    with wrapped() as undisturbed:
        expected = [step(undisturbed) for _ in range(2)]
    with wrapped() as engine:
        losses = [step(engine)]
        if at == "before step":
            engine.backward(F.mse_loss(engine(inputs), targets))
        replace(engine.module)
        with pytest.raises(hoist.UsageError, match=f"parameter '{name}' was replaced in the model.*repeat"):
            engine(inputs) if at == "before forward" else engine.step()
        with pytest.raises(hoist.UsageError, match="needs a backward pass before it"):
            engine.step()
        losses.append(step(engine))
        assert engine.step_count == 2
    assert losses == expected


def test_a_replaced_parameter_costs_no_earlier_micro_batch_before_a_pass(wrapped):
    digests = []
    for disturbs in (False, True):
        with wrapped(gradient_accumulation_steps=2) as engine:
            step(engine)
            if disturbs:
                put_another(engine.module)
                with pytest.raises(hoist.UsageError, match=r"'2\.bias' was replaced in the model"):
                    step(engine)
            step(engine)
            assert engine.step_count == 1
            digests.append(engine.digest())
    assert digests[0] == digests[1]


def test_a_parameter_that_is_replaced_before_a_step_of_mode_backward_is_refused_until_restore(wrapped):
    inputs, targets = batch()
    with wrapped(hoist={"device_memory": "1MiB", "pinned_memory": "32MiB", "update_mode": "backward"}) as engine:
        losses = [step(engine)]
        put_another(engine.module)
        with pytest.raises(hoist.UsageError, match=r"'2\.bias' was replaced.*repeat the step"):
            engine(inputs)
        losses.append(step(engine))
        before = engine.digest()
        engine.save().wait()
        engine.backward(F.mse_loss(engine(inputs), targets))
        put_another(engine.module)
        for _ in range(2):
            with pytest.raises(hoist.UsageError, match=r"'2\.bias' was replaced in the model.*restore\(\)"):
                engine.step()
        assert engine.restore() == 2 and engine.digest() == before
        losses.append(step(engine))
    with wrapped() as undisturbed:
        assert losses == [step(undisturbed) for _ in range(3)]


@pytest.mark.parametrize("change", [lambda p: p.mul_(2), lambda p: p.mul_(0.25), torch.Tensor.neg_, torch.Tensor.zero_])
def test_a_change_of_all_elements_alike_is_seen(wrapped, change):
    """Sums of the bits would stay the same: so many elements, each times a power of two, or with another sign."""
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 4, bias=False))
    model.signs = nn.Parameter(torch.tensor([1., -2., -3., 4.]))
    model.zeros = nn.Parameter(torch.tensor([0., -0., 0.5, 1.]))
    names = ["0.weight", "signs", "zeros"]
    with wrapped(model, hoist={"device_memory": "64MiB", "pinned_memory": "128MiB"}) as engine, torch.no_grad():
        for name in names:
            before = engine.read(name)
            with pytest.raises(hoist.UsageError, match="was changed inside of"), engine.gathered([name]):
                change(engine.module.get_parameter(name))
            assert torch.equal(engine.read(name), before)
            with engine.gathered([name], modify=True):
                change(engine.module.get_parameter(name))
            assert torch.equal(engine.read(name).view(torch.int32), change(before).view(torch.int32)), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["in place", "data", "another tensor"])
def test_gathered_weights_may_be_modified(wrapped, how, dtype):
    def clamp(parameter):
        if how == "in place":
            parameter.clamp_(-0.1, 0.1)
        elif how == "data":
            parameter.data.clamp_(-0.1, 0.1)
        else:
            parameter.data = parameter.data.clamp(-0.1, 0.1)

    with wrapped(**({"bf16": {"enabled": True}} if dtype == "bf16" else {})) as engine:
        step(engine)
        before = engine.state_dict(torch.float32)
        with engine.gathered(["2.weight"], modify=True), torch.no_grad():
            clamp(engine.module[2].weight)
        for name, master in engine.state_dict(torch.float32).items():
            if name != "2.weight":
                assert torch.equal(master, before[name])
                continue
            limit = torch.tensor(0.1, device="cpu").to(engine.module[2].weight.dtype).float()
            assert torch.equal(master, before[name].clamp(-limit, limit))  # other elements keep all bits of the master
            assert not torch.equal(master, before[name])
        step(engine)
        stored = engine.state_dict()
        with engine.gathered():
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(parameter.detach().cpu(), stored[name])


def test_what_a_gathered_block_has_changed_is_written_in_the_order_of_the_model(wrapped, monkeypatch):
    """All ranks write the same parameter at a time, however each has named them."""
    written = []
    change = Parameters._change

    def recorded(self, names, values_of, *arguments):
        change(self, names, lambda name: (written.append(name), values_of(name))[1], *arguments)

    monkeypatch.setattr(Parameters, "_change", recorded)
    with wrapped(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))) as engine:
        names = [name for name, _ in engine.module.named_parameters()]
        with engine.gathered(reversed(names), modify=True), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(2)
    assert written == names * 2  # checked one unit after the other, and then written


def test_one_parameter_may_be_gathered_by_its_name(wrapped):
    with wrapped() as engine:
        with engine.gathered("2.weight", modify=True), torch.no_grad():
            engine.module[2].weight.zero_()
        assert not engine.read("2.weight").any()


def test_other_places_of_the_same_values_are_changes(wrapped):
    def reverse(parameter):
        parameter.data.copy_(parameter.data.flip(0))

    with wrapped() as engine:
        before = engine.state_dict()
        with pytest.raises(hoist.UsageError, match="changed inside of gathered"), engine.gathered(["2.weight"]):
            reverse(engine.module[2].weight)
        assert torch.equal(engine.read("2.weight"), before["2.weight"])
        with engine.gathered(["2.weight"], modify=True):
            reverse(engine.module[2].weight)
        assert torch.equal(engine.read("2.weight"), before["2.weight"].flip(0))
        with pytest.raises(hoist.UsageError, match=r"'0\.weight' was given another tensor"):
            engine.module[0].weight.data = engine.module[2].weight.data
            engine.read("0.weight")
        step(engine)


@pytest.mark.parametrize("modify", [False, True])
def test_state_is_read_inside_of_gathered_and_what_was_changed_before_counts(wrapped, modify):
    with wrapped() as engine:
        before = engine.state_dict()
        for read in (engine.state_dict, engine.module.state_dict, lambda: engine.read("0.weight"), engine.digest):
            with engine.gathered(["0.weight"], modify=modify):
                read()
        with engine.gathered(["2.weight"], modify=True), torch.no_grad():
            engine.module[2].weight.zero_()
            with engine.gathered(["0.weight"]):
                assert torch.equal(engine.module[0].weight.detach().cpu(), before["0.weight"])
        assert not engine.read("2.weight").any() and torch.equal(engine.read("0.weight"), before["0.weight"])
        with engine.gathered(["0.weight"], modify=modify), torch.no_grad():
            with pytest.raises(RuntimeError):
                engine(torch.ones(3))  # of another width
            assert torch.equal(engine.module[0].weight.detach().cpu(), before["0.weight"])
        step(engine)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gathered_part_is_saved_and_loaded_as_the_block_has_it(wrapped, dtype):
    """As DeepSpeed's users, and transformers, save and load the parts of a model under GatheredParameters."""
    with wrapped(**({"bf16": {"enabled": True}} if dtype == "bf16" else {})) as engine:
        model, before = engine.module, engine.state_dict()
        given = {name: torch.full_like(values, 0.5) for name, values in before.items() if name.startswith("2.")}
        with engine.gathered(), torch.no_grad():
            assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
            assert torch.equal(model[0].weight.cpu(), before["0.weight"])  # the block goes on
        with engine.gathered(["2.weight", "2.bias"], modify=True), torch.no_grad():
            model[2].weight.mul_(2)
            saved = model[2].state_dict()
            model[2]._load_from_state_dict(given, "2.", {}, True, [], [], [])
            assert (model[2].weight == 0.5).all()
            model[2].load_state_dict({"bias": given["2.bias"] + 1}, strict=False)
            model[2].weight[0] = 0.25
        assert saved["weight"].dtype == before["2.weight"].dtype and torch.equal(saved["weight"], before["2.weight"] * 2)
        after = engine.state_dict()
        assert (after["2.weight"][0] == 0.25).all() and (after["2.weight"][1:] == 0.5).all() and (after["2.bias"] == 1.5).all()
        with pytest.raises(hoist.UsageError, match="inside of gathered.*modify=True"), engine.gathered(["2.weight"]):
            model[2].load_state_dict({"weight": before["2.weight"]}, strict=False)
        with engine.gathered(["2.weight"], modify=True):
            with pytest.raises(hoist.UsageError, match="not finite"):
                model[2].load_state_dict({"weight": before["2.weight"] / 0}, strict=False)
            model[0].load_state_dict({"weight": given["2.weight"]}, strict=False)  # of another unit: ends the block
        assert (engine.read("0.weight") == 0.5).all()
        assert all(torch.equal(values, after[name]) for name, values in engine.state_dict().items() if name.startswith("2."))
        step(engine)


def test_only_what_was_named_may_be_modified(wrapped):
    with wrapped() as engine:
        before = engine.state_dict()
        for change in (lambda p: p.zero_(), lambda p: p.data.zero_()):
            for arguments in ({}, {"modify": True}):
                refused = pytest.raises(hoist.UsageError, match=r"'2\.bias' was changed inside of gathered.*modify=True")
                with refused, engine.gathered(["2.weight"], **arguments), torch.no_grad():
                    change(engine.module[2].bias)
        assert all(torch.equal(values, before[name]) for name, values in engine.state_dict().items())
        step(engine)


@pytest.mark.parametrize("modify", [False, True])
def test_a_change_of_what_only_a_call_inside_of_gathered_has_gathered_is_refused(wrapped, modify):
    with wrapped(hoist={"device_memory": "16MiB", "pinned_memory": "32MiB"}) as engine:
        before = engine.state_dict()
        refused = pytest.raises(hoist.UsageError, match=r"'2\.weight' was changed inside of gathered.*modify=True")
        with refused, engine.gathered(["0.weight"], modify=modify), torch.no_grad():
            engine(batch()[0])
            engine.module[2].weight.mul_(2)
            engine.module[1](batch()[0])
        assert all(torch.equal(values, before[name]) for name, values in engine.state_dict().items())
        step(engine)


@pytest.mark.parametrize("modify", [False, True])
def test_a_step_inside_of_gathered_is_refused_and_can_be_made_after_it(wrapped, modify):
    with wrapped() as engine, wrapped() as other:
        step(other)
        engine.backward(F.mse_loss(engine(batch()[0]), batch()[1]))
        with engine.gathered(["0.weight"], modify=modify):
            for state_was_asked_for in (False, True):
                for call in (engine.step, engine.optimizer.step):
                    with pytest.raises(hoist.UsageError, match=r"step\(\) inside of gathered\(\).*leave the block"):
                        call()
                if not state_was_asked_for:
                    engine.read("2.weight")
        assert engine.step_count == 0
        engine.step()
        assert engine.step_count == 1 and engine.digest() == other.digest()


@pytest.mark.skipif(not hoist.torch.model.unit_tensors.CAN_REFUSE, reason="PyTorch before 2.13 cannot refuse to read a tensor")
@pytest.mark.parametrize("evaluations", [1, 2])
def test_weights_are_not_there_after_an_evaluation_and_cannot_be_changed_in_silence(wrapped, evaluations):
    with wrapped() as undisturbed:
        expected = [step(undisturbed) for _ in range(3)]
    with wrapped() as engine:
        losses = [step(engine)]
        for change in (lambda p: p.data.clamp_(-0.01, 0.01), lambda p: p.data.add_(p.data)):  # as PEFT's merge_adapter() does
            results = []
            for _ in range(evaluations):
                with torch.no_grad():
                    results.append(engine(batch()[0]))
            assert all(torch.equal(result, results[0]) for result in results)
            for parameter in engine.module.parameters():
                with pytest.raises(RuntimeError, match="are not loaded"):
                    change(parameter)
        losses += [step(engine), step(engine)]
    assert losses == expected


def test_small_parameters_are_there_for_the_loss_of_an_evaluation(settings):
    config = settings()
    config["zero_optimization"]["stage3_param_persistence_threshold"] = WIDTH * (WIDTH + 1)
    with hoist.torch.wrap(model_of(), config) as engine:
        with torch.no_grad():
            result = engine(batch()[0]) * engine.module[2].weight.mean()
        assert torch.isfinite(result).all()


class Revived(nn.Module):
    """Changes its weights in forward(), now and then."""

    def __init__(self, at, how):
        super().__init__()
        self.code, self.calls, self.at, self.how = nn.Parameter(torch.randn(4, WIDTH)), 0, at, how

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            with torch.no_grad():
                self.how(self.code)
        return x + self.code[torch.cdist(x, self.code).argmin(1)]


def set_row(code):
    code[0] = 100.0


def replace(code):
    code.data = code.data + 1


@pytest.mark.parametrize(("at", "how", "said"), [(1, set_row, "in forward"), (3, set_row, "was changed in place"),
                                                 (1, replace, "given another tensor"), (3, replace, "given another tensor")])
def test_weights_that_change_in_forward_are_refused_in_any_pass(wrapped, at, how, said):
    torch.manual_seed(0)
    model = nn.Sequential(Revived(at, how), nn.Linear(WIDTH, WIDTH))
    with wrapped(model) as engine:
        for _ in range(1, at):
            step(engine)
        before = engine.digest()
        with pytest.raises(hoist.UsageError, match=said):
            step(engine)
        assert engine.digest() == before
        step(engine)
        assert engine.step_count == at


@pytest.mark.parametrize("order", ["plain", "accumulated", "vertical"])
def test_an_edit_that_is_found_in_a_backward_pass_drops_the_step_and_no_more(wrapped, order):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    several = {"gradient_accumulation_steps": 2, "hoist": {"device_memory": "1MiB", "pinned_memory": "32MiB"}}
    if order == "vertical":
        several["hoist"]["micro_batch_order"] = "vertical"
    edits = []

    def edited(loss):
        if edits:
            model[1].weight.data = model[1].weight.data + edits.pop()
        return loss

    def train(engine):
        if order == "vertical":
            return engine.train_batch([batch(), batch()], lambda pair: edited(F.mse_loss(engine(pair[0]), pair[1])))
        for _ in range(2 if order == "accumulated" else 1):
            inputs, targets = batch()
            edited(F.mse_loss(engine(inputs), targets)).backward()
            engine.step()

    with wrapped(model, **({} if order == "plain" else several)) as engine:
        train(engine)
        before = engine.digest()
        edits.append(1.0)
        with pytest.raises((hoist.UsageError, RuntimeError), match="given another tensor|not loaded"):
            train(engine)
        assert engine.digest() == before
        train(engine)
        assert engine.step_count == 2 and engine.digest() != before


# --- the model itself ------------------------------------------------------------------------------------------------


# --- methods beside forward() ------------------------------------------------------------------------------------------


# --- attributes and places -------------------------------------------------------------------------------------------


# --- parameters on the meta device -----------------------------------------------------------------------------------


# --- buffers ---------------------------------------------------------------------------------------------------------
