# SPDX-License-Identifier: Apache-2.0
"""Small models with what makes offloading hard: tied weights, recomputation, frozen bases."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 97
CONTEXT = 16
DEVICE = torch.get_default_device()  # of the thread that imports this; other threads have the CPU


class Block(nn.Module):
    # No bias for keys: attention does not depend on it, so its gradient would be rounding noise, which AdamW turns
    # into steps of full size. Two programs that round differently would then differ there without a reason.
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A decoder whose head shares the token embedding's weights."""

    def __init__(self, width=32, heads=2, layers=3, recompute=None):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.recompute = recompute  # "non-reentrant", "reentrant" or None

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and two small trainable ones beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        base.weight.requires_grad_(False)
        if base.bias is not None:
            base.bias.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=0.02)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def freeze_base(model):
    """Everything frozen but low-rank additions to two linear layers of each block."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.qkv = LowRank(block.qkv)
        block.up = LowRank(block.up)
    return model


def on_device_of_tests(drawn):
    """Numbers that the CPU's generator drew: they are the same on every device."""
    return drawn.to(DEVICE)


def batches(count, seed=1, batch=4, length=CONTEXT):
    """(inputs, targets) of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = on_device_of_tests(torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator, device="cpu"))
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def has_values(parameter):
    """Whether the parameter's unit is gathered. Reading one that is not raises ("are not loaded"); memory that PyTorch cannot
    guard holds NaN."""
    try:
        return not parameter.isnan().all()
    except RuntimeError as error:
        assert "are not loaded" in str(error)
        return False


class TinyBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 11), nn.Linear(11, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A few hundred parameters with whatever checkpoints have to tell apart: tied and frozen ones, and a buffer that changes."""

    def __init__(self, width=8, layers=2):
        super().__init__()
        self.token = nn.Embedding(TINY_VOCABULARY, width)
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(layers))
        self.fixed = nn.Linear(width, width, bias=False)
        self.fixed.weight.requires_grad_(False)
        self.head = nn.Linear(width, TINY_VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens):
        if self.training:
            self.calls += 1
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.fixed(x))


TINY_VOCABULARY = 16


def tiny_batch(step, batch=4, length=8):
    """(inputs, targets) of sequences with a rule to learn, and an exception now and then."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, TINY_VOCABULARY, (batch,), generator=generator, device="cpu")]
    for _ in range(length):
        surprise = torch.rand(batch, generator=generator, device="cpu") < 0.1
        other = torch.randint(0, TINY_VOCABULARY, (batch,), generator=generator, device="cpu")
        tokens.append(torch.where(surprise, other, (5 * tokens[-1] + 3) % TINY_VOCABULARY))
    tokens = on_device_of_tests(torch.stack(tokens, 1))
    return tokens[:, :-1], tokens[:, 1:]
