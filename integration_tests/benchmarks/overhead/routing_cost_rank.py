"""Rank-side of routing_cost.py: steps of one layer with and without recording its expert loads, in turns."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice import routing
from sluice.adapters.torch import MoeLayer

from integration_tests.benchmarks.measuring.rank import Rank, forget_gradients, make_experts

WARM_UP = 12


class Stopwatch:
    """Stands in for the recorder's entry and counts what passes through it."""

    def __init__(self) -> None:
        self.note = routing.note
        self.wall = self.cpu = 0.0
        self.calls = 0

    def __call__(self, *arguments: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        self.note(*arguments)
        self.wall += time.perf_counter() - wall
        self.cpu += time.thread_time() - cpu
        self.calls += 1

    def restart(self) -> None:
        """Forget what was counted so far."""
        self.wall = self.cpu = 0.0
        self.calls = 0


def main() -> None:
    """All pairs, then one file with this rank's seconds."""
    rank = Rank()
    plan = rank.plan
    T, M, H, E, K = (plan[name] for name in "TMHEK")
    generator = torch.Generator().manual_seed(7 + rank.number)
    tokens = torch.randn(T, M, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    weights = torch.full((T, K), 1.0 / K)
    experts = make_experts(M, H, E // rank.world_size)
    cotangent = torch.randn(T, M, generator=generator)
    context = rank.context()
    layer = MoeLayer(context, model_width=M, hidden_width=H, num_experts=E, top_k=K, activation="gelu", num_chunks=2)
    watch = Stopwatch()
    routing.note = watch
    found: dict[str, dict[str, Any]] = {clock: {"with": [], "without": []} for clock in ("wall", "cpu")}
    backwards = 0

    def step(recording: bool) -> tuple[float, float]:
        nonlocal backwards
        forget_gradients(experts)
        routing.active = recording
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        layer(tokens, ids, weights, experts).backward(cotangent)
        backwards += 1
        return time.perf_counter() - wall, time.process_time() - cpu

    for number in range(WARM_UP):
        step(number % 2 == 0)
    watch.restart()
    backwards = 0
    for number in range(plan["pairs"]):
        order = ("with", "without") if number % 2 == 0 else ("without", "with")
        for side in order:
            wall, cpu = step(side == "with")
            found["wall"][side].append(wall)
            found["cpu"][side].append(cpu)
        if number % 50 == 0:
            rank.report(done=number + 1, of=plan["pairs"])
    routing.flush()
    found["wall"]["inside"], found["cpu"]["inside"] = watch.wall, watch.cpu
    out = {**found, "recorded": watch.calls, "backwards": backwards}
    (Path(plan["out"]) / f"rank{rank.number}.json").write_text(json.dumps(out))
    rank.leave(None)


if __name__ == "__main__":
    main()
