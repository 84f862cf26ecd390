# SPDX-License-Identifier: Apache-2.0
"""The work of a stage of the pipeline benchmarks: a sleep of planned or drawn length, or linear layers."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from integration_tests.benchmarks.measuring.rank import Rank, gather, seconds_of
from integration_tests.benchmarks.measuring.sleeping import Sleep
from integration_tests.benchmarks.stages import stages_draws
from integration_tests.benchmarks.stages.stages_stall import stalling

WIDTH = 1024  # width of the linear layers


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
            batch, micro_batch, self.count = self.batch, self.count, self.count + 1
            return Sleep.apply(
                x,
                self.weight,
                lambda direction: stages_draws.seconds(self.plan, batch, self.number, direction, micro_batch),
            )
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


def measure(
    rank: Rank,
    modules: dict[str, nn.Module],
    train: Callable[[str, int], torch.Tensor],
    stats: Callable[[], Any],
    unit_s: float,
) -> NoReturn:
    """Trains a batch with each side in turns, and leaves with the seconds of each. train: trains the batch of this
    number with a side, and returns its losses. stats: of Sluice's pipeline, after the last batch."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    worst = 0.0
    for number in range(rank.plan["pairs"] + 1):  # the first does not count
        losses: dict[str, torch.Tensor] = {}

        def step(name: str, number: int = number, losses: dict[str, torch.Tensor] = losses) -> None:
            losses[name] = train(name, number)

        for name in turns(list(modules), number):
            begin(modules[name], number)
            with stalling(rank.plan, rank.number, number):
                took = seconds_of(functools.partial(step, name))
            if number > 0:
                seconds[name].append(took)
        worst = max([worst, *(float((losses["stock"] - each).abs().max()) for each in losses.values())])
        rank.report(done=number, of=rank.plan["pairs"])
    found = {f"{name}_s": each for name, each in seconds.items()} | {"policy": stats()["policy"], "unit_s": unit_s}
    rank.leave(found | {"largest_loss_difference": max(gather(worst))})
