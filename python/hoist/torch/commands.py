# SPDX-License-Identifier: Apache-2.0
"""How the package's commands (python -m hoist.torch.finetune, python -m hoist.torch.deepspeed) end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hoist import _hoist
from hoist.torch.deepspeed.files import shown


def run_command(name: str, work: Callable[[], object]) -> int:
    """The exit status: 0, or 2 for input that is refused and 1 for what fails otherwise, with the error on stderr."""
    try:
        work()
    except (_hoist.Error, OSError) as error:
        sys.last_value = error  # as of an exception that ends a program: other ranks are told of it
        print(shown(f"{name}: {error}"), file=sys.stderr)
        return 2 if isinstance(error, (_hoist.UsageError, _hoist.ConfigError, _hoist.BudgetError, _hoist.StoreError)) else 1
    return 0
