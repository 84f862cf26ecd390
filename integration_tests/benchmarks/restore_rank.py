"""Rank-side of restore.py: one layer under every restore policy and n, in turns, in one process group."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer

from integration_tests.benchmarks import launch

POLICIES = {
    "none": ("keep", "keep"),
    "S1": ("offload", "offload"),
    "S2": ("redispatch", "offload"),
    "S3": ("offload", "recompute"),
    "S4": ("redispatch", "recompute"),
}
COUNTERS = ("saved_bytes", "slot_bytes", "peak_bytes")


class Case:
    """A layer of its own context, so that its high-water mark is its own."""

    def __init__(self, plan: dict[str, Any], group: EpGroup, policy: str, chunks: int) -> None:
        self.policy, self.chunks = policy, chunks
        self.context = Context(group, ContextOptions(gemm=plan["gemm"]))
        restore_input, restore_middle = POLICIES[policy]
        self.layer = MoeLayer(
            self.context,
            model_width=plan["M"],
            hidden_width=plan["H"],
            num_experts=plan["E"],
            top_k=plan["K"],
            activation="relu",
            num_chunks=chunks,
            wgrad_mode="per_chunk",
            restore_input=restore_input,
            restore_middle=restore_middle,
        )
        self.seconds: list[float] = []
        self.bytes: dict[str, int] = {}

    def step(self, inputs: tuple[Any, ...], cotangent: torch.Tensor) -> None:
        """One forward and backward; the slowest rank counts."""
        dist.barrier()
        began = time.perf_counter()
        out = self.layer(*inputs)
        forward_slots = self.context.stats()["slot_bytes"]
        out.backward(cotangent)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.seconds.append(took.item())
        self.bytes = {name: self.context.stats()[name] for name in COUNTERS} | {"forward_slot_bytes": forward_slots}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    W, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(plan["seed"] + rank)
    T, M, H, E, K = (plan[name] for name in "TMHEK")
    tokens = torch.randn(T, M, generator=generator).requires_grad_()
    # Balanced to the row: every rank sends each expert the same number of rows, in every block of tokens.
    ids = (torch.arange(T * K) % E).view(T, K)
    weights = torch.full((T, K), 1.0 / K)
    experts = [
        {"w1": (torch.randn(H, M) / M**0.5).requires_grad_(), "w2": (torch.randn(M, H) / H**0.5).requires_grad_()}
        for _ in range(E // W)
    ]
    cotangent = torch.randn(T, M, generator=generator)
    group = EpGroup.for_ranks(list(range(W)))
    cases = [Case(plan, group, policy, n) for n in plan["chunks"] for policy in POLICIES]
    rounds = plan["rounds"] + 1
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            for parameter in [tensor for expert in experts for tensor in expert.values()]:
                parameter.grad = None
            case.step((tokens, ids, weights, experts), cotangent)
        if rank == 0:
            launch.report(done=number + 1, of=rounds)
    if rank == 0:
        lines = [
            {
                "policy": case.policy,
                "chunks": case.chunks,
                "median_s": statistics.median(case.seconds[1:]),
                "seconds": [round(s, 5) for s in case.seconds[1:]],
                **case.bytes,
            }
            for case in cases
        ]
        Path(plan["out"]).write_text(json.dumps(lines))
    dist.barrier()
    for case in cases:
        case.context.close()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
