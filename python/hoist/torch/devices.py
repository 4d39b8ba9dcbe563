# SPDX-License-Identifier: Apache-2.0
"""Chooses where a model computes, and names its streams and memory to the extension.

Three kinds: CPU tensors, whose operators run on the calling thread; CUDA, whose operators run on PyTorch's current stream; and
an accelerator (PrivateUse1) whose memory is the CPU's. The operators of the last run on the calling thread, or on the stream that
hoist_stream() of its module returns (_hoist.HostStream).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hoist import _hoist

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_EXTENSION = 1, 2, 12
_OF_NVIDIAS_DRIVER = "/dev/nvidiactl"

_log = logging.getLogger("hoist")


def device_of(config: _hoist.Config, wanted: torch.device | str | None,
              parameters: Iterable[torch.Tensor] = ()) -> torch.device:
    """The configuration's device. If it names none: the GPU if there is one, and the configuration then says so. With several
    GPUs: the one that `wanted` or the configuration names, where the model's parameters are, or that the program has made the
    current one. Without all of these the configuration is left as it is, and the engine takes the launcher's local rank.
    Errors: UsageError for a device that the configuration's does not go with.
    """
    if config.device is None:
        config.device = "host" if wanted is not None and torch.device(wanted).type != "cuda" else _device_of_machine()
    of_config = torch.device("cuda" if config.device == "cuda" else "cpu")
    if of_config.type == "cuda" and not torch.cuda.is_available():
        raise _hoist.UsageError('"hoist": {"device": "cuda"}, and this PyTorch finds no CUDA device: install PyTorch with CUDA, '
                                'or set the device to "host"')
    device = of_config if wanted is None else torch.device(wanted)
    shares_memory = device.type == torch._C._get_privateuse1_backend_name() and of_config.type == "cpu"
    if device.type != of_config.type and not shares_memory:
        raise _hoist.UsageError(f"wrap(device='{device}'), and the configuration's device is {of_config.type}: set \"hoist\": "
                                "{\"device\": \"cuda\" or \"host\"}")
    if device.type == "cuda":
        _choose_gpu(config, device, parameters)
    return device


def _choose_gpu(config: _hoist.Config, wanted: torch.device, parameters: Iterable[torch.Tensor]) -> None:
    if config.device_ordinal < 0:
        found = next((p.device.index for p in parameters if p.device.type == "cuda"), None)
        index = wanted.index if wanted.index is not None else found
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        config.device_ordinal = index if index is not None else current if current > 0 else -1
    elif wanted.index not in (None, config.device_ordinal):
        raise _hoist.UsageError(f"wrap(device='{wanted}'), and hoist.device_ordinal of the configuration is "
                                f"{config.device_ordinal}: leave one of them out")


def _device_of_machine() -> str:
    why, pytorch_has_one = _hoist.why_no_gpu(), torch.cuda.is_available()
    if why and (pytorch_has_one or os.path.exists(_OF_NVIDIAS_DRIVER)):
        _log.warning("training on the CPU, and there is a GPU, which hoist cannot use: %s", why)
    elif not why and not pytorch_has_one:
        _log.warning("training on the CPU: hoist finds the GPU, and this build of PyTorch does not")
    return "cuda" if not why and pytorch_has_one else "host"


def current_stream_of(device: torch.device) -> Callable[[], Any] | None:
    """None: operators run on the calling thread."""
    if device.type == "cuda":
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return getattr(getattr(torch, device.type, None), "hoist_stream", None)


@contextlib.contextmanager
def own_random_numbers(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """The CPU's and the device's generators go on afterwards where they were; `seed` is theirs meanwhile. Generators of other
    devices are left alone (torch.manual_seed() sets those of every GPU)."""
    backend: Any = None if device.type == "cpu" else getattr(torch, device.type)
    with torch.random.fork_rng(devices=[] if backend is None else [device], device_type=device.type if backend else "cuda"):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if backend is not None:
                with backend.device(device):
                    backend.manual_seed(seed)
        yield


def carried_state(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes contexts in which other threads work with what PyTorch keeps for the calling one: autocast, the default device, and
    the current stream of an accelerator. Other state of a thread (a mode of the program's own) is not carried over."""
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)]
    caches = torch.is_autocast_cache_enabled()
    backend: Any = None if current_stream_of(device) is None else getattr(torch, device.type)
    stream = backend.current_stream(device) if backend is not None else None
    default_device = torch.get_default_device()

    @contextlib.contextmanager
    def carried() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(backend.device(device))
                stack.enter_context(backend.stream(stream))
            if default_device.type != "cpu":
                stack.enter_context(default_device)
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            yield

    return carried


def dlpack_device_of(device: torch.device) -> tuple[int, int]:
    kinds = {"cpu": _DLPACK_CPU, "cuda": _DLPACK_CUDA}
    return kinds.get(device.type, _DLPACK_EXTENSION), device.index or 0


def outside_of_inference_mode() -> contextlib.AbstractContextManager[object]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
