# SPDX-License-Identifier: Apache-2.0
"""One training run for compare.py: the same model, data and configuration in hoist, in DeepSpeed, or in plain PyTorch.

The reference is what both are to compute: bf16 weights, fp32 masters in memory, torch.optim.AdamW.

The products of linear layers are fp32, of weights rounded to bf16: processors without bf16 instructions take so long for
bf16 products that nothing else could be seen. --bf16-products multiplies in bf16.

Prints one line of JSON for every step, as it ends. "model_seconds" is the time of forward and backward; for the reference, of
the model alone. Bytes are the kernel's accounting (/proc/self/io: what reached the
block layer), memory is the peak of the resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

# DeepSpeed looks at these when it is imported, or asks a launcher that is not there.
SINGLE = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": os.environ.get("MASTER_PORT", "29511"), "LOCAL_SIZE": "1"}

VOCABULARY = 256


def build(layers: int, width: int, context: int, recompute: bool = True, bf16_products: bool = False):
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Linear(nn.Linear):
        def forward(self, x):
            if bf16_products:
                return super().forward(x)
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
            self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), Linear(width, VOCABULARY, bias=False)

        def forward(self, tokens):
            x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Gpt()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def batch_of(step: int, batch: int, context: int):
    """Windows of this file's own bytes: predictable enough that a loss falls."""
    import torch

    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - context - 1, (batch,), generator=generator)
    rows = torch.stack([text[s:s + context + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


class Reference:
    def __init__(self, model, config):
        import copy

        import torch

        settings = config["optimizer"]["params"]
        self.clip = config["gradient_clipping"]
        self.master = copy.deepcopy(model)
        self.model = model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.master.parameters(), **settings)

    def __call__(self, inputs):
        return self.model(inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        import torch

        pairs = list(zip(self.model.parameters(), self.master.parameters(), strict=True))
        for parameter, master in pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)


def accounting() -> dict[str, int]:
    values: dict[str, int] = {}
    with open("/proc/self/io") as file:
        for line in file:
            key, value = line.split(":")
            values[key] = int(value)
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                values["peak_rss"] = int(line.split()[1]) * 1024
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("hoist", "deepspeed", "reference"), required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--keep-activations", action="store_true")
    parser.add_argument("--bf16-products", action="store_true")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    import torch.nn.functional as F

    model = build(arguments.layers, arguments.width, arguments.context, not arguments.keep_activations, arguments.bf16_products)
    parameters = sum(p.numel() for p in model.parameters())
    with open(arguments.config) as file:
        config = json.load(file)
    if arguments.engine == "hoist":
        import hoist.torch

        engine = hoist.torch.wrap(model, config, resume=arguments.resume)
        first = engine.step_count
    elif arguments.engine == "reference":
        engine, first = Reference(model, config), 0
    else:
        os.environ.update(SINGLE)
        import deepspeed

        config.pop("hoist", None)  # a key that DeepSpeed does not know
        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        first = 0  # what it left on NVMe is no checkpoint: nothing says which step it is of
    print(json.dumps({"parameters": parameters, "first": first}), flush=True)
    before = accounting()
    for step in range(first, arguments.steps):
        inputs, targets = batch_of(step, arguments.batch, arguments.context)
        begin = time.perf_counter()
        logits = engine(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        model_seconds = time.perf_counter() - begin
        engine.step()
        seconds = time.perf_counter() - begin
        now = accounting()
        print(json.dumps({"step": step + 1, "loss": loss.item(), "seconds": seconds, "model_seconds": model_seconds,
                          "read": now["read_bytes"] - before["read_bytes"],
                          "written": now["write_bytes"] - before["write_bytes"], "peak_rss": now["peak_rss"]}),
              flush=True)
        before = now
    if arguments.engine == "hoist":
        engine.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
