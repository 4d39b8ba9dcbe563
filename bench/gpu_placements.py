#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""hoist-gpt on a GPU with its state on the device, in pinned memory and on a disk: what a step takes, and why.

    bench/gpu_placements.py --bin build/release/bin --path DIR [--largest] [--json FILE]

The same model and batches in each placement, one run each. Per placement: the median time of steps 4 to N (the first
passes record and warm up), model FLOP/s (what backward computes again is not counted) and their share of the card's dense
bf16 peak, the practicality (the step without offload over this one), how busy each link was, what the device stood still
for, and the peak of each tier against its budget. For the disk also the step over the longest of computing and moving its
bytes at the speeds that `hoist bench io` measures on the same disk. --largest looks for the deepest model of --width that
trains with 16 GiB of device memory, without offload and with pinned memory and disk, by `hoist check`; and runs it.

--device host runs the same on the host device, and says nothing about a GPU.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

GIB = 1 << 30
WARM_UP = 3
# Dense bf16 FLOP/s by NVIDIA's data sheets; the first that the card's name contains.
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
LINKS = {"host_to_device": "up", "device_to_host": "down", "nvme_read": "disk read", "nvme_write": "disk written"}


class Placement:
    def __init__(self, name, parameters, optimizer, activations, device_memory):
        self.name, self.parameters, self.optimizer = name, parameters, optimizer
        self.activations, self.device_memory = activations, device_memory

    def uses_disk(self):
        return "nvme" in (self.parameters, self.optimizer)


def placements(args):
    return [Placement("device", "none", "none", "keep", args.device_memory),
            Placement("optimizer pinned", "none", "cpu", "keep", args.device_memory),
            Placement("all pinned, small device", "cpu", "cpu", "offload", args.small_device_memory),
            Placement("optimizer on the disk", "none", "nvme", "keep", args.device_memory)]


def configuration(args, placement, store):
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0},
        "hoist": {"device": args.device, "device_memory": placement.device_memory, "pinned_memory": args.pinned_memory},
    }
    for key, place in (("offload_param", placement.parameters), ("offload_optimizer", placement.optimizer)):
        if place != "none":
            config["zero_optimization"][key] = {"device": place}
        if place == "nvme":
            config["zero_optimization"][key]["nvme_path"] = store
    return config


class Workplace:
    """A directory for one run's configuration, report and store."""

    def __init__(self, args, directory):
        self.args, self.directory = args, directory

    def file(self, name):
        return os.path.join(self.directory, name)

    def command(self, placement, layers, steps):
        shutil.rmtree(self.file("store"), ignore_errors=True)
        with open(self.file("config.json"), "w") as file:
            json.dump(configuration(self.args, placement, self.file("store")), file)
        args = self.args
        return [os.path.join(args.bin, "hoist-gpt"), "--config", self.file("config.json"), "--text", args.text, "--steps",
                str(steps), "--layers", str(layers), "--width", str(args.width), "--heads", str(args.heads), "--context",
                str(args.context), "--batch", str(args.batch), "--activations", placement.activations]

    def train(self, placement, layers, steps):
        """The report, or the message with which the program refused."""
        command = self.command(placement, layers, steps) + ["--report", self.file("report.json")]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        shutil.rmtree(self.file("store"), ignore_errors=True)
        if ended.returncode == 2:
            return None, ended.stderr.strip()
        if ended.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{ended.stderr}")
        with open(self.file("report.json")) as file:
            return json.load(file), ""

    def fits(self, placement, layers):
        """Whether every tier can hold the model, by arithmetic."""
        describe = self.command(placement, layers, 1) + ["--units", self.file("units.json")]
        if subprocess.run(describe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
            return False
        check = [os.path.join(self.args.bin, "hoist"), "check", self.file("config.json"), "--units", self.file("units.json"),
                 "--json", self.file("check.json")]
        if subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0:
            return False
        with open(self.file("check.json")) as file:
            prediction = json.load(file)["prediction"]
        # The store, and what a file system wants beside it.
        room = prediction["nvme"]["bytes"] <= 0.95 * shutil.disk_usage(self.directory).free
        return prediction["device"]["fits"] and prediction["pinned"]["fits"] and room

    def disk_speeds(self):
        """Bytes a second, read and written."""
        speeds = {}
        for operation in ("read", "write"):
            subprocess.run([os.path.join(self.args.bin, "hoist"), "bench", "io", "--path", self.directory, "--op", operation,
                            "--size", self.args.disk_file, "--seconds", str(self.args.disk_seconds), "--quiet", "--json",
                            self.file("io.json")], check=True, stdout=subprocess.DEVNULL)
            with open(self.file("io.json")) as file:
                speeds[operation] = 1e9 * json.load(file)["gb_per_s"]
        return speeds


def peak_of(args, device):
    if args.peak_tflops:
        return 1e12 * args.peak_tflops
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def figures(args, placement, report, disk):
    later = [step["seconds"] for step in report["steps"][WARM_UP:]]
    all_seconds = sum(step["seconds"] for step in report["steps"])
    seconds = statistics.median(later)
    flops = report["flops_per_token"] * report["tokens_per_step"] / seconds
    peak = peak_of(args, report["device"])
    steps = len(report["steps"])
    result = {
        "placement": placement.name, "activations": placement.activations, "parameters": report["parameters"],
        "tokens_per_step": report["tokens_per_step"], "step_seconds": seconds,
        "slowest_step_seconds": max(later), "compute_seconds": report["compute_seconds"] / steps,
        "model_flops": flops, "utilisation": flops / peak if peak else None,
        "links": {name: {"bytes": report["links"][name]["bytes"] / steps,
                         "busy_share": report["links"][name]["busy_seconds"] / all_seconds} for name in LINKS},
        "wait_share": {cause: waited / all_seconds for cause, waited in report["wait_seconds"].items()},
        "tiers": report["tiers"], "loss": report["steps"][-1]["loss"], "digest": report["digest"], "device": report["device"],
    }
    if placement.uses_disk():
        bytes_of = {name: result["links"][name]["bytes"] for name in ("nvme_read", "nvme_write")}
        disk_seconds = bytes_of["nvme_read"] / disk["read"] + bytes_of["nvme_write"] / disk["write"]
        result["disk"] = {**disk, "seconds": disk_seconds,
                          "over_bound": seconds / max(result["compute_seconds"], disk_seconds)}
    return result


def gib(count):
    return f"{count / GIB:.1f}"


def share(value):
    return "-" if value is None else f"{100 * value:.1f} %"


def table(results):
    print(f"{results[0]['parameters']} parameters, {results[0]['tokens_per_step']} tokens a step, {results[0]['device']}\n")
    print("| state | backward | step | model TFLOP/s | of peak | practicality | kernels | "
          + " | ".join(LINKS.values()) + " | waiting | device GiB | pinned GiB | disk GiB |")
    print("|---" * (11 + len(LINKS)) + "|")
    first = results[0]["step_seconds"]
    for r in results:
        links = " | ".join(f"{gib(r['links'][name]['bytes'])} GiB, {share(r['links'][name]['busy_share'])}" for name in LINKS)
        tiers = " | ".join(gib(r["tiers"][name]["peak_bytes"]) + " of " + gib(r["tiers"][name]["budget_bytes"])
                           for name in ("device", "pinned", "nvme"))
        waits = ", ".join(f"{cause} {share(waited)}" for cause, waited in r["wait_share"].items() if waited >= 0.001) or "-"
        print(f"| {r['placement']} | {r['activations']} | {r['step_seconds']:.3f} s | {r['model_flops'] / 1e12:.2f} | "
              f"{share(r['utilisation'])} | {share(first / r['step_seconds'])} | "
              f"{share(r['compute_seconds'] / r['step_seconds'])} | {links} | {waits} | {tiers} |")
    print()
    for r in results:
        if "disk" in r:
            print(f"{r['placement']}: the step is {r['disk']['over_bound']:.2f} of the longer of computing "
                  f"({r['compute_seconds']:.3f} s) and moving its bytes ({r['disk']['seconds']:.3f} s at "
                  f"{r['disk']['read'] / 1e9:.2f} GB/s read, {r['disk']['write'] / 1e9:.2f} GB/s written)")
    if any(r["digest"] != results[0]["digest"] for r in results):
        sys.exit("placements ended in different states: " + json.dumps({r["placement"]: r["digest"] for r in results}))
    print("all placements ended in the same masters and moments, bit by bit")


def largest(args, workplace):
    """The deepest model that trains with a device budget, without hoist's tiers and with them."""
    found = []
    for placement in (Placement("device only", "none", "none", "recompute", args.largest_device_memory),
                      Placement("pinned memory", "cpu", "cpu", "offload", args.largest_device_memory),
                      Placement("disk", "nvme", "nvme", "recompute", args.largest_device_memory)):
        low, high = 0, 1  # low fits, high does not
        while high <= args.layers_max and workplace.fits(placement, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if workplace.fits(placement, middle) else (low, middle)
        # Arithmetic knows nothing of the program's own pinned memory: what is refused is made smaller.
        report = None
        while low > 0:
            report, _ = workplace.train(placement, low, 2)
            if report is not None:
                break
            low -= max(1, low // 50)
        if report is None:
            print(f"{placement.name}: not even one layer")
            continue
        found.append({"placement": placement.name, "layers": low, "parameters": report["parameters"],
                      "seconds": report["steps"][-1]["seconds"], "tiers": report["tiers"]})
        print(f"{placement.name}: {low} layers, {report['parameters']} parameters, second step "
              f"{report['steps'][-1]['seconds']:.2f} s")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/bin", help="the folder of hoist and hoist-gpt")
    parser.add_argument("--path", default=".", help="a directory on the disk")
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3", help="what to learn")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device-memory", default="60GiB")
    parser.add_argument("--small-device-memory", default="6GiB")
    parser.add_argument("--pinned-memory", default="40GiB")
    parser.add_argument("--peak-tflops", type=float, help="of the card in dense bf16, when it is not an A100, H100 or H200")
    parser.add_argument("--disk-file", default="8GiB", help="size of the file that the disk's speed is measured with")
    parser.add_argument("--disk-seconds", type=float, default=10)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--largest-device-memory", default="16GiB")
    parser.add_argument("--layers-max", type=int, default=4096)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the host device: does it run")
    args = parser.parse_args()
    if args.smoke:
        args.device, args.layers, args.width, args.heads, args.context, args.batch, args.steps = "host", 2, 64, 1, 16, 2, 5
        args.device_memory, args.small_device_memory, args.pinned_memory = "8MiB", "4MiB", "64MiB"
        args.disk_file, args.disk_seconds = "16MiB", 0.1
        args.largest, args.largest_device_memory, args.layers_max = True, "4MiB", 16
    if args.steps <= WARM_UP:
        sys.exit(f"--steps {args.steps} leaves nothing after {WARM_UP} to warm up")
    if not os.path.exists(args.text):
        print(f"skipped: there is no text {args.text}")
        sys.exit(77)
    record = {"placements": []}
    with tempfile.TemporaryDirectory(prefix="hoist-gpu-placements-", dir=args.path) as directory:
        workplace = Workplace(args, directory)
        disk = workplace.disk_speeds()
        for placement in placements(args):
            report, refusal = workplace.train(placement, args.layers, args.steps)
            if report is None:
                sys.exit(f"{placement.name}: {refusal}")
            record["placements"].append(figures(args, placement, report, disk))
        table(record["placements"])
        if args.largest:
            print(f"\nwith {args.largest_device_memory} of device memory, width {args.width}, "
                  f"{args.batch} x {args.context} tokens a step:")
            record["largest"] = largest(args, workplace)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
