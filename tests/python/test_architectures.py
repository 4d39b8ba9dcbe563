# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers' architectures, everything on NVMe, against torch.optim.AdamW in memory."""

import copy

import pytest
import torch

import hoist.torch
from models import on_device_of_tests

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")

STEPS = 10
WORDS = 128
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BLOCKS = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
          "max_position_embeddings": 64, "intermediate_size": 128} | ENDS
GROUPED = BLOCKS | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}

ARCHITECTURES = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 16},
    "Mixtral": GROUPED | EXPERTS | {"num_local_experts": 4},
    "Qwen3Moe": GROUPED | EXPERTS | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    "Phi3": GROUPED | {"resid_pdrop": 0.0},
    "GPTNeoX": BLOCKS | {"hidden_dropout": 0.0},
    "Mamba": {"vocab_size": WORDS, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 3, "time_step_rank": 8},
}


def of_other_names():
    """Tied embeddings, an encoder beside the decoder, and a model that is not causal."""
    yield "GPT2", transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    yield "T5", transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    yield "Bert", transformers.BertForMaskedLM, transformers.BertConfig(
        **BLOCKS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def cases():
    for name, settings in ARCHITECTURES.items():
        config = getattr(transformers, f"{name}Config", None)
        if config is not None:  # in this version
            yield name, getattr(transformers, f"{name}ForCausalLM"), config(**settings)
    yield from of_other_names()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield on_device_of_tests(torch.randint(3, WORDS, (4, 16), generator=generator, device="cpu"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("make", "shape"), [pytest.param(*case[1:], id=case[0]) for case in cases()])
def test_trains_as_in_memory(tmp_path, make, shape, recompute):
    torch.manual_seed(0)
    model = make(shape).train()
    reference = copy.deepcopy(model)
    if recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    expected = []
    for tokens in batches():
        loss = reference(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
              "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme,
                                    "stage3_param_persistence_threshold": 0}}
    losses = []
    with hoist.torch.wrap(model, config) as engine:
        for tokens in batches():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-6)
