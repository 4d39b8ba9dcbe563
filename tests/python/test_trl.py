# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers and PEFT's adapters: the same class with hoist's Trainer before it trains as it does in memory."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
import datasets  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import hoist.torch.transformers as hoist_transformers  # noqa: E402

WORDS = 300


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, WORDS)}
    of_words = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(count, seed):
    words = torch.randint(3, WORDS, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in words.tolist()]


def train(kind, options, data, path, adapters, hoisted):
    """Losses, and the weights that were saved."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    arguments = options(output_dir=str(path), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, bf16=False,
                        save_strategy="no", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=7)
    nvme = {"device": "nvme", "nvme_path": str(path / "nvme")}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
              "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"}
    if hoisted:
        kind = type("Hoisted", (hoist_transformers.Trainer, kind), {})
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapters else None
    trainer = kind(model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=lora,
                   **({"hoist_config": config} if hoisted else {}))
    trainer.train()
    trainer.save_model(path / "saved")
    if hoisted:
        trainer.engine.close()
    return ([row["loss"] for row in trainer.state.log_history if "loss" in row],
            load_file(path / "saved" / ("adapter_model.safetensors" if adapters else "model.safetensors")))


@pytest.mark.parametrize("adapters", [False, True], ids=["all_weights", "lora"])
@pytest.mark.parametrize("preferences", [False, True], ids=["sft", "dpo"])
def test_trains_as_in_memory(tmp_path, preferences, adapters):
    if preferences and not adapters:
        pytest.skip("the reference model would be read from the hub")
    if preferences:
        kind, options = trl.DPOTrainer, trl.DPOConfig
        data = {"prompt": text(32, 0), "chosen": text(32, 1), "rejected": text(32, 2)}
    else:
        kind, options = trl.SFTTrainer, trl.SFTConfig
        data = {"text": text(32, 0)}
    results = [train(kind, options, datasets.Dataset.from_dict(data), tmp_path / name, adapters, name == "hoisted")
               for name in ("plain", "hoisted")]
    (plain_losses, plain), (losses, saved) = results
    assert len(losses) == 4
    assert losses == pytest.approx(plain_losses, abs=2e-6)
    assert plain.keys() == saved.keys()
    for name, weights in plain.items():
        torch.testing.assert_close(saved[name], weights, rtol=0, atol=1e-6)
