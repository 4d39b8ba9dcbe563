# SPDX-License-Identifier: Apache-2.0
"""An engine in a process that was forked: calls are refused, and the process ends like any other."""

import os
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

import pytest
import torch

import hoist
import hoist.optim
import hoist.torch
from models import batches, loss_of
from ranks import Program, process_of
from training import make, train


def exit_code_of_fork(body, seconds=30):
    """`body()` runs in the child, which then ends as a Python program does; -1 if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(9)
        sys.exit(0)
    for _ in range(seconds * 20):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def run_program(text, *arguments, seconds=120):
    """A program of its own, because its child runs the interpreter's end."""
    here = str(Path(__file__).parent)
    begin = "import sys\nsys.path.insert(0, sys.argv.pop(1))\nimport accelerator\naccelerator.use_if_asked()\n"
    code = begin + textwrap.dedent(text)
    return subprocess.run([sys.executable, "-c", code, here, *arguments], capture_output=True, text=True, timeout=seconds)


PROGRAM = """
    import json, os, sys, time
    import hoist, hoist.torch
    from test_processes import exit_code_of_fork
    from training import make, train

    def refused(call):
        try:
            call()
        except hoist.UsageError as error:
            return "forked" in str(error)
        return False

    engine = hoist.torch.wrap(make(), json.loads(sys.argv[1]))
    train(engine, 1)
"""


def config_of(settings):
    import json

    return json.dumps(settings())


def test_a_forked_process_ends_normally_and_the_parent_continues(settings):
    program = PROGRAM + """
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # atexit handlers and destructors run
    for _ in range(600):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, 9)
        sys.exit("the child hangs")
    assert status == 0, status
    train(engine, 1, first=1)
    engine.close()
    assert hoist.torch.wrap(make(), json.loads(sys.argv[1]), resume=True).step_count == 2
    """
    result = run_program(program, config_of(settings))
    assert result.returncode == 0, result.stderr


def test_what_a_program_does_at_its_end_a_forked_process_does_not():
    result = run_program("""
    import os, sys
    import torch
    from hoist.program_end import AtExit

    AtExit(lambda: print(os.getpid(), flush=True))
    print(os.getpid(), flush=True)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    """)
    own, *calling = result.stdout.split()
    assert result.returncode == 0 and set(calling) == {own}, (result.stdout, result.stderr)


@pytest.mark.host_device("a forked process cannot use CUDA, and PyTorch says so")
def test_calls_in_a_forked_process_are_usage_errors(settings):
    program = PROGRAM + """
    def child():
        calls = [engine.step, engine.settle, engine.save, lambda: train(engine, 1), lambda: engine.read("norm.weight"),
                 engine.state_dict, engine.restore, engine.digest]
        assert all(refused(call) for call in calls), [refused(call) for call in calls]
        engine.close()

    assert exit_code_of_fork(child) == 0
    train(engine, 1, first=1)
    engine.close()
    """
    result = run_program(program, config_of(settings))
    assert result.returncode == 0, result.stderr


def test_a_with_block_that_a_forked_process_leaves_ends_nothing(settings):
    program = PROGRAM + """
    with engine:
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        train(engine, 1, first=1)
        assert engine.committed_step is not None
    """
    result = run_program(program, config_of(settings))
    assert result.returncode == 0, result.stderr


@pytest.mark.cpu_tensors("a worker's samples are CPU tensors")
def test_workers_of_a_data_loader_end(settings):
    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.samples = [(i[0], t[0]) for i, t in batches(4)]

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            return self.samples[index]

    with hoist.torch.wrap(make(), settings()) as engine:
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        for inputs, targets in loader:
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()
        assert engine.step_count == 2


def test_a_program_of_a_test_says_why_it_exits():
    program = Program("import sys; sys.exit('the drive is full')")
    _, error = program.communicate()
    assert error.splitlines()[-1:] == ["the drive is full"] and program.returncode == 1


def test_transfers_and_stores_do_not_hold_up_a_forked_process(settings, tmp_path):
    program = PROGRAM + """
    import hoist.aio, hoist.store, torch
    engine.close()
    store = hoist.store.open(json.loads(sys.argv[1])["zero_optimization"]["offload_param"]["nvme_path"])
    transfers = hoist.aio.Engine()
    transfers.write(torch.zeros(4096, dtype=torch.uint8, device="cpu"), sys.argv[2]).wait()

    def child():
        assert refused(lambda: transfers.read(torch.zeros(4096, dtype=torch.uint8, device="cpu"), sys.argv[2]))
        assert refused(lambda: store.read("norm.weight"))

    assert exit_code_of_fork(child) == 0
    """
    result = run_program(program, config_of(settings), str(tmp_path / "file"))
    assert result.returncode == 0, result.stderr


kept = []  # until the process ends


def train_to_the_end(config):
    kept.append(hoist.torch.wrap(make(), config))
    train(kept[0], 3)


def optimize_to_the_end(directory):
    model = torch.nn.Linear(8, 8)
    optimizer = hoist.optim.AdamW(model.named_parameters(), lr=1e-2, offload="nvme", directory=directory)
    kept.append(optimizer)
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["an engine", "hoist.optim"])
def test_a_process_of_multiprocessing_commits_its_last_step(settings, tmp_path, kind):
    """A process that multiprocessing has forked ends without atexit's handlers."""
    work = {"an engine": (train_to_the_end, settings()), "hoist.optim": (optimize_to_the_end, str(tmp_path / "store"))}[kind]
    process = process_of(*work)
    process.join(60)
    assert process.exitcode == 0
    steps, _ = hoist._hoist.steps_in_store(str(tmp_path / "store/hoist"))
    assert max(step for step, _ in steps) == 3
