# SPDX-License-Identifier: Apache-2.0
"""The work of the stages of live.py: layers that sleep, and weights that are only sent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

SPUN_S = 2e-4  # of a layer's time: a sleep ends late by about as much


class Clock:
    """The forward time of each layer of this process; a backward takes twice as long. Layers sleep except at the end,
    so that they take the exact time."""

    seconds: list[float] = []

    @classmethod
    def wait(cls, layer: int, times: float, begun: float) -> None:
        """Until that long after `begun`."""
        if cls.seconds[layer] <= 0:
            return
        end = begun + cls.seconds[layer] * times
        time.sleep(max(0.0, end - SPUN_S - time.perf_counter()))
        while time.perf_counter() < end:
            pass


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: int) -> torch.Tensor:
        begun = time.perf_counter()
        ctx.layer = layer
        ctx.save_for_backward(weight)
        out = x * weight[0]
        Clock.wait(layer, 1, begun)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        begun = time.perf_counter()
        (weight,) = ctx.saved_tensors
        own = torch.zeros_like(weight)
        own[0] = grad.mean()
        out = grad * weight[0]
        Clock.wait(ctx.layer, 2, begun)
        return out, own, None


class Layer(nn.Module):
    """Sleeps by its number. elements: of its weight, of which AdamW keeps two moments."""

    def __init__(self, number: int, elements: int) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(x, self.weight, self.number)


def module_of(elements: Sequence[int], stages: int) -> PipelineModule:
    """A layer for each number of elements."""
    return PipelineModule(
        [LayerSpec(Layer, number, count) for number, count in enumerate(elements)],
        num_stages=stages,
        loss_fn=lambda output, label: (output.mean() - label.mean()) ** 2,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )


def data(micro_batches: int, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of one batch."""
    for number in range(micro_batches):
        yield torch.full((1, elements), 1.0), torch.tensor([float(number)])
