# SPDX-License-Identifier: Apache-2.0
"""docs/python-reference.md names each argument of wrap(), and each member of the classes that programs use; and no others."""

import inspect
import pathlib
import re

import pytest

import hoist
import hoist.optim
import hoist.torch
from training import make

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python-reference.md"


def names_in(section):
    """Those in the first column of the section's tables."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {match for cell in cells for match in re.findall(r"`(\w+)(?:\(.*?\))?`", cell)} - {"engine"}


def members_of(cls):
    """Public ones that hoist defines."""
    return {name for kind in cls.__mro__ if kind.__module__.startswith("hoist") for name in vars(kind) if name[0] != "_"}


def test_the_arguments_of_wrap():
    assert names_in("wrap") == inspect.signature(hoist.torch.wrap).parameters.keys()


def test_the_members_of_an_engine(settings):
    with hoist.torch.wrap(make(), settings()) as engine:
        listed = names_in("Engine")
        assert members_of(hoist.torch.Engine) <= listed
        assert {name for name in listed if not hasattr(engine, name)} == set()


@pytest.mark.parametrize(("section", "cls"), [("StepReport", hoist.StepReport), ("hoist.optim", hoist.optim.AdamW)])
def test_the_members_of(section, cls):
    assert names_in(section) == members_of(cls)
