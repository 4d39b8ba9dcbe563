# SPDX-License-Identifier: Apache-2.0
"""A byte-level Llama: transformers' own, or the same layers in plain PyTorch where transformers is not installed."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


def inner_width(width: int) -> int:
    """The width of the feed-forward part: Llama's two thirds of four times the width, in multiples of 64."""
    return (8 * width // 3 + 63) // 64 * 64


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, x[batch, heads, length, head width]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequencies
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner_width(width), bias=False) for _ in range(2))
        self.down = nn.Linear(inner_width(width), width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm1(x)
        query, key, value = (project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
                             for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def build(source: str, layers: int, width: int, heads: int, context: int) -> tuple[nn.Module, list[nn.Module]]:
    """The model with its blocks, which are computed again in the backward pass. The same values in every process."""
    torch.manual_seed(0)
    if source == "plain":
        model = Llama(layers, width, heads)
        return model, list(model.blocks)
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner_width(width), num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=context, use_cache=False, attn_implementation="sdpa"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(), list(model.model.layers)


def default_source() -> str:
    return "transformers" if importlib.util.find_spec("transformers") else "plain"
