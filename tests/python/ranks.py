# SPDX-License-Identifier: Apache-2.0
"""Processes of tests: the ranks of a job, or programs that are killed.

Importing PyTorch takes seconds of a processor, and some tests start dozens of processes. They are forked from multiprocessing's
fork server, which has imported PyTorch and done nothing else. Tests of how a process begins or ends start an interpreter instead.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading

import accelerator

_forks = multiprocessing.get_context("forkserver")
# DistributedDataParallel and torch.optim import torch._dynamo when they are used.
_imported = ["torch", "torch._dynamo", "pytest", "hoist.torch", "hoist.optim.offload", "hoist.store"]
if os.environ.get("HOIST_TEST_ACCELERATOR") not in (None, "cuda"):  # it looks for GPUs, which forked processes cannot use then
    _imported.append("torch.utils.cpp_extension")
_forks.set_forkserver_preload(_imported)

BEGIN = """
import json, os, signal, sys, time
import hoist.torch
import torch, torch.distributed as dist
import accelerator
from test_distributed import *
directory, config = sys.argv[1], json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join():
    backend = accelerator.process_group_backend()
    dist.init_process_group(backend, init_method=f"file://{directory}/meet", rank=rank, world_size=size)
"""


def import_too(module):
    """For files of tests whose programs import it: their server does so once, unless it has begun already."""
    _imported.append(module)
    _forks.set_forkserver_preload(_imported)


class Program:
    """A process that runs a text, with what one needs of subprocess.Popen."""

    def __init__(self, text, arguments=(), environment=None):
        self._said = tempfile.TemporaryDirectory(prefix="hoist-test-said-")
        words = [str(word) for word in arguments]
        self._process = _forks.Process(target=_run, args=(text, words, environment or {}, self._said.name), daemon=True)
        self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def wait(self, timeout=240):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a program of a test", timeout)
        return self.returncode

    def communicate(self, timeout=240):
        """Returns its standard output and standard error, once it has ended."""
        self.wait(timeout)
        return tuple(pathlib.Path(self._said.name, name).read_text() for name in ("1", "2"))

    def kill(self):
        self._process.kill()
        self._process.join()


def process_of(call, *arguments):
    """Starts a process of multiprocessing that ends as such a process does, unlike that of a Program."""
    process = _forks.Process(target=_called, args=(call.__module__, call.__name__, arguments), daemon=True)
    process.start()
    return process


def _called(module, name, arguments):
    accelerator.use_if_asked()  # before tests are imported
    getattr(importlib.import_module(module), name)(*arguments)


def _run(text, arguments, environment, said):
    """As an interpreter does with -c TEXT ARGUMENT..."""
    for stream in (1, 2):
        with open(os.path.join(said, str(stream)), "w") as file:
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    accelerator.use_if_asked()
    sys.argv = ["-c", *arguments]
    code = 0
    try:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and end.code is not code:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def output_of(text, *arguments, ends_with=0, **environment):
    """Runs a text to its end. Returns what it prints."""
    program = Program(textwrap.dedent(text), arguments, environment)
    out, error = program.communicate(600)
    assert program.returncode == ends_with, error
    return out


def start(program, directory, config, size=2, share_gpu=False, **environment):
    """Ranks of a job that run the program after BEGIN. They find each other in the directory.

    share_gpu: nothing is divided among them, so that one GPU is enough.
    """
    accelerator.skip_without_gpus(1 if share_gpu else size)
    os.makedirs(directory, exist_ok=True)
    return [Program(BEGIN + textwrap.dedent(program), [directory, json.dumps(config)],
                    {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)} | environment)
            for rank in range(size)]


def results(processes, timeout=240):
    """Returns the last line that every rank printed, as JSON."""
    ended = []
    try:
        for process in processes:
            out, error = process.communicate(timeout)
            assert process.returncode == 0, error
            ended.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return ended


def texts_of(program, directory, config, size=2):
    """The errors of all ranks."""
    return results(start("join()\ntext = 'no error'\ntry:\n" + textwrap.indent(textwrap.dedent(program), "    ") + """
except hoist.Error as error:
    text = f"{type(error).__name__}: {error}"
print(json.dumps(text), flush=True)
os._exit(0)
""", directory, config, size))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
