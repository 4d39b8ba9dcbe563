# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import hoist
import hoist.aio


@pytest.mark.parametrize("backend", ["automatic", "threads"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("count", [1, 4096, 1_000_003])
def test_what_was_written_is_read(tmp_path, backend, aligned, count):
    engine = hoist.aio.Engine(backend=backend)
    source = hoist.aio.aligned_empty(count) if aligned else torch.empty(count + 1)[1:]
    source.copy_(torch.arange(count))
    engine.write(source, tmp_path / "t").wait()
    assert (tmp_path / "t").stat().st_size == count * 4
    target = torch.full((count,), -1.0)
    transfer = engine.read(target, tmp_path / "t")
    transfer.wait()
    assert transfer.done()
    transfer.wait()
    assert torch.equal(target.cpu(), source.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_any_type_at_any_offset(tmp_path, dtype):
    engine = hoist.aio.Engine()
    source = torch.randint(0, 2, (33, 7)).to(dtype)
    engine.write(torch.zeros(10_000, dtype=torch.uint8), tmp_path / "t").wait()
    engine.write(source, tmp_path / "t", offset=1001).wait()
    target = torch.zeros(33, 7, dtype=dtype)
    engine.read(target, tmp_path / "t", offset=1001).wait()
    assert torch.equal(target, source)
    assert (tmp_path / "t").stat().st_size == 10_000


def test_writes_to_one_file_at_the_same_time_all_arrive_and_it_ends_where_the_last_one_ends(tmp_path):
    engine = hoist.aio.Engine()
    for turn in range(20):
        path = tmp_path / f"t{turn % 4}"  # new ones, and ones that are written over
        parts = [torch.full((length,), turn + i, dtype=torch.uint8) for i, length in enumerate([5000, 17, 4096, 30_001, 1, 777])]
        offsets = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]
        order = torch.randperm(len(parts), generator=torch.Generator("cpu").manual_seed(turn), device="cpu").tolist()
        writes = {i: engine.write(parts[i], path, offset=offsets[i]) for i in order}
        for i in reversed(range(len(parts))) if turn % 2 else order:
            writes.pop(i).wait() if turn % 3 else writes.pop(i)  # some are not waited for: their end does
        assert path.read_bytes() == torch.cat([part.cpu() for part in parts]).numpy().tobytes()


def test_engines_that_write_parts_of_one_file_keep_each_others(tmp_path):
    first, second = hoist.aio.Engine(), hoist.aio.Engine(backend="threads")
    long = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    for turn in range(10):
        path = tmp_path / f"t{turn % 2}"
        split = len(long) if turn < 5 else 1_000_001 + turn  # at a block, and inside of one
        parts = [(first, long[:split], 0), (second, torch.full((100,), turn, dtype=torch.uint8), split),
                 (first, torch.full((9,), 77, dtype=torch.uint8), split + 100)]
        writes = [engine.write(part, path, offset=offset) for engine, part, offset in (parts if turn % 3 else reversed(parts))]
        for write in writes if turn % 2 else reversed(writes):
            write.wait()
        assert path.read_bytes() == torch.cat([part.cpu() for _, part, _ in parts]).numpy().tobytes(), turn
        path.unlink()


def test_a_file_that_another_process_makes_longer_is_not_cut_off(tmp_path):
    path = tmp_path / "t"
    engine = hoist.aio.Engine()
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    write = engine.write(source, path)
    with open(path, "r+b") as other:  # meanwhile
        other.seek(len(source))
        other.write(b"x" * 100)
    write.wait()
    assert path.stat().st_size == len(source) + 100


def test_a_write_that_fails_beside_another_leaves_the_others_length(tmp_path):
    program = """if True:
        import resource, signal, sys, torch, hoist.aio
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        engine = hoist.aio.Engine(backend="threads")
        good = engine.write(torch.ones(100, dtype=torch.uint8), sys.argv[1])
        bad = engine.write(torch.ones(4096, dtype=torch.uint8), sys.argv[1], offset=12288)
        try:
            bad.wait()
            sys.exit("written beyond the limit")
        except hoist.IoError:
            good.wait()
    """
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "t")], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "t").read_bytes() == b"\1" * 100


def test_a_read_into_memory_that_is_not_dense_is_refused(tmp_path):
    engine = hoist._hoist.AioEngine()
    engine.write(torch.ones(100, device="cpu"), str(tmp_path / "t")).wait()
    target = torch.zeros(100, 2, device="cpu")[:, 0]
    with pytest.raises(TypeError):
        engine.read(target, str(tmp_path / "t"))


def test_a_write_inside_of_the_last_sector_leaves_the_length(tmp_path):
    engine = hoist.aio.Engine()
    path = tmp_path / "t"
    engine.write(torch.zeros(10_000, dtype=torch.uint8), path).wait()
    engine.write(torch.ones(500, dtype=torch.uint8), path, offset=9000).wait()
    assert path.read_bytes() == bytes(9000) + b"\1" * 500 + bytes(500)
    path.write_bytes(b"\2" * 3)  # somebody else makes it shorter
    engine.write(torch.ones(5000, dtype=torch.uint8), path, offset=1).wait()
    assert path.read_bytes() == b"\2" + b"\1" * 5000


def test_many_at_once_and_the_tensor_may_go(tmp_path):
    engine = hoist.aio.Engine(queue_depth=4)
    writes = [engine.write(torch.full((50_000,), float(i)), tmp_path / str(i)) for i in range(20)]
    for write in writes:
        write.wait()
    targets = [torch.empty(50_000) for _ in writes]
    for read in [engine.read(t, tmp_path / str(i)) for i, t in enumerate(targets)]:
        read.wait()
    assert [t.unique().tolist() for t in targets] == [[float(i)] for i in range(20)]


def test_errors_say_what_and_where(tmp_path):
    engine = hoist.aio.Engine()
    with pytest.raises(hoist.IoError, match="nothing") as missing:
        engine.read(torch.empty(10), tmp_path / "nothing")
    assert missing.value.errno == 2 and missing.value.filename.endswith("nothing")
    assert isinstance(missing.value, OSError) and "Errno" not in str(missing.value)
    engine.write(torch.zeros(1024), tmp_path / "short").wait()
    with pytest.raises(hoist.IoError, match="short"):
        engine.read(torch.empty(5000), tmp_path / "short").wait()
    with pytest.raises(hoist.UsageError, match="dense"):
        engine.write(torch.zeros(10, 10).t()[1:], tmp_path / "t")


def test_an_error_names_a_file_whose_name_is_not_utf8(tmp_path):
    link = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.safetensors")
    os.symlink("nowhere", link)
    with pytest.raises(hoist.IoError, match=r"a\\xff.safetensors failed: No such file") as missing:
        hoist._hoist.tensors_in(str(tmp_path))
    assert missing.value.errno == 2 and missing.value.filename == link


def test_what_is_no_tensor_of_its_own_memory_is_refused(tmp_path):
    with pytest.raises(hoist.UsageError, match="negative"):
        hoist.aio.aligned_empty(-1)
    with pytest.raises(hoist.UsageError, match="negative"):
        hoist.aio.aligned_empty([-2, -3])
    engine, values = hoist.aio.Engine(), torch.ones(1, dtype=torch.complex64, device="cpu")
    for view in (values.conj(), values.conj().imag):
        with pytest.raises(hoist.UsageError, match="resolve_neg"):
            engine.write(view, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_waiting_leaves_other_threads_running(tmp_path):
    engine = hoist.aio.Engine()
    source = hoist.aio.aligned_empty(32 << 20, torch.uint8)
    ticks = []
    running = True

    def tick():
        while running:
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    def ticks_while_writing():
        begin = time.perf_counter()
        for _ in range(4):
            engine.write(source, tmp_path / "t").wait()
        end = time.perf_counter()
        return sum(begin < t < end for t in ticks) / (end - begin)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        # A second; a GIL that is held allows none ever, a busy machine few in some of the attempts.
        assert any(ticks_while_writing() > 20 for _ in range(20)), "the GIL was held while waiting"
    finally:
        running = False
    thread.join()


def test_a_signals_handler_runs_while_a_transfer_is_waited_for(tmp_path):
    engine = hoist.aio.Engine(block_size=4096, queue_depth=1, threads=1)
    target = hoist.aio.aligned_empty(16 << 20, torch.uint8)
    engine.write(target, tmp_path / "t").wait()

    def was_done_when_the_handler_ran(count):
        reads, done = [engine.read(target, tmp_path / "t") for _ in range(count)], []
        previous = signal.signal(signal.SIGALRM, lambda *_: done.append(reads[-1].done()))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            reads[-1].wait()
            while not done:
                time.sleep(0.01)
        finally:
            signal.signal(signal.SIGALRM, previous)
        return done == [True]

    # A fast drive needs several reads for the time between two looks at signals.
    assert not all(was_done_when_the_handler_ran(2**n) for n in range(6))


def test_deepspeeds_names(tmp_path):
    handle = hoist.aio.aio_handle(1 << 20, 32, False, False, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 20, 32, 2)
    name = str(tmp_path / "t")
    buffer = handle.new_cpu_locked_tensor(100_000, torch.empty(0, dtype=torch.bfloat16))
    buffer.copy_(torch.arange(100_000))
    assert handle.sync_pwrite(buffer, name) == 1
    assert handle.pwrite(buffer, name, True, False) == 1
    back = torch.zeros(100_000, dtype=torch.bfloat16)
    handle.async_pread(back[:50_000], name, 0)
    handle.async_pread(back[50_000:], name, 100_000)
    assert handle.wait() == 2
    assert torch.equal(back.cpu(), buffer)
    assert handle.pwrite(back, name, True, False) == 1
    assert handle.wait() == 0
    assert handle.free_cpu_locked_tensor(buffer) and not handle.free_cpu_locked_tensor(buffer)
    handle.async_pread(back, name, 1 << 30)
    with pytest.raises(hoist.IoError):
        handle.wait()
