# SPDX-License-Identifier: Apache-2.0
"""A PyTorch device for tests, called "slate": see accelerator.cpp. use() makes it the default device of PyTorch and of hoist."""

import os
import pathlib
import tempfile
import types

import torch
import torch.utils.cpp_extension

import hoist.torch.engine
from hoist import _hoist

NAME = "slate"


def use():
    folder = os.path.join(tempfile.gettempdir(), f"hoist-test-accelerator-{os.getuid()}-{torch.__version__}")
    os.makedirs(folder, exist_ok=True)
    extension = torch.utils.cpp_extension.load(
        "hoist_test_accelerator", [str(pathlib.Path(__file__).with_name("accelerator.cpp"))],
        extra_cflags=["-O1", "-std=c++20"], build_directory=folder)
    stream = _hoist.HostStream()
    extension.start(*stream.functions(), int(os.environ.get("HOIST_ACCELERATOR_SEED", "1")))
    module = types.ModuleType(f"torch.{NAME}")
    module.hoist_stream = lambda: stream
    module.synchronize = extension.synchronize
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

    own = hoist.torch.engine.device_of
    hoist.torch.engine.device_of = lambda config, wanted: own(config, wanted or torch.device(NAME, 0))
