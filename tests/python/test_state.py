# SPDX-License-Identifier: Apache-2.0
"""State that goes in and out: commits, state dicts, safetensors, models too large to be built in memory."""

import functools
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading

import numpy
import pytest
import torch
from torch import nn

import hoist
import hoist.torch
from models import VOCABULARY, Gpt, batches, has_values, loss_of
from training import digests, make, train


def assert_same(a, b):
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name].cpu(), b[name].cpu()), name


def test_a_run_goes_on_where_it_ended(settings):
    """Stopped after 7 steps and resumed: losses, masters and moments of 12 are bit for bit those of an unbroken run."""
    with hoist.torch.wrap(make(), settings(store="whole")) as engine:
        expected = train(engine, 12)
        end = digests(engine)

    with hoist.torch.wrap(make(), settings()) as engine:
        engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=1.0)
        engine.state |= {"note": "of the program", "best": {3: (0.5, [1])}}
        losses = train(engine, 7)
    with pytest.raises(hoist.Error):  # not to be overwritten by accident
        hoist.torch.wrap(make(seed=5), settings())
    with hoist.torch.wrap(make(seed=5), settings(), resume=True) as engine:
        assert engine.restored and engine.step_count == 7
        assert engine.state == {"note": "of the program", "best": {3: (0.5, [1])}}  # integer keys and tuples, too
        losses += train(engine, 5, first=7)
        assert losses == expected
        assert digests(engine) == end


def test_what_a_commit_cannot_hold_is_named(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        for value, what in ((numpy.float32(1), "numpy.float32"), ({1: 0, "a": 0}, "keys of the types ['int', 'str']"),
                            ({"hoist.tuple": 5}, "no key but 'hoist.tuple'"),
                            ({"hoist.integer_keys": []}, "no key but 'hoist.integer_keys'")):
            engine.state["runs"] = [{"loss": value}]
            name = re.escape("engine.state['runs'][0]['loss'] has ")
            with pytest.raises(hoist.UsageError, match=f"{name}.*{re.escape(what)}"):
                engine.save()
        engine.state = {}
        train(engine, 1)


def test_a_state_that_is_refused_is_not_the_engines(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        engine.state = {"epoch": 1}
        for refused, why in (({"seen": [0] * 10**6}, "room for 65536"), ({"loss": numpy.float32(1)}, "numpy.float32")):
            with pytest.raises(hoist.UsageError, match=why):
                engine.save("one", state=refused)
        assert engine.state == {"epoch": 1}
        train(engine, 1)


def test_killed_and_resumed(settings):
    """kill -9 in the middle of training; the resumed run ends in the bits of one that nobody disturbed."""
    config = settings()
    program = textwrap.dedent(f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch, hoist.torch
        import accelerator
        accelerator.use_if_asked()
        from test_state import make, train
        engine = hoist.torch.wrap(make(), {config!r}, resume=True)
        train(engine, 5)
        print(engine.step_count, flush=True)
        engine._unit_manager.settle()
        train(engine, 20, first=5)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with hoist.torch.wrap(make(seed=9), config, resume=True) as engine:
        reached = engine.step_count
        assert 5 <= reached <= 25
        train(engine, 30 - reached, first=reached)
        digest = engine.digest()
    with hoist.torch.wrap(make(), settings(store="whole")) as engine:
        train(engine, 30)
        assert engine.digest() == digest


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_named_save_is_what_the_next_start_finds(settings, device):
    """State, buffers and rates are those of the save, not of the step before it, wherever the optimizer's states live."""
    config = settings()
    config["hoist"]["keep_steps"] = 1
    if device == "cpu":
        config["hoist"]["checkpoint_path"] = config["zero_optimization"]["offload_param"]["nvme_path"]
        config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    with hoist.torch.wrap(make(), config) as engine:
        engine.state = {"epoch": 0}
        train(engine, 2)
        engine.state = {"epoch": 1}
        engine.optimizer.param_groups[0]["lr"] *= 0.5
        rate = engine.get_lr()
        engine.save("epoch-1").wait()
    with hoist.torch.wrap(make(seed=9), config, resume=True) as engine:
        assert (engine.step_count, engine.state, engine.get_lr()) == (2, {"epoch": 1}, rate)


def test_the_last_step_of_a_program_that_ends_is_committed(settings):
    config = settings()
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        import accelerator
        accelerator.use_if_asked()
        from test_state import make, train
        engine = hoist.torch.wrap(make(), {config!r})
        train(engine, 3)
    """)
    subprocess.run([sys.executable, "-c", program], check=True)
    with hoist.torch.wrap(make(), config, resume=True) as engine:
        assert engine.step_count == 3


def test_state_dicts_have_pytorchs_names_and_values(settings):
    model = make()
    reference = make()
    with hoist.torch.wrap(model, settings()) as engine:
        assert_same(engine.state_dict(), reference.state_dict())
        assert_same(dict(model.state_dict()), reference.state_dict())  # as save_pretrained asks for it
        assert list(model.state_dict()) == list(reference.state_dict())
        other = make(seed=3)
        assert str(engine.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
        assert_same(engine.state_dict(), other.state_dict())
        third = make(seed=4)
        given = third.state_dict()
        result = model.load_state_dict(given)
        assert not result.missing_keys and not result.unexpected_keys and list(given) == list(third.state_dict())
        assert not any(has_values(p) for p in model.parameters())  # no copies outside of every budget
        assert_same(engine.state_dict(), third.state_dict())
        part = {"head.weight": torch.ones(VOCABULARY, 32), "another": torch.zeros(1)}
        result = model.load_state_dict(part, strict=False)  # tied: by its other name
        assert "token.weight" in result.missing_keys and "head.weight" not in result.missing_keys
        assert "blocks.0.up.weight" in result.missing_keys and result.unexpected_keys == ["another"]
        ours = engine.load_state_dict(part, strict=False)
        assert ours.unexpected_keys == ["another"] and set(ours.missing_keys) == set(result.missing_keys) - {"token.weight"}
        assert torch.equal(engine.read("token.weight"), part["head.weight"].cpu())
        with pytest.raises(RuntimeError, match="Missing key.*blocks.0.up.weight"):
            model.load_state_dict({"token.weight": torch.ones(VOCABULARY, 32)})
        model.load_state_dict(third.state_dict())
        inputs, _ = next(batches(1))
        with torch.no_grad():
            assert torch.equal(engine(inputs), third(inputs))
        with pytest.raises(hoist.UsageError, match="missing"):
            engine.load_state_dict({"token.weight": torch.zeros(VOCABULARY, 32)})
        before = engine.state_dict()
        wrong = {name: values + 1 for name, values in before.items()}
        last = [name for name in wrong if name != "head.weight"][-1]  # which is token.weight by another name
        wrong[last] = wrong[last][..., :1]
        with pytest.raises(hoist.UsageError, match="the values are"):
            engine.load_state_dict(wrong)
        all_bits = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()  # a NaN that is rounded to 0
        for value in (math.nan, all_bits, 3.4e38, 1j):
            wrong[last] = torch.full_like(before[last], value, dtype=torch.complex64 if value == 1j else None)
            for load in (engine.load_state_dict, model.load_state_dict):
                with pytest.raises(hoist.UsageError, match="not finite, or too large|complex values"):
                    load(wrong)
        with pytest.raises(hoist.UsageError, match="complex values"):
            engine.write(last, wrong[last])
        assert_same(engine.state_dict(), before)  # nothing has changed


class WithMeans(nn.Sequential):
    """Its units have several parameters, one of which is frozen."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)) for _ in range(4)))
        for block in self:
            block[2].weight.requires_grad_(False)


def two_steps(config):
    engine = hoist.torch.wrap(WithMeans(), config)
    for _ in range(2):
        engine.backward(engine(torch.rand(4, 64, device=engine.device)).sum())
        engine.step()
    engine.settle()
    return engine


def load_sevens(engine):
    engine.load_state_dict({name: torch.full_like(values, 7) for name, values in engine.state_dict().items()})


def gather_and_fill_with_sevens(engine):
    with engine.gathered(modify=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(7)


def change_and_be_killed(config, change, is_inside):
    """Ends this process in the middle of the writes, or after `change`."""
    engine = two_steps(config)
    engine.state["is_changed"] = True
    parameters, manager = engine._parameters, engine._parameters._unit_manager
    units = {declared.unit for declared in parameters.by_name.values()}
    calls = itertools.count()

    def kill_in_the_middle():
        if is_inside and next(calls) == len(units) + len(units) // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    class Writing:
        def __getattr__(self, name):
            return getattr(manager, name)

        def write(self, *arguments):
            kill_in_the_middle()
            manager.write(*arguments)

        def write_units(self, units, changes, program_state):
            manager.write_units(units, lambda unit: (kill_in_the_middle(), changes(unit))[1], program_state)

    parameters._unit_manager = Writing()
    change(engine)
    if not is_inside:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("change", [load_sevens, gather_and_fill_with_sevens])
def test_a_program_that_is_killed_as_it_changes_weights_resumes_with_all_of_them_or_none(settings, change, is_inside):
    config = settings()
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import accelerator
        accelerator.use_if_asked()
        import test_state
        test_state.change_and_be_killed({config!r}, test_state.{change.__name__}, {is_inside})
    """)
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    with hoist.torch.wrap(WithMeans(), config, resume=True) as engine:
        assert engine.step_count == 2
        seven = {name: bool((values == 7).all()) for name, values in engine.state_dict().items()}
        weights = {seven.pop(name) for name, _ in engine.module.named_parameters()}
        assert weights == {not is_inside}
        has_loaded = change is load_sevens and not is_inside
        assert set(seven.values()) == {has_loaded}  # the buffers
        assert engine.state == ({"is_changed": True} if has_loaded else {})


def moved_by(engine, call):
    before = engine.statistics()["links_apart"]
    call()
    after = engine.statistics()["links_apart"]
    return {link: after[link] - before[link] for link in ("nvme_read", "nvme_write")}


def test_weights_that_are_changed_together_are_read_and_written_once(settings):
    with two_steps(settings()) as engine:
        one_of_record = {(each.unit, each.trains): each.name for each in engine._parameters.by_name.values()}
        assert len(one_of_record) < len(engine._parameters.by_name)
        values = {name: engine.read(name) for name in one_of_record.values()}
        of_records = [moved_by(engine, functools.partial(engine.write, *each)) for each in values.items()]
        once = {link: sum(moved[link] for moved in of_records) for link in of_records[0]}
        state = engine.state_dict()
        moved = moved_by(engine, lambda: engine.load_state_dict(state))
        assert moved["nvme_read"] == once["nvme_read"]
        assert 0 < moved["nvme_write"] < once["nvme_write"]  # fewer commits
        assert moved_by(engine, lambda: gather_and_fill_with_sevens(engine))["nvme_write"] == moved["nvme_write"]


def test_loaded_values_between_micro_batches_are_committed_with_buffers_of_the_step(settings):
    config = settings(gradient_accumulation_steps=2)
    with two_steps(config) as engine:
        assert engine.step_count == 1
        means = engine.module[0][1].running_mean.clone()
        engine.backward(engine(torch.rand(4, 64, device=engine.device)).sum())
        load_sevens(engine)
        assert (engine.module[0][1].running_mean == 7).all()
    with hoist.torch.wrap(WithMeans(), config, resume=True) as engine:
        assert engine.step_count == 1 and (engine.read("0.0.weight") == 7).all()
        assert torch.equal(engine.module[0][1].running_mean, means)


def test_a_state_dict_into_which_a_step_of_another_thread_comes_is_refused(settings):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    inputs = torch.ones(2, 8)

    def make_step(*_):
        def body():
            engine.backward(engine(inputs).sum())
            engine.step()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    with hoist.torch.wrap(model, settings()) as engine:
        hook = model[1].register_state_dict_pre_hook(make_step)
        with pytest.raises(hoist.UsageError, match=r"began at step 0, .* step 1 meanwhile.*engine\.state_dict\(\)"):
            model.state_dict()
        hook.remove()
        assert_same(model.state_dict(), engine.state_dict())
        result = model.state_dict()
        make_step()
        assert_same(model.state_dict(destination=result), engine.state_dict())


class Turned(nn.Linear):
    """Its first version kept the weight turned, and it saves it in 16 bits."""

    _version = 2

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().bfloat16()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        if local_metadata.get("version", 1) < 2 and prefix + "weight" in state_dict:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        state_dict.setdefault(prefix + "bias", self.bias + 1)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


class InPlace(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *_):
        self.weight.data.copy_(state_dict[prefix + "weight"])
        self.bias = nn.Parameter(state_dict[prefix + "bias"])


def renaming(wide=8):
    layer = nn.Linear(wide, wide)
    layer.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({
        prefix + "kernel": state.pop(prefix + "weight").t(), prefix + "bias": state[prefix + "bias"] * 2}))

    def back(_, state, prefix, *__):
        state[prefix + "bias"] = state[prefix + "bias"] / 2
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel").t()

    layer.register_load_state_dict_pre_hook(back)
    return layer


CONVERTING = {
    "version": (lambda: nn.Sequential(Turned(8, 8), Turned(8, 8)),
                lambda old: {key: old[key] for key in old if "bias" not in key}),
    "in place": (lambda: nn.Sequential(InPlace(8, 8), nn.Linear(8, 8)), dict),
    "hooks": (lambda: nn.Sequential(renaming(), nn.Linear(8, 8)), dict),
    "weight_norm": (lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), lambda old: {
        "0.bias": old["0.bias"], "0.weight_g": old["0.parametrizations.weight.original0"] + 1,
        "0.weight_v": old["0.parametrizations.weight.original1"] + 1}),
    "spectral_norm": (lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)), dict),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", CONVERTING)
def test_modules_convert_what_they_save_and_load_as_in_pytorch(settings, kind, assign):
    build, older = CONVERTING[kind]

    def built(seed):
        torch.manual_seed(seed)
        return build()

    plain, model = built(0), built(0)
    with hoist.torch.wrap(model, settings()) as engine:
        for each in (plain, model):  # after it was wrapped, too
            each.register_load_state_dict_pre_hook(lambda _, state, *__: state.pop("padding", None))
        assert_same(model.state_dict(), plain.state_dict())
        assert [value.dtype for value in model.state_dict().values()] == [value.dtype for value in plain.state_dict().values()]
        assert_same(model[0].state_dict(), plain[0].state_dict())
        given = older(dict(built(1).state_dict())) | {"padding": torch.ones(1)}  # without metadata, as from safetensors
        for each in (plain, model):
            assert str(each.load_state_dict(given, assign=assign)) == "<All keys matched successfully>"
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.read(name), parameter.detach().float().cpu(), rtol=0, atol=0)
        part = built(2)[0].state_dict()
        for each in (plain, model):
            each[0].load_state_dict(part, assign=assign)
        assert_same(model.state_dict(), plain.state_dict())
        assert not any(has_values(p) for p in model.parameters())
        engine.backward(engine(torch.ones(2, 8)).sum())
        assert engine.step().applied


@pytest.mark.parametrize("assign", [False, True])
def test_masters_of_16_bit_weights_are_loaded_with_all_bits(settings, assign):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with hoist.torch.wrap(model, settings(bf16={"enabled": True})) as engine:
        given = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).state_dict()
        with torch.inference_mode():
            model.load_state_dict(given, assign=assign)
        assert all(torch.equal(engine.read(name), values.cpu()) for name, values in given.items())
        assert model.state_dict()["0.weight"].dtype == torch.bfloat16


def test_export_and_stream_in(settings, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 3)
        files = engine.export(str(tmp_path / "weights"))
        expected = engine.state_dict()
    weights = load_file(files[0])
    del expected["head.weight"]  # tied: written once
    assert_same(weights, expected)
    with torch.device("meta"):
        model = Gpt()
    with hoist.torch.wrap(model, settings(store="second"), weights=tmp_path / "weights") as engine:
        ours = engine.state_dict()
        assert torch.equal(ours.pop("head.weight"), ours["token.weight"])
        assert_same(ours, expected)
        assert train(engine, 2)


def test_a_model_on_the_meta_device_is_initialized_one_unit_at_a_time(settings):
    held = []

    def initialize(module):
        held.append(sum(p.numel() for p in model.parameters() if has_values(p)))
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)

    with torch.device("meta"):
        model = Gpt(layers=6)
    with hoist.torch.wrap(model, settings(), initialize=initialize, seed=1) as engine:
        assert not any(p.is_meta for p in model.parameters())
        assert model.head.weight is model.token.weight
        first = engine.state_dict()
        assert first["token.weight"].std() == pytest.approx(0.02, rel=0.1)
        assert (first["norm.bias"] == 1).all()
        assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
        block = sum(p.numel() for p in model.blocks[0].parameters())
        assert max(held) <= block
        assert train(engine, 2)[0] == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=0.2)
    with torch.device("meta"):
        model = Gpt(layers=6)
    with hoist.torch.wrap(model, settings(store="again"), initialize=initialize, seed=1) as engine:
        assert_same(engine.state_dict(), first)


def test_another_optimizer_or_type_than_the_stored_run_s_is_named(settings):
    hoist.torch.wrap(make(), settings()).close()
    frozen = make()
    frozen.norm.bias.requires_grad_(False)
    lion = {"type": "Lion", "params": {"lr": 1e-3}}
    for model, changes, text in (
            (make(), {"optimizer": lion}, r"was trained by AdamW or Adam, and this program asks for Lion \('token.weight'\)"),
            (make(), {"bf16": {"enabled": True}}, "holds 'token.weight' in fp32, and this program has it in bf16"),
            (frozen, {}, "holds 'norm.bias' with optimizer state, and this program has frozen it"),
            (make(width=16), {}, r"holds another model: line 1: stored: 'token \|")):
        with pytest.raises(hoist.StoreError, match=text):
            hoist.torch.wrap(model, settings(**changes), resume=True)


def test_weights_of_another_model_are_refused(settings, tmp_path):
    with hoist.torch.wrap(make(), settings()) as engine:
        engine.export(str(tmp_path / "weights"))
    with pytest.raises(hoist.SafetensorsError, match="blocks.3"):
        hoist.torch.wrap(make(layers=4), settings(store="second"), weights=str(tmp_path / "weights"))
    safetensors = pytest.importorskip("safetensors.torch")
    held = safetensors.load_file(tmp_path / "weights" / "model.safetensors")
    held |= {"head.weight": held["token.weight"].clone(), "blocks.9.norm.weight": torch.ones(3)}  # the first of both is tied
    safetensors.save_file(held, tmp_path / "more.safetensors")
    with pytest.raises(hoist.SafetensorsError, match="1 problem: 'blocks.9.norm.weight' is not a parameter of the model"):
        hoist.torch.wrap(make(), settings(store="second"), weights=str(tmp_path / "more.safetensors"))


def test_moments_can_be_read(settings):
    model = make()
    reference = make()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with hoist.torch.wrap(model, settings()) as engine:
        inputs, targets = next(batches(1))
        engine.backward(loss_of(engine(inputs), targets))
        loss_of(reference(inputs), targets).backward()
        name, parameter = "blocks.1.up.weight", reference.blocks[1].up.weight
        assert torch.equal(engine.read(name, hoist.State.gradient), parameter.grad.cpu())
        engine.step()
        optimizer.step()
        torch.testing.assert_close(engine.read(name, hoist.State.moment1), optimizer.state[parameter]["exp_avg"].cpu())
        torch.testing.assert_close(engine.read(name, hoist.State.moment2), optimizer.state[parameter]["exp_avg_sq"].cpu())


def test_state_dicts_have_the_extra_state_of_modules(settings):
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    with hoist.torch.wrap(nn.Sequential(Counts(8, 8), nn.Tanh()), settings()) as engine:
        engine(torch.randn(2, 8))
        state = engine.state_dict()
        assert state.keys() == engine.module.state_dict().keys() and state["0._extra_state"] == {"calls": 1}
        engine(torch.randn(2, 8))
        engine.load_state_dict(state)
        assert engine.module[0].calls == 1
        engine.module.load_state_dict(state | {"0._extra_state": {"calls": 5}})
        assert engine.module[0].calls == 5


# --- refusals --------------------------------------------------------------------------------------------------------


def test_errors_have_the_engines_text(settings):
    with pytest.raises(hoist.ConfigError, match="did you mean") as error:
        hoist.torch.wrap(make(), settings(zero_optimizatio={}))
    assert error.value.problems[0]["key"] == "zero_optimizatio"
    with pytest.raises(hoist.BudgetError, match="hoist.device_memory") as small:
        hoist.torch.wrap(make(), settings(hoist={"device_memory": "64KiB", "pinned_memory": "32MiB"}))
    assert isinstance(small.value, MemoryError) and small.value.need_bytes > small.value.have_bytes
    with pytest.raises(hoist.ConfigError, match="stage"):
        hoist.torch.wrap(make(), settings(zero_optimization={"stage": 7}))
    with pytest.raises(hoist.UsageError, match="float64"):
        hoist.torch.wrap(make().double(), settings())


def test_the_budget_an_error_names_is_enough(settings):
    with pytest.raises(hoist.BudgetError) as small:
        hoist.torch.wrap(make(), settings(hoist={"device_memory": "64KiB", "pinned_memory": "32MiB"}))
    config = settings(hoist={"device_memory": small.value.need_bytes, "pinned_memory": "32MiB"})
    with hoist.torch.wrap(make(), config) as engine:
        assert len(train(engine, 3)) == 3


def test_misuse_is_said_and_harms_nothing(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        inputs, targets = next(batches(1))
        with pytest.raises(hoist.UsageError, match="backward"):
            engine.step()
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        with pytest.raises(hoist.UsageError, match="step"):
            engine(inputs)
        assert engine.step().applied
        with pytest.raises(RuntimeError):  # the graph is gone, as PyTorch says itself
            engine.backward(loss)
        with pytest.raises(hoist.UsageError, match="closure"):
            engine.optimizer.step(lambda: None)
        assert len(train(engine, 2)) == 2


def test_a_graph_kept_beyond_a_step_is_refused(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        inputs, targets = next(batches(1))
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss, retain_graph=True)
        engine.step()
        engine(inputs)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(loss)
        assert len(train(engine, 2)) == 2


def test_a_loss_that_is_not_finite_skips_the_step(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 2)
        before = engine.state_dict()
        inputs, targets = next(batches(1))
        engine.backward(loss_of(engine(inputs), targets) * float("nan"))
        report = engine.step()
        assert not report.applied and report.step == 2
        assert_same(engine.state_dict(), before)


def test_weights_used_outside_of_their_module_are_found(settings):
    """The head multiplies with the embedding's weights without calling the embedding."""

    class Outside(Gpt):
        def __init__(self):
            super().__init__()
            del self.head

        def forward(self, tokens):
            x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return nn.functional.linear(self.norm(x), self.token.weight)

    torch.manual_seed(0)
    model = Outside()
    with hoist.torch.wrap(model, settings()) as engine:
        ours = train(engine, 10)
    torch.manual_seed(0)
    reference = Outside()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = []
    for inputs, targets in batches(10):
        loss = loss_of(reference(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_directories_that_the_program_names_like_hoists_are_of_runs_of_their_own(settings):
    for rank in (8, 16):  # of LoRA, say
        with hoist.torch.wrap(make(), settings(store=f"rank-{rank}"), resume=True) as engine:
            assert engine.step_count == 0
            train(engine, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_whose_wrapping_failed_is_as_before(settings, device):
    """For instance in a notebook, where the store already holds a run."""
    with hoist.torch.wrap(make(), settings()) as engine:
        train(engine, 1)
    model = make(seed=5) if device == "cpu" else None
    if model is None:
        with torch.device("meta"):
            model = Gpt()
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with pytest.raises(hoist.StoreError, match="holds step 1"):
        hoist.torch.wrap(model, settings())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.head.weight is model.token.weight
    if device == "cpu":
        assert_same(dict(model.named_parameters()), before)
        loss_of(model(next(batches(1))[0]), next(batches(1))[1]).backward()
        assert all(p.grad is not None for p in model.parameters())
    with hoist.torch.wrap(model, settings(), resume=True) as engine:
        assert engine.step_count == 1 and train(engine, 1, first=1)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("can_refuse", [False, True])
def test_a_model_whose_engine_was_closed_is_not_wrapped_without_values(settings, monkeypatch, resume, can_refuse):
    """Also with PyTorch before 2.13, where the weights of such a model are NaN. It has a store of its own to begin with again."""
    if not can_refuse:
        monkeypatch.setattr(hoist.torch.model.unit_tensors, "CAN_REFUSE", False)
    model = make()
    with hoist.torch.wrap(model, settings(store="first")) as engine:
        train(engine, 1)
    closed = r"token.weight' has no values: the engine.* was closed.*weights=DIR.*engine.export.*resume=True"
    for store in ("empty", "empty too"):
        with pytest.raises(hoist.UsageError, match=closed):
            hoist.torch.wrap(model, settings(store=store), resume=resume)
    with hoist.torch.wrap(model, settings(store="first"), resume=True) as engine:
        assert engine.step_count == 1
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    with hoist.torch.wrap(model, settings(store="second")) as engine:
        assert not engine.read("token.weight").any()
