# SPDX-License-Identifier: Apache-2.0
"""The accelerator that tests run on: a PyTorch device called "slate" (accelerator.cpp), or a GPU where
HOIST_TEST_ACCELERATOR=cuda. use() makes it the default device of PyTorch and of hoist."""

import atexit
import contextlib
import hashlib
import os
import pathlib
import tempfile
import types

import torch
import torch.utils.cpp_extension

import hoist.torch.engine
import hoist.torch.estimates
from hoist import _hoist

ON_GPU = os.environ.get("HOIST_TEST_ACCELERATOR") == "cuda"
NAME = "cuda" if ON_GPU else "slate"
STREAMS = 4  # the default one, and those that torch.Stream() takes in turn


def use_if_asked():
    """For programs that tests start."""
    if os.environ.get("HOIST_TEST_ACCELERATOR"):
        use()


def process_group_backend():
    """For torch.distributed.init_process_group(), where tensors are on the tests' device."""
    if not os.environ.get("HOIST_TEST_ACCELERATOR"):
        return "gloo"
    return f"cpu:gloo,{NAME}:{'gloo' if ON_GPU else 'staged'}"  # NCCL wants a GPU for each rank


def sleep(milliseconds):
    """Delays the current stream."""
    if ON_GPU:
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles
    else:
        torch.slate._sleep(milliseconds)


def use():
    if ON_GPU:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # tests compare bits
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_device(NAME)
        return
    home = pathlib.Path(__file__).parent
    sources = [str(file) for file in sorted(home.glob("*.cpp"))]
    version = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(home.glob("*.[ch]pp")))).hexdigest()[:12]
    folder = os.path.join(tempfile.gettempdir(), f"hoist-test-accelerator-{os.getuid()}-{torch.__version__}-{version}")
    os.makedirs(folder, exist_ok=True)
    extension = torch.utils.cpp_extension.load(
        "hoist_test_accelerator", sources, extra_cflags=["-O1", "-std=c++20"],
        build_directory=folder)
    streams = [_hoist.HostStream() for _ in range(STREAMS)]
    extension.start(_hoist.HostStream.functions(), [stream.address for stream in streams],
                    int(os.environ.get("HOIST_ACCELERATOR_SEED", "1")))
    atexit.register(extension.end)
    module = types.ModuleType(f"torch.{NAME}")
    module.hoist_stream = lambda: streams[extension.current_stream()]
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = lambda stream: stream  # which is a context
    module.device = lambda device: contextlib.nullcontext()
    module.synchronize = extension.synchronize
    module._sleep = extension.sleep  # (milliseconds): of the current stream
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: extension.synchronize()  # operators draw numbers from the CPU's when they run
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.set_default_device(NAME)
    os.environ["ACCELERATE_TORCH_DEVICE"] = NAME  # the device of transformers' Trainer
    torch.distributed.Backend.register_backend(
        "staged", lambda *place: extension.staged(torch.distributed.ProcessGroupGloo(*place)), devices=[NAME])

    own = hoist.torch.engine.device_of
    for module in (hoist.torch.engine, hoist.torch.estimates):
        module.device_of = lambda config, wanted: own(config, wanted or torch.device(NAME, 0))
