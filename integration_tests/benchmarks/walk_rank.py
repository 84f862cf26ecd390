"""Rank-side of walk.py: blocks of steps with a trace and without, in turns."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer

from integration_tests.benchmarks import launch

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


def inputs_of(plan: dict[str, Any]) -> tuple[Any, ...]:
    """Tokens, ids (balanced to the row), weights and the local experts."""
    T, M, H, E, K = (plan[name] for name in "TMHEK")
    generator = torch.Generator().manual_seed(plan["seed"] + dist.get_rank())

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).requires_grad_()

    experts = [{"w1": leaf(H, M), "w2": leaf(M, H)} for _ in range(E // dist.get_world_size())]
    return leaf(T, M), (torch.arange(T * K) % E).view(T, K), torch.full((T, K), 1.0 / K), experts


def step(layer: MoeLayer, inputs: tuple[Any, ...], cotangent: torch.Tensor) -> float:
    """Seconds of one forward and backward; the slowest rank's."""
    for parameter in [tensor for expert in inputs[3] for tensor in expert.values()]:
        parameter.grad = None
    dist.barrier()
    began = time.perf_counter()
    layer(*inputs).backward(cotangent)
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, W = dist.get_rank(), dist.get_world_size()
    group = EpGroup.for_ranks(list(range(W)))
    context = Context(group, ContextOptions(gemm=plan["gemm"]))
    layer = MoeLayer(
        context,
        model_width=plan["M"],
        hidden_width=plan["H"],
        num_experts=plan["E"],
        top_k=plan["K"],
        activation="gelu",
        num_chunks=plan["chunks"],
        restore_input="keep",
        restore_middle="keep",
    )
    inputs = inputs_of(plan)
    cotangent = torch.ones(plan["T"], plan["M"])
    for _ in range(5):  # products are chosen, slots made
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
        if rank == 0:
            launch.report(done=number + 1, of=2 * plan["blocks"])
    stats = context.stats()
    mine = torch.tensor([stats[name] for name in COUNTERS], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(W)]
    dist.all_gather(every, mine)
    if rank == 0:
        found = {
            "seconds": seconds[False],
            "traced_seconds": seconds[True],
            "traced_steps": plan["blocks"] * (plan["steps"] + 1),
            "ranks": [dict(zip(COUNTERS, each.tolist())) for each in every],
        }
        Path(plan["out"]).write_text(json.dumps(found))
    dist.barrier()
    context.close()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
