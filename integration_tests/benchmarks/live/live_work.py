# SPDX-License-Identifier: Apache-2.0
"""The work of the stages of live.py: layers that sleep, with weights that matter only when they are sent."""

from collections.abc import Iterator, Sequence

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from integration_tests.benchmarks.measuring.sleeping import Sleep


class Clock:
    """The forward time of each layer of this process."""

    seconds: list[float] = []


class Layer(nn.Module):
    """Sleeps for the time of its number. elements: the size of its weight, for which AdamW keeps two moments; frozen:
    bytes that only matter when they are sent."""

    def __init__(self, number: int, elements: int, frozen: int = 0) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(elements))
        if frozen:
            self.frozen = nn.Parameter(torch.ones(frozen, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)

    def seconds(self, direction: str) -> float:
        """A backward takes twice as long as a forward."""
        return Clock.seconds[self.number] * (1 if direction == "forward" else 2)


def layers_of(elements: Sequence[int], frozen: int = 0) -> list[LayerSpec]:
    """A layer for each entry of `elements`."""
    return [LayerSpec(Layer, number, count, frozen) for number, count in enumerate(elements)]


def data(micro_batches: int, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch."""
    for number in range(micro_batches):
        yield torch.full((1, elements), 1.0), torch.tensor([float(number)])
