# SPDX-License-Identifier: Apache-2.0
"""The work of a stage of the pipeline benchmarks: a sleep of planned or drawn length, or linear layers."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import nn

from integration_tests.benchmarks.stages.stages_draws import seconds

WIDTH = 1024  # width of the linear layers


def _sleep_until(end: float) -> None:
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)


class _Sleep(torch.autograd.Function):
    """Multiplies by the weight and sleeps. The planned time includes the arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage, ctx.place = stage, (stage.batch, stage.number)
        ctx.micro_batch, stage.count = stage.count, stage.count + 1
        ctx.save_for_backward(weight)
        end = time.perf_counter() + seconds(stage.plan, *ctx.place, "forward", ctx.micro_batch)
        out = x * weight
        _sleep_until(end)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        end = time.perf_counter() + seconds(ctx.stage.plan, *ctx.place, "backward", ctx.micro_batch)
        gradients = grad * weight, grad.sum().reshape(1), None
        _sleep_until(end)
        return gradients


class Stage(nn.Module):
    """One stage, with one layer."""

    def __init__(self, plan: dict[str, Any], number: int) -> None:
        super().__init__()
        self.plan, self.number, self.weight = plan, number, nn.Parameter(torch.ones(1))
        self.batch, self.count = 0, 0
        layers = plan.get("layers", 0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) if layers else None

    def begin(self, batch: int) -> None:
        """Must be called before each batch."""
        self.batch, self.count = batch, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layers is None:
            return _Sleep.apply(x, self.weight, self)
        return self.layers((x * self.weight).view(-1, WIDTH)).view_as(x)


def begin(module: nn.Module, batch: int) -> None:
    """Calls `begin` of all stages in `module`."""
    for stage in module.modules():
        if isinstance(stage, Stage):
            stage.begin(batch)


def layers_for(unit_s: float, elements: int) -> tuple[int, float]:
    """The number of linear layers whose forward and backward of a micro-batch take about unit_s, and their seconds."""
    layer, took = nn.Linear(WIDTH, WIDTH), []
    for _ in range(5):
        x = torch.randn(elements // WIDTH, WIDTH, requires_grad=True)
        began = time.perf_counter()
        layer(x).sum().backward()
        took.append(time.perf_counter() - began)
    one = statistics.median(took[1:])
    count = max(1, math.floor(unit_s / one + 0.5))
    return count, count * one


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.mean() - label.mean()) ** 2


def turns(sides: list[str], number: int) -> list[str]:
    """The order of the sides in a round. Each side comes first, and after each other side, equally often."""
    first = number % len(sides)
    turned = sides[first:] + sides[:first]
    return turned if number // len(sides) % 2 == 0 else turned[::-1]
