# SPDX-License-Identifier: Apache-2.0
"""`python -m hoist.torch.finetune` with a file that is no recipe: a sentence and exit status 2, as for every bad input."""

import pytest

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
