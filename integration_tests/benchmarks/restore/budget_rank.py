"""Ranks of budget.py: what a budget is kept by, in a model of several layers and under a hot expert."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeConfig, MoeLayer

from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.measuring.rank import Rank, forget_gradients


def largest(value: float) -> float:
    """Over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def hot_ids(tokens: int, experts: int, top_k: int, hot: str, generator: torch.Generator) -> torch.Tensor:
    """Expert 0 gets `hot` times the rows of each other expert, or "all" of them; no token names an expert twice."""
    if hot == "all":
        first = torch.zeros(tokens, dtype=torch.int64)
    else:
        load = torch.ones(experts)
        load[0] = float(hot)
        first = torch.multinomial(load, tokens, replacement=True, generator=generator)
    further = 1 + torch.arange(top_k - 1)
    return torch.cat([first[:, None], (first[:, None] + further) % experts], dim=1)


class Model:
    """Layers of one context, each taking the output of the one before."""

    def __init__(self, plan: dict[str, Any], group: EpGroup, budget: int | None, layers: int, chunks: int) -> None:
        self.context = Context(group, ContextOptions(gemm=plan["gemm"], memory_budget=budget))
        policy = None if budget else ("keep", "keep")
        self.layers = [
            MoeLayer(
                self.context,
                MoeConfig(
                    model_width=plan["M"],
                    hidden_width=plan["H"],
                    num_experts=plan["E"],
                    top_k=plan["K"],
                    activation="gelu",
                    chunks=chunks,
                    layer_id=number,
                    policy=policy,
                ),
            )
            for number in range(layers)
        ]

    def step(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Any) -> torch.Tensor:
        """Forward of all layers, then backward of all; the output."""
        forget_gradients(experts)
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden, ids, weights, experts)
        hidden.sum().backward()
        return hidden.detach()


def measure(plan: dict[str, Any], group: EpGroup) -> dict[str, Any]:
    """The steps under the budget, and how far the output is from that of a run without a budget in one chunk."""
    W, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(plan["seed"] + rank)
    T, M, H, E, K = (plan[name] for name in "TMHEK")
    tokens = torch.randn(T, M, generator=generator).requires_grad_()
    if plan["hot"] is None:
        ids = (torch.arange(T * K) % E).view(T, K)
    else:
        ids = hot_ids(T, E, K, plan["hot"], generator)
    weights = torch.full((T, K), 1.0 / K)
    experts = [
        {
            "w1": (torch.randn(H, M, generator=generator) / M**0.5).requires_grad_(),
            "w2": (torch.randn(M, H, generator=generator) / H**0.5).requires_grad_(),
        }
        for _ in range(E // W)
    ]
    free = Model(plan, group, None, plan["layers"], 1)
    wanted = free.step(tokens, ids, weights, experts)
    free_peak = largest(free.context.stats()["peak_bytes"])
    free.context.close()
    tight = Model(plan, group, plan["budget"], plan["layers"], 0)
    seconds, gap = [], 0.0
    for number in range(plan["rounds"] + 1):
        dist.barrier()
        began = time.perf_counter()
        out = tight.step(tokens, ids, weights, experts)
        seconds.append(largest(time.perf_counter() - began))
        gap = max(gap, largest(float((out - wanted).abs().max() / wanted.abs().max())))
        if rank == 0:
            launch.report(done=number + 1, of=plan["rounds"] + 1)
    stats = tight.context.stats()
    found = {
        "budget_bytes": plan["budget"],
        "peak_bytes": int(largest(stats["peak_bytes"])),
        "free_peak_bytes": int(free_peak),
        "n": stats["last_num_chunks"],
        "median_s": statistics.median(seconds[1:]),
        "largest_difference": gap,
    }
    tight.context.close()
    return found


def main() -> None:
    rank = Rank()
    rank.leave(measure(rank.plan, rank.group))


if __name__ == "__main__":
    main()
