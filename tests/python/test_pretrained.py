# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that begin with the hub's files, read at wrap, against transformers' own from_pretrained."""

import copy
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import hoist
import hoist.torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")

from hoist.torch.transformers import from_pretrained, save_pretrained  # noqa: E402

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "max_position_embeddings": 64}
KINDS = {
    "Llama": SMALL | {"tie_word_embeddings": True},
    "Mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    # a persistent buffer, which is in the files and is not trained
    "DeepseekV3": SMALL | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 8,
                           "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
                           "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
}


def saved(path, kind="Llama", shards="40KB", seed=0, **changes):
    """A small model in files of its own, and where they are."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**KINDS[kind] | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    model.generation_config.max_new_tokens = 33
    model.save_pretrained(path, max_shard_size=shards)
    return model, str(path)


def config_of(path, **changes):
    nvme = {"device": "nvme", "nvme_path": str(path)}
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme,
                                  "stage3_param_persistence_threshold": 0}} | changes


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name].cpu(), values.cpu()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_transformers_and_back(tmp_path, kind, dtype):
    """Sharded files of fp32: tied weights, experts that files have one by one, a type other than the files'."""
    _, directory = saved(tmp_path / "hub", kind)
    assert os.path.exists(os.path.join(directory, "model.safetensors.index.json"))
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model = from_pretrained(transformers.AutoModelForCausalLM, directory, dtype=dtype)
    assert all(p.isnan().all() for p in model.parameters()) and not model.training
    tokens = torch.arange(16)[None] % 13
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())
        with torch.no_grad():
            assert torch.equal(engine(input_ids=tokens).logits, expected(input_ids=tokens).logits)
        save_pretrained(engine, tmp_path / "out", max_shard_size="40KB")
    assert os.path.exists(tmp_path / "out" / "model.safetensors.index.json")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(back.state_dict(), expected.state_dict())
    assert back.generation_config.max_new_tokens == 33
    assert back.config.to_diff_dict().keys() == expected.config.to_diff_dict().keys()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("sharded", [False, True])
def test_pytorchs_files(tmp_path, sharded, tied):
    """pytorch_model.bin, alone and with an index. Tied weights are in them under both names."""
    expected, _ = saved(tmp_path / "unused", tie_word_embeddings=tied)
    directory = tmp_path / "hub"
    expected.config.save_pretrained(directory)
    tensors = {name: value.clone() for name, value in expected.state_dict().items()}
    if sharded:
        names = {name: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, name in enumerate(tensors)}
        for file in set(names.values()):
            torch.save({name: value for name, value in tensors.items() if names[name] == file}, directory / file)
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        torch.save(tensors, directory / "pytorch_model.bin")
    model = from_pretrained(transformers.LlamaForCausalLM, directory)
    assert len(list(model.parameters())) == len(list(expected.parameters()))
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())


def test_tied_weights_that_differ_in_the_files_are_trained_apart(tmp_path, caplog):
    expected, _ = saved(tmp_path / "unused")
    tensors = {name: value.clone() for name, value in expected.state_dict().items()}
    tensors["lm_head.weight"] += 1
    expected.config.save_pretrained(tmp_path / "hub")
    torch.save(tensors, tmp_path / "hub" / "pytorch_model.bin")
    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path / "hub")
    if len(list(model.parameters())) == len(list(expected.parameters())):
        pytest.skip("transformers 4 ties them whatever the files hold")
    assert "lm_head.weight" in caplog.text and "differ" in caplog.text
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), tensors)


def test_a_name_in_the_hubs_cache(tmp_path, monkeypatch):
    """As huggingface_hub lays its cache out; nothing is asked of the network."""
    expected, directory = saved(tmp_path / "models--someone--small" / "snapshots" / ("0" * 40))
    (tmp_path / "models--someone--small" / "refs").mkdir()
    (tmp_path / "models--someone--small" / "refs" / "main").write_text("0" * 40)
    model = from_pretrained(transformers.AutoModelForCausalLM, "someone/small", cache_dir=str(tmp_path), local_files_only=True)
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())


def test_files_are_found_from_another_directory(tmp_path, monkeypatch):
    expected, _ = saved(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    model = from_pretrained(transformers.LlamaForCausalLM, "hub")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())


def test_a_copy_has_the_values(tmp_path):
    source, directory = saved(tmp_path / "hub")
    model = from_pretrained(transformers.LlamaForCausalLM, directory)
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert_same(copied.state_dict(), source.state_dict())
    assert all(p.isnan().all() for p in model.parameters())


def test_missing_unexpected_and_mismatched_are_reported_as_transformers_does(tmp_path, caplog):
    """A head that the files lack, and one that the model has not; the base's weights are read from the files."""
    source, directory = saved(tmp_path / "hub", tie_word_embeddings=False)
    transformers.utils.logging.enable_propagation()
    kind = transformers.LlamaForSequenceClassification
    torch.manual_seed(5)
    expected, expected_info = kind.from_pretrained(directory, num_labels=3, output_loading_info=True)
    torch.manual_seed(5)
    caplog.clear()
    model, info = from_pretrained(kind, directory, num_labels=3, output_loading_info=True)
    assert info == expected_info
    assert set(info["missing_keys"]) == {"score.weight"} and set(info["unexpected_keys"]) == {"lm_head.weight"}
    assert "score.weight" in caplog.text
    assert [name for name, p in model.named_parameters() if not p.isnan().all()] == ["score.weight"]
    assert model.score.weight.std() > 0
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        found = engine.state_dict()
        assert found.pop("score.weight").shape == (3, 32)
        assert_same(found, {name: value for name, value in expected.state_dict().items() if name != "score.weight"})
    with pytest.raises(RuntimeError, match="mismatched|size"):
        from_pretrained(transformers.LlamaForCausalLM, directory, vocab_size=50)
    resized, info = from_pretrained(transformers.LlamaForCausalLM, directory, vocab_size=50, ignore_mismatched_sizes=True,
                                    output_loading_info=True)
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    assert mismatched == {"lm_head.weight", "model.embed_tokens.weight"}
    with hoist.torch.wrap(resized, config_of(tmp_path / "resized")) as engine:
        assert engine.read("lm_head.weight").shape == (50, 32)
        assert torch.equal(engine.read("model.norm.weight"), source.model.norm.weight.cpu())


def test_a_model_that_calls_a_module_while_it_is_initialized(tmp_path):
    """Wav2Vec2 normalizes weights by a parametrization, whose module PyTorch calls where the weight is read."""
    config = transformers.Wav2Vec2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, conv_dim=(16, 16),
        conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2)
    expected = transformers.Wav2Vec2ForCTC(config)
    expected.save_pretrained(tmp_path / "source")
    model = from_pretrained(transformers.Wav2Vec2ForCTC, tmp_path / "source")
    with pytest.raises(hoist.UsageError, match="was called, and its weights are still in their files"):
        model(torch.randn(1, 400))
    with hoist.torch.wrap(model, config_of(tmp_path / "store")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())
        engine.backward(engine(torch.randn(2, 400), labels=torch.tensor([[1, 2], [3, 4]])).loss)
        assert engine.step().applied


def test_a_directory_of_an_adapter_is_refused_with_its_base(tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    _, base = saved(tmp_path / "base")
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(hoist.UsageError, match=f"adapter.*from_pretrained of '{base}'.*PeftModel.from_pretrained"):
        from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "adapter")


def test_what_cannot_be_kept_in_files_is_refused(tmp_path):
    _, directory = saved(tmp_path / "hub")
    with pytest.raises(hoist.UsageError, match="device_map"):
        from_pretrained(transformers.LlamaForCausalLM, directory, device_map="auto")
    os.remove(os.path.join(directory, next(file for file in os.listdir(directory) if file.startswith("model-0"))))
    with pytest.raises(OSError, match="model-0"):
        from_pretrained(transformers.LlamaForCausalLM, directory)


def test_adapters_on_a_base_in_files(tmp_path):
    """PEFT renames the base's parameters; they still know their files. The adapters are made in memory."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    expected, directory = saved(tmp_path / "hub")
    model = peft.get_peft_model(from_pretrained(transformers.LlamaForCausalLM, directory),
                                peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    tokens = torch.arange(16)[None] % 13
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        with torch.no_grad():
            assert torch.equal(engine(input_ids=tokens).logits, expected(input_ids=tokens).logits)
        adapter = engine.state_dict()["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"]
        assert adapter.std() > 0
        save_pretrained(engine, tmp_path / "adapter")
    assert sorted(os.listdir(tmp_path / "adapter")) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_a_buffer_that_was_made_from_weights_in_files_is_refused(tmp_path):
    """As DeLoRA's norms of the base's weights, with which each loss would be NaN."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    if not hasattr(peft, "DeloraConfig"):
        pytest.skip("this PEFT has no DeLoRA")
    _, directory = saved(tmp_path / "hub")
    model = peft.get_peft_model(from_pretrained(transformers.LlamaForCausalLM, directory),
                                peft.DeloraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(hoist.UsageError, match="delora_w_norm.*made from other weights.*transformers' own from_pretrained"):
        hoist.torch.wrap(model, config_of(tmp_path / "nvme"))


def test_a_model_whose_weights_are_in_files_refuses_to_be_called(tmp_path):
    """It would compute NaN. What needs no weights works, and so does a copy, which has them."""
    source, directory = saved(tmp_path / "hub")
    model = from_pretrained(transformers.LlamaForCausalLM, directory)
    tokens, part = torch.arange(8)[None], model.model.layers[0].mlp
    for use in (lambda: model(input_ids=tokens), lambda: model.generate(tokens), lambda: part(torch.ones(1, 32))):
        with torch.no_grad(), pytest.raises(hoist.UsageError, match=r"still in their files.*wrap\(model, config\)"):
            use()
    shapes = {name: torch.empty_like(p, device="meta") for name, p in part.named_parameters()}
    assert torch.func.functional_call(part, shapes, (torch.ones(1, 32, device="meta"),)).shape == (1, 32)
    model.tie_weights()
    with torch.no_grad():
        expected = source(input_ids=tokens).logits
        assert torch.equal(copy.deepcopy(model).to(tokens.device)(input_ids=tokens).logits, expected)
        with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
            assert torch.equal(engine(input_ids=tokens).logits, expected)
            assert [hook.__name__ for m in model.modules() for hook in m._forward_pre_hooks.values()
                    if hook.__module__ == "hoist.torch.pretrained.loading"] == []


@pytest.mark.parametrize("begins", [True, False], ids=["zero", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dora_begins_with_the_norms_of_weights_in_files(tmp_path, dtype, begins):
    """PEFT takes them when it adds the adapters, from linear layers and embeddings."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    _, directory = saved(tmp_path / "hub", tie_word_embeddings=False)
    lora = peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj", "embed_tokens"], task_type="CAUSAL_LM",
                           init_lora_weights=begins)
    torch.manual_seed(1)
    expected = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(directory, dtype=dtype), lora)
    torch.manual_seed(1)
    model = peft.get_peft_model(from_pretrained(transformers.LlamaForCausalLM, directory, dtype=dtype), lora)
    tokens = torch.arange(16)[None] % 13
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        assert_same(engine.state_dict(), expected.state_dict())
        assert not any(hasattr(p, "initial_values") for name, p in model.named_parameters() if "magnitude" in name)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        assert engine.step().applied and engine.get_global_grad_norm() > 0


@pytest.mark.host_device("CUDA takes host memory of its own")
def test_memory_is_that_of_one_unit(tmp_path):
    """40 layers of 4.7 MB, fp32 files cast to bf16: besides the budgets, the process grows by a few layers, not by 190 MB."""
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from test_pretrained import *
        path = Path({str(tmp_path)!r})
        def peak():
            for line in open("/proc/self/status"):
                if line.startswith("VmHWM"): return int(line.split()[1]) * 1024
        model = from_pretrained(transformers.AutoModelForCausalLM, path / "hub", dtype=torch.bfloat16)
        for parameter in model.parameters():  # the gradients of all of it would be in pinned memory
            parameter.requires_grad_(parameter.dim() == 1)
        config = config_of(path / "nvme", hoist={{"device_memory": "16MiB", "pinned_memory": "32MiB"}})
        unit = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.model.layers)
        whole = sum(p.numel() * 4 for p in model.parameters())
        before = peak()
        engine = hoist.torch.wrap(model, config)
        wrapped = peak() - before
        save_pretrained(engine, path / "out")
        print(json.dumps({{"wrapped": wrapped, "saved": peak() - before, "unit": unit, "whole": whole}}))
        engine.close()
    """)
    expected, _ = saved(tmp_path / "hub", shards="30MB", vocab_size=64, hidden_size=256, intermediate_size=1024,
                        num_hidden_layers=40)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["whole"] > 39 * found["unit"]
    bound = (48 << 20) + 3 * found["unit"] + (32 << 20)  # budgets, units, and the extension's threads and tables
    assert found["wrapped"] <= found["saved"] < bound < found["whole"], found
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert_same(back, {name: value.to(torch.bfloat16) for name, value in expected.state_dict().items()})


def test_a_trained_model_does_not_begin_with_its_files_again(tmp_path):
    """After close() its weights are in the store: another engine is refused them, as of any model."""
    _, source = saved(tmp_path / "source")
    model = from_pretrained(transformers.LlamaForCausalLM, source)
    hoist.torch.wrap(model, config_of(tmp_path / "first")).close()
    with pytest.raises((RuntimeError, hoist.Error), match="has no values|not finite"):  # the second: before PyTorch 2.13
        hoist.torch.wrap(model, config_of(tmp_path / "second"))
    hoist.torch.wrap(model, config_of(tmp_path / "third"), weights=source).close()


def test_a_model_that_is_still_in_its_files_is_saved_with_its_values(tmp_path):
    """Not as NaN, also over its own files; then it is in other files than it was made from."""
    original, hub = saved(tmp_path / "hub")
    expected = original.state_dict()
    model = from_pretrained(transformers.LlamaForCausalLM, hub, device_map=None)
    assert_same(model.state_dict(), expected)
    model.save_pretrained(hub, max_shard_size="40KB")
    assert_same(transformers.LlamaForCausalLM.from_pretrained(hub).state_dict(), expected)
    with pytest.raises(hoist.UsageError, match="was written anew"):
        hoist.torch.wrap(model, config_of(tmp_path / "store"))
    model = from_pretrained(transformers.LlamaForCausalLM, hub)
    with hoist.torch.wrap(model, config_of(tmp_path / "store")) as engine:
        assert_same(model.state_dict(), expected)
        assert_same(engine.state_dict(), expected)


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_a_model_of_which_nothing_is_trained_generates(tmp_path, device):
    """Without an optimizer in the configuration; a forward pass outside of torch.no_grad() makes no training pass, either."""
    expected, path = saved(tmp_path / "hub")
    expected.eval()
    tokens = torch.arange(10).view(2, 5)
    arguments = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    model = from_pretrained(transformers.AutoModelForCausalLM, path).eval().requires_grad_(False)
    place = {"device": device} | ({"nvme_path": str(tmp_path / "store")} if device == "nvme" else {})
    config = {"zero_optimization": {"stage": 3, "offload_param": place, "stage3_param_persistence_threshold": 0}}
    with hoist.torch.wrap(model, config) as engine:
        assert torch.equal(engine.generate(tokens, **arguments), expected.generate(tokens, **arguments))
        assert torch.equal(model.generate(tokens, **arguments), expected.generate(tokens, **arguments))
        result = engine(tokens).logits
        assert torch.equal(result, expected(tokens).logits) and not result.requires_grad
        with pytest.raises(hoist.UsageError, match="needs a backward pass"):
            engine.step()
    if device == "nvme":  # its weights stay there
        again = transformers.AutoModelForCausalLM.from_config(expected.config).eval().requires_grad_(False)
        with hoist.torch.wrap(again, config, resume=True) as engine:
            assert torch.equal(again.generate(tokens, **arguments), expected.generate(tokens, **arguments))
