# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of torch.distributed (gloo, on CPUs), against one process that sees the same batches."""

import json
import os
import subprocess
import sys
import textwrap

import accelerator
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

import hoist
import hoist.torch
from hoist.torch.ranks import distributed
from models import batches, loss_of
from ranks import results, start, texts_of
from training import digests, make

STEPS = 8

def train_share(engine, rank, size, steps=STEPS, first=0):
    """This rank's micro-batch of each step: number `rank` of its `size`."""
    losses = []
    for index, (inputs, targets) in enumerate(batches((first + steps) * size)):
        if index >= first * size and index % size == rank:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def at(path, config):
    for part in config["zero_optimization"].values():
        if isinstance(part, dict):
            part["nvme_path"] = str(path)
    return config


def one_process(config, path, accumulation=2):
    """A step of as many micro-batches as there are ranks elsewhere."""
    at(path, config)
    config["gradient_accumulation_steps"] = accumulation
    losses = []
    with hoist.torch.wrap(make(), config) as engine:
        for inputs, targets in batches(STEPS * accumulation):
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, digests(engine)


TRAIN = """
join()
engine = hoist.torch.wrap(make(), config)
assert engine.world_size == size and engine.rank == rank
losses = train_share(engine, rank, size)
tiers = engine.statistics()["tiers"]
assert all(t["peak_bytes"] <= t["budget_bytes"] for t in tiers.values()), tiers
assert engine.statistics()["links"]["wire"] > 0
print(json.dumps([losses, digests(engine)]))
engine.close()
dist.destroy_process_group()
"""


def with_room(settings, **changes):
    """Ranks need staging for what they reduce, 4 MiB each."""
    return settings(hoist={"device_memory": "6MiB", "pinned_memory": "32MiB"}, **changes)


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_two_ranks_are_one_process_with_two_micro_batches(settings, tmp_path, stage):
    """fp32: losses, masters and moments, bit for bit. Both add the two gradients in fp32 and halve the sum."""
    def config():
        made = with_room(settings, gradient_clipping=0.5)
        if stage < 3:
            made["zero_optimization"] = {"stage": stage,
                                         "offload_optimizer": made["zero_optimization"]["offload_optimizer"]}
        return made

    ranks = results(start(TRAIN, tmp_path / "meet", config()))
    losses, ends = one_process(config(), tmp_path / "alone")
    assert [ranks[0][0], ranks[1][0]] == [losses[0::2], losses[1::2]]
    assert ranks[0][1] == ranks[1][1] == ends


def built_with(seed, device):
    """With a parameter that is not contiguous."""
    with torch.device(device):
        model = make(seed)
        model.columns = torch.nn.Parameter(torch.randn(6, 40).t())
    return model


def fill_at_random(module):
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_that_built_other_values_begin_with_those_of_rank_0(settings, tmp_path, device):
    """As with DistributedDataParallel: a program may seed each rank differently before it builds its model."""
    ranks = results(start(f"""
join()
with hoist.torch.wrap(built_with(rank, "{device}"), config, seed=7 + rank, initialize=fill_at_random) as engine:
    print(json.dumps(digests(engine)))
dist.destroy_process_group()
""", tmp_path / "meet", with_room(settings)))
    config = at(tmp_path / "alone", with_room(settings))
    with hoist.torch.wrap(built_with(0, device), config, seed=7, initialize=fill_at_random) as engine:
        assert ranks == [digests(engine)] * 2


def train_and_clip(engine, rank, size):
    """As a plain loop does. Returns the norms of its steps."""
    norms = []
    for index, (inputs, targets) in enumerate(batches(STEPS * 2)):
        if index % size != rank:
            continue
        engine.backward(loss_of(engine(inputs), targets))
        if size == 2 or index % 2 == 1:
            norms.append(clip_grad_norm_(engine.parameters(), 0.05).item())
        engine.step()
    return norms


def test_a_loop_that_clips_takes_the_norm_of_all_ranks(settings, tmp_path):
    program = """
join()
with hoist.torch.wrap(make(), config) as engine:
    print(json.dumps([train_and_clip(engine, rank, size), digests(engine)]))
dist.destroy_process_group()
"""
    ranks = results(start(program, tmp_path / "meet", with_room(settings)))
    with hoist.torch.wrap(make(), at(tmp_path / "alone", with_room(settings, gradient_accumulation_steps=2))) as engine:
        assert ranks == [[train_and_clip(engine, 0, 1), digests(engine)]] * 2
        assert engine._steps.last_report.clip_factor < 1


def test_bf16_gradients_are_rounded_once_more(settings, tmp_path):
    """Two ranks send gradients as bf16, and their mean is rounded to it; micro-batches of one process add up in fp32. That
    is one rounding to 8 bits of a gradient, and losses stay within 1 % of each other."""
    ranks = results(start(TRAIN, tmp_path / "meet", with_room(settings, bf16={"enabled": True})))
    losses, _ = one_process(with_room(settings, bf16={"enabled": True}), tmp_path / "alone")
    assert ranks[0][1] == ranks[1][1]
    ours = [loss for pair in zip(ranks[0][0], ranks[1][0], strict=True) for loss in pair]
    assert ours[:2] == losses[:2] and ours == pytest.approx(losses, rel=0.01)


def test_state_of_several_ranks(settings, tmp_path, caplog):
    """Named checkpoints, checkpoints, state dicts and exports are collective; rank 0 writes what is one file. Then one process
    goes on with the two ranks' state."""
    config = with_room(settings)
    config["hoist"]["keep_steps"] = 1
    ranks = results(start("""
        join()
        engine = hoist.torch.wrap(make(), config)
        first = train_share(engine, rank, size, 3)
        engine.save_checkpoint(directory + "/checkpoints", client_state={"steps": 3})
        at_three = digests(engine)
        train_share(engine, rank, size, 2, first=3)
        path, client = engine.load_checkpoint(directory + "/checkpoints")
        assert client == {"steps": 3} and digests(engine) == at_three
        engine.state = {"rank": rank}
        train_share(engine, rank, size, 2, first=3)
        files = engine.export(directory + "/weights")
        assert len(files) == (1 if rank == 0 else 0)
        weights = engine.state_dict()
        total = float(sum(w.double().sum() for w in weights.values()))
        print(json.dumps([digests(engine), total]))
        engine.close()
    """, tmp_path / "meet", config))
    assert ranks[0] == ranks[1]
    with hoist.torch.wrap(make(), config, resume=True) as engine:
        assert "the run that is resumed had 2 ranks, and this one has 1" in caplog.text and engine.state == {"rank": 0}
        assert engine.step_count == 5 and digests(engine) == ranks[0][0]
        assert float(sum(w.double().sum() for w in engine.state_dict().values())) == ranks[0][1]
        train_share(engine, 0, 1, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_client_states_of_ranks(settings, tmp_path, caplog, stage):
    """As DeepSpeed does: each rank has its own in stage 3, and rank 0's counts in the others. Then one process loads them, and
    two ranks load what one process has saved, which is the form of a single file."""
    config = with_room(settings)
    config["hoist"]["keep_steps"] = 1
    config["zero_optimization"]["stage"] = stage
    if stage == 2:
        config["zero_optimization"].pop("offload_param")
    program = """
        import logging
        join()
        engine, *_ = hoist.torch.initialize(model=make(), config=config)
        saved, said = directory + "/../saved", []
        class Said(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())
        logging.getLogger("hoist").addHandler(Said())
        train_share(engine, rank, size, 1)
        engine.save_checkpoint(saved, client_state={"rank": rank})
        first = sorted(os.listdir(saved + "/global_step1"))
        dist.barrier()
        train_share(engine, rank, size, 1, first=1)
        engine.save_checkpoint(saved, client_state={"rank": rank}, tag="own")
        client = engine.load_checkpoint(saved)[1]
        print(json.dumps([first, client, sorted(os.listdir(saved)), [text for text in said if "client states" in text]]))
        engine.close()
    """
    files = ["client_state-1-rank-1.pt", "client_state-1.pt"][stage == 2:]
    for rank, found in enumerate(results(start(program, tmp_path / "meet", config))):
        assert found == [files, {"rank": rank if stage == 3 else 0}, ["latest", "own"], []]
    assert sorted(os.listdir(tmp_path / "saved" / "own")) == [name.replace("-1", "-2", 1) for name in files]

    with hoist.torch.initialize(model=make(), config=config)[0] as engine:
        assert engine.load_checkpoint(tmp_path / "saved")[1] == {"rank": 0}
        assert ("has client states of 2 rank(s), and all ranks of this run load rank 0's" in caplog.text) == (stage == 3)
        engine.save_checkpoint(tmp_path / "saved", tag="own", client_state={"rank": "alone"})
        assert os.listdir(tmp_path / "saved" / "own") == ["client_state-2.pt"]
    ranks = results(start("""
        join()
        engine, *_ = hoist.torch.initialize(model=make(), config=config)
        print(json.dumps(engine.load_checkpoint(directory + "/../saved")[1]))
        engine.close()
    """, tmp_path / "meet again", config))
    assert ranks == [{"rank": "alone"}] * 2


def test_a_client_state_that_one_rank_cannot_write_replaces_none(settings, tmp_path):
    """Saved again under its tag, at the same step: no rank's file is replaced unless every rank has written its own."""
    config = with_room(settings)
    config["hoist"]["keep_steps"] = 1
    ranks = results(start("""
        join()
        engine, *_ = hoist.torch.initialize(model=make(), config=config)
        saved = directory + "/../saved"
        train_share(engine, rank, size, 1)
        engine.save_checkpoint(saved, "tag", {"save": 1})
        try:
            engine.save_checkpoint(saved, "tag", {"save": 2, "of rank 1": (lambda: 0) if rank else None})
            failed = False
        except Exception:
            failed = True
        print(json.dumps([failed, engine.load_checkpoint(saved)[1], sorted(os.listdir(saved + "/tag"))]))
        engine.close()
    """, tmp_path / "meet", config))
    assert ranks == [[True, {"save": 1}, ["client_state-1-rank-1.pt", "client_state-1.pt"]]] * 2


def test_torchrun_and_initialize(settings, tmp_path):
    """As DeepSpeed's programs are started: nobody calls init_process_group, and the data is dealt out."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(f"""
        import json, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import hoist.torch
        import torch
        from test_distributed import *
        data = [(torch.full((16,), i), torch.full((16,), i)) for i in range(16)]
        engine, _, loader, _ = hoist.torch.initialize(
            model=make(), training_data=data, config=json.loads({json.dumps(json.dumps(with_room(settings)))}))
        seen = []
        for inputs, targets in loader:
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()
            seen += inputs[:, 0].tolist()
        with open({str(tmp_path)!r} + f"/seen-{{engine.rank}}", "w") as file:
            json.dump([engine.world_size, seen, digests(engine)], file)
        engine.close()
    """))
    accelerator.skip_without_gpus(2)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
                   check=True, capture_output=True, text=True, timeout=240)
    first, second = (json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2))
    assert first[0] == second[0] == 2 and first[2] == second[2]
    assert sorted(first[1] + second[1]) == list(range(16))


@pytest.mark.cpu_tensors("FSDP wants the device's number")
def test_modules_of_fsdp_are_refused(settings, tmp_path):
    texts = texts_of("""
        from torch.distributed.fsdp import FullyShardedDataParallel
        model = make()
        model.blocks[0] = FullyShardedDataParallel(model.blocks[0], device_id=torch.device("cpu"))
        hoist.torch.wrap(model, config)
    """, tmp_path / "meet", with_room(settings))
    assert all("module 'blocks.0' is divided by FSDP" in text for text in texts)


def test_a_run_of_one_group_is_not_begun_anew_by_several(settings, tmp_path):
    texts = texts_of("""
        with hoist.torch.wrap(make(), config) as engine:
            train_share(engine, rank, size, 2)
        dist.barrier()
        groups = [dist.new_group([0]), dist.new_group([1])]
        hoist.torch.wrap(make(), config, resume=True, mesh=groups[rank])
    """, tmp_path / "meet", with_room(settings))
    assert all(text.startswith("StoreError") and "holds one of step 2" in text and "mesh=" in text for text in texts)


def test_generate_goes_on_until_the_last_rank_has_ended(settings, tmp_path):
    pytest.importorskip("transformers")
    assert results(start("""
        import pickle, transformers
        join()
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=2))
        class Stop(transformers.StoppingCriteria):  # other prompts end elsewhere
            def __call__(self, ids, scores, **_):
                return torch.full((ids.shape[0],), ids.shape[1] >= 6 + rank)
        del config["zero_optimization"]["stage"]  # 3 is the default
        config["zero_optimization"] |= {"stage3_max_live_parameters": 14000, "stage3_prefetch_bucket_size": 0,
                                        "stage3_max_reuse_distance": 0}
        lengths = []
        def generate():
            ids = model.generate(torch.full((1, 4), 5), max_new_tokens=12, do_sample=False, synced_gpus=False,
                                 stopping_criteria=transformers.StoppingCriteriaList([Stop()]))
            lengths.append(ids.shape[1])
        with hoist.torch.wrap(model, config) as engine:
            generate()
            generate()
            state = engine.state_dict()
        model.load_state_dict(state, assign=True)
        model.state_dict()  # the model is PyTorch's alone from here on
        model = pickle.loads(pickle.dumps(model))
        generate()
        with hoist.torch.wrap(model, config, resume=True):
            generate()
        print(json.dumps(lengths))
    """, tmp_path / "meet", with_room(settings))) == [[6] * 4, [7] * 4]


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "MultitaskPromptTuningConfig", "PromptEncoderConfig",
                                  "PrefixTuningConfig"])
def test_prompts_that_are_learned_are_saved(settings, tmp_path, kind):
    """PEFT computes them on the first rank alone, which has a part of the weights."""
    pytest.importorskip("peft")
    assert results(start(f"""
        import peft, transformers
        from hoist.torch.transformers import save_pretrained
        from safetensors.torch import load_file
        join()
        def made():
            torch.manual_seed(0)
            more = {{"MultitaskPromptTuningConfig": {{"num_tasks": 2}}, "PromptEncoderConfig": {{"encoder_hidden_size": 32}},
                    "PrefixTuningConfig": {{"prefix_projection": True, "encoder_hidden_size": 32}}}}.get({kind!r}, {{}})
            return peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2)), peft.{kind}(num_virtual_tokens=4, task_type="CAUSAL_LM", **more))
        folder = {str(tmp_path / "saved")!r}
        with hoist.torch.wrap(made(), config) as engine:
            save_pretrained(engine, folder)
            state = engine.state_dict()
        plain = made()
        plain.load_state_dict(state)
        expected, found = peft.get_peft_model_state_dict(plain), load_file(folder + "/adapter_model.safetensors")
        print(json.dumps(found.keys() == expected.keys() and all(
            torch.equal(found[key].cpu(), expected[key].cpu()) for key in found)))
    """, tmp_path / "meet", with_room(settings))) == [True, True]


def test_waiting_for_a_rank_leaves_other_threads_running(settings, tmp_path):
    """Rank 1 comes three seconds late to a step, wherever rank 0 then waits: the GIL is free meanwhile."""
    ranks = results(start("""
        import threading
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        ticks, running = [], True
        def tick():
            while running:
                ticks.append(time.monotonic())
                time.sleep(0.01)
        thread = threading.Thread(target=tick)
        thread.start()
        waits = []
        for where in ("forward", "step", "state"):
            inputs, targets = next(batches(1))
            dist.barrier()
            if rank == 1 and where == "forward":
                time.sleep(3)
            began = time.monotonic()
            engine.backward(loss_of(engine(inputs), targets))
            if rank == 1 and where == "step":
                time.sleep(3)
            engine.step()
            if rank == 1 and where == "state":
                time.sleep(3)
            engine.state_dict()
            ended = time.monotonic()
            waits.append([ended - began, sum(began < t < ended for t in ticks)])
        running = False
        thread.join()
        print(json.dumps(waits))
        engine.close()
    """, tmp_path / "meet", with_room(settings)))
    for seconds, ticks in ranks[0]:
        assert seconds > 1 and ticks > 20 * seconds, ranks  # a hundred a second, but for what the machine is busy with


def test_groups_of_ranks_that_gather_among_themselves(settings, tmp_path):
    """zero_hpz_partition_size: the bits of ranks without groups, and fewer bytes between the groups."""
    ends = []
    for group in (1, 2):
        config = with_room(settings)
        config["hoist"]["device_memory"] = "7MiB"  # a layer is not kept from the forward to the backward pass
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] += str(group)
        config["zero_optimization"]["zero_hpz_partition_size"] = group
        ends.append(results(start("""
            join()
            engine = hoist.torch.wrap(make(width=128), config)
            losses = train_share(engine, rank, size, 4)
            wire, within = engine.statistics()["links"]["wire"], engine.statistics()["wire_in_group"]
            print(json.dumps([losses, digests(engine), wire - within, within]))
            engine.close()
        """, tmp_path / f"meet-{group}", config, size=4)))
    for plain, grouped in zip(*ends, strict=True):
        assert plain[:2] == grouped[:2]
        assert plain[3] == 0 < grouped[3] and grouped[2] < plain[2]


FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 4, "hysteresis": 1}


def train_with_overflows(engine, rank, size, overflows_here, steps=12):
    """[losses, what was applied, scales, digests]; rank `rank` of `size` takes its micro-batches of each step."""
    losses, applied, scales = [], [], []
    for index, (inputs, targets) in enumerate(batches(steps * size)):
        if rank is not None and index % size != rank:
            continue
        loss = loss_of(engine(inputs), targets)
        losses.append(loss.item())
        scales.append(engine.optimizer.loss_scale)
        engine.backward(loss.float() * 1e30 if overflows_here(index // size, index % size) else loss)
        if engine.step() is not None:
            applied.append(engine.was_step_applied())
    return [losses, applied, scales, engine.skipped_steps, digests(engine)]


def test_fp16_an_overflow_on_one_rank_skips_the_step_on_all(settings, tmp_path):
    """Ranks that see the same batches average equal gradients: their bits are those of one process, which here skips the
    steps whose gradients overflow on rank 1 alone."""
    ranks = results(start("""
        join()
        engine = hoist.torch.wrap(make(), config)
        print(json.dumps(train_with_overflows(engine, None, 1, lambda step, _: rank == 1 and step in (2, 3, 9))))
        engine.close()
    """, tmp_path / "meet", with_room(settings, fp16=FP16)))
    with hoist.torch.wrap(make(), at(tmp_path / "alone", with_room(settings, fp16=FP16))) as engine:
        alone = train_with_overflows(engine, None, 1, lambda step, _: step in (2, 3, 9))
    assert ranks[0] == ranks[1] == json.loads(json.dumps(alone))
    assert alone[1] == [step not in (2, 3, 9) for step in range(12)] and alone[3] == 3
    assert [alone[2][step] for step in (2, 3, 4, 9, 10)] == [2**10, 2**9, 2**8, 2**9, 2**8]


def test_fp16_of_several_ranks(settings, tmp_path):
    """Each rank has its own batches. A mean is rounded to fp16 on the way, as bf16 is: losses, which
    are numbers of fp16, agree to three units in their last place."""
    ranks = results(start("""
        join()
        engine = hoist.torch.wrap(make(), config)
        print(json.dumps(train_with_overflows(engine, rank, size, lambda step, where: where == 1 and step == 5)))
        engine.close()
    """, tmp_path / "meet", with_room(settings, fp16=FP16)))
    config = at(tmp_path / "alone", with_room(settings, fp16=FP16, gradient_accumulation_steps=2))
    with hoist.torch.wrap(make(), config) as engine:
        alone = train_with_overflows(engine, None, 2, lambda step, where: where == 1 and step == 5)
    assert ranks[0][1:] == ranks[1][1:] and ranks[0][1] == alone[1] == [step != 5 for step in range(12)]
    assert ranks[0][2] == alone[2][::2] and ranks[0][3] == alone[3] == 1
    ours = [loss for pair in zip(ranks[0][0], ranks[1][0], strict=True) for loss in pair]
    assert ours[:2] == alone[0][:2] and ours == pytest.approx(alone[0], rel=3 * 2.0**-10)


def test_ranks_go_back_after_their_channel_failed(settings, tmp_path):
    """One rank stays away until the other has given it up. Both go back to a named checkpoint, by channels made anew."""
    config = with_room(settings)
    config["hoist"] |= {"keep_steps": 1, "comm_timeout_seconds": 3.0}
    ranks = results(start("""
        join()
        def wait_for(name):
            while not os.path.exists(f"{directory}/{name}"):
                time.sleep(0.05)
        engine = hoist.torch.wrap(make(), config)
        first = train_share(engine, rank, size, 2)
        engine.save("two").wait()
        first = train_share(engine, rank, size, 2, first=2)
        failures = 0
        if rank == 1:
            wait_for("failed-0")
        for _ in range(2):  # it is the channel that failed, and stays so
            try:
                engine.checkpoints()
            except hoist.CommError:
                failures += 1
        open(f"{directory}/failed-{rank}", "w").close()
        wait_for("failed-1")
        assert engine.restore("two") == 2
        again = train_share(engine, rank, size, 2, first=2)
        print(json.dumps([failures, again == first, digests(engine)]))
        engine.close()
    """, tmp_path / "meet", config))
    assert ranks[0] == ranks[1] and ranks[0][:2] == [2, True]


# Of mpirun with one process for each machine, which starts the ranks there.
ONE_A_MACHINE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize("launcher", [{}, ONE_A_MACHINE], ids=["RANK and WORLD_SIZE", "mpirun of one process a machine"])
def test_ranks_divide_the_machine_that_they_are_on(settings, tmp_path, launcher):
    config = with_room(settings)
    del config["hoist"]["pinned_memory"]
    ranks = results(start("""
        hoist._hoist.memory_id = lambda: f"machine {rank % 2}"
        os.environ["LOCAL_RANK"] = str(rank // 2)
        join()
        with hoist.torch.wrap(make(), config) as engine:
            budget = engine.statistics()["tiers"]["pinned"]["budget_bytes"]
            print(json.dumps([engine.global_rank, engine.local_rank, budget]))
    """, tmp_path / "meet", config, size=3, **launcher))
    assert [ranks[rank][:2] for rank in range(3)] == [[0, 0], [1, 0], [2, 1]]
    assert all(1.5 * ranks[rank][2] < ranks[1][2] for rank in (0, 2)), ranks


@pytest.mark.parametrize("memories, launched, places", [
    (["b"] * 4, [0, 1, 2, 3], [(4, 0, 0), (4, 1, 1), (4, 2, 2), (4, 3, 3)]),
    (["b"] * 2, [1, 0], [(2, 1, 1), (2, 0, 0)]),
    (["b"] * 2, [-1, -1], [(2, 0, 0), (2, 1, 1)]),
    # Two launchers on one machine, each with half of the GPUs.
    (["b"] * 4, [0, 1, 0, 1], [(4, 0, 0), (4, 1, 1), (4, 2, 0), (4, 3, 1)]),
    # A container with a memory limit for each rank, which sees all GPUs.
    (["b:1", "b:2", "b:3"], [0, 1, 2], [(1, 0, 0), (1, 0, 1), (1, 0, 2)]),
    (["b:1", "b:2", "c:3"], [-1, -1, -1], [(1, 0, 0), (1, 0, 1), (1, 0, 0)]),
    (["b:1", "b:1", "b:2"], [0, 1, -1], [(2, 0, 0), (2, 1, 1), (1, 0, 2)]),
    (["b", "c", "b", "c"], [0, 0, 1, 1], [(2, 0, 0), (2, 0, 0), (2, 1, 1), (2, 1, 1)]),
])
def test_gpus_are_by_local_rank_and_budgets_by_memory(memories, launched, places):
    words = [{"memory": memory, "local_rank": rank} for memory, rank in zip(memories, launched, strict=True)]
    assert [distributed._local_place(rank, words) for rank in range(len(words))] == places


def test_ranks_that_are_joined_after_wrap_are_refused(settings):
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    alone = settings(store="alone")
    alone["hoist"]["communicator"] = "self"
    engines = [hoist.torch.wrap(make(), config) for config in (settings(), alone)]
    inputs, targets = next(batches(1))
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(hoist.UsageError, match=r"init_process_group\(\) came after wrap\(\), .* other ranks \(2 in all\)"):
            engines[0](inputs)
        engines[1].backward(loss_of(engines[1](inputs), targets))
        assert engines[1].step().applied
    finally:
        dist.destroy_process_group()
        for engine in engines:
            engine.close()


def test_processes_that_would_train_alone_are_refused(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(hoist.UsageError, match="init_process_group"):
        hoist.torch.wrap(make(), settings())
    config = settings()
    config["hoist"]["communicator"] = "self"
    with hoist.torch.wrap(make(), config) as engine:
        assert engine.world_size == 1
