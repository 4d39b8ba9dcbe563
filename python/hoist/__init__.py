# SPDX-License-Identifier: Apache-2.0
"""hoist: training state on three tiers (GPU, pinned host memory, NVMe).

`hoist.torch` trains PyTorch models; `hoist.aio` and `hoist.optim` are the storage engine and the optimizers on their
own. What stands here is the engine as C++ programs see it, the configuration, and the errors.
"""

from hoist._hoist import (
    BudgetError,
    CommError,
    Completion,
    Config,
    ConfigError,
    CorruptionError,
    DeviceError,
    DType,
    Engine,
    Error,
    GroupId,
    IoError,
    Lease,
    OptimizerOptions,
    ParameterId,
    ParameterSpec,
    Pass,
    SafetensorsError,
    State,
    StepBytes,
    StepReport,
    StoreError,
    UnitId,
    UsageError,
)

__all__ = [
    "BudgetError", "CommError", "Completion", "Config", "ConfigError", "CorruptionError", "DeviceError", "DType",
    "Engine", "Error", "GroupId", "IoError", "Lease", "OptimizerOptions", "ParameterId", "ParameterSpec", "Pass",
    "SafetensorsError", "State", "StepBytes", "StepReport", "StoreError", "UnitId", "UsageError",
]
