# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages.py in the case "torch": Schedule1F1B on gloo, and get_schedule_class("SluiceSingle")."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.stages.stages_work import Stage, loss_of, measure


def schedule_of(name: str, plan: dict[str, Any]) -> tuple[Stage, Any]:
    """The stage of this rank, and the schedule that runs it."""
    module = Stage(plan, dist.get_rank())
    stage = PipelineStage(module, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    if name == "stock":
        return module, Schedule1F1B(stage, plan["micro_batches"], loss_of)
    kind = get_schedule_class("SluiceSingle")
    return module, kind(stage, plan["micro_batches"], loss_of, in_flight=plan["in_flight"])


def main() -> None:
    rank = Rank()
    plan, is_first, is_last = rank.plan, rank.number == 0, rank.number == rank.world_size - 1
    sides = {name: schedule_of(name, plan) for name in ("stock", "sluice")}
    inputs = (torch.ones(plan["micro_batches"], plan["elements"]),) if is_first else ()
    labels = torch.arange(float(plan["micro_batches"])) if is_last else None

    def train(name: str, number: int) -> torch.Tensor:
        module, schedule = sides[name]
        module.zero_grad()
        found: list[torch.Tensor] | None = [] if is_last else None
        schedule.step(*inputs, target=labels, losses=found, return_outputs=False)
        return torch.stack(found).detach() if found else torch.zeros(1)

    modules = {name: module for name, (module, _) in sides.items()}
    measure(rank, modules, train, lambda: sides["sluice"][1].sluice.stats(), 0.0)


if __name__ == "__main__":
    main()
