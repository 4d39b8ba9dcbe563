# SPDX-License-Identifier: Apache-2.0
"""The methods of recipes: which trainer of TRL runs each, and the rows that it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["DPO", "KTO", "PRETRAINING", "REWARD", "SFT", "Method", "method_of"]


@dataclasses.dataclass(frozen=True)
class Method:
    name: str
    trainer: str                         # of TRL. Its settings are the class of the same name with Config
    needs: str                           # of each row of the data
    columns: tuple[str, ...]             # of the rows that the trainer gets
    long_rows: str                       # what becomes of rows that are longer than LLaMA-Factory's cutoff_len
    kinds: tuple[str, ...] = ()          # axolotl's `type` of a data set
    task: str = "CAUSAL_LM"              # PEFT's
    model: str = "AutoModelForCausalLM"  # where the recipe names none
    has_reference: bool = False          # the weights before training
    in_order: bool = False               # whether the trainer reads rows in the order of the data
    not_taken: frozenset[str] = frozenset()  # settings that recipes' keys for DPO would set, too

    @property
    def is_tokenized(self) -> bool:
        """Whether hoist makes the tokens, and not the trainer."""
        return "input_ids" in self.columns


_TOKENS, _PAIRS = ("input_ids", "labels"), ("prompt", "chosen", "rejected")
_AT_THE_END = "cut at the end, or dropped if their prompt is that long"
SFT = Method("SFT", "SFTTrainer", "an answer", _TOKENS, "cut, prompt and answer in proportion",
             ("alpaca", "chat_template", "completion"))
PRETRAINING = Method("pretraining", "SFTTrainer", "a text", _TOKENS, "")
DPO = Method("DPO", "DPOTrainer", "a pair of answers", _PAIRS, _AT_THE_END, ("chat_template.default", "chat_template"),
             has_reference=True)
KTO = Method("KTO", "KTOTrainer", "an answer with a label", ("prompt", "completion", "label"), _AT_THE_END,
             tuple(f"{template}.{source}" for template in ("llama3", "chatml")
                   for source in ("argilla", "argilla_chat", "intel", "prompt_pairs", "ultra")),
             has_reference=True, in_order=True, not_taken=frozenset({"loss_type"}))
REWARD = Method("a reward model", "RewardTrainer", "a pair of answers", _PAIRS, "dropped", ("bradley_terry.chat_template",),
                task="SEQ_CLS", model="AutoModelForSequenceClassification")
_METHODS = {"pt": PRETRAINING, "dpo": DPO, "ipo": DPO, "kto": KTO, "rm": REWARD}


def method_of(recipe: dict[str, Any]) -> Method:
    """SFT also where the recipe names what hoist does not have."""
    asked = recipe.get("stage") or recipe.get("rl") or ("rm" if recipe.get("reward_model") is True else None)
    return _METHODS.get(str(asked), SFT)
