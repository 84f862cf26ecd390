"""Rank-side of walk.py: blocks of steps with a trace and without, in turns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import MoeLayer

from integration_tests.benchmarks.measuring.rank import Rank, balanced_ids, forget_gradients, make_experts, seconds_of

COUNTERS = (
    "num_walks",
    "bind_cpu_ns",
    "walk_cpu_ns",
    "wait_ns",
    "num_wakes",
    "wake_cpu_ns",
    "num_readings",
    "readings_cpu_ns",
)
EVENTS = 1 << 14


def inputs_of(rank: Rank) -> tuple[Any, ...]:
    """Tokens, ids (balanced to the row), weights and the local experts."""
    T, M, H, E, K = (rank.plan[name] for name in "TMHEK")
    generator = torch.Generator().manual_seed(rank.plan["seed"] + rank.number)
    experts = make_experts(M, H, E // rank.world_size, generator)
    tokens = (torch.randn(T, M, generator=generator) / M**0.5).requires_grad_()
    return tokens, balanced_ids(T, E, K), torch.full((T, K), 1.0 / K), experts


def step(layer: MoeLayer, inputs: tuple[Any, ...], cotangent: torch.Tensor) -> float:
    """Seconds of one forward and backward; the slowest rank's."""
    forget_gradients(inputs[3])
    return seconds_of(lambda: layer(*inputs).backward(cotangent))


def main() -> None:
    rank = Rank()
    plan, context = rank.plan, rank.context(gemm=rank.plan["gemm"])
    layer = MoeLayer(
        context,
        model_width=plan["M"],
        hidden_width=plan["H"],
        num_experts=plan["E"],
        top_k=plan["K"],
        activation="gelu",
        num_chunks=plan["chunks"],
        restore_input="keep",
        restore_pre_activation="keep",
    )
    inputs = inputs_of(rank)
    cotangent = torch.ones(plan["T"], plan["M"])
    for _ in range(5):  # GEMMs are chosen, slots made
        step(layer, inputs, cotangent)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * plan["blocks"]):
        traced = number % 2 == 1
        if traced:
            context.trace_start(EVENTS)
        step(layer, inputs, cotangent)  # the first of its kind does not count as time
        seconds[traced] += [step(layer, inputs, cotangent) for _ in range(plan["steps"])]
        if traced:
            context.trace_stop()
        rank.report(done=number + 1, of=2 * plan["blocks"])
    stats = context.stats()
    mine = torch.tensor([stats[name] for name in COUNTERS], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(rank.world_size)]
    dist.all_gather(every, mine)
    rank.leave(
        {
            "seconds": seconds[False],
            "traced_seconds": seconds[True],
            "traced_steps": plan["blocks"] * (plan["steps"] + 1),
            "ranks": [dict(zip(COUNTERS, each.tolist())) for each in every],
        }
    )


if __name__ == "__main__":
    main()
