# SPDX-License-Identifier: Apache-2.0
"""The accelerator that tests run on. use() makes it the default device of PyTorch and of hoist.

HOIST_TEST_ACCELERATOR=1 means a PyTorch device called "slate" (accelerator.cpp), and "cuda" a GPU. Any other value is the name
that slate takes: transformers and accelerate train in bf16 and fp16 only on devices whose names they know, such as "musa".
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.machinery
import os
import pathlib
import sys
import tempfile
import types

import pytest
import torch
import torch.utils.cpp_extension

import hoist.torch.engine
import hoist.torch.estimates
from hoist import _hoist

WANTED = os.environ.get("HOIST_TEST_ACCELERATOR", "1")
ON_GPU = WANTED == "cuda"
NAME = "slate" if WANTED == "1" else WANTED
COLLECTIVES = {"musa": ("mccl",)}  # that accelerate asks for on a device of this name
STREAMS = 4  # the default one, and those that torch.Stream() takes in turn


def use_if_asked(cpu_by_default=False):
    """For programs that tests start; cpu_by_default is conftest's fixture of that name."""
    if os.environ.get("HOIST_TEST_ACCELERATOR"):
        use()
        if cpu_by_default and ON_GPU:
            torch.set_default_device("cpu")


def process_group_backend():
    """For torch.distributed.init_process_group(), where tensors are on the tests' device."""
    if not os.environ.get("HOIST_TEST_ACCELERATOR"):
        return "gloo"
    return f"cpu:gloo,{NAME}:{'gloo' if ON_GPU else 'staged'}"  # NCCL wants a GPU for each rank


def random_delays(seed):
    """Keys of the section "hoist" that delay its streams; those of a GPU are as late as they are."""
    return {} if ON_GPU else {"chaos_seed": seed}


def skip_without_gpus(count):
    if ON_GPU and torch.cuda.device_count() < count:
        pytest.skip(f"NCCL wants a GPU for each of {count} ranks")


def sleep(milliseconds):
    """Delays the current stream."""
    if ON_GPU:
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles
    else:
        getattr(torch, NAME)._sleep(milliseconds)


@contextlib.contextmanager
def without_waits():
    """Errors: where the program has waited for a stream meanwhile."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        extension = getattr(torch, NAME).extension
        before = extension.waits()
        yield
        assert extension.waits() == before


def use():
    if ON_GPU:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # tests compare bits
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_flash_sdp(False)  # these two are not deterministic where the others only warn
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.set_default_device(NAME)
        return
    home = pathlib.Path(__file__).parent
    contents = b"".join(file.read_bytes() for file in sorted(home.glob("*.[ch]pp")))
    places = f"{home} {torch.__file__}".encode()  # which the compiler is told: another checkout builds its own
    version = hashlib.sha256(places + contents).hexdigest()[:12]
    folder = os.path.join(tempfile.gettempdir(), f"hoist-test-accelerator-{os.getuid()}-{torch.__version__}-{version}")
    os.makedirs(folder, exist_ok=True)
    extension = torch.utils.cpp_extension.load(
        "hoist_test_accelerator", str(home / "extension.cpp"), extra_cflags=["-O1", "-std=c++20"], build_directory=folder)
    streams = [_hoist.HostStream() for _ in range(STREAMS)]
    extension.start(_hoist.HostStream.functions(), [stream.address for stream in streams],
                    int(os.environ.get("HOIST_ACCELERATOR_SEED", "1")))
    atexit.register(extension.end)
    module = types.ModuleType(f"torch.{NAME}")
    module.extension = extension
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
    module.set_device = lambda device: None
    module.get_device_properties = lambda device=None: types.SimpleNamespace(name="tests", major=1, minor=0)
    module.empty_cache = lambda: None
    module.is_bf16_supported = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.amp = types.SimpleNamespace(GradScaler=functools.partial(torch.amp.GradScaler, NAME))
    module._initialized = True  # so that torch.utils.checkpoint keeps the state of its random numbers
    module.manual_seed = module.manual_seed_all = extension.manual_seed
    module.get_rng_state = lambda device=None: extension.get_rng_state()
    module.set_rng_state = lambda state, device=None: extension.set_rng_state(state)
    module.get_rng_state_all = lambda: [extension.get_rng_state()]
    module.set_rng_state_all = lambda states: extension.set_rng_state(states[0])
    module.random = module  # where others look for these functions
    if NAME != "slate":  # the package that would bring the device, for those who look for it
        package = sys.modules[f"torch_{NAME}"] = types.ModuleType(f"torch_{NAME}")
        package.__spec__ = importlib.machinery.ModuleSpec(f"torch_{NAME}", None)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    setattr(torch.backends, NAME, types.SimpleNamespace(matmul=types.SimpleNamespace(allow_tf32=False)))
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.set_default_device(NAME)
    os.environ["ACCELERATE_TORCH_DEVICE"] = NAME  # the device of transformers' Trainer
    for backend in ("staged", *COLLECTIVES.get(NAME, ())):
        torch.distributed.Backend.register_backend(
            backend, lambda *place: extension.staged(torch.distributed.ProcessGroupGloo(*place)), devices=[NAME])

    own = hoist.torch.engine.device_of
    for user in (hoist.torch.engine, hoist.torch.estimates):
        user.device_of = lambda config, wanted, *more: own(config, wanted or torch.device(NAME, 0), *more)
