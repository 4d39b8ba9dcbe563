# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or fail: every rank gets an error that says which one, and why."""

import ctypes
import json
import os
import pathlib
import signal
import sys
import time
import types

import accelerator
import pytest
import torch.distributed as dist

import hoist
import hoist.torch
from hoist.torch.ranks import channels, distributed, job_store
from ranks import free_port, process_of, results, start, texts_of
from test_distributed import train_share, with_room
from training import make


def train_until_an_error(rank, directory, config, how):
    dist.init_process_group(accelerator.process_group_backend(), init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    engine = hoist.torch.wrap(make(), config)
    train_share(engine, rank, 2, 1)
    if rank == 1:
        try:
            raise ValueError("a bad sample")
        except ValueError:
            if how == "torch.multiprocessing":
                sys.exit(1)
            raise
    try:
        train_share(engine, rank, 2, 1, first=1)
    except hoist.Error as error:
        pathlib.Path(directory, "error").write_text(str(error))


@pytest.mark.parametrize("how", ["multiprocessing", "torch.multiprocessing"])
def test_ranks_of_multiprocessing_say_why_they_end(settings, tmp_path, how):
    accelerator.skip_without_gpus(2)
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 20.0
    ranks = [process_of(train_until_an_error, rank, str(tmp_path), config, how) for rank in range(2)]
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 1]
    assert "rank 1 failed: ValueError: a bad sample" in (tmp_path / "error").read_text()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_dies_is_an_error_on_the_other(settings, tmp_path, how):
    """Killed: its connections end. Stopped: nothing comes for as long as the configuration allows."""
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 5.0
    processes = start(f"""
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        if rank == 1:
            print("ready", flush=True)
            os.kill(os.getpid(), {int(signal.SIGKILL if how == "killed" else signal.SIGSTOP)})
        began = time.monotonic()
        try:
            train_share(engine, rank, size, 50, first=2)
        except hoist.Error as error:
            print(json.dumps([type(error).__name__, str(error), time.monotonic() - began]), flush=True)
            os._exit(0)
    """, tmp_path / "meet", config)
    try:
        out, error = processes[0].communicate(timeout=120)
        assert processes[0].returncode == 0, error
        kind, text, seconds = json.loads(out.splitlines()[-1])
        assert kind == "CommError", text
        assert "torch.distributed" in text and "on rank 0 of 2" in text
        assert seconds < 30
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_every_rank_names_the_one_that_was_killed_before_their_call(settings, tmp_path):
    """Which finds a connection that has ended already. The store is nobody's process."""
    processes = start("""
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        engine.settle()
        if rank == 2:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        try:
            train_share(engine, rank, size, 50, first=2)
        except hoist.CommError as error:
            print(json.dumps(str(error)), flush=True)
    """, tmp_path / "meet", with_room(settings), size=3)
    try:
        for process in processes[:2]:
            out, error = process.communicate(timeout=90)
            assert process.returncode == 0, error
            assert "rank 2 has closed its engine, or ended" in json.loads(out.splitlines()[-1]), out
    finally:
        for process in processes:
            process.kill()


def test_ranks_end_though_the_process_that_holds_the_store_does_not_answer(settings, tmp_path):
    """It is stopped, and so as silent as one behind a cable that is cut."""
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 4.0
    processes = start(f"""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{free_port()}"
        dist.init_process_group("gloo")
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        train_share(engine, rank, size, 50, first=2)
    """, tmp_path / "meet", config, size=3)
    try:
        texts = []
        for process in processes[1:]:
            _, error = process.communicate(timeout=90)
            assert process.returncode == 1 and "CommError" in error, error
            texts.append(error)
        assert any("rank 0 did not come within 4 s" in text for text in texts), texts
    finally:
        for process in processes:
            process.kill()


def test_a_rank_that_dies_between_two_channels_is_an_error_on_the_others(settings, tmp_path):
    """Long before the time-out of ten minutes."""
    processes = start(f"""
        from hoist.torch.ranks import channels
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{free_port()}"
        dist.init_process_group("gloo")
        if rank == 1:
            channels.Channel.duplicate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            hoist.torch.wrap(make(), config)
        except hoist.CommError as error:
            print(json.dumps(str(error)), flush=True)
    """, tmp_path / "meet", with_room(settings), size=3)
    try:
        assert processes[1].wait(120) == -signal.SIGKILL
        began = time.monotonic()
        for rank in (0, 2):
            out, error = processes[rank].communicate(timeout=120)
            assert processes[rank].returncode == 0, error
            text = json.loads(out.splitlines()[-1])
            assert f"on rank {rank} of 3" in text and "waiting for rank 1" in text, text
        assert time.monotonic() - began < 60
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_python_that_stands_still_has_not_lost_the_store():
    """Here an extension holds the GIL for longer than a rank waits for an answer."""
    def answer(_):
        time.sleep(0.2)
        ctypes.PyDLL(None).sleep(2)
        time.sleep(0.2)
        return "here"
    store = job_store.JobStore(dist.HashStore(), job_store._Thread())
    assert store.ask(answer, 1.0) == "here"


def test_a_process_that_was_forked_asks_no_store():
    """The thread that asks it is not there."""
    store = job_store.JobStore(dist.HashStore(), job_store._Thread())
    if (child := os.fork()) == 0:
        began = time.monotonic()
        try:
            store.ask(lambda plain: plain.set("key", "value"), 20)
        except job_store.StoreLost:
            os._exit(0 if time.monotonic() - began < 5 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_store_that_fails_in_the_process_itself_names_no_other_process():
    def fail(_):
        raise RuntimeError("No space left on device")
    store = job_store.JobStore(dist.HashStore(), job_store._Thread())
    with pytest.raises(job_store.StoreLost, match="^torch.distributed's store failed: No space left on device$"):
        store.ask(fail)


def test_a_restart_by_torchrun_does_not_read_the_failure_before_it(monkeypatch):
    """torchrun keeps one store over restarts. Agents of several machines do not count alike: their ranks must meet."""
    def start():
        monkeypatch.setattr(channels, "_numbers", {})
        return channels.Start((0,))
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    start().fail("its own reason")
    assert start().why(1) == "rank 0 failed: its own reason"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start().why(1) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert start().why(1) == "rank 0 failed: its own reason"


def test_a_rank_that_comes_too_late_for_wrap_waits_for_nobody(settings, tmp_path):
    config = with_room(settings)
    late = dict(config["hoist"])
    config["hoist"]["comm_timeout_seconds"] = 2.0
    texts = texts_of(f"""
        if rank == 1:
            config["hoist"] = {late}
            while not os.path.exists(directory + "/rank 0 gave up"):
                time.sleep(0.1)
        try:
            hoist.torch.wrap(make(), config)
        finally:
            open(directory + "/rank 0 gave up", "w").close()
    """, tmp_path / "meet", config)
    for text in texts:
        assert text.startswith("CommError") and "rank 1 did not come within 2 s (hoist.comm_timeout_seconds)" in text, text
    assert "rank 0 failed" in texts[1]


def test_a_slow_rank_is_named_with_the_key_that_gives_it_more_time(settings, tmp_path):
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 10.0
    texts = texts_of("""
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        try:
            while rank == 1 and not os.path.exists(directory + "/rank 0 gave up"):
                time.sleep(0.1)
            train_share(engine, rank, size, 1, first=1)
        finally:
            open(directory + "/rank 0 gave up", "w").close()
    """, tmp_path / "meet", config)
    for text in texts:
        assert text.startswith("CommError") and "rank 1 did not come within 10 s (hoist.comm_timeout_seconds)" in text, text
        assert "Every rank must make the same calls" not in text


def broken():
    raise LookupError("no such token")


def fail_in_forward(engine, steps):
    engine.module.blocks[1].up.register_forward_pre_hook(lambda *_: broken())
    train_share(engine, 1, 3, 1, first=steps)


def fail_between_steps(engine, steps):
    engine.settle()
    broken()


def fail_in_with(engine, steps):
    with engine:
        broken()


def fail_in_forward_in_with(engine, steps):
    with engine:
        fail_in_forward(engine, steps)


def fail_and_close(engine, steps):
    try:
        fail_in_forward(engine, steps)
    finally:
        engine.close()
        time.sleep(1000)  # its process, and with it the connections, would not end by themselves


def fail_between_steps_and_close(engine, steps):
    try:
        broken()
    finally:
        engine.close()


def fail_between_steps_and_close_for_long(engine, steps):
    """As with much pinned memory, which is given back after the connections have closed."""
    ending = engine._unit_manager
    engine._unit_manager = types.SimpleNamespace(close=lambda: (ending.close(), time.sleep(10)))
    fail_between_steps_and_close(engine, steps)


# Where they find each other, and the reason, is in the process of rank 0.
@pytest.mark.parametrize("how, failing", [(fail_in_forward, 0), (fail_in_forward, 1), (fail_between_steps, 0),
                                          (fail_in_with, 1), (fail_in_forward_in_with, 1), (fail_and_close, 2),
                                          (fail_between_steps_and_close, 0), (fail_between_steps_and_close, 1),
                                          (fail_between_steps_and_close_for_long, 1)])
def test_a_rank_that_raises_names_itself_to_the_others(settings, tmp_path, how, failing):
    """Within seconds, where the time-out is ten minutes, and whoever they wait for just then. The last step is not lost."""
    processes = start(f"""
        from test_rank_failures import {how.__name__}
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{free_port()}"
        dist.init_process_group("gloo")
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        if rank == {failing}:
            {how.__name__}(engine, 2)
        began = time.monotonic()
        try:
            train_share(engine, rank, size, 50, first=2)
        except hoist.CommError as error:
            print(json.dumps([str(error), time.monotonic() - began]), flush=True)
    """, tmp_path / "meet", with_room(settings), size=3)
    try:
        for rank, process in enumerate(processes):
            if rank == failing:
                continue
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error
            text, seconds = json.loads(out.splitlines()[-1])
            assert f"rank {failing} failed: LookupError: no such token" in text and f"on rank {rank} of 3" in text
            assert seconds < 40
        if how is not fail_and_close:
            out, error = processes[failing].communicate(timeout=60)
            raised = [line for line in error.splitlines() if "Error: " in line]
            assert processes[failing].returncode == 1 and "LookupError: no such token" in raised[-1], error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    with hoist.torch.wrap(make(), with_room(settings), resume=True) as engine:
        assert engine.step_count == 2


def test_an_end_in_an_except_block_is_an_error_on_no_rank(settings, tmp_path):
    """All ranks have made their last step, which is committed."""
    ended = results(start(f"""
        from test_rank_failures import broken
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{free_port()}"
        dist.init_process_group("gloo")
        engine = hoist.torch.wrap(make(), config)
        try:
            train_share(engine, rank, size, 2)
            time.sleep(rank)
            broken()
        except LookupError:
            engine.close()
        print(json.dumps(rank))
    """, tmp_path / "meet", with_room(settings), size=3))
    assert ended == [0, 1, 2]
    with hoist.torch.wrap(make(), with_room(settings), resume=True) as engine:
        assert engine.step_count == 2


def told_in_a_block_of(met, error):
    """What other ranks learn of an engine that ends in an `except` or `finally` block."""
    told = []
    met.add(types.SimpleNamespace(members=(0, 1), rank_of_job=1, leave=told.append, fail=told.append))
    try:
        raise error
    except BaseException:
        with met.told_of_error():
            assert len(told) in (0, 1)
    return set(told)


def test_an_error_from_before_the_engine_is_not_told_and_a_later_one_at_its_address_is():
    error = LookupError("no such token")
    try:
        raise error
    except LookupError:
        met = distributed.MetRanks([])
    assert told_in_a_block_of(met, error) == set()
    address = id(error)
    del error
    later = [LookupError("no such batch")]
    while id(later[-1]) != address and len(later) < 1000:
        later.append(LookupError("no such batch"))
    assert told_in_a_block_of(met, later[-1]) == {"rank 1 failed: LookupError: no such batch"}


@pytest.mark.parametrize("error, told", [(StopIteration(), {"rank 1 failed: StopIteration"}), (GeneratorExit(), set()),
                                         (SystemExit(), set()), (SystemExit(3), {"rank 1 failed: SystemExit: 3"})])
def test_a_loader_that_runs_out_on_one_rank_is_told_and_an_orderly_end_is_not(error, told):
    assert told_in_a_block_of(distributed.MetRanks([]), error) == told


def test_what_fails_on_one_rank_is_an_error_on_the_other(settings, tmp_path):
    """Wrong bytes on rank 1's drive: rank 0 learns of which unit, and both go back once the bytes are right again."""
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 1}
    ranks = results(start("""
        from test_checkpoint_failures import write
        import pathlib
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        engine.save("two").wait()
        expected = train_share(engine, rank, size, 2, first=2)
        engine.restore("two")
        dist.barrier()
        if rank == 1:
            store = pathlib.Path(config["zero_optimization"]["offload_param"]["nvme_path"])
            files = [f for f in store.rglob("*") if f.name == "rank-00001.data"]
            whole = [f.read_bytes() for f in files]
            for file, content in zip(files, whole, strict=True):
                write(file, bytes(byte ^ 0x5A for byte in content))
            assert len(files) == 1
        dist.barrier()
        began = time.monotonic()
        try:
            train_share(engine, rank, size, 2, first=2)
            text = "nothing happened"
        except hoist.Error as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        dist.barrier()
        if rank == 1:
            for file, content in zip(files, whole, strict=True):
                write(file, content)
        dist.barrier()
        assert engine.restore("two") == 2
        print(json.dumps([text, seconds, train_share(engine, rank, size, 2, first=2) == expected]))
        engine.close()
    """, tmp_path / "meet", config))
    (first, seconds, same), (second, _, same_there) = ranks
    assert second.startswith("CorruptionError") and same and same_there
    assert first.startswith("CommError") and "rank 1 failed" in first and "unit '" in first, first
    assert seconds < 40


def test_files_that_one_rank_cannot_write_end_nothing(settings, tmp_path):
    """Each rank raises the reason within seconds, and all train on."""
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 1, "comm_timeout_seconds": 60.0}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_bytes(b"another model")
    (tmp_path / "file").write_bytes(b"")
    ranks = results(start(f"""
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        texts = []
        for write in (lambda: engine.export({str(tmp_path / "full")!r}),
                      lambda: engine.save_checkpoint({str(tmp_path)!r} + ("/file" if rank else "/saved"), "tag")):
            began = time.monotonic()
            try:
                write()
            except (hoist.Error, OSError) as error:
                texts.append(str(error))
            assert time.monotonic() - began < 20
        texts.append(len(engine.export({str(tmp_path / "empty")!r})))
        train_share(engine, rank, size, 1, first=1)
        engine.close()
        print(json.dumps(texts))
    """, tmp_path / "meet", config))
    for rank, (export, checkpoint, files) in enumerate(ranks):
        assert "already holds model.safetensors" in export and "Not a directory" in checkpoint, (export, checkpoint)
        assert ("rank 0 failed: " in export) == (rank == 1) and ("rank 1 failed: " in checkpoint) == (rank == 0)
        assert files == (1 if rank == 0 else 0)


def test_a_full_disk_below_a_saved_model_is_told_to_all_ranks(settings, tmp_path):
    """Also where it is found between the reads that all ranks make."""
    pytest.importorskip("transformers")
    config = with_room(settings)
    config["hoist"] |= {"comm_timeout_seconds": 60.0}
    ranks = results(start(f"""
        import transformers
        from hoist.torch.pretrained import export as pretrained_export
        join()
        shape = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=2)
        model = transformers.LlamaForCausalLM(shape)
        engine = hoist.torch.wrap(model, config)
        written = pretrained_export._Files.write
        def write(files, *values):
            if len(calls := globals().setdefault("calls", [])) == 2:
                raise OSError(28, "No space left on device")
            calls.append(values)
            written(files, *values)
        pretrained_export._Files.write = write
        texts = []
        began = time.monotonic()
        try:
            pretrained_export.save_pretrained(engine, {str(tmp_path / "model")!r})
        except (hoist.Error, OSError) as error:
            texts.append(str(error))
        assert time.monotonic() - began < 20
        pretrained_export._Files.write = written
        pretrained_export.save_pretrained(engine, {str(tmp_path / "model")!r})
        tokens = torch.arange(16).view(2, 8) + rank
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
        engine.close()
        print(json.dumps(texts))
    """, tmp_path / "meet", config))
    for rank, (text,) in enumerate(ranks):
        assert "No space left on device" in text and ("rank 0 failed: " in text) == (rank == 1), text
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("failing", ['config["hoist"]["device_memory"] = "1KiB"', "model = 1"])
def test_an_error_in_wrap_is_told_to_ranks_that_wait(settings, tmp_path, failing):
    texts = texts_of(f"""
        model = make()
        if rank == 1:
            {failing}
        hoist.torch.wrap(model, config)
    """, tmp_path / "meet", with_room(settings))
    error = texts[1].partition(":")[0]
    assert error in ("ConfigError", "UsageError")
    assert texts[0].startswith("CommError") and f"rank 1 failed: hoist.{error}" in texts[0]


def test_ranks_meet_again_after_a_construction_that_failed_on_one(settings, tmp_path):
    texts = texts_of("""
        for attempt in range(2):
            try:
                engine = hoist.torch.wrap(1 if attempt == rank == 0 else make(), config)
            except hoist.Error as error:
                text = type(error).__name__
        train_share(engine, rank, size, 1)
        engine.close()
        dist.barrier()
    """, tmp_path / "meet", with_room(settings))
    assert texts == ["UsageError", "CommError"]


def test_a_restore_that_fails_on_one_rank_is_told_to_ranks_that_wait_in_theirs(settings, tmp_path):
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 2, "comm_timeout_seconds": 20.0}
    texts = texts_of("""
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        engine.save("one").wait()
        engine.restore("one" if rank else "two")
    """, tmp_path / "meet", config)
    assert texts[0].startswith("StoreError") and "'two'" in texts[0], texts
    assert texts[1].startswith("CommError") and "rank 0 failed: hoist.StoreError" in texts[1], texts


@pytest.mark.parametrize("damage, reason", [("[os.unlink(path) for path in glob.glob(mine + '/one/client_*')]", "is missing"),
                                            ("open(mine + '/latest', 'w').write('..')", "which is not the name of a checkpoint")])
def test_a_load_checkpoint_that_fails_on_one_rank_is_told_to_the_others(settings, tmp_path, damage, reason):
    """Its copy of the directory is damaged, or incomplete. All of them train on."""
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 2, "comm_timeout_seconds": 60.0}
    texts = texts_of(f"""
        import glob, shutil
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        engine.save_checkpoint(directory + "/saved", "one")
        dist.barrier()
        mine = shutil.copytree(directory + "/saved", directory + f"/of rank {{rank}}")
        if rank == 1:
            {damage}
        began = time.monotonic()
        try:
            engine.load_checkpoint(mine)
        finally:
            assert time.monotonic() - began < 30
            assert engine.load_checkpoint(directory + "/saved")[0]
            train_share(engine, rank, size, 1, first=1)
    """, tmp_path / "meet", config)
    assert texts[1].startswith("StoreError") and reason in texts[1], texts
    assert texts[0].startswith("Error: rank 1 failed: hoist.StoreError") and reason in texts[0], texts


@pytest.mark.parametrize("call", ["hoist.torch.wrap(make(), config)", "engine.wake()"])
def test_the_end_of_the_process_that_holds_the_store_is_named(settings, tmp_path, call):
    """A rank that meets the others there, by itself, would give what a socket says."""
    processes = start(f"""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{free_port()}"
        dist.init_process_group("gloo")
        engine = hoist.torch.wrap(make(), config)
        engine.sleep()
        if rank == 0:
            time.sleep(2)
            os._exit(3)
        try:
            {call}
        except hoist.Error as error:
            print(json.dumps([type(error).__name__, str(error)]), flush=True)
        os._exit(0)
    """, tmp_path / "meet", with_room(settings))
    try:
        out, error = processes[1].communicate(timeout=90)
        kind, text = json.loads(out.splitlines()[-1])
        assert kind == "CommError" and "the process that holds torch.distributed's store (rank 0, or torchrun's" in text, text
    finally:
        for process in processes:
            process.kill()
