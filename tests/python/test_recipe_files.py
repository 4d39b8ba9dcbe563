# SPDX-License-Identifier: Apache-2.0
"""`python -m hoist.torch.finetune` with a file that is no recipe: a sentence and exit status 2, as for every bad input."""

import errno
import runpy
import unittest.mock

import pytest

import hoist

for package in ("yaml", "transformers", "accelerate", "datasets", "trl", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install '.[finetune]')")
from hoist.torch import finetune  # noqa: E402


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file or directory"),
    (b"model_name_or_path: [a\n  b: {", "line 2"),
    (b"\xff\xfe\x00", "cannot be read"),
    (b"- a\n", "has no keys"),
    (b"", "has no keys"),
])
def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path, capsys, content, message):
    recipe = tmp_path / "recipe.yaml"
    if content is not None:
        recipe.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        finetune.main([str(recipe)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def answer(tmp_path, capsys, content, *words):
    """The exit status of the command, and what it says."""
    (tmp_path / "recipe.yaml").write_text(content)
    words = ["hoist", str(tmp_path / "recipe.yaml"), *words]
    with unittest.mock.patch("sys.argv", words), pytest.raises(SystemExit) as ended:
        runpy.run_module("hoist.torch.finetune", run_name="__main__")  # as python -m does
    return ended.value.code, capsys.readouterr().err


def test_wrong_changes_and_plugins_are_said_in_a_sentence(tmp_path, capsys):
    status, said = answer(tmp_path, capsys, "base_model: m", "--set", "datasets=[")
    assert status == 2 and "--set datasets=[ cannot be read" in said
    status, said = answer(tmp_path, capsys, "base_model: m\nplugins: true")
    assert status == 2 and "plugins: True: hoist does not have it" in said


@pytest.mark.parametrize(("error", "expected"), [
    (hoist.ConfigError("zero_optimization.stage is wrong"), 2), (hoist.UsageError("wrong"), 2), (hoist.StoreError("in use"), 2),
    (hoist.StoreChangedError("was removed"), 1), (hoist.BudgetError("too little"), 2), (hoist.SafetensorsError("cut off"), 2),
    (hoist.IoError("EIO"), 1), (hoist.IoError(errno.ENOSPC, "no room"), 2), (OSError(errno.EDQUOT, "no room"), 2),
    (hoist.DeviceError("no GPU"), 1), (PermissionError("not yours"), 1)])
def test_errors_of_the_run_are_said_in_a_sentence(tmp_path, capsys, monkeypatch, error, expected):
    monkeypatch.setattr("sys.last_value", None, raising=False)

    def fail(*_):
        raise error

    monkeypatch.setattr(finetune, "run", fail)
    status, said = answer(tmp_path, capsys, "base_model: m")
    assert status == expected and f"hoist: {error}" in said
    assert ("resume_from_checkpoint=true" in said) == isinstance(error, hoist.StoreError)
