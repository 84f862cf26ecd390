# SPDX-License-Identifier: Apache-2.0
"""The work of the stages of live.py: layers that sleep, with weights that matter only when they are sent."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

SPUN_S = 2e-4  # the end of a layer's time is spent in a loop, because a sleep may end late by about this much


class Clock:
    """The forward time of each layer of this process. A backward takes twice as long."""

    seconds: list[float] = []

    @classmethod
    def wait(cls, layer: int, times: float, begun: float) -> None:
        """Waits until `times` times the layer's forward time has passed since `begun`."""
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
    """Sleeps for the time of its number. elements: the size of its weight, for which AdamW keeps two moments; frozen:
    bytes that only matter when they are sent."""

    def __init__(self, number: int, elements: int, frozen: int = 0) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(elements))
        if frozen:
            self.frozen = nn.Parameter(torch.ones(frozen, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(x, self.weight, self.number)


def module_of(elements: Sequence[int], stages: int, frozen: int = 0) -> PipelineModule:
    """A pipeline with a layer for each entry of `elements`."""
    return PipelineModule(
        [LayerSpec(Layer, number, count, frozen) for number, count in enumerate(elements)],
        num_stages=stages,
        loss_fn=lambda output, label: (output.mean() - label.mean()) ** 2,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )


def data(micro_batches: int, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch."""
    for number in range(micro_batches):
        yield torch.full((1, elements), 1.0), torch.tensor([float(number)])
