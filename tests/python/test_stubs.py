# SPDX-License-Identifier: Apache-2.0
"""The type stubs that are shipped, against the extension: the same names, with the same arguments."""

import ast
import inspect
import pathlib
import re

import pytest

import hoist
from hoist import _hoist

STUBS = pathlib.Path(hoist.__file__).with_name("_hoist.pyi")


def entries(body):
    """Functions (overloads in order), classes and values of a module's or a class's body, by name."""
    found = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.AnnAssign):
            found.setdefault(node.target.id, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found.setdefault(target.id, []).append(node)
    return found


def arguments(function):
    parts = function.args
    return [a.arg for a in (*parts.posonlyargs, *parts.args, *parts.kwonlyargs)]


def arguments_of(thing):
    """The parameters of each overload, as nanobind knows them."""
    def parse(text):
        text = re.sub(r"ndarray\[[^\]]*\]", "ndarray", text)  # of a syntax of its own
        return ast.parse(re.sub(r"\\\d+", "0", text) + ": ...").body[0]  # defaults stand elsewhere

    return [arguments(parse(text)) for text, *_ in thing.__nb_signature__]


def is_of_nanobind(thing):
    return hasattr(thing, "__nb_signature__")


def public(names):
    return {name for name in names if not name.startswith("_") or name in ("__init__", "__call__", "__enter__", "__exit__")}


def compare(stub, thing, where):
    """The members that a stub declares in a class or in the module."""
    said = entries(stub.body)
    if inspect.isclass(thing) and issubclass(thing, BaseException):  # what an error carries is its instance's
        said = {name: nodes for name, nodes in said.items() if not isinstance(nodes[0], ast.AnnAssign)}
    there = {name: value for name, value in vars(thing).items()
             if not inspect.ismodule(value) and (name != "__init__" or is_of_nanobind(value))}
    assert public(said) == public(there), where
    compared = 0
    for name in public(said):
        value, nodes = there[name], said[name]
        if is_of_nanobind(value):
            assert [arguments(node) for node in nodes] == arguments_of(value), (where, name)
            compared += 1
        elif inspect.isclass(value):
            assert isinstance(nodes[0], ast.ClassDef), (where, name)
            compared += compare(nodes[0], value, f"{where}.{name}")
    return compared


@pytest.mark.skipif(not STUBS.exists(), reason="stubs are made by the build, and this one made none")
def test_stubs_say_what_is_there():
    assert compare(ast.parse(STUBS.read_text()), _hoist, "hoist._hoist") > 80


def test_what_is_offered_is_there_and_typed():
    assert STUBS.with_name("py.typed").exists()
    assert set(hoist.__all__) <= set(entries(ast.parse(STUBS.read_text()).body))
    for name in hoist.__all__:
        assert getattr(hoist, name) is getattr(_hoist, name)


def test_the_version_is_the_projects():
    project = pathlib.Path(__file__).parents[2] / "CMakeLists.txt"
    assert re.search(r"project\(\s*hoist\s+VERSION ([0-9.]+)", project.read_text(encoding="utf-8")).group(1) == hoist.__version__
