# SPDX-License-Identifier: Apache-2.0
"""Runs one file of tests; exit status 77, which ctest shows as skipped, when what it needs is not installed."""

import importlib.util
import os
import sys
import tempfile


def main():
    missing = [name for name in ("pytest", "torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {sys.executable} has no {', '.join(missing)} (pip install {' '.join(missing)})")
        return 77

    device = os.environ.get("HOIST_TEST_ACCELERATOR")
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a configuration that names no device would mean the GPU
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("skipped: PyTorch finds no GPU")
            return 77
    elif device:
        import torch.utils.cpp_extension

        import hoist.torch.unit_tensors

        if not (torch.utils.cpp_extension.is_ninja_available() and hoist.torch.unit_tensors.CAN_REFUSE):
            print("skipped: the test accelerator needs ninja, and PyTorch 2.13 or newer")
            return 77

    import pytest

    with tempfile.TemporaryDirectory(prefix="hoist-test-python-") as directory:
        status = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", f"--basetemp={directory}/t", *sys.argv[1:]])
    # 5: no test was collected, because a module the whole file needs is missing.
    return 77 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":  # tests fork processes, which import this file
    sys.exit(main())
