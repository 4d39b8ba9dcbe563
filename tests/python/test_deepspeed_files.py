# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's files that are incomplete, changed, of another model or of another version: read as they were meant, or refused."""

import logging
import os
import random
import shutil

import pytest
import torch
from deepspeed_runs import STATES, change, config_at, damage, refusal, states_in, values_of, wrap

import hoist
import hoist.store
import hoist.torch
import hoist.torch.deepspeed
from hoist.torch.deepspeed.__main__ import main as command
from models import Gpt, Tiny


def test_a_rank_s_file_is_missing(spoil):
    path = spoil("zero3-bf16")
    (path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    text = refusal(path, "zero3-bf16")
    assert "is of 2 ranks, and has no *_optim_states.pt of rank 1" in text and str(path) in text
    (path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "run without ZeRO (stage 0), or the files were not all copied" in refusal(path, "zero3-bf16")


def test_a_file_is_cut_short(spoil):
    path = spoil("zero2-bf16") / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-200])
    text = refusal(path.parent)
    assert str(path) in text and "copy it once more" in text


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("content", [b"P", b"hello", b"\x80", b"\x80\x02"])
def test_a_file_of_a_few_bytes(spoil, content, trusted):
    """PyTorch's advice for such files is to run what is in them."""
    path = spoil("zero2-bf16") / "mp_rank_00_model_states.pt"
    path.write_bytes(content)
    with pytest.raises(hoist.StoreError, match=f"{path} cannot be read .* It may be cut short or damaged") as caught:
        hoist.torch.deepspeed.open(path.parent, trusted=trusted)
    assert "weights_only" not in str(caught.value) and "trust" not in str(caught.value)


@pytest.mark.parametrize("name", ["bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"])
def test_a_changed_byte(spoil, capsys, name):
    path = spoil("zero2-bf16") / name
    damage(path)
    text = refusal(path.parent)
    assert f"{path} is damaged" in text and "Copy it once more" in text
    assert command(["inspect", str(path.parent)]) == 2 and "is damaged" in capsys.readouterr().err


def test_a_changed_byte_of_a_universal_checkpoint(spoil):
    path = spoil("zero2-bf16-universal")
    file = next((path / "zero").glob("*/exp_avg.pt"))
    damage(file)
    assert f"{file} is damaged" in refusal(path)


def test_files_without_checksums(spoil):
    path = spoil("zero2-bf16")
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this PyTorch always writes checksums")
    torch.serialization.set_crc32_options(False)
    try:
        for file in path.glob("*.pt"):
            change(file, lambda _: None)
    finally:
        torch.serialization.set_crc32_options(True)
    wrap("zero2-bf16", path.parent / "store", deepspeed=path).close()


def test_a_copy_of_another_ranks_file(spoil):
    path = spoil("zero2-bf16")
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copyfile(path / name.format(0), path / name.format(1))
    assert "was written as the file of rank 0" in refusal(path)
    (path / name.format(1)).write_bytes(b"")
    assert f"{path / name.format(1)} cannot be read as a file of torch.save" in refusal(path)


def test_files_of_the_old_format(checkpoints, spoil):
    """With "checkpoint_serialization": false DeepSpeed writes files that cannot be mapped: they are read."""
    path = spoil("zero3-fp16")
    for file in path.glob("*.pt"):
        change(file, lambda _: None, _use_new_zipfile_serialization=False)
    before, after = hoist.torch.deepspeed.open(checkpoints / "zero3-fp16"), hoist.torch.deepspeed.open(path)
    for name in before.parameters:
        assert torch.equal(values_of(after, name, hoist.State.moment1), values_of(before, name, hoist.State.moment1))
    hoist.torch.deepspeed.open(path, trusted=True)
    file = next(path.glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(hoist.StoreError, match="copy it once more"):
        hoist.torch.deepspeed.open(path)


def test_another_model(checkpoints, tmp_path):
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(width=16), tmp=tmp_path)
    assert "parameter 'token.weight' is (16, 8), and (16, 16) here" in text
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(layers=3), tmp=tmp_path)
    assert "is of another model: it lacks ['blocks.2.norm.weight'" in text and "weights=" in text
    text = refusal(checkpoints / "zero2-bf16", model=Gpt(width=8, layers=1), tmp=tmp_path)
    assert "parameter 'token.weight' is (16, 8), and (97, 8) here" in text
    text = refusal(checkpoints / "zero2-bf16", model=Tiny(layers=1), tmp=tmp_path)
    assert "and has ['blocks.1.down.bias'" in text


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero2-bf16-universal"])
def test_a_parameter_without_elements(spoil, cell):
    path = spoil(cell)
    change(path / "mp_rank_00_model_states.pt", lambda file: file["param_shapes"][0].update(empty=torch.Size([0, 2])))
    if (path / "zero").is_dir():
        (path / "zero" / "empty").mkdir()
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.zeros(0, 2), "cat_dim": 0}, path / "zero" / "empty" / f"{key}.pt")
    model = Tiny()
    model.empty = torch.nn.Parameter(torch.zeros(0, 2))
    with wrap("zero2-bf16", path.parent / "store", model, deepspeed=path) as engine:
        assert engine.step_count == 20


def test_another_optimizer(checkpoints, tmp_path, spoil):
    model = Tiny()
    config = config_at("zero2-bf16", tmp_path / "store") | {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}
    with pytest.raises(hoist.UsageError, match="Lion cannot continue with Adam's moments"):
        hoist.torch.wrap(model, config, deepspeed=checkpoints / "zero2-bf16")
    path = spoil("zero2-bf16")
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: [
            state.update(momentum_buffer=state.pop("exp_avg")) for state in states_in(file)])
    assert "of another optimizer than Adam: its states are exp_avg_sq, momentum_buffer, step" in refusal(path)


@pytest.mark.parametrize("cell", ["zero1-fp16", "zero2-fp16", "zero3-fp16"])
def test_a_run_that_has_skipped_all_its_steps(spoil, cell):
    """Its optimizer has masters, and states without moments."""
    path = spoil(cell)
    for file in path.glob("*optim_states.pt"):
        change(file, lambda loaded: [state.clear() for state in states_in(loaded)])
    files = list(path.glob("*model_states.pt"))
    for file in files:
        change(file, lambda loaded: loaded.update(skipped_steps=loaded["global_steps"]))
    checkpoint = hoist.torch.deepspeed.open(path)
    assert checkpoint.step == 0 and checkpoint.global_steps > 0
    with wrap(cell, path.parent / "store", deepspeed=path) as engine:
        assert engine.step_count == 0 and engine.global_steps == checkpoint.global_steps
        for name in checkpoint.parameters:
            assert torch.equal(engine.read(name).view(-1), values_of(checkpoint, name, STATES[0]))
            assert not engine.read(name, STATES[1]).any()
    for file in files:
        change(file, lambda loaded: loaded.update(skipped_steps=loaded["global_steps"] - 1))
    assert "holds no optimizer states, and the run had made 1 steps" in refusal(path, cell)


def test_parameters_that_deepspeed_aligned(checkpoints, spoil):
    """With "parameter_alignment" each parameter of ZeRO 1 and 2 begins at a multiple of 16 bytes."""
    path = spoil("zero2-bf16")
    before = hoist.torch.deepspeed.open(checkpoints / "zero2-bf16")
    paths = [path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    paddings, parts = [], []
    for group in range(len(before.groups)):
        names = [name for name in before.parameters if before.group_of[name] == group]
        after = [-before.parameters[name].numel() % 8 for name in names[:-1]] + [0]
        flat = [torch.cat([torch.nn.functional.pad(values_of(before, name, state), (0, padding))
                           for name, padding in zip(names, after, strict=True)]) for state in STATES]
        part = -(-len(flat[0]) // 4) * 2
        parts.append([[values[rank * part:(rank + 1) * part].clone() for values in flat] for rank in range(2)])
        paddings.append(after)
    assert sum(map(sum, paddings)) > 0

    def align(file, rank):
        optimizer = file["optimizer_state_dict"]
        optimizer["param_alignment_paddings"] = paddings
        for group, (state, of_ranks) in enumerate(zip(states_in(file), parts, strict=True)):
            optimizer["single_partition_of_fp32_groups"][group], state["exp_avg"], state["exp_avg_sq"] = of_ranks[rank]

    for rank in range(2):
        change(paths[rank], lambda file, rank=rank: align(file, rank))
    after = hoist.torch.deepspeed.open(path)
    for name in before.parameters:
        for state in STATES:
            assert torch.equal(values_of(after, name, state), values_of(before, name, state)), (name, state)
    for wrong in ([[-8] * len(paddings[0]), *paddings[1:]], [[2**70, *paddings[0][1:]], *paddings[1:]], [[0], *paddings[1:]],
                  paddings[:1]):
        change(paths[0], lambda file, wrong=wrong: file["optimizer_state_dict"].update(param_alignment_paddings=wrong))
        with pytest.raises(hoist.StoreError):
            hoist.torch.deepspeed.open(path)


def test_states_that_were_left_out(spoil):
    path = spoil("zero3-fp32")
    for rank in range(2):
        change(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
               lambda file: file["optimizer_state_dict"]["optimizer_state_dict"].update(state={}))
    assert "holds no optimizer states, and the run had made 20 steps" in refusal(path, "zero3-fp32")
    (path / "offloaded_tensors").mkdir()
    assert 'offload_optimizer {"device": "cpu"}' in refusal(path, "zero3-fp32")


def test_files_of_two_steps(spoil):
    path = spoil("zero2-bf16")
    change(path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda file: [
        state.update(step=torch.tensor(19.0)) for state in states_in(file)])
    assert "is of step 20 of the optimizer, and" in refusal(path)


def test_a_step_that_deepspeed_s_own_adam_counts(spoil):
    """The step count is an integer, or, in older versions, in the parameter group."""
    path = spoil("zero2-bf16")
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: [
            state.update(step=20) for state in states_in(file)])
    assert hoist.torch.deepspeed.open(path).step == 20
    for rank in range(2):
        change(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda file: (
            [state.pop("step") for state in states_in(file)],
            [group.update(step=21) for group in file["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]]))
    assert hoist.torch.deepspeed.open(path).step == 21


@pytest.mark.parametrize("name, reason", [
    ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture of experts"),
    ("layer_03-model_00-model_states.pt", "pipeline-parallel"),
    ("mp_rank_01_model_states.pt", "tensor- or pipeline-parallel"),
    ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "two files of rank 1"),
])
def test_parallel_in_another_way(spoil, name, reason):
    path = spoil("zero2-bf16")
    (path / name).write_bytes(b"")
    text = refusal(path)
    assert reason in text and name in text


@pytest.mark.parametrize("name", ["zero/blocks.1.up.bias/exp_avg.pt", "mp_rank_00_model_states.pt"])
def test_tensors_without_values(spoil, name):
    path = spoil("zero2-bf16-universal") / name
    nothing = torch.zeros(8, device="meta")
    change(path, lambda file: file["module"].update(token=nothing) if "module" in file else file.update(param=nothing))
    assert f"{path} has tensors on the meta device" in refusal(path.parents[name.count("/")])


def test_no_checkpoint_there(tmp_path, spoil):
    assert "there is no directory" in refusal(tmp_path / "nowhere", tmp=tmp_path)
    (tmp_path / "empty").mkdir()
    assert "Name the directory with the file `latest`" in refusal(tmp_path / "empty", tmp=tmp_path)
    (tmp_path / "empty" / "latest").write_text("../../etc")
    assert "not the name of a checkpoint beside it" in refusal(tmp_path / "empty", tmp=tmp_path)
    path = spoil("zero2-bf16-universal")
    (path / "zero" / "blocks.1.up.bias" / "exp_avg.pt").unlink()
    text = refusal(path)
    assert "blocks.1.up.bias/exp_avg.pt is missing" in text
    (path / "zero" / "optimizer_state.pt").unlink()
    assert f"{path}/zero/optimizer_state.pt of a universal checkpoint is missing" in refusal(path)


@pytest.mark.parametrize("cell", ["zero2-bf16", "zero3-fp16", "zero2-bf16-universal"])
def test_whatever_a_file_holds_is_read_or_refused(checkpoints, spoil, cell, monkeypatch):
    from hoist.torch.deepspeed import files

    path = spoil(cell)
    load, source = files.load, random.Random(7)
    monkeypatch.setattr(files, "load", lambda path, trusted: disturbed(load(path, trusted), source))
    for attempt in range(150):
        try:
            hoist.torch.deepspeed.open(path)
        except hoist.StoreError as error:
            assert "\x1b" not in str(error), attempt


def disturbed(value, source, depth=6):
    """The same, with something of another kind at one place or more."""
    if source.random() < 0.02:
        return source.choice([None, -1, 2**70, float("nan"), "\x1b[2J", [], {}, {"a": 1}, [None, 3], torch.zeros(2, 3),
                              torch.tensor(1j)])
    if isinstance(value, dict) and depth > 0:
        return {key: disturbed(held, source, depth - 1) for key, held in value.items() if source.random() > 0.01}
    if isinstance(value, list) and depth > 0:
        return [disturbed(held, source, depth - 1) for held in value]
    return value


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("the-pickle-was-run",)


def test_nothing_in_a_file_is_run(spoil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = spoil("zero2-bf16")
    model = path / "mp_rank_00_model_states.pt"
    change(model, lambda file: file.update(rng=Malicious()))
    text = refusal(path)
    assert "holds objects of" in text and "mkdir" in text and "trusted=True" in text and str(model) in text
    assert not os.path.exists("the-pickle-was-run")
    hoist.torch.deepspeed.open(path, trusted=True)  # as the program asks for
    assert os.path.exists("the-pickle-was-run")


def test_names_from_files_do_not_reach_the_terminal(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file["param_shapes"][1].update({"\x1b[2Jforged": torch.Size([0])}))
    text = refusal(path)
    assert "\x1b" not in text and "x1b[2Jforged" in text
    (path.parent / "latest").write_text("\x1b[2J/")
    assert "\x1b" not in refusal(path.parent)


def test_client_state_that_json_cannot_hold(spoil, caplog):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file.update(order=torch.arange(4)))
    with caplog.at_level(logging.WARNING, "hoist"), wrap("zero2-bf16", path.parent / "store", deepspeed=path) as engine:
        assert engine.state == {"epoch": 3, "name": "tiny"}
    assert "client state ['order']" in caplog.text
    assert torch.equal(hoist.torch.deepspeed.open(path).client_state["order"].cpu(), torch.arange(4, device="cpu"))


def test_what_newer_versions_write_is_no_client_state(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: file.update(
        checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 1}))  # 0.19.6
    assert hoist.torch.deepspeed.open(path).client_state == {"epoch": 3, "name": "tiny"}


def test_weights_that_are_trained_here_and_were_frozen_there(checkpoints, tmp_path):
    model = Tiny()
    model.fixed.weight.requires_grad_(True)
    assert "'fixed.weight' was frozen, and has no moments" in refusal(checkpoints / "zero2-bf16", model=model, tmp=tmp_path)


def test_frozen_weights_that_the_checkpoint_leaves_out(spoil):
    path = spoil("zero2-bf16")
    change(path / "mp_rank_00_model_states.pt", lambda file: [file["module"].pop("fixed.weight"), file.update(
        frozen_param_shapes=None, frozen_param_fragments=None)])
    model = Tiny()
    fixed = model.fixed.weight.detach().clone()
    with wrap("zero2-bf16", path.parent / "store", model, deepspeed=path) as engine:
        assert torch.equal(engine.read("fixed.weight"), fixed.cpu().bfloat16().float())
