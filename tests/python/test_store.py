# SPDX-License-Identifier: Apache-2.0
"""hoist.store: what a run has left on NVMe, without its program."""

import os
import pathlib
import shutil
import threading
import time

import pytest
import torch

import hoist
import hoist.store
import hoist.torch
from models import Gpt, freeze_base
from test_checkpoint_failures import write
from training import train


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 64}}],
                         ids=["fp32", "bf16", "fp16"])
def test_what_was_trained_is_read(settings, tmp_path, changes):
    config = settings(**changes)
    config["hoist"]["keep_steps"] = 1
    torch.manual_seed(0)
    with hoist.torch.wrap(freeze_base(Gpt()), config) as engine:
        train(engine, 2)
        engine.state["epoch"] = 7
        engine.save("two").wait()
        at_two = engine.state_dict()
        train(engine, 1, first=2)
        engine.settle()
        weights, masters = engine.state_dict(), engine.state_dict(torch.float32)
        moments = {name: engine.read(name, hoist.State.moment1) for name in masters if ".a." in name}
        with pytest.raises(hoist.StoreError):
            hoist.store.open(tmp_path / "store")  # a trainer holds it
        seen = hoist.store.steps(tmp_path / "store")
        assert seen.commits[0] == 3 and seen.checkpoints == {"two": 2}

    with hoist.store.open(tmp_path / "store") as stored:
        assert stored.step == 3 and stored.world_size == 1 and stored.program_state == {"epoch": 7}
        assert set(stored) == set(masters) - {"head.weight"} and len(stored) == len(stored.parameters)
        for name in stored:
            assert stored[name].dtype == weights[name].dtype and torch.equal(stored[name], weights[name]), name
            assert torch.equal(stored.read(name), masters[name]), name
        assert moments
        for name, values in moments.items():
            assert stored.parameters[name].trainable
            assert torch.equal(stored.read(name, hoist.State.moment1), values), name
        with pytest.raises(hoist.UsageError):
            stored.read("blocks.0.qkv.base.weight", hoist.State.moment1)  # frozen
        with pytest.raises(KeyError):
            stored["nothing"]
    assert hoist.store.verify(tmp_path / "store") == []
    with pytest.raises(hoist.UsageError, match="closed"):
        stored.read("token.weight")
    with hoist.store.open(tmp_path / "store", checkpoint="two") as stored:
        assert stored.step == 2
        assert all(torch.equal(stored[name], at_two[name]) for name in stored)
        other = Gpt()
        freeze_base(other).to(stored["token.weight"].dtype)
        missing = other.load_state_dict(dict(stored), strict=False)
        assert missing.missing_keys == ["head.weight"] and not missing.unexpected_keys


def test_a_checkpoint_whose_slot_is_damaged_is_damage(settings, tmp_path):
    config = settings()
    config["hoist"]["keep_steps"] = 1
    with hoist.torch.wrap(freeze_base(Gpt()), config) as engine:
        train(engine, 1)
        engine.save("kept").wait()
        train(engine, 1, first=1)
    manifest, = (tmp_path / "store").rglob("*.manifest")
    content = bytearray(manifest.read_bytes())
    content[content.rindex(b"kept")] ^= 1
    manifest.write_bytes(content)
    assert hoist.store.steps(tmp_path / "store").checkpoints == {}
    damage, = hoist.store.verify(tmp_path / "store")
    assert "named checkpoint slot" in damage


def test_a_run_continues_from_a_copy(settings, tmp_path):
    torch.manual_seed(0)
    with hoist.torch.wrap(Gpt(), settings()) as engine:
        train(engine, 2)
        at_two = engine.digest()
    with hoist.store.open(tmp_path / "store") as stored:
        stored.copy(tmp_path / "backup")
        stored.copy(tmp_path / "backup")  # compared
        with pytest.raises(hoist.UsageError, match="is where the store itself is"):
            stored.copy(tmp_path / "store")
    assert hoist.store.steps(tmp_path / "backup").commits == [2]
    with hoist.torch.wrap(Gpt(), settings(store="backup"), resume=True) as engine:
        assert engine.step_count == 2 and engine.digest() == at_two
        train(engine, 1)


def test_a_run_whose_newest_store_is_incomplete_is_not_begun_anew(settings, tmp_path):
    config = settings(store="store/rank-0")
    for kept, first in (1, 0), (2, 2):  # the second needs a new store
        config["hoist"]["keep_steps"] = kept
        with hoist.torch.wrap(Gpt(), config, resume=True) as engine:
            train(engine, 2, first=first)
            if kept == 1:
                engine.save("two").wait()
    before = tmp_path / "store/rank-0/hoist"
    assert hoist.store.steps(before).commits[0] == 4
    manifest, = before.glob("reshard-*/*.manifest")
    manifest.rename(tmp_path / "manifest")
    with pytest.raises(hoist.StoreError, match="manifest is missing"):
        hoist.store.steps(before)
    with pytest.raises(hoist.StoreError, match="manifest is missing"):
        hoist.torch.wrap(Gpt(), settings(), resume=True)


def test_a_step_and_a_checkpoint_are_two_choices(tmp_path):
    with pytest.raises(hoist.UsageError, match="give one of them"):
        hoist.store.open(tmp_path, step=2, checkpoint="best")


def test_threads_ask_while_another_copies(settings, tmp_path):
    with hoist.torch.wrap(Gpt(), settings()) as engine:
        train(engine, 1)
    size = sum(file.stat().st_blocks for file in (tmp_path / "store").rglob("*.data")) * 512
    with hoist.store.open(tmp_path / "store") as stored:
        copying = threading.Thread(target=stored.copy, args=[tmp_path / "backup", size // 2])  # takes about 2 s
        copying.start()
        while copying.is_alive():
            assert stored.step == 1 and stored.world_size == 1
            time.sleep(0.01)
        copying.join()
    assert hoist.store.steps(tmp_path / "backup").commits == [1]


def test_damage_is_found_and_no_wrong_byte_is_read(settings, tmp_path):
    torch.manual_seed(0)
    with hoist.torch.wrap(Gpt(), settings()) as engine:
        train(engine, 2)
    (data,) = (tmp_path / "store").rglob("rank-00000.data")
    write(data, bytes(byte ^ 0x5A for byte in data.read_bytes()))
    with hoist.store.open(tmp_path / "store") as stored:
        damage = hoist.store.verify(tmp_path / "store")
        assert damage and any("blocks.1" in text for text in damage)
        with pytest.raises(hoist.CorruptionError) as error:
            stored["blocks.1.up.weight"]
        assert error.value.unit == "blocks.1"


def opened(path):
    """How often this process has a file open."""
    return sum(os.path.realpath(link) == os.path.realpath(path) for link in pathlib.Path("/proc/self/fd").iterdir())


def test_damage_is_told_and_no_checkpoint_that_is_removed_meanwhile(settings, tmp_path):
    torch.manual_seed(0)
    config = settings()
    config["hoist"] |= {"keep_steps": 1}
    found = []
    with hoist.torch.wrap(Gpt(), config) as engine:
        train(engine, 1)
        engine.save("one").wait()
        train(engine, 1, first=1)
        engine.settle()
        (data,) = (tmp_path / "store").rglob("rank-00000.data")
        write(data, bytes(byte ^ 0x5A for byte in data.read_bytes()))
        size = data.stat().st_size
        verifying = threading.Thread(target=lambda: found.extend(hoist.store.verify(tmp_path / "store", size // 4)))
        before = opened(data)
        verifying.start()
        while opened(data) == before and verifying.is_alive():  # the engine has it open as well
            time.sleep(0.01)
        engine.save("two").wait()  # which "one" makes room for
        verifying.join()
    assert any("blocks.1" in text for text in found)
    assert not any("'one'" in text for text in found), "a checkpoint that made room is no damage"


def test_where_there_is_none(tmp_path):
    with pytest.raises(hoist.StoreError):
        hoist.store.open(tmp_path)


def test_a_run_goes_on_from_its_mirror_when_its_drive_is_gone(settings, tmp_path):
    config = settings()
    config["hoist"]["mirror"] = {"path": str(tmp_path / "mirror"), "every": 0}
    torch.manual_seed(0)
    with hoist.torch.wrap(Gpt(), config) as engine:
        train(engine, 2)
        engine.state["epoch"] = 7
        assert engine.mirrored_step is None
        engine.save(mirror=True).wait()
        assert engine.mirrored_step == 2
        assert hoist.store.verify(tmp_path / "store") == []  # in use
        masters = engine.state_dict(torch.float32)
        train(engine, 1, first=2)
        undisturbed = engine.state_dict(torch.float32)
    with hoist.store.open(tmp_path / "mirror") as stored:
        assert stored.step == 2 and stored.program_state == {"epoch": 7}
    assert hoist.store.verify(tmp_path / "mirror", bytes_per_second=10**9) == []
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(hoist.StoreError, match="mirror"):
        hoist.torch.wrap(Gpt(), config)
    with hoist.torch.wrap(Gpt(), config, resume=True) as engine:
        assert engine.restored and engine.step_count == 2 and engine.state == {"epoch": 7}
        assert all(torch.equal(value, masters[name]) for name, value in engine.state_dict(torch.float32).items())
        train(engine, 1, first=2)
        assert all(torch.equal(value, undisturbed[name]) for name, value in engine.state_dict(torch.float32).items())
    del config["hoist"]["mirror"]
    with hoist.torch.wrap(Gpt(), config, resume=True) as engine, pytest.raises(hoist.UsageError, match="hoist.mirror"):
        engine.save(mirror=True)
