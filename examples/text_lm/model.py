# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model whose feed-forward layers are DeepSpeed's own mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from data import VOCABULARY
from deepspeed.moe.layer import MoE
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of its experts."""

    layers: int = 3
    width: int = 256
    heads: int = 4
    length: int = 128
    hidden: int = 1024
    experts: int = 8
    top_k: int = 1
    ep_size: int = 2
    capacity_factor: float = 1.25
    drop_tokens: bool = True
    aux_weight: float = 0.01


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_experts = nn.LayerNorm(shape.width)
        expert = nn.Sequential(nn.Linear(shape.width, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.width))
        self.moe = MoE(
            shape.width,
            expert,
            num_experts=shape.experts,
            ep_size=shape.ep_size,
            k=shape.top_k,
            capacity_factor=shape.capacity_factor,
            eval_capacity_factor=shape.capacity_factor,
            drop_tokens=shape.drop_tokens,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, length, width] -> the same, and the gate's balance loss."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed, aux, _counts = self.moe(self.norm_experts(x))
        return x + mixed, aux


class TextLM(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, length] bytes -> (the minimised loss, the cross entropy in it)."""
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        balance = x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x)
            balance = balance + aux
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + self.shape.aux_weight * balance, loss.detach()
