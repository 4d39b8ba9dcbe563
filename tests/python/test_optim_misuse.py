# SPDX-License-Identifier: Apache-2.0
"""hoist.optim in memory, and programs that change their parameters, settings or the optimizer itself between steps."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import hoist
import hoist.optim


def with_gradients(*parameters):
    for number, parameter in enumerate(parameters):
        made = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=made).to(parameter.dtype)
    return parameters


def refused(optimizer, match):
    """The step is an error, and neither weights nor states change."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in parameters]
    steps = [optimizer.state[p]["step"] for p in parameters if p in optimizer.state]
    with pytest.raises(hoist.UsageError, match=match):
        optimizer.step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))
    assert [optimizer.state[p]["step"] for p in parameters if p in optimizer.state] == steps


# --- parameters that change ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", [0, 2])
def test_weights_may_be_in_another_order_in_memory(dtype, when):
    """channels_last before the first step, and between steps: the bits of contiguous weights."""
    contiguous = nn.Parameter(torch.randn(4, 5, 3, 2).to(dtype))
    other = nn.Parameter(contiguous.detach().clone())
    optimizers = [hoist.optim.AdamW([p], lr=0.1) for p in (contiguous, other)]
    for step in range(4):
        if step == when:
            other.data = other.data.to(memory_format=torch.channels_last)
        for p, optimizer in zip((contiguous, other), optimizers, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()
    assert not other.is_contiguous()
    assert torch.equal(contiguous, other)
    assert torch.equal(optimizers[0].master(contiguous), optimizers[1].master(other))
    saved = copy.deepcopy(optimizers[1].state_dict())
    continued = hoist.optim.AdamW([other], lr=0.1)
    continued.load_state_dict(saved)
    assert torch.equal(continued.master(other), optimizers[0].master(contiguous))
    values = torch.randn(other.shape)
    continued.set_master(other, values)
    assert torch.equal(continued.master(other), values)


@pytest.mark.parametrize("change, match", [
    (lambda p: p.data.bfloat16(), "was torch.float32 on cpu when its states were made, and is torch.bfloat16"),
    (lambda p: p.data.double(), "and is torch.float64 on cpu: move and convert the model before"),
    (lambda p: torch.cat([p.data, p.data]), r"has the shape \(6, 4\), and its state 'exp_avg' \(3, 4\)"),
    (lambda p: p.data.t().contiguous(), r"has the shape \(4, 3\), and its state"),
    (lambda p: torch.zeros(1).expand(3, 4), r"gaps or overlaps in memory .*strides \(0, 0\)"),
    (lambda p: torch.zeros(3, 8)[:, ::2], "gaps or overlaps"),
])
def test_a_parameter_that_changed_between_steps_is_refused_by_name(change, match):
    first, second = with_gradients(nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 4)))
    optimizer = hoist.optim.AdamW([("first", first), ("second", second)])
    optimizer.step()
    second.grad = None
    second.data = change(second)
    with_gradients(second)
    with pytest.raises(hoist.UsageError, match="'second' " + match if match.startswith(("was", "has")) else match):
        optimizer.step()
    assert optimizer.state[first]["step"] == optimizer.state[second]["step"] == 1


def test_a_parameter_that_moved_between_steps_is_refused():
    parameter, = with_gradients(nn.Parameter(torch.ones(5)))
    optimizer = hoist.optim.AdamW([parameter])
    optimizer.step()
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(5, device="meta")))  # as .cuda() with a GPU
    parameter.grad = torch.ones(5, device="meta")
    with pytest.raises(hoist.UsageError, match="on cpu when its states were made, and is torch.float32 on meta"):
        optimizer.step()
    assert optimizer.state[parameter]["step"] == 1


def test_bf16_parameters_that_became_fp32_are_refused():
    parameter, = with_gradients(nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    optimizer = hoist.optim.AdamW([parameter])
    optimizer.step()
    parameter.grad = None
    parameter.data = parameter.data.float()
    with_gradients(parameter)
    refused(optimizer, "parameter 0 of group 0 was torch.bfloat16")


def test_states_that_the_program_moved_are_refused():
    parameter, = with_gradients(nn.Parameter(torch.ones(5)))
    optimizer = hoist.optim.AdamW([parameter])
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].half()
    refused(optimizer, "'exp_avg' that is torch.float16")


def test_what_is_not_a_plain_tensor_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return Wrapper(torch.zeros(3))

    parameter = nn.Parameter(Wrapper(torch.zeros(3)))
    parameter.grad = Wrapper(torch.zeros(3))
    with pytest.raises(hoist.UsageError, match="parameter 0 of group 0 is a Wrapper, and hoist trains only plain tensors"):
        hoist.optim.AdamW([parameter]).step()
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = Wrapper(torch.zeros(3))
    refused(hoist.optim.AdamW([parameter]), "gradient without memory, a Wrapper")
    parameter, = with_gradients(nn.Parameter(torch.zeros(3)))
    parameter.untyped_storage().resize_(0)
    with pytest.raises(hoist.UsageError, match="has no memory: gather it first"):
        hoist.optim.AdamW([parameter]).step()


@pytest.mark.parametrize("share, why", [
    (lambda p: p, "is listed twice, as '0 of group 0' and as '0 of group 1'"),
    (lambda p: nn.Parameter(p.detach()), "parameters '0 of group [01]' and '0 of group [01]' share memory"),
    (lambda p: nn.Parameter(p.detach()[10:20]), "parameters '0 of group 0' and '0 of group 1' share memory")])
def test_parameters_that_share_memory_are_refused(share, why):
    """Threads would update them at the same time."""
    first = nn.Parameter(torch.randn(100))
    groups = [{"params": [first], "lr": 0.1}]
    optimizer = hoist.optim.AdamW(groups)
    with_gradients(first)
    optimizer.step()
    optimizer.param_groups.append(optimizer.param_groups[0] | {"params": list(with_gradients(share(first)))})
    refused(optimizer, why)


def test_sparse_gradients_are_refused_before_a_step_counts():
    dense, = with_gradients(nn.Parameter(torch.ones(3)))
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = hoist.optim.AdamW([{"params": [dense]}, {"params": embedding.parameters()}])
    embedding(torch.tensor([1])).sum().backward()
    refused(optimizer, r"parameter 0 of group 1 has a gradient of layout torch.sparse_coo.*sparse=False")
    assert not optimizer.state


def test_the_refusal_of_float64_says_what_to_do():
    parameter, = with_gradients(nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    refused(hoist.optim.AdamW([parameter]), "is torch.float64; hoist trains float32 and bfloat16, and float16 only with offload")


@pytest.mark.parametrize("arguments", [{}, {"offload": "cpu", "pinned_memory": "32MiB", "device_memory": "16MiB"}])
def test_a_gradient_may_be_a_negative_view(arguments):
    """As the imaginary part of a conjugate is: its memory has the other sign."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch._neg_view(torch.ones(3))
    with hoist.optim.SGD([parameter], lr=1.0, **arguments) as optimizer:
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_empty_parameters_are_no_problem():
    parameters = with_gradients(nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3)))
    hoist.optim.AdamW(parameters).step()
    assert parameters[1].abs().min() > 0


# --- settings that change ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_may_begin_and_pause_as_in_pytorch(dampening):
    parameters = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    ours, theirs = (kind([p], lr=0.1, dampening=dampening)
                    for kind, p in zip((hoist.optim.SGD, torch.optim.SGD), parameters, strict=True))
    for step, momentum in enumerate([0, 0, 0.9, 0.9, 0, 0.8, 0.8]):
        for parameter, optimizer in zip(parameters, (ours, theirs), strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            parameter.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        torch.testing.assert_close(*parameters, rtol=1e-6, atol=1e-7)


def test_settings_that_are_no_formula_are_refused_before_anything_changes():
    parameters = with_gradients(nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)))
    optimizer = hoist.optim.AdamW([{"params": [p]} for p in parameters])
    optimizer.step()
    optimizer.param_groups[1]["amsgrad"] = True
    refused(optimizer, "amsgrad=True is not among")
    optimizer.param_groups[1].update(amsgrad=False, betas=(1.5, 0.9))
    refused(optimizer, "beta1")


# --- arguments of torch.optim --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, arguments", [
    ("AdamW", {"foreach": None, "fused": True, "capturable": False, "amsgrad": False, "maximize": False}),
    ("Adam", {"foreach": True, "differentiable": False, "decoupled_weight_decay": False}),
    ("SGD", {"fused": False, "maximize": False}),
    ("AdamW", {"offload": None, "directory": None, "resume": False, "missing_gradients": "refuse", "settings": {}}),
])
def test_arguments_without_effect_are_taken(name, arguments):
    parameter, = with_gradients(nn.Parameter(torch.ones(3)))
    optimizer = getattr(hoist.optim, name)([parameter], weight_decay=0.1, **arguments)
    optimizer.step()
    assert optimizer.defaults.keys() & arguments.keys() == set()


@pytest.mark.parametrize("name, arguments, error, match", [
    ("AdamW", {"amsgrad": True}, hoist.UsageError, "amsgrad=True is not among the settings of hoist's optimizers"),
    ("SGD", {"maximize": True}, hoist.UsageError, "maximize=True is not among"),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}, hoist.UsageError, "AdamW decouples weight decay"),
    ("AdamW", {"lr": -1.0}, hoist.UsageError, "learning rate is -1"),
    ("AdamW", {"betas": (0.9, 1.0)}, hoist.UsageError, "beta2 is 1"),
    ("AdamW", {"momentum": 0.9}, TypeError, r"AdamW\(\) got an unexpected keyword argument 'momentum'"),
    ("AdamW", {"offload": "cpu", "momentum": 0.9}, TypeError, "unexpected keyword argument 'momentum'"),
    ("AdamW", {"commit_every": 3}, hoist.UsageError, "commit_every=... is for offloaded states"),
    ("AdamW", {"missing_gradients": "zeros"}, hoist.UsageError, "missing_gradients=... is for offloaded states"),
    ("AdamW", {"offload": "cpu", "directory": "store", "commit_every": -1}, hoist.UsageError, "commit_every=-1: choose"),
    ("AdamW", {"offload": "nvme", "directory": "store", "commit_every": 0}, hoist.UsageError, "commit_every=0: choose"),
    ("AdamW", {"offload": "nvme", "directory": []}, hoist.UsageError, r"directory=\[\]: name one"),
    ("AdamW", {"offload": "disk"}, hoist.UsageError, "choose None"),
    ("AdamW", {"offload": "nvme"}, hoist.UsageError, "needs directory"),
    ("AdamW", {"offload": "cpu", "resume": True}, hoist.UsageError, "needs directory"),
    ("AdamW", {"directory": "somewhere"}, hoist.UsageError, "is for offloaded states"),
    ("AdamW", {"offload": "cpu", "amsgrad": True}, hoist.UsageError, "amsgrad=True is not among"),
    ("AdamW", {"offload": "cpu", "missing_gradients": "skip"}, hoist.UsageError, 'choose "refuse"'),
])
def test_arguments_that_cannot_be_followed_are_refused(name, arguments, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for directories
    with pytest.raises(error, match=match):
        getattr(hoist.optim, name)([nn.Parameter(torch.ones(3))], **arguments)


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_of_other_parameters_are_refused(offload, dtype):
    own, other = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    with hoist.optim.AdamW([own], offload=offload) as optimizer:
        for call in (lambda: optimizer.master(other), lambda: optimizer.set_master(other, torch.zeros(3))):
            with pytest.raises(hoist.UsageError, match="the parameter is not trained by this optimizer"):
                call()
    assert torch.equal(other, torch.ones(3, dtype=dtype))


# --- arguments by position -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "Lion", "SGD"])
def test_arguments_by_position_are_those_of_torch(name):
    """Adam's sixth argument is amsgrad there, which must not be taken for another setting."""
    def by_position(optimizer):
        return [p.name for p in inspect.signature(optimizer).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    ours = by_position(getattr(hoist.optim, name))
    assert ours[:2] == ["params", "lr"] and "threads" not in ours
    if hasattr(torch.optim, name):
        assert ours == by_position(getattr(torch.optim, name))[:len(ours)]


# --- copies --------------------------------------------------------------------------------------------------------------

def through_torch_save(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), through_torch_save])
def test_a_copy_continues(copied, dtype):
    parameter, = with_gradients(nn.Parameter(torch.randn(50).to(dtype)))
    optimizer = hoist.optim.AdamW([parameter], lr=0.01, threads=1)
    optimizer.step()
    other, its = copied((parameter, optimizer))
    for p, each in ((parameter, optimizer), (other, its)):
        with_gradients(p)
        each.step()
        assert each.state[p]["step"] == 2 and not each.step_was_skipped
    assert torch.equal(parameter, other) and parameter is not other
    assert torch.equal(optimizer.master(parameter), its.master(other))
    its.load_state_dict(optimizer.state_dict())
    its.close()


# --- state_dicts of other formulas ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, match", [
    (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
    (lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True"),
    (lambda p: torch.optim.Adam(p, weight_decay=0.1), "decoupled_weight_decay=False is not AdamW's"),
])
def test_a_state_dict_of_another_formula_is_refused(make, match):
    theirs, ours = with_gradients(nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)))
    reference = make([theirs])
    reference.step()
    optimizer = hoist.optim.AdamW([ours])
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    saved = reference.state_dict()
    saved["param_groups"][0].setdefault("decoupled_weight_decay", isinstance(reference, torch.optim.AdamW))  # older PyTorch
    with pytest.raises(hoist.UsageError, match=match):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


def test_settings_that_cannot_be_are_refused_when_they_come():
    optimizer = hoist.optim.AdamW(with_gradients(nn.Parameter(torch.ones(3))))
    with pytest.raises(hoist.UsageError, match="learning rate is -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -1.0})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = (0.9, 1.5)
    with pytest.raises(hoist.UsageError, match="beta2 is 1.5"):
        optimizer.load_state_dict(saved)
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    optimizer.step()


def test_a_state_dict_that_is_refused_changes_nothing():
    parameters = with_gradients(nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(7)))
    optimizer = hoist.optim.AdamW(parameters, lr=0.01, threads=1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 1.0
    wrong["state"][0]["exp_avg"].fill_(9.0)
    wrong["state"][1]["exp_avg"] = torch.zeros(8)
    with pytest.raises(hoist.UsageError, match="of another model"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(torch.as_tensor(after["state"][number][key]), torch.as_tensor(state[key])) for key in state)


@pytest.mark.parametrize("arguments", [{}, {"offload": "cpu", "pinned_memory": "32MiB", "device_memory": "1MiB"}])
def test_hooks_of_state_dicts_see_states_and_change_them(arguments):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = hoist.optim.AdamW([parameter], lr=0.1, **arguments)
    parameter.grad = torch.ones(4)
    optimizer.step()
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": saved["state"][0]["exp_avg"].tolist()})
    assert optimizer.state_dict()["note"] == pytest.approx([0.1] * 4)

    def before(_, saved):
        state = {**saved["state"][0], "exp_avg": torch.full((4,), 2.0)}
        return {**saved, "state": {0: state}, "param_groups": [{**saved["param_groups"][0], "lr": 0.5}]}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda its: seen.append(its.state_dict()["state"][0]["exp_avg"].tolist()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [[2.0] * 4] and optimizer.param_groups[0]["lr"] == 0.5
    if arguments:
        optimizer.close()
