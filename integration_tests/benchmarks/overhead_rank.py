"""Rank-side of overhead.py: scouts, then blocks of the tuned layer and of configured ones in turns."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer

from integration_tests.benchmarks import launch

MODES = ("deferred", "per_chunk")


class Run:
    """Batches, experts and layers of one workload."""

    def __init__(self, plan: dict[str, Any], group: EpGroup) -> None:
        self.plan, self.group = plan, group
        W, shape = dist.get_world_size(), plan["shape"]
        M, H, E, K = (shape[name] for name in "MHEK")
        generator = torch.Generator().manual_seed(plan["seed"] + dist.get_rank())
        self.batches = {}
        for T in plan["sizes"]:
            ids = (torch.arange(T * K) % E).view(T, K)
            tokens = torch.randn(T, M, generator=generator).requires_grad_()
            self.batches[T] = (tokens, ids, torch.full((T, K), 1.0 / K), torch.randn(T, M, generator=generator))
        self.experts = [
            {"w1": (torch.randn(H, M) / M**0.5).requires_grad_(), "w2": (torch.randn(M, H) / H**0.5).requires_grad_()}
            for _ in range(E // W)
        ]

    def context(self) -> Context:
        return Context(self.group, ContextOptions(gemm=self.plan["gemm"]))

    def layer(self, context: Context, chunks: int = 0, wgrad: str = "adaptive") -> MoeLayer:
        shape = self.plan["shape"]
        return MoeLayer(
            context,
            model_width=shape["M"],
            hidden_width=shape["H"],
            num_experts=shape["E"],
            top_k=shape["K"],
            activation="relu",
            num_chunks=chunks,
            wgrad_mode=wgrad,
        )

    def step(self, layer: MoeLayer, T: int) -> None:
        for expert in self.experts:
            for parameter in expert.values():
                parameter.grad = None
        tokens, ids, weights, cotangent = self.batches[T]
        layer(tokens, ids, weights, self.experts).backward(cotangent)

    def chosen(self, context: Context) -> dict[int, tuple[int, str]]:
        """What was decided last for each size; one chunk where nothing was."""
        found = dict.fromkeys(self.batches, (1, "deferred"))
        for decision in context.decisions():
            rows = {T: abs(T * self.plan["shape"]["K"] - decision["rows"]) for T in self.batches}
            found[min(rows, key=rows.__getitem__)] = (decision["num_chunks"], MODES[decision["wgrad_mode"]])
        return found


def scout(run: Run) -> dict[int, tuple[int, str]]:
    """Trains on each size until it is settled, and says what was chosen."""
    context = run.context()
    layer = run.layer(context)
    for T in run.batches:
        for _ in range(run.plan["scout"]):
            run.step(layer, T)
    found = run.chosen(context)
    context.close()
    return found


def slowest(seconds: list[float]) -> list[float]:
    """Of all ranks, block by block."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    group = EpGroup.for_ranks(list(range(dist.get_world_size())))
    run = Run(plan, group)
    scouted = scout(run)
    tuned_context, fixed_context = run.context(), run.context()
    tuned = run.layer(tuned_context)
    fixed = {choice: run.layer(fixed_context, *choice) for choice in sorted(set(scouted.values()))}
    for T, choice in scouted.items():  # warm-ups of the fixed side are not what tuning costs
        run.step(fixed[choice], T)
    draw = random.Random(plan["seed"])
    clocks: dict[str, dict[str, list[float]]] = {c: {"tuned": [], "fixed": []} for c in ("wall", "cpu")}
    done = 0
    while done < plan["steps"]:
        sizes = [draw.choice(plan["sizes"]) for _ in range(min(plan["block"], plan["steps"] - done))]
        sides = ("tuned", "fixed") if done // plan["block"] % 2 == 0 else ("fixed", "tuned")
        for side in sides:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for T in sizes:
                run.step(tuned if side == "tuned" else fixed[scouted[T]], T)
            clocks["cpu"][side].append(time.process_time() - cpu)
            clocks["wall"][side].append(time.perf_counter() - wall)
        done += len(sizes)
        if dist.get_rank() == 0:
            launch.report(done=done, of=plan["steps"])
    found: dict[str, Any] = {
        c: {side: slowest(values) for side, values in sides.items()} for c, sides in clocks.items()
    }
    found["stats"], found["scouted"] = tuned_context.tuner_stats(), scouted
    found["chosen"] = run.chosen(tuned_context)
    if dist.get_rank() == 0:
        Path(plan["out"]).write_text(json.dumps(found))
    dist.barrier()
    tuned_context.close()
    fixed_context.close()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
