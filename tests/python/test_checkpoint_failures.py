# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on full and failing drives, in damaged files, under signal handlers that raise, and in killed programs."""

import errno
import os
import resource
import signal
import sys

import pytest
import torch

import hoist
import hoist.torch
from hoist import signal_handlers
from hoist.torch.checkpoint.checkpoints import write_durably
from ranks import output_of
from test_checkpoints import initialize, keeping
from training import digests, make, train


def test_damaged_small_files_are_said_with_the_path(settings, tmp_path):
    """And with what still continues."""
    engine, *_ = initialize(settings())
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "c", client_state={"epoch": 1})
    latest, client = tmp_path / "c" / "latest", tmp_path / "c" / "global_step1" / "client_state-1.pt"

    def refusal():
        with pytest.raises(hoist.StoreError) as caught:
            engine.load_checkpoint(tmp_path / "c")
        return str(caught.value)

    whole = client.read_bytes()
    for count in (0, 10, len(whole) // 2):
        client.write_bytes(whole[:count])
        assert f"{client} cannot be loaded (" in (said := refusal()) and "damaged, restore('global_step1') continues" in said
    client.unlink()
    assert f"is number 1, and {client} is missing; restore('global_step1') continues" in refusal()
    client.write_bytes(whole)
    for content in (b"a\0", b"\xff\xfe", b"", b"../c/global_step1"):
        latest.write_bytes(content)
        assert f"{latest} holds '" in (said := refusal()) and "name one with tag=..." in said
    assert engine.load_checkpoint(tmp_path / "c", tag="global_step1")[1] == {"epoch": 1}
    engine.close()


def test_a_full_drive_is_said_with_the_path(tmp_path):
    path = tmp_path / "client_state-1.pt"
    (tmp_path / "client_state-1.pt.partial").symlink_to("/dev/full")
    with pytest.raises(hoist.IoError, match=f"{path}.*No space left on device; free space on this drive, or") as caught:
        write_durably(str(path), lambda file: torch.save(torch.ones(10_000), file))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path)) and not path.exists()


def test_a_failed_write_is_said_where_torch_hides_it(tmp_path):
    """torch.save() raises an error about positions in its archive, unless closing the file fails, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(hoist.IoError, match="state.pt failed: File too large; raise the limit of file sizes") as caught:
            write_durably(str(tmp_path / "state.pt"), lambda file: torch.save(torch.ones(10_000), file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert os.listdir(tmp_path) == []  # the partial file takes no space on a full drive


@pytest.mark.parametrize("code, remedy", [(errno.EDQUOT, "raise the quota, or choose another directory"),
                                          (errno.EROFS, "this file system is mounted read-only: .*"),
                                          (errno.EIO, "check the drive's health .*")])
def test_a_drive_that_fails_otherwise_is_not_called_full(tmp_path, monkeypatch, code, remedy):
    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(hoist.IoError, match=f"latest failed: {os.strerror(code)}; {remedy}$"):
        write_durably(str(tmp_path / "latest"), lambda file: file.write(b"tag"))


@pytest.fixture
def alarm():
    """Has the program's handler of a signal raise a TimeoutError, which is an OSError."""
    def handler(*_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as a watchdog does that barks once
        raise TimeoutError("alarm")

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda *_: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", ["fsync", "rmdir"])
def test_an_alarm_while_a_checkpoint_is_saved_is_no_failure_of_the_drive(settings, tmp_path, monkeypatch, alarm, call):
    """Also where the client state of one that makes room is removed. The call counts as interrupted."""
    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path / "c", "one")
        train(engine, 1, first=1)
        with monkeypatch.context() as context:
            context.setattr(os, call, alarm)
            with pytest.raises(TimeoutError, match="^alarm$"):
                engine.save_checkpoint(tmp_path / "c", "two")
        with pytest.raises(hoist.UsageError, match=r"save_checkpoint\(\) was interrupted by TimeoutError"):
            engine.state_dict()
        engine.load_checkpoint(tmp_path / "c")
        train(engine, 1, first=engine.step_count)


def test_an_alarm_in_a_write_is_raised_where_torch_hides_it(tmp_path, alarm):
    def in_write(frame, event, called):
        if event == "c_call" and frame.f_code.co_name == "write" and called.__name__ == "write":
            sys.setprofile(None)
            alarm()

    signal_handlers.note()
    sys.setprofile(in_write)
    try:
        with pytest.raises(TimeoutError, match="^alarm$"):
            write_durably(str(tmp_path / "state.pt"), lambda file: torch.save(torch.ones(100_000), file))
    finally:
        sys.setprofile(None)
    assert os.listdir(tmp_path) == []


def test_an_error_out_of_code_that_cannot_be_hashed_is_told_from_a_handlers():
    """torch.compile makes code whose constants are objects of any kind."""
    def fail():
        raise LookupError("of the program")

    fail.__code__ = fail.__code__.replace(co_consts=(*fail.__code__.co_consts, {}))
    with pytest.raises(LookupError) as raised:
        fail()
    assert not signal_handlers.raised(raised.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_after_a_failed_write_is_raised(tmp_path, error):
    def fail_and_interrupt(file):
        with pytest.raises(OSError, match="No space left"):
            file.write(bytes(1 << 20))
        raise error

    (tmp_path / "state.pt.partial").symlink_to("/dev/full")
    with pytest.raises(error):
        write_durably(str(tmp_path / "state.pt"), fail_and_interrupt)


def test_a_function_that_was_a_handler_once_interrupts_nothing_when_the_program_calls_it():
    def raise_it(*_):
        raise LookupError("no such token")

    before = signal.signal(signal.SIGALRM, raise_it)
    signal_handlers.note()
    signal.signal(signal.SIGALRM, before)
    with pytest.raises(LookupError) as raised:
        raise_it()
    assert signal_handlers.raised(raised.value)  # as far as this call can know: it may have replaced itself
    signal_handlers.note(is_outermost=False)
    assert signal_handlers.raised(raised.value)
    signal_handlers.note()
    assert not signal_handlers.raised(raised.value)


class Alarm:
    def __reduce__(self):
        return signal.raise_signal, (signal.SIGALRM,)


def test_an_alarm_while_a_checkpoint_is_loaded_is_no_damage(settings, tmp_path, alarm):
    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path, "one", {"alarm": Alarm()})
        with pytest.raises(TimeoutError, match="^alarm$"):
            engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)  # the signal is ignored now
        train(engine, 1, first=1)


@pytest.mark.parametrize("error", [TypeError, FileNotFoundError])
def test_a_state_that_cannot_be_pickled_is_no_failure_of_the_drive(tmp_path, error):
    class Unsaved:
        def __getstate__(self):
            try:
                return (tmp_path / "missing").read_bytes()
            except FileNotFoundError:
                raise error("cannot be pickled") from None

    with pytest.raises(error, match="^cannot be pickled$"):
        write_durably(str(tmp_path / "state.pt"), lambda file: torch.save({"model": Unsaved()}, file))


def test_killed_while_saving(settings, tmp_path):
    """Whenever it dies, `latest` names a step that comes back with its own client state."""
    config = keeping(settings, 2)
    program = f"""
        import os, signal, sys, threading, time
        from test_checkpoints import initialize, train
        after = float(sys.argv[1])
        engine, *_ = initialize({config!r})
        engine.load_checkpoint({str(tmp_path / "c")!r})
        first = engine.step_count
        print(first, flush=True)
        killer = threading.Thread(target=lambda: (time.sleep(after), os.kill(os.getpid(), signal.SIGKILL)), daemon=True)
        for step in range(first, 1000):
            train(engine, 1, first=step)
            engine.save_checkpoint({str(tmp_path / "c")!r}, client_state={{"step": step + 1}})
            if step == first:
                killer.start()
    """
    reached = 0
    for after in (0.1, 0.13, 0.17):
        began = int(output_of(program, after, ends_with=-signal.SIGKILL).split()[0])
        assert began >= reached + (reached > 0)
        reached = began
    engine, *_ = initialize(config)
    path, client = engine.load_checkpoint(tmp_path / "c")
    assert path is not None and client["step"] == engine.step_count >= max(reached, 1)
    engine.close()


def test_killed_between_the_kept_step_and_latest(settings, tmp_path, caplog):
    """With room for one step, the one that `latest` names is gone then: the newest comes back, with its client state."""
    config = settings()
    output_of(f"""
        import os, signal
        from hoist.torch.checkpoint import checkpoints
        from test_checkpoints import initialize, train
        engine, *_ = initialize({config!r})
        train(engine, 2)
        engine.save_checkpoint({str(tmp_path / "c")!r}, client_state={{"step": 2}})
        write = checkpoints.write_durably
        def killed(path, content, **how):
            if path.endswith("latest"):
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, content, **how)
        checkpoints.write_durably = killed
        train(engine, 1, first=2)
        engine.save_checkpoint({str(tmp_path / "c")!r}, client_state={{"step": 3}})
    """, ends_with=-signal.SIGKILL)
    assert (tmp_path / "c" / "latest").read_text() == "global_step2"
    engine, *_ = initialize(config)
    assert engine.checkpoints() == {"global_step3": 3}
    path, client = engine.load_checkpoint(tmp_path / "c")
    assert path == str(tmp_path / "c" / "global_step3") and client == {"step": 3} and engine.step_count == 3
    assert "'global_step2'" in caplog.text and "'global_step3', step 3" in caplog.text
    train(engine, 1, first=3)
    engine.close()


def test_a_closed_engine_that_cannot_be_restored_stays_closed(settings):
    """Another engine has the store. The model can still be given weights for PyTorch alone."""
    config, model = settings(), make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with hoist.torch.wrap(model, config) as engine:
        train(engine, 1)
    with hoist.torch.wrap(make(), config, resume=True):
        with pytest.raises(hoist.StoreError, match="in use"):
            engine.restore()
        model.load_state_dict(state, assign=True)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["", "two"])
def test_after_damage_was_undone_a_failed_engine_goes_on(settings, tmp_path, how):
    """Every byte of the weights on NVMe is wrong for a while: the pass fails, the engine too, and restore() revives it."""
    with hoist.torch.wrap(make(), keeping(settings, 1)) as engine:
        train(engine, 2)
        engine.save("two").wait()
        train(engine, 1, first=2)
        engine.settle()
        expected = digests(engine)
        train(engine, 1, first=3)
        after = digests(engine)
        engine.restore("two")
        train(engine, 1, first=2)
        engine.settle()
        assert digests(engine) == expected
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
        assert files
        whole = [path.read_bytes() for path in files]
        every_byte_wrong = bytes(byte ^ 0x5A for byte in range(256))
        for path, content in zip(files, whole, strict=True):
            write(path, content.translate(every_byte_wrong))
        with pytest.raises(hoist.CorruptionError):
            train(engine, 1, first=3)
        with pytest.raises(hoist.Error):
            train(engine, 1, first=3)
        for path, content in zip(files, whole, strict=True):
            write(path, content)
        assert engine.restore(how) == (2 if how else 3)
        train(engine, 1, first=3 - bool(how))
        assert digests(engine) == (expected if how else after)
        assert engine.restore("two") == 2


def write(path, content):
    with open(path, "r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
