# SPDX-License-Identifier: Apache-2.0
"""hoist: training state on three tiers (GPU, pinned host memory, NVMe).

`hoist.torch` trains PyTorch models; `hoist.aio`, `hoist.store` and `hoist.optim` are the storage engine, stores and the
optimizers on their own. This module has the configuration, the errors, and the types of the values that those modules return.
"""

import ctypes
import glob
import importlib.util
import os


def _prefer_nccl_of_pytorch() -> None:
    """PyTorch brings an NCCL of its own, newer than a distribution's. One process can load one; it must be PyTorch's."""
    for place in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ():
        for library in glob.glob(os.path.join(glob.escape(place), "nccl", "lib", "libnccl.so.2")):
            ctypes.CDLL(library)
            return


_prefer_nccl_of_pytorch()

from hoist import _hoist  # noqa: E402
from hoist._hoist import (  # noqa: E402
    BudgetError,
    CommError,
    Completion,
    Config,
    ConfigError,
    CorruptionError,
    DeviceError,
    DType,
    Error,
    IoError,
    OptimizerOptions,
    SafetensorsError,
    State,
    StepBytes,
    StepReport,
    StoreChangedError,
    StoreError,
    UsageError,
)

__all__ = [
    "BudgetError", "CommError", "Completion", "Config", "ConfigError", "CorruptionError", "DeviceError", "DType",
    "Error", "IoError", "OptimizerOptions", "SafetensorsError", "State", "StepBytes", "StepReport", "StoreChangedError",
    "StoreError", "UsageError",
]

__version__ = _hoist.version

# Tracebacks name them hoist.IoError, not hoist._hoist.IoError.
for _error in [value for value in globals().values() if isinstance(value, type) and issubclass(value, Error)]:
    _error.__module__ = __name__
del _error
