# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages.py in the case "torch": Schedule1F1B on gloo, and get_schedule_class("SluiceSingle")."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class

from integration_tests.benchmarks.measuring.rank import Rank, seconds_of
from integration_tests.benchmarks.stages.stages_work import Stage, begin, loss_of, turns


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
    labels = torch.arange(float(plan["micro_batches"])) if is_last else None
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    worst = 0.0
    for number in range(plan["pairs"] + 1):  # the first does not count
        batch = torch.full((plan["micro_batches"], plan["elements"]), 1.0 + 0.01 * number) if is_first else None
        losses: dict[str, torch.Tensor] = {}

        def step(name: str, batch: Any = batch, losses: Any = losses) -> None:
            found: list[torch.Tensor] | None = [] if is_last else None
            sides[name][1].step(*(() if batch is None else (batch,)), target=labels, losses=found, return_outputs=False)
            losses[name] = torch.stack(found).detach() if found else torch.zeros(1)

        for name in turns(list(sides), number):
            begin(sides[name][0], number)
            took = seconds_of(lambda name=name: step(name))
            sides[name][0].zero_grad()
            if number > 0:
                seconds[name].append(took)
        worst = max(worst, float((losses["stock"] - losses["sluice"]).abs().max()))
        rank.report(done=number, of=plan["pairs"])
    difference = torch.tensor([worst])
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    stats = sides["sluice"][1].sluice.stats()
    rank.leave(
        {
            **{f"{name}_s": each for name, each in seconds.items()},
            **{name: stats[name] for name in ("most_in_flight", "messages_sent", "policy")},
            "largest_loss_difference": float(difference),
            "unit_s": 0.0,
        }
    )


if __name__ == "__main__":
    main()
