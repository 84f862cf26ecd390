"""Rank-side of overhead.py: scouts, then blocks of the tuned layer and of configured ones in turns."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, MoeLayer
from sluice.config import TunerOptions

from integration_tests.benchmarks.rank import Rank, balanced_ids, forget_gradients, make_experts

MODES = ("deferred", "per_chunk")


class Run:
    """Batches, experts and layers of one workload."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.plan = rank, rank.plan
        plan, shape = rank.plan, rank.plan["shape"]
        M, H, E, K = (shape[name] for name in "MHEK")
        generator = torch.Generator().manual_seed(plan["seed"] + rank.number)
        self.batches = {}
        for T in plan["sizes"]:
            tokens = torch.randn(T, M, generator=generator).requires_grad_()
            self.batches[T] = (
                tokens,
                balanced_ids(T, E, K),
                torch.full((T, K), 1.0 / K),
                torch.randn(T, M, generator=generator),
            )
        self.experts = make_experts(M, H, E // rank.world_size)

    def context(self) -> Context:
        return self.rank.context(gemm=self.plan["gemm"])

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
        forget_gradients(self.experts)
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


def calibrations(run: Run) -> list[float]:
    """Seconds that the first layer takes longer to make where this machine is calibrated: now, and from the cache."""
    plan, found = run.plan, []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            options = TunerOptions("adaptive", calibrate=plan["calibrate"], cache=folder)
            context = run.rank.context(gemm=plan["gemm"], tuner=options)
            dist.barrier()
            began = time.perf_counter()
            run.layer(context)
            found.append(time.perf_counter() - began)
            context.close()
    return found


def slowest(seconds: list[float]) -> list[float]:
    """Of all ranks, block by block."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return [float(value) for value in values]


def main() -> None:
    rank = Rank()
    plan, run = rank.plan, Run(rank)
    scouted = scout(run)
    tuned_context, fixed_context = run.context(), run.context()
    tuned = run.layer(tuned_context)
    fixed = {choice: run.layer(fixed_context, *choice) for choice in sorted(set(scouted.values()))}
    for T, choice in scouted.items():  # warm-ups of the fixed side are not what tuning costs
        run.step(fixed[choice], T)
    draw = random.Random(plan["seed"])
    clocks: dict[str, dict[str, list[float]]] = {c: {"tuned": [], "fixed": []} for c in ("wall", "cpu")}
    raced: list[bool] = []
    done, races = 0, 0
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
        before, races = races, tuned_context.tuner_stats()["race_passes"]
        raced.append(races > before)
        done += len(sizes)
        rank.report(done=done, of=plan["steps"])
    found: dict[str, Any] = {
        c: {side: slowest(values) for side, values in sides.items()} for c, sides in clocks.items()
    }
    found["stats"], found["scouted"] = tuned_context.tuner_stats(), scouted
    found["chosen"], found["raced"] = run.chosen(tuned_context), raced
    found["calibration_s"] = slowest(calibrations(run))
    rank.leave(found)


if __name__ == "__main__":
    main()
