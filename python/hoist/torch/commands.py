# SPDX-License-Identifier: Apache-2.0
"""How the package's commands (python -m hoist.torch.finetune, python -m hoist.torch.deepspeed) end."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from hoist import _hoist
from hoist.torch.deepspeed.files import shown


def _is_bad_input(error: Exception) -> bool:
    """As is_bad_input() in cli/output.cpp; of OSErrors, only a lack of room."""
    if isinstance(error, _hoist.StoreChangedError):
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, (_hoist.UsageError, _hoist.ConfigError, _hoist.BudgetError, _hoist.StoreError,
                              _hoist.SafetensorsError))


def run_command(name: str, work: Callable[[], object]) -> int:
    """The exit status: 0, or 2 for bad input and 1 for another failure, with the error on stderr."""
    try:
        work()
    except (_hoist.Error, OSError) as error:
        sys.last_value = error  # as Python does if an exception ends a program: the other ranks are told this one
        print(shown(f"{name}: {error}"), file=sys.stderr)
        return 2 if _is_bad_input(error) else 1
    return 0
