# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages.py in the case "bubbles": the bubble of each planned policy, from its events. Stages only sleep."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Edge, EpGroup, Pipeline, PipelineConfig
from sluice.timeline import stages
from sluice.timeline.model import from_trace

from integration_tests.benchmarks.measuring.rank import Rank

COMPUTED = ("forward", "backward", "weight_grad")


class Sleeper:
    """A virtual stage that sleeps. is_whole: weight gradients are part of the backward."""

    def __init__(self, op_s: float, is_last: bool, is_first: bool, is_whole: bool) -> None:
        self._op_s, self._is_last, self._is_first, self._is_whole = op_s, is_last, is_first, is_whole

    def load(self, micro_batch: int) -> None:
        """There are no inputs to load."""

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        time.sleep(self._op_s)
        return None if self._is_last else Edge([torch.zeros(1)])

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        time.sleep(2 * self._op_s if self._is_whole else self._op_s)
        return None if self._is_first else Edge([torch.zeros(1)])

    def weight_grad(self, micro_batch: int) -> None:
        time.sleep(self._op_s)


def bubble_of(policy: dict[str, Any], plan: dict[str, Any], rank: Rank) -> dict[str, Any]:
    """The bubble of each batch, and the most micro-batches in flight and held on any rank. "predicted" is the bubble of
    the simulator with the measured times of the last batch, including messages."""
    p, v, is_split = rank.world_size, policy["num_virtual"], policy["split"]
    in_v = policy["name"] == "v"
    numbers = [p * k + (p - 1 - rank.number if in_v and k % 2 else rank.number) for k in range(v)]
    sleepers = [Sleeper(plan["op_s"], c == p * v - 1, c == 0, not is_split) for c in numbers]
    group = EpGroup.unshared(range(p))
    config = PipelineConfig(policy["name"], "", rank.number, num_virtual=v, separate_wgrad=is_split)
    pipeline = Pipeline(config, group)
    bubbles = []
    for number in range(plan["batches"] + 1):  # the first does not count
        pipeline.run(sleepers, plan["micro_batches"])
        events = [event for event in pipeline.timeline() if event["op"] in COMPUTED]
        mine = {
            "begin": min(event["begin_ns"] for event in events),
            "end": max(event["end_ns"] for event in events),
            "busy": sum(event["end_ns"] - event["begin_ns"] for event in events),
        }
        told: list[Any] = [None] * p
        dist.all_gather_object(told, mine)
        span = max(each["end"] for each in told) - min(each["begin"] for each in told)
        if number > 0:
            bubbles.append(1 - sum(each["busy"] for each in told) / (p * span))
    told = [None] * p
    dist.all_gather_object(told, pipeline.stats())
    predicted = stages.bubble(from_trace(pipeline.timeline(predicted=True)))
    group.close()
    return {
        "bubble": bubbles,
        "predicted": predicted,
        **{name: max(each[name] for each in told) for name in ("most_in_flight", "most_held")},
    }


def main() -> None:
    rank = Rank()
    found = {}
    for number, policy in enumerate(rank.plan["policies"]):
        found[policy["name"]] = bubble_of(policy, rank.plan, rank)
        rank.report(done=number + 1, of=len(rank.plan["policies"]), name=policy["name"])
    rank.leave(found)


if __name__ == "__main__":
    main()
