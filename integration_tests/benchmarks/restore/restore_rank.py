# SPDX-License-Identifier: Apache-2.0
"""Runs on each rank of restore.py: times one layer with every restore policy and n, and stock DeepSpeed, in turns."""

from __future__ import annotations

import statistics

import deepspeed
import torch
from sluice.restore import SETS
from torch.utils.checkpoint import checkpoint

from integration_tests.benchmarks.layer.cells import Cell
from integration_tests.benchmarks.layer.layer_rank import Bench
from integration_tests.benchmarks.measuring.rank import Rank, forget_gradients, seconds_of
from integration_tests.benchmarks.memory import memory
from integration_tests.benchmarks.restore.restore import WITHOUT_COPIES
from integration_tests.benchmarks.tuner.tuner_scenario import Choice, Scenario

# The sources of T_DI and T_M in backward: `none` and S1 to S4 of the papers, then two without copies.
POLICIES = {
    **SETS,
    "k/rec": ("keep", "recompute"),
    "red/k": ("redispatch", "keep"),
}
COUNTERS = ("saved_bytes", "slot_bytes", "peak_bytes")


class Case:
    """A layer with a context of its own, so that the peak of the context is that of the layer."""

    def __init__(self, rank: Rank, inputs: Scenario, policy: str, chunks: int) -> None:
        self.policy, self.chunks, self.inputs = policy, chunks, inputs
        self.context = rank.context(gemm=rank.plan["gemm"])
        wgrad = "per_chunk" if policy == "none" else "adaptive"
        self.layer = inputs.layer(self.context, Choice(chunks, *POLICIES[policy], wgrad), activation="gelu")
        self.seconds: list[float] = []
        self.pair_ratios: list[float] = []  # the duration of a step over that of the adjacent step of `none`
        self.bytes: dict[str, int] = {}

    def step(self) -> None:
        """One forward and backward; its duration is that of the slowest rank."""
        forget_gradients(self.inputs.experts)
        slots = 0

        def run() -> None:
            nonlocal slots
            out = self.inputs.forward(self.layer)
            slots = self.context.stats()["slot_bytes"]
            out.backward(self.inputs.cotangent)

        self.seconds.append(seconds_of(run))
        self.bytes = {name: self.context.stats()[name] for name in COUNTERS} | {"forward_slot_bytes": slots}


def run_pairs(rank: Rank, cases: list[Case]) -> None:
    """Times each policy without copies in pairs with `none` of the same n, in alternating order, so that drift of the
    machine affects both."""
    none = {case.chunks: case for case in cases if case.policy == "none"}
    others = [case for case in cases if case.policy in WITHOUT_COPIES and case.chunks > 1]
    kept = {id(case): list(case.seconds) for case in cases}
    for number in range(rank.plan["pairs"]):
        for other in others:
            pair = [other, none[other.chunks]]
            for case in pair if number % 2 == 0 else reversed(pair):
                case.step()
            other.pair_ratios.append(other.seconds[-1] / none[other.chunks].seconds[-1])
        rank.report(done=number + 1, of=rank.plan["pairs"])
    for case in cases:
        case.seconds = kept[id(case)]


class Stock:
    """DeepSpeed's own layer of the same shape, keeping its activations or recomputing them in backward."""

    chunks = 1

    def __init__(self, bench: Bench, checkpointed: bool) -> None:
        self.bench, self.checkpointed = bench, checkpointed
        self.policy = "stock, checkpointed" if checkpointed else "stock"
        self.seconds: list[float] = []
        self.bytes: dict[str, int] = {}

    def call(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return layer(x)[0]
        return checkpoint(lambda rows: layer(rows)[0], x, use_reentrant=False)

    def step(self) -> None:
        """One forward and backward; its duration is that of the slowest rank."""
        bench = self.bench
        bench.stock.zero_grad(set_to_none=True)
        x = bench.x.detach().requires_grad_()
        self.seconds.append(seconds_of(lambda: self.call(bench.stock, x).backward(bench.gradient)))

    def measure_bytes(self) -> None:
        """Measures the peak with the watch of the allocator (memory.py), after the timed rounds."""
        bench = self.bench
        if memory.Watch.available():
            self.bytes = memory.moe_peak_bytes([bench.stock], [bench.x], [bench.gradient], self.call)


def main() -> None:
    deepspeed.init_distributed()
    rank = Rank()
    plan, shape = rank.plan, {name: rank.plan[name] for name in "TMHEK"}
    inputs = Scenario(plan, {**shape, "skew": 1.0})
    cases: list[Case | Stock] = [Case(rank, inputs, policy, n) for n in plan["chunks"] for policy in POLICIES]
    bench = Bench(Cell("restore", W=rank.world_size, **shape), plan["seed"], {})
    cases += [Stock(bench, checkpointed) for checkpointed in (False, True)]
    rounds = plan["rounds"] + 1
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            case.step()
        rank.report(done=number + 1, of=rounds)
    run_pairs(rank, [case for case in cases if isinstance(case, Case)])
    for case in cases:
        if isinstance(case, Stock):
            case.measure_bytes()
    lines = [
        {
            "policy": case.policy,
            "n": case.chunks,
            "median_s": statistics.median(case.seconds[1:]),
            "wall_s": [round(s, 5) for s in case.seconds[1:]],
            "pair_ratios": [round(r, 4) for r in getattr(case, "pair_ratios", [])],
            **case.bytes,
        }
        for case in cases
    ]
    rank.leave(lines)


if __name__ == "__main__":
    main()
