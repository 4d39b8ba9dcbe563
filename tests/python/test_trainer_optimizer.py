# SPDX-License-Identifier: Apache-2.0
"""`optim` of TrainingArguments beside a configuration that names an optimizer: one of them would be ignored."""

import pytest

import hoist

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
from hoist.torch.transformers import fill_in  # noqa: E402


def filled(tmp_path, optim, kind):
    arguments = {} if optim is None else {"optim": optim}
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **arguments)
    config = {} if kind is None else {"optimizer": {"type": kind, "params": {"lr": "auto"}}}
    return fill_in(config, args, steps=10)


@pytest.mark.parametrize("optim", ["adafactor", "galore_adamw", "lion_32bit"])
def test_another_optimizer_than_the_files_is_refused(tmp_path, optim):
    with pytest.raises(hoist.UsageError, match=rf"optimizer\.type is AdamW, and optim is {optim}"):
        filled(tmp_path, optim, "AdamW")
    filled(tmp_path, optim, None)  # the file leaves it to the arguments


@pytest.mark.parametrize(("optim", "kind"), [(None, "AdamW"), (None, "Lion"), ("adamw_torch", "AdamW"), ("sgd", "SGD"),
                                             ("adagrad", "Adagrad"), ("lion_32bit", "Lion"),
                                             ("adamw_bnb_8bit", "AdamW"), ("paged_adamw_32bit", "AdamW"),
                                             ("paged_lion_8bit", "Lion")])
def test_the_same_optimizer_and_the_default_are_accepted(tmp_path, optim, kind):
    assert filled(tmp_path, optim, kind)["optimizer"]["type"] == kind
