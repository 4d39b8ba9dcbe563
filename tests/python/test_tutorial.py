# SPDX-License-Identifier: Apache-2.0
"""Runs docs/pytorch.md: every block of Python in it, in order, in one namespace."""

import pathlib
import re

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def test_the_tutorial(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"docs/pytorch.md, block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "40 steps" in printed and "update mode forward" in printed
