# SPDX-License-Identifier: Apache-2.0
"""Compares the losses of 40 steps in DeepSpeed with those of a run that makes 20 steps in DeepSpeed or hoist and, from their
checkpoint, 20 steps in the other.

    python bench/deepspeed/checkpoints.py --deepspeed-python ~/deepspeed/bin/python [--stages 1 2 3] [--types fp32 bf16 fp16]

Runs DeepSpeed itself, on `--ranks` processes (0.19; DS_BUILD_OPS=0 pip install deepspeed==0.19.0 beside the same PyTorch), and
hoist with everything on NVMe. Prints the largest difference of a loss from DeepSpeed's 40 steps: in hoist from DeepSpeed's
checkpoint after 20 steps ("into_hoist"); in hoist's own first 20 steps ("within_hoist"); and in DeepSpeed from what
`hoist.torch.deepspeed export` wrote after these ("back_into_deepspeed").
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

HALF, ALL = 20, 40
BATCH = 4
TYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12}}}


def config_of(stage: int, kind: str, micro_batch: int) -> dict:
    return {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": 1.0, **TYPES[kind],
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 30}},
            "zero_optimization": {"stage": stage}}


def model_of(kind: str):
    """A model whose weights every type can hold, because DeepSpeed also rounds its masters at the start."""
    import torch

    from train import build

    model = build(layers=2, width=128, context=64, recompute=False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def steps(engine, first: int, last: int, rank: int = 0, ranks: int = 1) -> list[float]:
    import torch
    import torch.nn.functional as F

    from train import batch_of

    losses = []
    for step in range(first, last):
        share = BATCH // ranks
        inputs, targets = (part[rank * share:(rank + 1) * share] for part in batch_of(step, BATCH, 64))
        loss = F.cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        if ranks > 1:
            torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def run_deepspeed(arguments: argparse.Namespace) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    model = model_of(arguments.type)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = config_of(arguments.stage, arguments.type, BATCH // ranks)
    if arguments.load:
        config["checkpoint"] = {"load_universal": True}
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    first = 0
    if arguments.load:
        engine.load_checkpoint(arguments.load)
        first = engine.global_steps
    losses = steps(engine, first, HALF if first < HALF else ALL, rank, ranks)
    if arguments.save:
        engine.save_checkpoint(arguments.save)
        losses += steps(engine, HALF, ALL, rank, ranks)
    if rank == 0:
        print(json.dumps(losses), flush=True)
    torch.distributed.barrier()
    os._exit(0)


def run_hoist(arguments: argparse.Namespace) -> None:
    import torch

    import hoist.torch

    torch.set_num_threads(1)
    config = config_of(arguments.stage, arguments.type, BATCH)
    store = os.path.join(arguments.directory, "store")
    nvme = {"device": "nvme", "nvme_path": store}
    offloaded = {**config, "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    engine = hoist.torch.wrap(model_of(arguments.type), offloaded, deepspeed=arguments.load)
    losses = steps(engine, engine.global_steps, HALF if arguments.save else ALL)
    engine.close()
    if arguments.save:
        hoist.torch.deepspeed.export(store, arguments.save, config)
    print(json.dumps(losses), flush=True)


def run(python: str, engine: str, ranks: int, *arguments: str) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, outputs, errors = [], [], []
    try:
        for rank in range(ranks):
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank),
                           "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            outputs.append(tempfile.TemporaryFile("w+"))  # a rank that fills a pipe would wait for a reader
            errors.append(tempfile.TemporaryFile("w+"))
            processes.append(subprocess.Popen([python, __file__, "--run", engine, *arguments], env=environment,
                                              stdout=outputs[-1], stderr=errors[-1]))
        # After one rank's failure the others would wait for it until gloo's time-out.
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    failed = [error for code, error in zip(codes, errors, strict=True) if code]
    for file in (outputs[0], *failed):
        file.seek(0)
    if failed:
        raise SystemExit("\n".join(f"{engine} {arguments} failed:\n{error.read()[-3000:]}" for error in failed))
    losses: list[float] = json.loads(outputs[0].read().splitlines()[-1])
    return losses


def compare(arguments: argparse.Namespace, stage: int, kind: str) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        what = ["--stage", str(stage), "--type", kind]
        theirs, back = os.path.join(directory, "theirs"), os.path.join(directory, "back")
        alone = run(arguments.deepspeed_python, "deepspeed", arguments.ranks, *what, "--save", theirs)
        here = run(sys.executable, "hoist", 1, *what, "--directory", os.path.join(directory, "a"), "--load", theirs)
        before = run(sys.executable, "hoist", 1, *what, "--directory", os.path.join(directory, "b"), "--save", back)
        there = run(arguments.deepspeed_python, "deepspeed", arguments.ranks, *what, "--load", back)
    assert len(alone) == ALL and len(here) == len(there) == len(before) == HALF
    print(json.dumps({"stage": stage, "type": kind, "ranks": arguments.ranks, "first_loss": alone[0], "last_loss": alone[-1],
                      "into_hoist": largest(here, alone[HALF:]), "within_hoist": largest(before, alone[:HALF]),
                      "back_into_deepspeed": largest(there, alone[HALF:])}), flush=True)


def largest(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--ranks", type=int, default=2, help="of DeepSpeed")
    parser.add_argument("--directory", help="for stores and checkpoints; a temporary one by default")
    for hidden in ("--run", "--type", "--load", "--save"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return {"deepspeed": run_deepspeed, "hoist": run_hoist}[arguments.run](arguments)
    for stage in arguments.stages:
        for kind in arguments.types:
            compare(arguments, stage, kind)


if __name__ == "__main__":
    main()
