#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what offloading costs a PyTorch program: one Llama, its state in every place, at three batch sizes.

    PYTHONPATH=build/release/python python bench/placements/measure.py --directory DIR [--json FILE] [--cells NAME...]

The model is trained in bf16 with AdamW over fp32 masters, blocks computed again in the backward pass, and the same tokens
in each cell:

    memory, memory-again  in PyTorch's memory, with torch.optim.AdamW: the baseline, measured before and after all others
    hoist-...             hoist.torch: everything on the device; the optimizer, or everything, in pinned memory or on NVMe
    deepspeed-pinned, -nvme    ZeRO-3 with offloaded parameters and optimizer, by the same JSON
    fsdp-pinned           FSDP2 with CPUOffloadPolicy

Each cell is a process of its own that trains with all batch sizes in turn. If an engine is not installed, its cells are left
out with a message. Each cell reports, by batch size: the median time of a step after the warm-up; the practicality (the mean
of the two times in memory divided by this one; 1 is ideal, and the two in memory are the control); for hoist, how busy
each link was, what the device waited for, and the digests of masters and moments after the last step, which must be the same in
all its placements; the peak of device memory (what PyTorch reserved, and hoist's own; on the CPU only that) and of resident
host memory, with hoist's pinned part.

--device cpu runs the same in CPU memory with a small model, and says nothing about a GPU. --smoke uses a tiny model there.

Exit status: 0; 1 when a cell of hoist or the one in memory did not run, or hoist's placements ended in different bits; 77
when PyTorch is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
LINKS = {"host_to_device": "up", "device_to_host": "down", "nvme_read": "read", "nvme_write": "written"}

# engine, parameters, optimizer
CELLS = {
    "memory": ("memory", "none", "none"),
    "hoist-device": ("hoist", "none", "none"),
    "hoist-optimizer-pinned": ("hoist", "none", "cpu"),
    "hoist-pinned": ("hoist", "cpu", "cpu"),
    "hoist-optimizer-nvme": ("hoist", "none", "nvme"),
    "hoist-nvme": ("hoist", "nvme", "nvme"),
    "deepspeed-pinned": ("deepspeed", "cpu", "cpu"),
    "deepspeed-nvme": ("deepspeed", "nvme", "nvme"),
    "fsdp-pinned": ("fsdp", "cpu", "cpu"),
    "memory-again": ("memory", "none", "none"),
}
SHAPES = {
    "cuda": {"layers": 24, "width": 2048, "heads": 16, "context": 2048, "batch": [2, 16, 64], "steps": 12, "warm_up": 4},
    "cpu": {"layers": 4, "width": 256, "heads": 4, "context": 128, "batch": [1, 4, 16], "steps": 10, "warm_up": 4},
    "smoke": {"layers": 2, "width": 64, "heads": 2, "context": 16, "batch": [2], "steps": 4, "warm_up": 2},
}


def configuration(parameters: str, optimizer: str, arguments, store: str) -> dict:
    """The JSON configuration that hoist and DeepSpeed read."""
    on_gpu = arguments.device == "cuda"
    zero: dict = {"stage": 3}
    for key, place in (("offload_param", parameters), ("offload_optimizer", optimizer)):
        if place != "none":
            zero[key] = {"device": place, "pin_memory": on_gpu}
        if place == "nvme":
            zero[key]["nvme_path"] = store
            zero["sub_group_size"] = 5e7  # DeepSpeed's 1e9 is a pinned buffer of 4 GB, four times
    if parameters == "nvme":
        zero["offload_param"]["max_in_cpu"] = 0  # DeepSpeed keeps 1e9 parameters in memory otherwise
    settings = {"device": "cuda" if on_gpu else "host", "device_memory": arguments.device_memory,
                "pinned_memory": arguments.pinned_memory, "trace": arguments.trace}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "aio": {"block_size": 1048576, "queue_depth": 32, "single_submit": False, "overlap_events": True},
        "hoist": {key: value for key, value in settings.items() if value is not None},
    }


def missing(engine: str) -> str:
    """The module that the engine needs, if it is not installed; otherwise an empty string."""
    wanted = {"hoist": "hoist._hoist", "deepspeed": "deepspeed", "fsdp": "torch.distributed.fsdp", "memory": "torch"}[engine]
    try:
        return "" if importlib.util.find_spec(wanted) else wanted
    except ImportError as error:
        return error.name or wanted


def run(name: str, arguments) -> dict:
    engine, parameters, optimizer = CELLS[name]
    cell: dict = {"name": name, "engine": engine, "parameters_at": parameters, "optimizer_at": optimizer, "batches": []}
    if absent := missing(engine):
        return cell | {"left_out": f"{absent} is not installed"}
    with tempfile.TemporaryDirectory(prefix="hoist-placements-", dir=arguments.directory) as directory:
        path = os.path.join(directory, "config.json")
        with open(path, "w") as file:
            json.dump(configuration(parameters, optimizer, arguments, os.path.join(directory, "store")), file)
        command = [sys.executable, os.path.join(HERE, "run.py"), "--engine", engine, "--config", path, "--directory", directory,
                   "--device", arguments.device, "--model", arguments.model]
        for option in ("layers", "width", "heads", "context", "steps", "warm_up"):
            command += ["--" + option.replace("_", "-"), str(getattr(arguments, option))]
        command += ["--batch", *map(str, arguments.batch)]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ
        begin = time.monotonic()
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in ended.stdout.splitlines():
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        if "batch" in entry:
            cell["batches"].append(entry)
        else:
            cell |= entry
    cell["whole_seconds"] = time.monotonic() - begin
    if ended.returncode != 0 or not cell["batches"]:
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        cell["error"] = (said or ["no reason given"])[-1]
        print(f"{name} failed:\n{ended.stderr[-4000:]}", file=sys.stderr)
    return cell


def mib(count: float) -> str:
    return f"{count / MIB:.1f}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def row_of(cell: dict, entry: dict) -> str:
    columns = [cell["name"], f"{entry['seconds']:.3f} s ({entry['fastest']:.3f}-{entry['slowest']:.3f})",
               f"{entry['practicality']:.2f}" if "practicality" in entry else "-"]
    if "links" in entry:
        for link in LINKS:
            columns.append(f"{mib(entry['links'][link]['bytes'])}, {share(entry['links'][link]['busy_share'])}")
        waits = [f"{cause} {share(value)}" for cause, value in entry["wait_share"].items() if value >= 0.005]
        columns.append(", ".join(waits) or "none")
    else:
        columns += ["-", "-", mib(entry["file_read"]), mib(entry["file_written"]), "-"]
    tiers = entry.get("tiers")
    device = entry.get("peak_device_bytes", tiers["device"]["peak_bytes"] if tiers else None)
    columns.append("-" if device is None else mib(device))
    columns.append(mib(entry["peak_host_bytes"]) + (f" ({mib(tiers['pinned']['peak_bytes'])})" if tiers else ""))
    columns.append(entry["digest"]["master"][:8] if "digest" in entry else "-")
    return "| " + " | ".join(columns) + " |"


def compare_with_memory(cells: list[dict]) -> None:
    """Adds to each entry its practicality, and how far its losses are from those in memory."""
    in_memory: dict[int, list[dict]] = {}
    for cell in cells:
        for entry in cell["batches"]:
            if cell["engine"] == "memory" and "error" not in entry:
                in_memory.setdefault(entry["batch"], []).append(entry)
    for cell in cells:
        for entry in cell["batches"]:
            if "error" not in entry and (base := in_memory.get(entry["batch"])):
                entry["practicality"] = statistics.fmean(run["seconds"] for run in base) / entry["seconds"]
                entry["loss_difference"] = max(abs(a - b) for a, b in zip(entry["losses"], base[0]["losses"], strict=True))


def print_tables(result: dict) -> None:
    cells = result["cells"]
    for batch in result["batch"]:
        print(f"\n{batch * result['context']} tokens a step\n")
        print("| | step, median (range) | practicality | " + " | ".join(f"{name}: MiB a step, busy" for name in LINKS.values())
              + " | waiting | device MiB | host MiB (pinned) | masters |\n|" + "---|" * (6 + len(LINKS) + 1))
        for cell in cells:
            for entry in cell["batches"]:
                if entry["batch"] == batch:
                    print(f"| {cell['name']} | {entry['error']} |" if "error" in entry else row_of(cell, entry))
    print()
    for cell in cells:
        differences = [entry["loss_difference"] for entry in cell["batches"] if "loss_difference" in entry]
        if differences and cell["name"] != "memory":
            print(f"{cell['name']}: losses at most {max(differences):.4f} from those in memory")
        if "left_out" in cell or "error" in cell:
            print(f"{cell['name']}: {'not run, ' + cell['left_out'] if 'left_out' in cell else 'failed, ' + cell['error']}")


def same_bits(result: dict) -> bool:
    """Whether hoist's placements ended every batch size in the same state and losses."""
    seen: dict[int, dict[str, str]] = {}
    for cell in result["cells"]:
        for entry in cell["batches"]:
            if "digest" in entry:
                state = json.dumps([entry["digest"], entry["losses"]])
                seen.setdefault(entry["batch"], {})[cell["name"]] = state
    same = True
    for batch, states in seen.items():
        different = sorted(name for name, state in states.items() if state != next(iter(states.values())))
        if different:
            print(f"batch {batch}: {', '.join(different)} ended in other bits than {next(iter(states))}")
            same = False
    compared = max((len(states) for states in seen.values()), default=0)
    if same and compared > 1:
        print(f"{compared} placements of hoist: the same losses, masters and moments, bit by bit, after each batch size")
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the drive that NVMe stands for")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--model", choices=("transformers", "plain"), help="default: transformers if it is installed")
    for name in ("layers", "width", "heads", "context", "steps", "warm-up"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--batch", type=int, nargs="+", help="sequences a step, in ascending order")
    parser.add_argument("--device-memory", help="hoist.device_memory; default: by the machine")
    parser.add_argument("--pinned-memory", help="hoist.pinned_memory; default: by the machine")
    parser.add_argument("--trace", help="hoist.trace of hoist's cells; each cell overwrites the file of the one before")
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print(f"skipped: {sys.executable} has no torch")
        return 77
    from llama import default_source

    if arguments.smoke:
        arguments.device = "cpu"
    arguments.model = arguments.model or default_source()
    for key, value in SHAPES["smoke" if arguments.smoke else arguments.device].items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    if arguments.steps <= arguments.warm_up:
        parser.error(f"--steps {arguments.steps} leaves nothing after {arguments.warm_up} steps of warm-up")
    result: dict = {key: getattr(arguments, key) for key in ("device", "model", "layers", "width", "heads", "context", "batch",
                                                             "steps", "warm_up")}
    result["cells"] = []
    for name in arguments.cells:
        print(f"{name} ...", file=sys.stderr)
        cell = run(name, arguments)
        result["cells"].append(cell)
        steps = [f"{entry['batch']}: {entry['seconds']:.3f} s" for entry in cell["batches"] if "seconds" in entry]
        print(f"    {', '.join(steps)}; with the start {cell.get('whole_seconds', 0):.0f} s", file=sys.stderr)
    known = next((cell for cell in result["cells"] if "parameters" in cell), {})
    versions = {name: version for cell in result["cells"] for name, version in cell.get("versions", {}).items()}
    print(f"Llama of {arguments.model}, {known.get('parameters', 0) / 1e6:.1f} M parameters in {arguments.layers} layers of "
          f"width {arguments.width}, {arguments.context} tokens a sequence, on {known.get('device', arguments.device)}; "
          + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    compare_with_memory(result["cells"])
    print_tables(result)
    same = same_bits(result)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    ours = [cell for cell in result["cells"] if cell["engine"] in ("memory", "hoist")]
    return 0 if same and not any("error" in cell or "left_out" in cell for cell in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
