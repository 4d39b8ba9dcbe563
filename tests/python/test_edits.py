# SPDX-License-Identifier: Apache-2.0
"""What programs change in a wrapped model by themselves: weights, attributes, where it is. It has its effect, or is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoist
import hoist.torch
from hoist.torch.model.parameters import Parameters
from models import on_device_of_tests

WIDTH = 8


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch():
    generator = torch.Generator().manual_seed(1)
    return [on_device_of_tests(torch.randn(4, WIDTH, generator=generator, device="cpu")) for _ in range(2)]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    inputs, targets = (tensor.to(dtype) for tensor in batch())
    loss = F.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.fixture
def wrapped(settings):
    count = iter(range(100))

    def make(model=None, **changes):
        config = settings(f"store-{next(count)}",
                          **{"hoist": {"device_memory": "1MiB", "pinned_memory": "32MiB"}, **changes})
        return hoist.torch.wrap(model or model_of(), config)

    return make


# --- weights ---------------------------------------------------------------------------------------------------------


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
    write = Parameters.write
    monkeypatch.setattr(Parameters, "write", lambda self, name, values: (written.append(name), write(self, name, values)))
    with wrapped(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))) as engine:
        names = [name for name, _ in engine.module.named_parameters()]
        with engine.gathered(reversed(names), modify=True), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(2)
    assert written == names


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


def test_a_model_is_wrapped_again_after_close(settings):
    model = model_of()
    with hoist.torch.wrap(model, settings()) as engine:
        losses = [step(engine) for _ in range(3)]
    with hoist.torch.wrap(model, settings(), resume=True) as engine:
        losses += [step(engine) for _ in range(3)]
    with hoist.torch.wrap(model_of(), settings(store="other")) as engine:
        assert losses == [step(engine) for _ in range(6)]


def test_a_parameter_of_another_wrapped_model_is_refused_and_trained_there(wrapped):
    with wrapped() as undisturbed:
        expected = [step(undisturbed) for _ in range(2)]
    first, second = model_of(), model_of()
    with wrapped(first) as engine:
        losses = [step(engine)]
        second[2].weight = engine.module[2].weight
        with pytest.raises(hoist.UsageError, match=r"parameter '2\.weight' belongs to an engine of another model"):
            wrapped(second)
        losses.append(step(engine))
    assert losses == expected


# --- the model itself ------------------------------------------------------------------------------------------------


def test_weights_that_are_tied_after_wrapping_are_refused(wrapped):
    with wrapped() as engine:
        with pytest.raises(hoist.UsageError, match="'weight' of a Linear was set to another parameter of the model"):
            engine.module[2].weight = engine.module[0].weight
        engine.module[2].weight = engine.module[2].weight
        step(engine)


def test_weights_that_share_a_part_of_their_memory_are_refused(wrapped):
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(3 * WIDTH, WIDTH))
    whole = model[0].weight.data
    model[1].weight.data = whole[WIDTH:2 * WIDTH]
    with pytest.raises(hoist.UsageError, match=r"'0\.weight' and '1\.weight' share memory"):
        wrapped(model)
    for number, fused in enumerate((torch.empty(2, WIDTH, WIDTH), torch.empty(WIDTH, 2, WIDTH).transpose(0, 1))):
        model = model_of()  # the halves of one tensor, one after the other and row by row
        for layer, half in zip((model[0], model[2]), fused, strict=True):
            layer.weight.data = half.copy_(layer.weight.data)
        assert model[0].weight.is_contiguous() == (number == 0)
        with wrapped(model) as engine:
            step(engine)


def test_weights_that_share_memory_without_being_one_parameter_are_refused(wrapped):
    model = model_of()
    model[2].weight.data = model[0].weight.data
    with pytest.raises(hoist.UsageError, match=r"'0\.weight' and '2\.weight' share memory.*head.weight = embedding.weight"):
        wrapped(model)
    model[2].weight = model[0].weight
    with wrapped(model) as engine:
        step(engine)
        assert torch.equal(engine.read("2.weight"), engine.read("0.weight"))
    model, whole = model_of(), torch.randn(2, WIDTH, WIDTH)
    model[0].weight.data, model[2].weight.data = whole  # parts of one tensor
    with wrapped(model) as engine:
        assert torch.equal(engine.read("2.weight"), whole[1].cpu())


@pytest.mark.parametrize("message, change", [
    (r"'layers\.0\.weight' was 'layers\.2\.weight' when", lambda model: nn.Sequential(model[2], model[1], model[0])),
    (r"'layers\.2\.bias' was removed", lambda model: model[:2]),
])
def test_a_model_whose_layers_were_moved_is_not_saved(wrapped, tmp_path, message, change):
    model = nn.Sequential()
    model.layers = model_of()
    with wrapped(model) as engine:
        model.layers = change(layers := model.layers)
        for save in (engine.state_dict, model.state_dict, lambda: engine.export(tmp_path / "exported")):
            with pytest.raises(hoist.UsageError, match=message):
                save()
        model.layers = layers
        assert engine.state_dict().keys() == model.state_dict().keys()


def test_a_layer_that_another_module_contains_now_is_saved_and_loaded(wrapped):
    with wrapped() as engine:
        engine.module[0] = torch.compile(engine.module[0], backend="eager")
        step(engine)
        saved = engine.module.state_dict()
        assert torch.equal(saved["0._orig_mod.weight"], engine.read("0.weight"))
        engine.module.load_state_dict({name: torch.ones_like(values) for name, values in saved.items()})
        assert all((engine.read(name) == 1).all() for name in ("0.weight", "2.bias"))


# --- methods beside forward() ------------------------------------------------------------------------------------------


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, WIDTH), nn.Parameter(torch.ones(3, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, tokens):
        return self.head(self.tokens(tokens) + self.positions)

    def forward(self, tokens):
        return self.encode(tokens).mean()


@pytest.mark.parametrize("memory", ["1MiB", "12KiB"])
def test_methods_that_use_the_models_own_weights_are_called_inside_of_gathered(wrapped, memory):
    torch.manual_seed(0)
    model = Clip()
    tokens = on_device_of_tests(torch.ones(2, 3, dtype=torch.long))
    expected = copy.deepcopy(model).encode(tokens)
    with wrapped(model, hoist={"device_memory": memory, "pinned_memory": "32MiB"}) as engine:
        for _ in range(2):
            with torch.no_grad(), engine.gathered(["positions"]):
                assert torch.equal(engine.encode(tokens), expected)
                assert torch.equal(engine.encode(tokens), expected)
                assert engine.module.positions.mean() == 1
            engine.backward(engine(tokens))
            engine.zero_grad()
        with engine.gathered(["positions"]), pytest.raises(hoist.UsageError, match=r"inside of gathered\(\).*no_grad"):
            engine(tokens)
        engine.backward(engine(tokens))
        engine.step()


class Patched(nn.Linear):
    """Whose forward() is replaced."""


@pytest.mark.parametrize("whole", [False, True])
def test_a_forward_that_the_class_is_given_after_wrapping_counts_at_once_and_after_close(settings, monkeypatch, whole):
    """As mock.patch.object and libraries that replace a layer's kernels do it."""
    torch.manual_seed(0)
    model = Patched(WIDTH, WIDTH) if whole else nn.Sequential(nn.Tanh(), Patched(WIDTH, WIDTH))
    inputs = batch()[0]

    def doubled(self, x):
        return nn.Linear.forward(self, x) * 2

    with hoist.torch.wrap(model, settings()) as engine, torch.no_grad():
        for call in (engine, model):
            before = call(inputs)
            with monkeypatch.context() as patches:
                patches.setattr(Patched, "forward", doubled)
                if whole and call is model:
                    with pytest.raises(hoist.UsageError, match=r"forward\(\) of Patched was replaced.*repeat the call"):
                        call(inputs)
                assert torch.equal(call(inputs), 2 * before)
                assert torch.equal(engine.module(inputs), 2 * before)
            assert torch.equal(engine(inputs), before)
        monkeypatch.setattr(Patched, "forward", doubled)
        engine.save().wait()
    with hoist.torch.wrap(model, settings(), resume=True) as engine, torch.no_grad():
        assert torch.equal(engine(inputs), 2 * before)


# --- attributes and places -------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.beta = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x):
        return self.layer(x).pow(2).mean() * self.beta


def test_attributes_of_the_model_are_set_in_the_model(wrapped):
    with wrapped(Weighted()) as engine:
        losses = []
        for _ in range(3):
            engine.beta += 0.5
            losses.append(engine(batch()[0]).item())
        assert engine.module.beta == engine.beta == 1.5
        assert losses == pytest.approx([losses[0], 2 * losses[0], 3 * losses[0]]) and losses[0] > 0
        engine.state = {"epoch": 1}  # the engine's own
        engine.remark = "new"
        assert not hasattr(engine.module, "state") and not hasattr(engine.module, "remark")
        engine.training = False
        assert not engine.module.training


def test_a_wrapped_model_stays_where_it_is(wrapped):
    with wrapped() as engine:
        assert all(engine.to(what) is engine for what in (engine.device, engine.device.type, torch.float32))
        with pytest.raises(hoist.UsageError, match="device=.*of wrap"):
            engine.to("meta")
        with pytest.raises(hoist.UsageError, match=r"bf16\.enabled"):
            engine.to(torch.bfloat16)
        step(engine)


# --- parameters on the meta device -----------------------------------------------------------------------------------


def test_parameters_taken_on_the_meta_device_are_known_by_the_new_ones(wrapped):
    with torch.device("meta"):
        model = model_of()
    former = list(model.parameters())
    seen = []
    former[0].register_hook(lambda gradient: seen.append(gradient.shape))
    former[0]._no_weight_decay = True
    with wrapped(model) as engine:
        assert [getattr(p, "_no_weight_decay", False) for p in model.parameters()] == [True, False, False, False]
        in_groups = [p for group in engine.optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in in_groups] == [id(p) for p in engine.module.parameters()]
        for parameters in (former, in_groups):
            inputs, targets = batch()
            engine.backward(F.mse_loss(engine(inputs), targets))
            assert torch.nn.utils.clip_grad_norm_(parameters, 1e-4) > 1e-4
            assert engine.step().clip_factor < 1
        assert seen == [former[0].shape] * 2


def test_two_models_are_not_clipped_in_one_call(wrapped):
    with wrapped() as first, wrapped() as second:
        second.module(first.module(batch()[0])).sum().backward()
        with pytest.raises(hoist.UsageError, match="each by itself"):
            torch.nn.utils.clip_grad_norm_([*first.module.parameters(), *second.module.parameters()], 1)
        for engine in (first, second):
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
            assert engine.step().clip_factor < 1


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_rotary_frequencies_keep_their_type(wrapped):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, WIDTH, 2, device="cpu") / WIDTH), persistent=False)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return self.layer(x * self.scale) + torch.outer(torch.arange(4.0), self.inv_freq).repeat(1, 2).to(x.dtype)

    model = Rotary()
    before = model.inv_freq.clone()
    with wrapped(model, bf16={"enabled": True}) as engine:
        assert engine.module.inv_freq.dtype == torch.float32 and torch.equal(engine.module.inv_freq.cpu(), before.cpu())
        assert engine.module.scale.dtype == torch.bfloat16
        engine.backward(engine(batch()[0].bfloat16()).float().pow(2).mean())
        engine.step()
