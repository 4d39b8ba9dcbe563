# SPDX-License-Identifier: Apache-2.0
"""Every model of transformers' that a few small settings and random words can train: the same losses, bit for bit, with
everything on NVMe as with everything in memory. What cannot be made or trained that way is counted, and left out."""

import collections
import copy
import os
import shutil

import pytest
import torch

import hoist.torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
from transformers.models.auto import modeling_auto  # noqa: E402

STEPS = 3
WORDS = 128
PARAMETERS_MAX = 60e6
SMALL = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "lru_width",
                     "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("d_kv", "head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim", "sliding_window", "attention_window"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size", "projection_dim"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "state_size", "time_step_rank", "patch_size", "mamba_d_state"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_hidden_groups",
                     "bos_token_id"), 1),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0),
    "eos_token_id": 2,
}


def shrink(config):
    for name in sorted(set(SMALL) & set(config.to_dict())):
        if isinstance(getattr(config, name), (int, float)):
            setattr(config, name, SMALL[name])
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:SMALL["num_layers"]]
    for part in vars(config).values():
        if isinstance(part, transformers.PretrainedConfig):
            shrink(part)
    return config


def small_model(make, shape, recompute):
    config = shrink(shape())
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in make(copy.deepcopy(config)).parameters()) > PARAMETERS_MAX:
            raise ValueError("too large")
    torch.manual_seed(0)
    model = make(config).float().train()
    if recompute and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def batches(model):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        if model.main_input_name == "pixel_values":
            side, channels = model.config.image_size, getattr(model.config, "num_channels", 3)
            yield {"pixel_values": torch.randn(2, channels, side, side, generator=generator), "labels": torch.tensor([0, 1])}
        else:
            tokens = torch.randint(3, WORDS, (2, 16), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}


def losses(model, config):
    found = []
    with hoist.torch.wrap(model, config) as engine:
        for batch in batches(model):
            torch.manual_seed(2)  # for dropout
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


def differs(make, shape, recompute, directory):
    """Whether losses differ; nothing where the model cannot be made or cannot be trained without hoist."""
    try:
        models = [small_model(make, shape, recompute) for _ in range(3)]
        models[0](**next(batches(models[0]))).loss.backward()
    except Exception:  # whatever a class of transformers' may raise at settings that it does not expect
        return None
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0}}
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    stored = config | {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme,
                                             "stage3_param_persistence_threshold": 0}}
    return repr(losses(models[1], config)) != repr(losses(models[2], stored))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("family", "least"), [("CAUSAL_LM", 100), ("SEQ_TO_SEQ_CAUSAL_LM", 15), ("MASKED_LM", 20),
                                               ("IMAGE_CLASSIFICATION", 10)])
def test_placement_changes_no_loss(tmp_path, family, least, recompute):
    models = getattr(modeling_auto, f"MODEL_FOR_{family}_MAPPING")
    names = collections.defaultdict(list)
    for number, shape in enumerate(models.keys()):
        make = models[shape]
        make = make[0] if isinstance(make, (list, tuple)) else make
        directory = tmp_path / str(number)
        directory.mkdir()
        child = os.fork()  # one model's failure or fallen process is not the next one's
        if child == 0:
            try:
                os._exit({None: 2, True: 1, False: 0}[differs(make, shape, recompute, directory)])
            except BaseException as error:
                print(make.__name__, repr(error), flush=True)
                os._exit(3)
        status = os.waitpid(child, 0)[1]
        shutil.rmtree(directory)
        names[os.waitstatus_to_exitcode(status)].append(make.__name__)
    print(f"{len(names[0])} models of {family} equal, {len(names.pop(2, []))} left out")
    equal = names.pop(0)
    assert not names  # 1: losses differ; 3: an error; a signal's number
    assert len(equal) >= least
