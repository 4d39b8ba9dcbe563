# SPDX-License-Identifier: Apache-2.0
"""Makes deepspeed_files.tar.xz, which test_deepspeed_checkpoints.py continues from: checkpoints that DeepSpeed wrote after 20
steps on two ranks, and what its own losses were in the 20 steps after. Needs DeepSpeed 0.19; the tests do not.

    DS_BUILD_OPS=0 pip install deepspeed==0.19.0
    python tests/python/make_deepspeed_files.py

In the archive: CELL/TAG (a checkpoint), CELL-universal/TAG (what DeepSpeed's ds_to_universal made of it), losses.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile

RANKS = 2
STEPS, LAST = 20, 40
HERE = os.path.dirname(os.path.abspath(__file__))

# With these settings, DeepSpeed chooses another class for the optimizer: BF16_Optimizer.
_FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
_BF16 = {"bf16": {"enabled": True}}
# Overflows in the first steps; or doubles before and after the checkpoint, far from any overflow.
_FP16_OVERFLOWS = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 100, "hysteresis": 1}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 14}}
_WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 30}}}
_COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 60, "warmup_num_steps": 8}}}
_SMALL_SUB_GROUPS = {"sub_group_size": 200}

CELLS = {
    "zero1-bf16": (1, {**_BF16, **_WARMUP}, {}),
    "zero1-bf16-fp32-gradients": (1, {**_BF16, **_FP32_GRADIENTS, **_WARMUP}, {}),
    "zero1-fp16": (1, {**_FP16_OVERFLOWS, **_COSINE}, {}),
    "zero2-bf16": (2, _BF16, {}),  # with a scheduler of the program's
    "zero2-fp16": (2, {**_FP16, **_WARMUP}, {}),
    "zero3-bf16": (3, {**_BF16, **_COSINE}, _SMALL_SUB_GROUPS),
    "zero3-fp16": (3, _FP16, {}),  # likewise
    "zero3-fp32": (3, _WARMUP, {}),
}


def config_of(cell: str) -> dict:
    stage, rest, zero = CELLS[cell]
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, **rest,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "torch_adam": True}},
            "zero_optimization": {"stage": stage, **zero}}


def has_own_scheduler(cell: str) -> bool:
    return "scheduler" not in CELLS[cell][1]


def scheduler_of(optimizer):
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))


def groups_of(model) -> list[dict]:
    """Two groups: matrices, and the other parameters, as in most programs."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]


def train_cell(cell: str, to: str) -> None:
    """Trains as one rank; torchrun's environment variables say which."""
    import deepspeed
    import torch

    from models import Tiny, loss_of, tiny_batch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Tiny()
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config_of(cell),
                                      lr_scheduler=scheduler_of if has_own_scheduler(cell) else None)
    losses = []
    for step in range(LAST):
        inputs, targets = (part[2 * rank:2 * rank + 2] for part in tiny_batch(step))
        loss = loss_of(engine(inputs).float(), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / RANKS)
        if step + 1 == STEPS:
            engine.save_checkpoint(os.path.join(to, cell), client_state={"epoch": 3, "name": "tiny"})
    if rank == 0:
        with open(os.path.join(to, f"{cell}.json"), "w") as file:
            json.dump({"losses": losses, "scale": getattr(engine.optimizer, "cur_scale", 1.0), "skipped": engine.skipped_steps},
                      file)
    torch.distributed.barrier()
    os._exit(0)  # the interpreter's end may wait for gloo's threads


def run_ranks(arguments: list[str], ranks: int, port: int) -> None:
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank),
                       "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{arguments} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        return train_cell(arguments.cell, arguments.to)
    archive = os.path.join(HERE, "deepspeed_files.tar.xz")
    with tempfile.TemporaryDirectory() as directory:
        for index, cell in enumerate(CELLS):
            run_ranks([__file__, "--cell", cell, "--to", directory], RANKS, 29600 + index)
            tag = f"global_step{STEPS}"
            subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
                            "--num_extract_workers", "1", "--num_merge_workers", "1",
                            "--input_folder", os.path.join(directory, cell, tag),
                            "--output_folder", os.path.join(directory, f"{cell}-universal", tag)],
                           check=True, stdout=subprocess.DEVNULL, env={**os.environ, "DS_ACCELERATOR": "cpu"})
            os.remove(os.path.join(directory, cell, "zero_to_fp32.py"))
            print(cell, flush=True)
        expected = {}
        for cell in CELLS:
            with open(os.path.join(directory, f"{cell}.json")) as file:
                expected[cell] = json.load(file)
            os.remove(os.path.join(directory, f"{cell}.json"))
        with open(os.path.join(directory, "losses.json"), "w") as file:
            json.dump(expected, file, indent=1)
        with tarfile.open(archive, "w:xz") as tar:
            for name in sorted(os.listdir(directory)):
                tar.add(os.path.join(directory, name), name)
    print(archive, os.path.getsize(archive), "bytes")


if __name__ == "__main__":
    main()
