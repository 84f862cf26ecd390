# SPDX-License-Identifier: Apache-2.0
"""Ranks of overlap.py: a layer with one chunk and a tuned layer, traced in turns."""

import statistics
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import MoeLayer
from sluice.config import TunerOptions

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.tuner.tuner_scenario import OPEN, Choice, Scenario

DIRECTIONS = ("forward", "backward")
EVENTS = 1 << 14  # upper bound of the ops of one step
EXCHANGES = ("dispatch", "combine", "dispatch_grad", "combine_grad")


def traced(scenario: Scenario, layer: MoeLayer) -> list[dict[str, Any]]:
    """The ops of one step, including passes."""
    layer.context.trace_start(EVENTS)
    scenario.step(layer)
    events = [dict(event) for event in layer.context.trace_take()]
    layer.context.trace_start(0)
    return events


def seconds_of(events: list[dict[str, Any]]) -> float:
    """Seconds of both passes."""
    return sum(e["end_ns"] - e["begin_ns"] for e in events if e["op"] == "pass") / 1e9


def lanes_of(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For a step with one chunk, by direction: seconds of each exchange and of the compute lane."""
    found = {}
    for one in (e for e in events if e["op"] == "pass"):
        inside = [e for e in events if e["op"] != "pass" and one["begin_ns"] <= e["begin_ns"] <= one["end_ns"]]
        parts = {name: 0.0 for name in ("compute", *EXCHANGES)}
        for e in inside:
            name = "compute" if e["lane"] == "compute" else e["op"]
            if name in parts:
                parts[name] += (e["end_ns"] - e["begin_ns"]) / 1e9
        found[one["direction"]] = parts
    return found


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Reduces values elementwise over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def parts_of(rounds: list[dict[str, dict[str, float]]], comm_cpu_s: float) -> dict[str, dict[str, float]]:
    """By direction: medians of communication, computation, and the communication lane's CPU time."""

    def median(direction: str, name: str) -> float:
        return statistics.median(parts[direction][name] for parts in rounds)

    exchanges = {"forward": ("dispatch", "combine"), "backward": ("dispatch_grad", "dispatch_grad")}
    comm = over_ranks([sum(median(d, name) for name in exchanges[d]) for d in DIRECTIONS], dist.ReduceOp.MIN)
    # Forward and backward move the same rows, so each has half of the lane's CPU time. Half of the backward's part runs
    # during the weight gradients, and their seconds already include it.
    cpu = over_ranks([comm_cpu_s / 2], dist.ReduceOp.MAX)[0]
    busy = [median("forward", "compute"), max(0.0, median("backward", "compute") - cpu / 2)]
    compute = over_ranks(busy, dist.ReduceOp.MAX)
    return {
        direction: {"comm_s": comm[i], "compute_s": compute[i], "comm_cpu_s": cpu}
        for i, direction in enumerate(DIRECTIONS)
    }


def main() -> None:
    rank = Rank()
    plan = rank.plan
    scenario = Scenario(plan, plan["case"])
    alone = rank.context(gemm=plan["gemm"])
    choosing = rank.context(gemm=plan["gemm"], tuner=TunerOptions(mode="adaptive"))
    one = scenario.layer(alone, Choice(1))
    chosen = scenario.layer(choosing, OPEN)
    settled_after = None
    for count in range(plan["settle"]):
        scenario.step(chosen)
        if choosing.stats()["last_is_settled"]:
            settled_after = count + 1
            break
    for _ in range(2):
        scenario.step(one)
    lanes, walls = [], {"one": [], "chosen": []}
    cpu_ns = 0
    for count in range(plan["rounds"]):
        for side in ("one", "chosen") if count % 2 == 0 else ("chosen", "one"):
            layer = one if side == "one" else chosen
            scenario.step(layer)  # a measured step follows a step of the same kind
            before = alone.stats()["comm_cpu_ns"]
            events = traced(scenario, layer)
            cpu_ns += alone.stats()["comm_cpu_ns"] - before
            walls[side].append(seconds_of(events))
            if side == "one":
                lanes.append(lanes_of(events))
        rank.report(done=count + 1, of=plan["rounds"])
    found = {
        "parts": parts_of(lanes, cpu_ns / 1e9 / plan["rounds"]),
        "one_chunk_s": over_ranks(walls["one"], dist.ReduceOp.MAX),
        "chosen_s": over_ranks(walls["chosen"], dist.ReduceOp.MAX),
        "n": choosing.stats()["last_num_chunks"],
        "settled_after": settled_after,  # number of steps; None: the race had not ended before the rounds
        "decisions": choosing.decisions(),
    }
    rank.leave(found)


if __name__ == "__main__":
    main()
