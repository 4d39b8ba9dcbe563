# SPDX-License-Identifier: Apache-2.0
"""One cell of measure.py: one way to hold the model's state, all batch sizes in turn. Prints a line of JSON for each."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "deepspeed"))
from train import SINGLE, Reference, accounting, batch_of  # noqa: E402

LINKS = ("host_to_device", "device_to_host", "nvme_read", "nvme_write")


class InMemory(Reference):
    def __init__(self, model, blocks, config, arguments):
        config["optimizer"]["params"]["fused"] = True
        super().__init__(model.to(arguments.device), config)


class Hoist:
    def __init__(self, model, blocks, config, arguments):
        import hoist.torch

        self.metrics = os.path.join(arguments.directory, "metrics.json")
        self.engine = hoist.torch.wrap(model, config | {"hoist": config["hoist"] | {"metrics": self.metrics}})
        self.backward, self.step = self.engine.backward, self.engine.step

    def __call__(self, inputs):
        return self.engine(inputs)

    def figures(self, steps: int, seconds: float) -> dict:
        """The figures of the last steps, and the digests of the state after them."""
        import hoist

        with open(self.metrics) as file:
            lines = [json.loads(line) for line in file][-steps:]
        links = {name: {"bytes": statistics.fmean(line["links"][name]["bytes"] for line in lines),
                        "busy_share": sum(line["links"][name]["busy_seconds"] for line in lines) / seconds}
                 for name in LINKS}
        waits = {cause: sum(line["wait_seconds"][cause] for line in lines) / seconds for cause in lines[0]["wait_seconds"]}
        digests = {name: self.engine.digest(getattr(hoist.State, name)) for name in ("master", "moment1", "moment2")}
        return {"links": links, "wait_share": waits, "tiers": self.engine.statistics()["tiers"], "digest": digests}

    def close(self):
        self.engine.close()


class DeepSpeed:
    def __init__(self, model, blocks, config, arguments):
        os.environ.update(SINGLE)
        if arguments.device == "cuda":
            del os.environ["DS_ACCELERATOR"]
        import deepspeed

        config.pop("hoist")  # a key that DeepSpeed does not know
        deepspeed.init_distributed("nccl" if arguments.device == "cuda" else "gloo")
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.backward, self.step = self.engine.backward, self.engine.step

    def __call__(self, inputs):
        return self.engine(inputs)


class Fsdp:
    """FSDP2: fp32 shards, gradients and moments in host memory, PyTorch's fused AdamW there."""

    def __init__(self, model, blocks, config, arguments):
        import torch
        import torch.distributed
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        on_gpu = arguments.device == "cuda"
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=0, world_size=1,
                                             store=torch.distributed.HashStore())
        for module in model.modules():  # FSDP moves parameters only
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(arguments.device))
        policies = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
                    "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)}
        for module in (*blocks, model):
            fully_shard(module, **policies)
        self.model, self.clip = model, config["gradient_clipping"]
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **config["optimizer"]["params"])

    def __call__(self, inputs):
        return self.model(inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


ENGINES = {"memory": InMemory, "hoist": Hoist, "deepspeed": DeepSpeed, "fsdp": Fsdp}


def forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # the peak is then the process's, start-up included


def measure(engine, batch: int, arguments) -> dict:
    import torch
    import torch.nn.functional as F

    on_gpu = arguments.device == "cuda"
    forget_peak()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, before = [], [], accounting()
    for step in range(arguments.steps):
        if step == arguments.warm_up:
            before = accounting()
        inputs, targets = (tokens.to(arguments.device) for tokens in batch_of(step, batch, arguments.context))
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        output = engine(inputs)
        logits = getattr(output, "logits", output)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    later = seconds[arguments.warm_up:]
    now = accounting()
    result = {"batch": batch, "tokens": batch * arguments.context, "seconds": statistics.median(later), "fastest": min(later),
              "slowest": max(later), "losses": losses, "peak_host_bytes": now["peak_rss"],
              "file_read": (now["read_bytes"] - before["read_bytes"]) / len(later),
              "file_written": (now["write_bytes"] - before["write_bytes"]) / len(later)}
    if isinstance(engine, Hoist):
        result |= engine.figures(len(later), sum(later))
    if on_gpu:  # hoist's own part is no memory of PyTorch's
        own = result["tiers"]["device"]["peak_bytes"] if "tiers" in result else 0
        result["peak_device_bytes"] = torch.cuda.max_memory_reserved() + own
    return result


def be_deterministic(arguments) -> None:
    """Makes PyTorch's kernels deterministic, so that two runs end in the same bits; strictly if a small model can be trained
    so, because flash attention has its deterministic backward pass only then."""
    import torch
    import torch.nn.functional as F
    from llama import build

    torch.use_deterministic_algorithms(True)
    try:
        with torch.device(arguments.device):
            model, _ = build(arguments.model, 1, 128, 2, 32)
            output = model.bfloat16()(torch.zeros(2, 32, dtype=torch.long))
            F.cross_entropy(getattr(output, "logits", output).float().flatten(0, 1), torch.zeros(64, dtype=torch.long)).backward()
    except RuntimeError as error:
        print(f"attention may differ between runs: {error}", file=sys.stderr)
        torch.use_deterministic_algorithms(True, warn_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", choices=("transformers", "plain"), required=True)
    for name in ("layers", "width", "heads", "context", "steps", "warm-up"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    if arguments.engine == "hoist":
        import hoist.torch  # noqa: F401 - before torch, so that PyTorch's threads do not spin
    import torch
    from llama import build

    if arguments.device == "cuda":
        be_deterministic(arguments)
    with torch.device(arguments.device):  # a GPU draws a billion initial values in a moment
        model, blocks = build(arguments.model, arguments.layers, arguments.width, arguments.heads, arguments.context)
    model.cpu()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()  # or the peaks below would have what building took
    parameters = sum(p.numel() for p in model.parameters())
    with open(arguments.config) as file:
        engine = ENGINES[arguments.engine](model, blocks, json.load(file), arguments)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")
                if name in sys.modules}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(json.dumps({"parameters": parameters, "versions": versions, "device": device}), flush=True)
    for batch in arguments.batch:
        try:
            print(json.dumps(measure(engine, batch, arguments)), flush=True)
        except torch.OutOfMemoryError as error:
            print(json.dumps({"batch": batch, "error": "out of memory: " + str(error).splitlines()[0]}), flush=True)
            os._exit(0)  # larger batches will not fit, and the step that failed leaves the engine unusable
    if isinstance(engine, Hoist):
        engine.close()
    sys.stdout.flush()
    os._exit(0)  # not every engine ends its threads


if __name__ == "__main__":
    main()
