# SPDX-License-Identifier: Apache-2.0
"""Parameter groups as torch.optim has them: their settings in the engine's words, and which of them may change."""

from __future__ import annotations

from typing import Any

from hoist import _hoist

# Names in torch.optim's parameter groups -> the engine's.
_SETTINGS = {
    "eps": "epsilon", "weight_decay": "weight_decay", "bias_correction": "bias_correction",
    "momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "lr_decay": "learning_rate_decay",
    "initial_accumulator_value": "initial_accumulator",
}


# Arguments of torch.optim's optimizers that change no result here, or are refused by options_of().
TORCH_ARGUMENTS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "maximize", "decoupled_weight_decay")


def options_of(group: dict[str, Any], defaults: _hoist.OptimizerOptions) -> _hoist.OptimizerOptions:
    """A parameter group's settings over others. Errors: UsageError for what cannot be, or is not among hoist's formulas."""
    options = _hoist.OptimizerOptions(defaults)
    if "lr" in group:
        options.learning_rate = rate_of(group)
    for key, name in _SETTINGS.items():
        if key in group:
            setattr(options, name, type(getattr(options, name))(group[key]))
    if "betas" in group:
        options.beta1, options.beta2 = (float(beta) for beta in group["betas"])
    for key in ("amsgrad", "maximize", "differentiable"):
        if group.get(key):
            raise _hoist.UsageError(f"{key}=True is not among the settings of hoist's optimizers")
    is_decoupled = options.kind == "AdamW"
    if options.weight_decay and bool(group.get("decoupled_weight_decay", is_decoupled)) != is_decoupled:
        raise _hoist.UsageError(f"decoupled_weight_decay={group['decoupled_weight_decay']} is not {options.kind}'s: AdamW "
                                "decouples weight decay in every group, and Adam adds it to the gradient in every group")
    options.check()
    return options


_SETTINGS_OF = {
    "AdamW": ("eps", "weight_decay"), "Adam": ("eps", "weight_decay"), "Lion": ("weight_decay",),
    "Adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "SGD": ("momentum", "dampening", "weight_decay", "nesterov"),
}


def settings_of(options: _hoist.OptimizerOptions) -> dict[str, Any]:
    """The settings by torch.optim's names, as a parameter group has them."""
    betas = {"betas": (options.beta1, options.beta2)} if options.kind in ("AdamW", "Adam", "Lion") else {}
    return {"lr": options.learning_rate} | betas | {
        key: getattr(options, _SETTINGS[key]) for key in _SETTINGS_OF[options.kind]}


# The options of a group, besides its learning rate, that change results. An engine takes them when it is made.
_SETTLED = ("betas", "momentum", "dampening", "nesterov", "eps", "weight_decay", "bias_correction", "amsgrad",
            "maximize", "decoupled_weight_decay", "lr_decay")


def settled_of(group: dict[str, Any]) -> dict[str, Any]:
    settled = {key: tuple(group[key]) if key == "betas" else group[key] for key in _SETTLED if key in group}
    return settled | {"params": {id(parameter) for parameter in group["params"]}}


def is_setting(key: str) -> bool:
    """Whether an entry of a parameter group, besides its learning rate, says how steps are computed."""
    return key in _SETTLED or key in TORCH_ARGUMENTS or key == "initial_accumulator_value"


def refuse_changes(groups: list[dict[str, Any]], settled: list[dict[str, Any]]) -> None:
    """Errors: UsageError where the program, or a schedule of it, has changed more than learning rates."""
    if len(groups) != len(settled):
        raise _hoist.UsageError(f"there were {len(settled)} parameter groups when the optimizer was made, and there are "
                                f"{len(groups)}: groups are fixed then. Set lr=0 for one that is not to be trained for a while")
    for index, (group, before) in enumerate(zip(groups, settled, strict=True)):
        now = settled_of(group)
        if now["params"] != before["params"]:
            raise _hoist.UsageError(f"the parameters of group {index} were changed: groups are fixed when the optimizer is made. "
                                    "Set lr=0 for one that is not to be trained for a while")
        for key in _SETTLED:
            if before.get(key) != now.get(key):
                was = f"changed from {before[key]}" if key in before else "set"
                back = f"set it back to {before[key]}" if key in before else "remove it"
                raise _hoist.UsageError(
                    f"'{key}' of parameter group {index} was {was} to {now.get(key)}; only learning rates can change during "
                    f"a run: {back} (OneCycleLR and CyclicLR need cycle_momentum=False as well)")


def rate_of(group: dict[str, Any]) -> float:
    """Its learning rate. PyTorch's LinearLR to 0 ends a rounding error away from it, which may be below."""
    rate = float(group["lr"])
    return 0.0 if -1e-12 * float(group.get("initial_lr", 0)) <= rate < 0 else rate


def rates_of(groups: list[dict[str, Any]]) -> list[float]:
    return [rate_of(group) for group in groups]
