# SPDX-License-Identifier: Apache-2.0
"""A PyTorch device for tests, called "slate": see accelerator.cpp. use() makes it the default device of PyTorch and of hoist."""

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

NAME = "slate"


STREAMS = 4  # the default one, and those that torch.Stream() takes in turn


def use_if_asked():
    """For programs that tests start."""
    if os.environ.get("HOIST_TEST_ACCELERATOR"):
        use()


def process_group_backend():
    """For torch.distributed.init_process_group(), where tensors are on the tests' device."""
    return f"cpu:gloo,{NAME}:staged" if os.environ.get("HOIST_TEST_ACCELERATOR") else "gloo"


def use():
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
