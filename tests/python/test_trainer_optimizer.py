# SPDX-License-Identifier: Apache-2.0
"""`optim` of TrainingArguments beside a configuration that names an optimizer: one of them would be ignored."""

import pytest

import hoist

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
from hoist.torch.transformers import fill_in  # noqa: E402


def filled_in(tmp_path, config, **arguments):
    return fill_in(config, transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **arguments), steps=10)


def filled(tmp_path, optim, kind):
    config = {} if kind is None else {"optimizer": {"type": kind, "params": {"lr": "auto"}}}
    return filled_in(tmp_path, config, **({} if optim is None else {"optim": optim}))


@pytest.mark.parametrize("optim", ["adafactor", "galore_adamw", "lion_32bit"])
def test_another_optimizer_than_the_files_is_refused(tmp_path, optim):
    with pytest.raises(hoist.UsageError, match=rf"optimizer\.type is AdamW, and optim is {optim}"):
        filled(tmp_path, optim, "AdamW")
    filled(tmp_path, optim, None)  # the file leaves it to the arguments


@pytest.mark.parametrize(("optim", "kind"), [(None, "AdamW"), (None, "Lion"), ("adamw_torch", "AdamW"), ("sgd", "SGD"),
                                             ("adagrad", "Adagrad"), ("lion_32bit", "Lion"),
                                             ("adamw_bnb_8bit", "AdamW"), ("paged_adamw_32bit", "AdamW"),
                                             ("paged_lion_8bit", "Lion"), ("adagrad", "adagrad"),
                                             ("paged_adamw_32bit", "ADAMW")])
def test_the_same_optimizer_and_the_default_are_accepted(tmp_path, optim, kind):
    assert filled(tmp_path, optim, kind)["optimizer"]["type"] == kind


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_a_key_has_its_meaning_under_all_of_its_names(tmp_path, name):
    assert "bf16" not in filled_in(tmp_path, {name: {"enabled": "auto"}})
    assert filled_in(tmp_path, {name: {"enabled": "auto"}}, bf16=True)["bf16"] == {"enabled": True}
    assert filled_in(tmp_path, {name: {"enabled": True}}, bf16=True)["bf16"] == {"enabled": True}
    with pytest.raises(hoist.UsageError, match=r"bf16\.enabled is True, and bf16 is False"):
        filled_in(tmp_path, {name: {"enabled": True}})
    with pytest.raises(hoist.ConfigError, match="both are names of one setting"):
        filled_in(tmp_path, {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}})


@pytest.mark.parametrize(("config", "match"), [
    ({"scheduler": None}, "scheduler: null is not an object"),
    ({"optimizer": {"type": "AdamW", "params": None}}, "optimizer.params"),
    ({"bf16": True}, "bf16: true is not an object"), ({"optimizer": "AdamW"}, '"AdamW" is not an object')])
def test_a_section_of_another_form_is_an_error_of_the_configuration(tmp_path, config, match):
    with pytest.raises(hoist.ConfigError, match=match):
        filled_in(tmp_path, config)


def test_values_of_python_are_those_of_json(tmp_path):
    betas = {"type": "AdamW", "params": {"lr": "auto", "betas": (0.9, 0.999)}}
    assert filled_in(tmp_path, {"optimizer": betas})["optimizer"]["params"]["betas"] == [0.9, 0.999]
