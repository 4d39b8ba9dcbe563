# SPDX-License-Identifier: Apache-2.0
"""Runs files of tests; exit status 77, which ctest shows as skipped, when what they need is not installed.

Importing PyTorch takes seconds of a processor, and trainers take ten. Several files are each run in a process that is forked
from this one, which has imported these and done nothing else.
"""

import atexit
import gc
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
import threading

SKIPPED = 77


def run(arguments):
    """Runs a file of tests in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
    device = os.environ.get("HOIST_TEST_ACCELERATOR")
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a configuration that names no device would mean the GPU
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("skipped: PyTorch finds no GPU")
            return SKIPPED
    elif device:
        import torch.utils.cpp_extension

        import hoist.torch.model.unit_tensors

        if not (torch.utils.cpp_extension.is_ninja_available() and hoist.torch.model.unit_tensors.CAN_REFUSE):
            print("skipped: the test accelerator needs ninja, and PyTorch 2.13 or newer")
            return SKIPPED

    import pytest

    with tempfile.TemporaryDirectory(prefix="hoist-test-python-") as directory:
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:anyio", f"--basetemp={directory}/t"]
        status = pytest.main([*options, *arguments])
    # 5: no test was collected, because a module the whole file needs is missing.
    return SKIPPED if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


def import_for(files):
    """Imports what the files import, as far as it is installed and starts no thread: torch.optim imports torch._dynamo."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    wanted = ["torch", "torch._dynamo", "pytest", "hoist.torch"]
    if any("trainer" in name or "finetune" in name for name in files):
        wanted += ["transformers.trainer", "peft", "trl.trainer.sft_trainer"]
    for name in wanted:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def run_each(files):
    """Runs every file in a process of its own. A group is skipped when all of its files are."""
    import_for([pathlib.Path(file).name for file in files])
    gc.collect()
    gc.freeze()  # garbage collections in a child process skip the imported modules
    statuses = {}
    for file in files:
        print(f"== {pathlib.Path(file).name}", flush=True)
        child = os.fork()
        if child == 0:
            status = run([file])
            # Ends as the interpreter does, but does not unload imported modules, which takes seconds of processor time.
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        statuses[file] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    gc.unfreeze()
    failed = [pathlib.Path(file).name for file, status in statuses.items() if status not in (0, SKIPPED)]
    if failed:
        print(f"failed: {' '.join(failed)}")
        return 1
    return SKIPPED if all(status == SKIPPED for status in statuses.values()) else 0


def main():
    missing = [name for name in ("pytest", "torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {sys.executable} has no {', '.join(missing)} (pip install {' '.join(missing)})")
        return SKIPPED
    files = sys.argv[1:]
    if len(files) > 1 and all(name.endswith(".py") for name in files):
        return run_each(files)
    return run(files)


if __name__ == "__main__":  # tests fork processes, which import this file
    sys.exit(main())
