# SPDX-License-Identifier: Apache-2.0
"""The same model, data and JSON in hoist and in DeepSpeed, in turns on this machine. Prints one table.

    python bench/deepspeed/compare.py --directory /local_nvme [--pairs 3 --steps 8] [--json FILE]

Both read ds_config.json; the key "hoist" is taken out for DeepSpeed, which does not know it. Every run is a process of its
own and begins with an empty directory. The first two steps of a run are left out: buffers are made, the order of layers is
learnt. PyTorch with the same model in memory is the measure of both:

    overhead       a step's time less the model's own: forward and backward in memory
    practicality   a step in memory, with torch.optim.AdamW over fp32 masters, divided by a step with offloading; 1 is ideal

OpenMP's threads sleep while they wait, in both (OMP_WAIT_POLICY=PASSIVE, unless the caller has set it). If they spun, they
would take the processors from the threads that move data. Each pair also runs hoist a second time, as `control`;
hoist / control shows the noise. And it runs drive.py, which moves the bytes of hoist's step and computes nothing. At the end a
run of each is killed after a step, and started again.

    --keep-activations      without torch.utils.checkpoint
    --bf16-products         for processors that have them (train.py)
    --hoist '{"moments_dtype": "bf16"}'      over what stands under "hoist" in the file
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from pairs import text_of, write_json  # noqa: E402

WARM_UP = 2


def run(engine: str, arguments, directory: str, *extra: str, kill_after: int | None = None):
    """(first line, lines of steps, the end of what it said when it failed)."""
    config = json.load(open(os.path.join(HERE, "ds_config.json")))
    config["hoist"] |= json.loads(arguments.hoist)
    for part in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][part]["nvme_path"] = directory
    path = directory + ".json"
    with open(path, "w") as file:
        json.dump(config, file)
    command = [sys.executable, os.path.join(HERE, "train.py"), "--engine", engine, "--config", path,
               "--steps", str(arguments.steps), "--layers", str(arguments.layers), "--width", str(arguments.width),
               "--batch", str(arguments.batch), *extra]
    for option in ("keep_activations", "bf16_products"):
        if getattr(arguments, option):
            command.append("--" + option.replace("_", "-"))
    head, steps = {}, []
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    with open(directory + ".log", "w+") as log, \
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            if "step" not in entry:
                head = entry
                continue
            steps.append(entry)
            if kill_after is not None and len(steps) == kill_after:
                process.send_signal(signal.SIGKILL)
        process.wait()
        log.seek(0)
        said = log.read().strip().splitlines()[-1:]
    failed = process.returncode not in ((0,) if kill_after is None else (0, -signal.SIGKILL))
    return head, steps, (" ".join([f"ended with {process.returncode}", *said]) if failed else "")


def fresh(directory: str) -> str:
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    return directory


def drive_alone(arguments, steps: list[dict]) -> list[float]:
    """Seconds of moving what one step moves, with nothing else to do."""
    read, written = (statistics.median(step[key] for step in steps[WARM_UP:]) for key in ("read", "written"))
    ended = subprocess.run([sys.executable, os.path.join(HERE, "drive.py"), "--directory", arguments.directory, "--read",
                            str(read), "--written", str(written)], capture_output=True, text=True, check=True)
    return [json.loads(line)["seconds"] for line in ended.stdout.splitlines()]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="on the drive to be measured")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--keep-activations", action="store_true")
    parser.add_argument("--bf16-products", action="store_true")
    parser.add_argument("--hoist", default="{}")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 1:
        parser.error(f"--steps: at least {WARM_UP + 1}")
    os.makedirs(arguments.directory, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hoist-compare-", dir=arguments.directory) as arguments.directory:
        result = measure(arguments)
    write_json(arguments.json, result)
    print_table(result)


def measure(arguments) -> dict:
    result: dict = {"engines": {}, "errors": [], "losses": {}, "ratios": {"deepspeed": [], "control": []}, "drive": [],
                    "overhead": [], "practicality": {"hoist": [], "deepspeed": []}}
    seen: dict[str, dict[str, list[float]]] = {}
    parameters = 0
    for pair in range(arguments.pairs):
        seconds: dict[str, float] = {}
        order = ("hoist", "deepspeed", "control", "reference")
        for name in order if pair % 2 == 0 else reversed(order):
            engine = "hoist" if name == "control" else name
            directory = fresh(os.path.join(arguments.directory, engine))
            head, steps, error = run(engine, arguments, directory)
            if error:
                result["errors"].append({"pair": pair + 1, "run": name, "error": error})
                continue
            seconds[name] = statistics.median(step["seconds"] for step in steps[WARM_UP:])
            if name == "control":
                continue
            result["losses"][engine] = [step["loss"] for step in steps]
            if name == "reference":
                seconds["model"] = statistics.median(step["model_seconds"] for step in steps[WARM_UP:])
                continue
            parameters = head["parameters"]
            into = seen.setdefault(engine, {"seconds": [], "read": [], "written": [], "peak_rss": []})
            for key in into:
                into[key] += [step[key] for step in steps[WARM_UP:]] if key != "peak_rss" else [steps[-1][key]]
            if engine == "hoist":
                result["drive"] += drive_alone(arguments, steps)
        for name, ratios in result["ratios"].items():
            if name in seconds and "hoist" in seconds:
                ratios.append(seconds["hoist"] / seconds[name])
        if {"hoist", "deepspeed", "model"} <= set(seconds):
            over = {name: seconds[name] - seconds["model"] for name in ("hoist", "deepspeed")}
            result["overhead"].append(over)
            for name, values in result["practicality"].items():
                values.append(seconds["reference"] / seconds[name])
    for engine, values in seen.items():
        result["engines"][engine] = {key: summary(v) for key, v in values.items()}
    for engine in seen:
        directory = fresh(os.path.join(arguments.directory, engine))
        _, before, _ = run(engine, arguments, directory, kill_after=arguments.steps - 2)
        head, after, error = run(engine, arguments, directory, *(["--resume"] if engine == "hoist" else []))
        result["engines"][engine]["killed"] = {
            "after": before[-1]["step"] if before else None, "continues_from": head.get("first"), "error": error,
            "loss_at_end": after[-1]["loss"] if after else None}
    result["parameters"] = parameters
    return result


def print_table(result: dict) -> None:
    engines = result["engines"]
    print(f"{result['parameters'] / 1e6:.1f} M parameters, weights and optimizer state on NVMe, one process")
    for failure in result["errors"]:
        print(f"{failure['run']} failed in pair {failure['pair']}: {failure['error']}")
    if not {"hoist", "deepspeed"} <= set(engines):
        return
    ours, theirs = engines["hoist"], engines["deepspeed"]

    def row(name, key, scale, unit):
        a, b = ours[key]["median"] / scale, theirs[key]["median"] / scale
        print(f"| {name} | {a:.2f} {unit} ({ours[key]['min'] / scale:.2f}-{ours[key]['max'] / scale:.2f}) | {b:.2f} {unit} "
              f"({theirs[key]['min'] / scale:.2f}-{theirs[key]['max'] / scale:.2f}) | {a / b:.2f} |")

    print("| median of steps (range) | hoist | DeepSpeed | hoist / DeepSpeed |\n|---|---|---|---|")
    row("time of a step", "seconds", 1, "s")
    for name, ratios in result["ratios"].items():
        about = "hoist / DeepSpeed" if name == "deepspeed" else "hoist / hoist, the control"
        print(f"| its ratio, pair by pair: {about} | | | {text_of(ratios)} |")
    if result["overhead"]:
        ours_over, theirs_over = ([over[name] for over in result["overhead"]] for name in ("hoist", "deepspeed"))
        ratios = [a / b for a, b in zip(ours_over, theirs_over, strict=True)]
        print(f"| overhead | {statistics.median(ours_over):.2f} s ({min(ours_over):.2f}-{max(ours_over):.2f}) | "
              f"{statistics.median(theirs_over):.2f} s ({min(theirs_over):.2f}-{max(theirs_over):.2f}) | "
              f"pairs {text_of(ratios)} |")
        print("| practicality | " + " | ".join(text_of(result["practicality"][name]) for name in ("hoist", "deepspeed")) + " | |")
    drive = summary(result["drive"])
    print(f"| the drive alone, for hoist's bytes | {drive['median']:.2f} s ({drive['min']:.2f}-{drive['max']:.2f}) | | |")
    row("NVMe read a step, per parameter", "read", result["parameters"], "B")
    row("NVMe written a step, per parameter", "written", result["parameters"], "B")
    row("peak memory of the process", "peak_rss", 2**20, "MiB")
    for engine, values in engines.items():
        killed = values["killed"]
        print(f"{engine}: killed after step {killed['after']}, goes on from step {killed['continues_from']}"
              + (f" ({killed['error']})" if killed["error"] else ""))
    print("loss, step by step: " + ", ".join(result["losses"]) + " (reference: PyTorch in memory with fp32 masters)")
    for step, row_ in enumerate(zip(*result["losses"].values(), strict=True), start=1):
        print(f"  {step:3}  " + "  ".join(f"{loss:.4f}" for loss in row_))


if __name__ == "__main__":
    main()
