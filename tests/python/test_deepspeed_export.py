# SPDX-License-Identifier: Apache-2.0
"""Which stores become DeepSpeed checkpoints, which are refused, and that a finished export is durable."""

import errno
import fcntl
import json
import logging
import os
import shutil
import types

import pytest
import torch
from torch import nn

import hoist
import hoist.optim
import hoist.store
import hoist.torch
import hoist.torch.deepspeed
from hoist.torch.checkpoint import directories
from hoist.torch.deepspeed import universal
from hoist.torch.deepspeed.__main__ import main as command

ADAMW = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def wrapped(path, kind="AdamW", room=65_536, **arguments):
    nvme = {"device": "nvme", "nvme_path": str(path)}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": kind, "params": {"lr": 1e-2}},
              "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
              "hoist": {"caller_state_max": room}}
    return hoist.torch.wrap(model_of(), config, **arguments)


def trained_store(path, kind="AdamW", state=None, room=65_536):
    """A store of one step of hoist.torch."""
    with wrapped(path, kind, room) as engine:
        engine.backward(engine(torch.ones(1, 4)).pow(2).sum())
        engine.step()
        engine.save(state=state).wait()
    return path


def optimizer_store(path, parameters_of, rates=(1e-2,)):
    """A store of one step of hoist.optim; one parameter group for each rate."""
    model = model_of()
    parameters = list(parameters_of(model))
    part = -(-len(parameters) // len(rates))
    groups = [{"params": parameters[part * i:part * (i + 1)], "lr": rate} for i, rate in enumerate(rates)]
    optimizer = hoist.optim.AdamW(groups, offload="nvme", directory=path)
    model(torch.ones(1, 4)).pow(2).sum().backward()
    optimizer.step()
    optimizer.close()
    return path


def refusal(store, to, config=ADAMW):
    with pytest.raises(hoist.UsageError) as caught:
        hoist.torch.deepspeed.export(store, to, config)
    assert not to.exists()
    return str(caught.value)


@pytest.mark.cpu_tensors("hoist.optim's parameters are on the CPU here")
def test_names_that_hoist_made_up_are_refused(tmp_path, capsys):
    store = optimizer_store(tmp_path / "store", nn.Module.parameters)
    text = refusal(store, tmp_path / "out")
    assert "'parameter 0'" in text and "named_parameters()" in text
    (tmp_path / "ds.json").write_text(json.dumps(ADAMW))
    assert command(["export", str(store), "--to", str(tmp_path / "out"), "--config", str(tmp_path / "ds.json")]) == 2
    assert "named_parameters()" in capsys.readouterr().err


@pytest.mark.cpu_tensors("hoist.optim's parameters are on the CPU here")
def test_pieces_of_parameters_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("hoist.optim.pieces._PIECE_ELEMENTS", 16)
    store = optimizer_store(tmp_path / "store", nn.Module.named_parameters)
    text = refusal(store, tmp_path / "out")
    assert "'0.weight[0:4]'" in text and "this store cannot be exported" in text


@pytest.mark.cpu_tensors("hoist.optim's parameters are on the CPU here")
def test_a_store_of_hoist_optim_with_names(tmp_path):
    store = optimizer_store(tmp_path / "store", nn.Module.named_parameters, rates=(2e-2, 3e-3))
    back = hoist.torch.deepspeed.open(hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW))
    assert {name: tuple(shape) for name, shape in back.parameters.items()} == {
        name: tuple(p.shape) for name, p in model_of().named_parameters()}
    assert [group["lr"] for group in back.groups] == [2e-2, 3e-3]


@pytest.mark.parametrize("kind", ["Lion", "SGD", "Adagrad"])
def test_other_optimizers_are_refused(tmp_path, kind):
    store = trained_store(tmp_path / "store", kind)
    text = refusal(store, tmp_path / "out", ADAMW)
    assert "'0.weight'" in text and "not of Adam" in text
    text = refusal(store, tmp_path / "out", ADAMW | {"optimizer": {"type": kind, "params": {"lr": 1e-2}}})
    assert f"the configuration's optimizer is {kind}" in text


def test_client_keys_do_not_replace_deepspeed_s(tmp_path, caplog):
    state = {"epoch": 3, "checkpoint_parallel_dimensions": 5, "global_samples": 7, "module": {}}
    store = trained_store(tmp_path / "store", state=state)
    with caplog.at_level(logging.WARNING, "hoist"):
        written = hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW)
    assert "['checkpoint_parallel_dimensions', 'global_samples', 'module']" in caplog.text
    model = torch.load(os.path.join(written, "zero_pp_rank_0_mp_rank_00_model_states.pt"), weights_only=False)
    assert model["epoch"] == 3 and "global_samples" not in model and "checkpoint_parallel_dimensions" not in model
    assert hoist.torch.deepspeed.open(written).client_state == {"epoch": 3}


# What a hoist-gpt run commits, and other bytes that a program in C++ may commit.
@pytest.mark.parametrize("committed", [b'{"program":"hoist-gpt","format":2,"step":1}', b"\xff\x00\x01", b"[1]", b"[" * 100_000])
def test_a_store_of_another_program_has_no_client_state(tmp_path, monkeypatch, caplog, committed):
    monkeypatch.setattr("hoist.torch.checkpoint.program_state.pack", lambda *_, **__: committed)
    store = trained_store(tmp_path / "store", room=200_000)
    with hoist.store.open(store) as stored:
        assert stored.program_state == {}
    with caplog.at_level(logging.WARNING, "hoist"):
        back = hoist.torch.deepspeed.open(hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW))
    assert caplog.text.count("another program") == 1
    assert back.client_state == {} and back.step == 1 and [group["lr"] for group in back.groups] == [1e-2]
    with wrapped(store, room=200_000, resume=True) as engine:  # a program in PyTorch may continue the run
        assert engine.restored and engine.step_count == 1 and engine.state == {}


@pytest.mark.parametrize("tag", [None, "other"])
@pytest.mark.parametrize("last", ["fp32.pt", "latest_universal"])
def test_two_exports_into_one_directory_do_not_mix(tmp_path, monkeypatch, last, tag):
    """As of the ranks of a job that all call export(): the second is refused up to the end, and the first is complete."""
    store, write, refused = trained_store(tmp_path / "store"), universal.write_durably, []

    def export_again(path, content):
        if path.endswith(last):
            monkeypatch.setattr(universal, "write_durably", write)
            with pytest.raises(hoist.UsageError) as caught:
                hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW, tag=tag)
            refused.append(str(caught.value))
        write(path, content)

    monkeypatch.setattr(universal, "write_durably", export_again)
    (tmp_path / "out" / "global_step1.partial" / "zero").mkdir(parents=True)  # of an export that was killed
    (tmp_path / "out" / "global_step1.partial" / "zero" / "other").touch()
    (tmp_path / "out" / "latest_universal.lock").touch()
    back = hoist.torch.deepspeed.open(hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW))
    assert f"another export writes into {tmp_path / 'out'}: call export() on one rank" in refused[0]
    assert sorted(os.listdir(tmp_path / "out")) == ["global_step1", "latest_universal"]
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step1"
    assert set(os.listdir(tmp_path / "out" / "global_step1" / "zero")) == {*back.parameters, "optimizer_state.pt"}
    assert all(len(os.listdir(tmp_path / "out" / "global_step1" / "zero" / name)) == 3 for name in back.parameters)


def test_a_lock_that_cannot_be_opened_is_said_with_its_path(tmp_path, monkeypatch):
    """As on a full drive, or where another user's export was killed."""
    store, lock = trained_store(tmp_path / "store"), tmp_path / "out" / "latest_universal.lock"

    def export(code):
        def fail(*_):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(directories, "open", fail, raising=False)
        with pytest.raises(hoist.IoError) as caught:
            hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW)
        return str(caught.value)

    assert export(errno.ENOSPC) == (f"opening {lock} failed: No space left on device; free space on this drive, or choose "
                                    "another directory")
    assert not (tmp_path / "out").exists()
    lock.parent.mkdir()
    lock.touch()
    said = export(errno.EACCES)
    assert f"opening {lock} failed: Permission denied (it is another user's: if no export runs, remove it); choose" in said


def test_a_lock_that_fails_is_said_with_its_path(tmp_path, monkeypatch):
    """As on a network mount that has gone."""
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = trained_store(tmp_path / "store")
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(hoist.IoError, match="locking .*/out/latest_universal.lock failed: Input/output error"):
        hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW)


def test_a_file_system_without_locks_takes_exports(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))  # as of NFS whose server runs no lockd

    monkeypatch.setattr(fcntl, "flock", fail)
    written = hoist.torch.deepspeed.export(trained_store(tmp_path / "store"), tmp_path / "out", ADAMW)
    assert written == str(tmp_path / "out" / "global_step1") and len(os.listdir(tmp_path / "out")) == 2


def test_a_drive_that_is_too_small_is_said_before_the_first_file(tmp_path, monkeypatch):
    store, elements = trained_store(tmp_path / "store"), sum(p.numel() for p in model_of().parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=12 * elements - 1))
    monkeypatch.setattr(universal, "_save", None)
    with pytest.raises(hoist.IoError, match="out needs 528 B, and 527 B are free; free space on this drive, or") as caught:
        hoist.torch.deepspeed.export(store, tmp_path / "out", ADAMW)
    assert caught.value.errno == errno.ENOSPC and not (tmp_path / "out").exists()


def test_a_finished_export_is_durable(tmp_path, monkeypatch):
    """All that it made is synced: directories after their last entry, and `latest_universal` after the checkpoint."""
    store = trained_store(tmp_path / "store")
    synced, fsync = [], os.fsync

    def note(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, sorted(os.listdir(path)) if os.path.isdir(path) else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    to = tmp_path / "new" / "out"
    written = hoist.torch.deepspeed.export(store, to, ADAMW)
    last = {path.replace(".partial", ""): entries for path, entries in synced}
    for path, folders, files in os.walk(written):
        assert last[path] == sorted(folders + files), path
        assert all(os.path.join(path, name) in last for name in files)
    assert last[str(to)] == ["global_step1", "latest_universal", "latest_universal.lock"]
    assert "out" in last[str(to.parent)]
    order = [path for path, _ in synced]
    assert order.index(str(to)) < order.index(str(to / "latest_universal.partial"))


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    store = trained_store(tmp_path / "store")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(universal._Export, "_model", fail)
    (tmp_path / "mine").mkdir()
    for to in (tmp_path / "out", tmp_path / "mine"):
        with pytest.raises(OSError, match="no space"):
            hoist.torch.deepspeed.export(store, to, ADAMW)
    assert not (tmp_path / "out").exists() and os.listdir(tmp_path / "mine") == []


@pytest.mark.parametrize("where", ["afile", "afile/x", "link"])
def test_a_directory_that_cannot_be_made_is_said(tmp_path, where):
    (tmp_path / "afile").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(hoist.IoError, match=f"making the directory {tmp_path / where} failed: .*choose another directory"):
        hoist.torch.deepspeed.export(trained_store(tmp_path / "store"), tmp_path / where, ADAMW)


def test_a_refused_export_leaves_no_parents(tmp_path, monkeypatch):
    store = trained_store(tmp_path / "store")
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
    for to in (tmp_path / "a" / "b" / "c", tmp_path / "mine" / "d" / "e"):
        with pytest.raises(hoist.IoError, match="are free"):
            hoist.torch.deepspeed.export(store, to, ADAMW)
    assert not (tmp_path / "a").exists() and os.listdir(tmp_path / "mine") == []
