# SPDX-License-Identifier: Apache-2.0
"""Configurations in the forms that Python programs have them: DeepSpeed's JSON, and the YAML that `accelerate config` writes."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

from hoist import _hoist

_FORMS = "a DeepSpeed JSON file, a dictionary in its form, or the YAML file of `accelerate config`"
# What Accelerate's section says about DeepSpeed, and where DeepSpeed's file says it.
_PLACE_OF = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
}
# About the launch, or about how transformers builds a model.
_OF_THE_LAUNCH = {"zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
                  "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names"}


def as_json(config: dict[str, Any], name: str) -> str:
    """The text of a dictionary, in which paths and numbers of NumPy or PyTorch may be. Errors: UsageError for other objects."""
    return json.dumps(_plain(config, name, ""))


def _plain(value: Any, name: str, key: str) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v, name, f"{key}.{k}".lstrip(".")) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, name, key) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    kind = f"{type(value).__module__}.{type(value).__name__}"
    raise _hoist.UsageError(f"{name}: {key} is of type {kind}: pass a number, text, true or false, a list or a dictionary")


def with_first_names(section: dict[str, Any], path: str = "") -> dict[str, Any]:
    """A configuration that was understood, in which each key has the first of its names, such as bf16 for bfloat16. A key of
    null is left out, as null means that."""
    named = {}
    for key, value in section.items():
        known = None if "." in key else _hoist.key_name(path + key)  # a comment's key may have dots, such as _was.device
        name = key if known is None else known.rpartition(".")[2]
        if value is not None:
            named[name] = with_first_names(value, f"{path}{name}.") if isinstance(value, dict) else value
    return named


def is_yaml(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike)) and os.fspath(source).endswith((".yaml", ".yml"))


def base64_text(source: Any) -> str | None:
    """The JSON of a configuration that is base64 text instead of a file's name, as DeepSpeed takes it; None for others."""
    if not isinstance(source, str) or os.path.exists(source):
        return None
    try:
        text = base64.urlsafe_b64decode(source).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def read_config(source: Any) -> dict[str, Any]:
    """A configuration as a dictionary in DeepSpeed's form. Errors: ConfigError for broken JSON, UsageError for anything else."""
    if isinstance(source, dict):
        return _of_accelerate(source, "hoist_config") if "distributed_type" in source else source
    if not isinstance(source, (str, os.PathLike)):
        raise _hoist.UsageError(f"the configuration is {source!r}: pass {_FORMS}")
    name = os.fspath(source)
    if (text := base64_text(source)) is not None:
        name = "config"
    else:
        text = _text_of(name)
    if is_yaml(name):
        return _of_accelerate(_yaml(text, name), name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError("a key appears twice")
        return dict(pairs)

    try:
        content = json.loads(_hoist.plain_json(text), object_pairs_hook=unique)
    except ValueError as error:
        _hoist.Config.parse(text, name, trains=False)  # its error says what is wrong, and in which line
        raise _hoist.UsageError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _hoist.UsageError(f"{name} has no keys: it is to be {_FORMS}")
    return read_config(content)


def _text_of(name: str) -> str:
    try:
        with open(name, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise _hoist.UsageError(f"{name} is not UTF-8 text: pass {_FORMS}") from error


def _yaml(text: str, name: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise _hoist.UsageError(f"{name}: reading YAML needs PyYAML (pip install pyyaml)") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _hoist.UsageError(f"{name} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise _hoist.UsageError(f"{name} has no keys: it is to be {_FORMS}")
    return content


def _of_accelerate(content: dict[str, Any], name: str) -> dict[str, Any]:
    """DeepSpeed's form of what Accelerate's file says. Its defaults are Accelerate's."""
    if "distributed_type" not in content and "deepspeed_config" not in content:
        raise _hoist.UsageError(f"{name} is not a file of `accelerate config`, which has the key distributed_type: pass {_FORMS}")
    kind, section = str(content.get("distributed_type", "DEEPSPEED")).upper(), content.get("deepspeed_config") or {}
    if kind != "DEEPSPEED":
        raise _hoist.UsageError(f"{name} is a file of `accelerate config` with distributed_type {kind}: hoist reads the section "
                                "deepspeed_config of distributed_type DEEPSPEED. Run `accelerate config` anew, or pass a "
                                "DeepSpeed JSON file")
    if named := section.get("deepspeed_config_file"):
        return read_config(named)
    unknown = section.keys() - _PLACE_OF.keys() - _OF_THE_LAUNCH
    if unknown:
        raise _hoist.UsageError(f"{name}: deepspeed_config: {', '.join(sorted(unknown))}: hoist does not know this; remove it, "
                                "or name a DeepSpeed JSON file in deepspeed_config_file")
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto",
                              "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    for key, value in section.items():
        if key in _OF_THE_LAUNCH or value in (None, "none"):
            continue
        *sections, last = _PLACE_OF[key]
        place = config
        for part in sections:
            place = place.setdefault(part, {})
        place[last] = value
    precision = str(content.get("mixed_precision", "no")).lower()
    if precision not in ("no", "false", "bf16", "fp16"):
        raise _hoist.UsageError(f"{name}: mixed_precision: {precision}: hoist trains weights of bf16, fp16 or fp32")
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    return config
