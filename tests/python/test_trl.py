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


def text(seed):
    words = torch.randint(3, WORDS, (32, 8), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in words.tolist()]


def reward(completions, **_):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


# The trainer, its arguments' class, its data, and what else its constructor and its arguments take.
KINDS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"text": text(0)}, {}, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"prompt": text(0), "chosen": text(1), "rejected": text(2)}, {}, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"prompt": text(0)}, {"reward_funcs": reward},
             {"num_generations": 4, "max_completion_length": 8}),
}


def make(kind, path, adapters, hoisted, callbacks=(), **changes):
    base, options, data, more, settings = KINDS[kind]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "bf16": False, "save_strategy": "no",
                "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7} | settings | changes
    nvme = {"device": "nvme", "nvme_path": str(path / "nvme")}
    config = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
              "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"}
    if hoisted:
        base = type("Hoisted", (hoist_transformers.Trainer, base), {})
        more = more | {"hoist_config": config}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if adapters else None
    return base(model=model, args=options(output_dir=str(path), **settings), train_dataset=datasets.Dataset.from_dict(data),
                processing_class=tokenizer(), peft_config=lora, callbacks=list(callbacks), **more)


def results(trainer, path, adapters):
    """Losses and gradient norms, and the weights that are saved."""
    trainer.save_model(path / "saved")
    if hasattr(trainer, "engine"):
        trainer.engine.close()
    numbers = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return numbers, load_file(path / "saved" / ("adapter_model.safetensors" if adapters else "model.safetensors"))


# DPO without adapters reads a reference model from the hub.
@pytest.mark.parametrize(("kind", "adapters"),
                         [("sft", False), ("sft", True), ("dpo", True), ("grpo", False), ("grpo", True)])
def test_trains_as_in_memory(tmp_path, kind, adapters):
    runs = []
    for hoisted in (False, True):
        path = tmp_path / str(hoisted)
        trainer = make(kind, path, adapters, hoisted)
        trainer.train()
        runs.append(results(trainer, path, adapters))
    (plain_numbers, plain), (numbers, saved) = runs
    assert len(numbers) == 4
    for expected, found in zip(plain_numbers, numbers, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert plain.keys() == saved.keys()
    for name, weights in plain.items():
        torch.testing.assert_close(saved[name], weights, rtol=0, atol=1e-5)


class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_adapters_that_are_killed_and_resumed_have_the_bits_of_an_undisturbed_run(tmp_path):
    changes = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    undisturbed = make("sft", tmp_path / "whole", True, True, **changes)
    undisturbed.train()
    expected = results(undisturbed, tmp_path / "whole", True)

    path = tmp_path / "killed"
    killed = make("sft", path, True, True, callbacks=[Dies()], **changes)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    killed.engine.close()
    resumed = make("sft", path, True, True, **changes)
    resumed.train(resume_from_checkpoint=True)
    numbers, saved = results(resumed, path, True)
    assert numbers == expected[0]
    assert all(torch.equal(saved[name], weights) for name, weights in expected[1].items())
