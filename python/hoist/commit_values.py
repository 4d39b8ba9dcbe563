# SPDX-License-Identifier: Apache-2.0
"""The program's own values in a commit, which is JSON: integer keys and tuples come back as such."""

from __future__ import annotations

import json
from typing import Any

from hoist import _hoist

INTEGER_KEYS = "hoist.integer_keys"  # the only key of a dictionary that has integer keys, with its pairs
_TUPLE = "hoist.tuple"  # the only key of a tuple, with its items


def to_json(value: Any, name: str) -> Any:
    """The value in a form that JSON can hold. Errors: UsageError for a part that it cannot, which the text names."""
    if isinstance(value, dict) and value.keys() in ({INTEGER_KEYS}, {_TUPLE}):
        raise _hoist.UsageError(f"{name} has no key but {next(iter(value))!r}, by which commits know other values: add another")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return {INTEGER_KEYS: [[key, to_json(item, f"{name}[{key}]")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    kind = f"the type {type(value).__module__}.{type(value).__name__}"
    what = f"keys of the types {sorted({type(key).__name__ for key in value})}" if isinstance(value, dict) else kind
    raise _hoist.UsageError(f"{name} has {what}, and commits hold numbers, text, lists, tuples, and dictionaries whose keys are "
                            "all text or all integers. float() and int() make a number of an array's element")


def from_json(value: Any) -> Any:
    """The value that to_json() was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {INTEGER_KEYS}:
        return {key: from_json(item) for key, item in value[INTEGER_KEYS]}
    if value.keys() == {_TUPLE}:
        return tuple(from_json(item) for item in value[_TUPLE])
    return {key: from_json(item) for key, item in value.items()}


def read_state(data: bytes) -> dict[str, Any]:
    """The state in a commit of hoist.torch or hoist.optim, without from_json(). Empty if there is none, or if another program
    made the commit: one in C++ commits any bytes."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    is_ours = isinstance(state, dict) and "program" in state and ("rates" in state or "groups" in state)
    return state if is_ours else {}
