# SPDX-License-Identifier: Apache-2.0
"""Runs on each rank of restore.py: times one layer with every restore policy and n, and stock DeepSpeed, in turns."""

from __future__ import annotations

import statistics
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from sluice.adapters.torch import MoeConfig, MoeLayer
from sluice.restore import SETS
from torch.utils.checkpoint import checkpoint

from integration_tests.benchmarks.layer.cells import Cell
from integration_tests.benchmarks.layer.layer_rank import Bench
from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.measuring.rank import Rank, balanced_ids, forget_gradients, make_experts
from integration_tests.benchmarks.memory import memory

# The sources of T_DI and T_M in backward: `none` and S1 to S4 of the papers, then the other combinations of the 3 x 3.
POLICIES = {
    **SETS,
    "k/off": ("keep", "offload"),
    "k/rec": ("keep", "recompute"),
    "off/k": ("offload", "keep"),
    "red/k": ("redispatch", "keep"),
}
WITHOUT_COPIES = ("S4", "k/rec", "red/k")
COUNTERS = ("saved_bytes", "slot_bytes", "peak_bytes")


class Case:
    """A layer with a context of its own, so that the peak of the context is that of the layer."""

    def __init__(self, rank: Rank, policy: str, chunks: int) -> None:
        plan = rank.plan
        self.policy, self.chunks = policy, chunks
        self.context = rank.context(gemm=plan["gemm"])
        self.layer = MoeLayer(
            self.context,
            MoeConfig(
                model_width=plan["M"],
                hidden_width=plan["H"],
                num_experts=plan["E"],
                top_k=plan["K"],
                activation="gelu",
                chunks=chunks,
                wgrad_mode="per_chunk" if policy == "none" else "adaptive",
                policy=POLICIES[policy],
            ),
        )
        self.seconds: list[float] = []
        self.pair_ratios: list[float] = []  # the duration of a step over that of the adjacent step of `none`
        self.bytes: dict[str, int] = {}

    def step(self, inputs: tuple[Any, ...], cotangent: torch.Tensor) -> None:
        """One forward and backward; its duration is that of the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        out = self.layer(*inputs)
        forward_slots = self.context.stats()["slot_bytes"]
        out.backward(cotangent)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.seconds.append(took.item())
        self.bytes = {name: self.context.stats()[name] for name in COUNTERS} | {"forward_slot_bytes": forward_slots}


def run_pairs(cases: list[Case], plan: dict[str, Any], inputs: tuple[Any, ...], cotangent: torch.Tensor) -> None:
    """Times each policy without copies in pairs with `none` of the same n, in alternating order, so that drift of the
    machine affects both."""
    none = {case.chunks: case for case in cases if case.policy == "none"}
    others = [case for case in cases if case.policy in WITHOUT_COPIES and case.chunks > 1]
    kept = {id(case): list(case.seconds) for case in cases}
    for number in range(plan["pairs"]):
        for other in others:
            pair = [other, none[other.chunks]]
            for case in pair if number % 2 == 0 else reversed(pair):
                for parameter in [tensor for expert in inputs[3] for tensor in expert.values()]:
                    parameter.grad = None
                case.step(inputs, cotangent)
            other.pair_ratios.append(other.seconds[-1] / none[other.chunks].seconds[-1])
        if dist.get_rank() == 0:
            launch.report(done=number + 1, of=plan["pairs"])
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

    def step(self, *_: object) -> None:
        """One forward and backward; its duration is that of the slowest rank."""
        bench = self.bench
        for parameter in bench.stock.parameters():
            parameter.grad = None
        x = bench.x.detach().requires_grad_()
        dist.barrier()
        began = time.perf_counter()
        self.call(bench.stock, x).backward(bench.gradient)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.seconds.append(took.item())

    def measure_bytes(self) -> None:
        """Measures the peak with the watch of the allocator (memory.py), after the timed rounds."""
        bench = self.bench
        if memory.Watch.available():
            self.bytes = memory.moe_peak_bytes([bench.stock], [bench.x], [bench.gradient], self.call)


def main() -> None:
    deepspeed.init_distributed()
    rank = Rank()
    plan, W = rank.plan, rank.world_size
    generator = torch.Generator().manual_seed(plan["seed"] + rank.number)
    T, M, H, E, K = (plan[name] for name in "TMHEK")
    tokens = torch.randn(T, M, generator=generator).requires_grad_()
    ids = balanced_ids(T, E, K)
    weights = torch.full((T, K), 1.0 / K)
    experts = make_experts(M, H, E // W)
    cotangent = torch.randn(T, M, generator=generator)
    cases: list[Case | Stock] = [Case(rank, policy, n) for n in plan["chunks"] for policy in POLICIES]
    bench = Bench(Cell("restore", W=W, **{name: plan[name] for name in "TMHEK"}), plan["seed"], {})
    cases += [Stock(bench, checkpointed) for checkpointed in (False, True)]
    rounds = plan["rounds"] + 1
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            forget_gradients(experts)
            case.step((tokens, ids, weights, experts), cotangent)
        rank.report(done=number + 1, of=rounds)
    run_pairs([case for case in cases if isinstance(case, Case)], plan, (tokens, ids, weights, experts), cotangent)
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
