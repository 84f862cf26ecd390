"""Rank-side of restore.py: one layer under every restore policy and n, and stock DeepSpeed, in turns, in one group."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer
from torch.utils.checkpoint import checkpoint

from integration_tests.benchmarks import launch, memory
from integration_tests.benchmarks.cells import Cell
from integration_tests.benchmarks.layer_rank import Bench

# Where T_DI and T_M come from in backward. `none` and S1 to S4 are the papers' points; the rest of 3 x 3 follows.
POLICIES = {
    "none": ("keep", "keep"),
    "S1": ("offload", "offload"),
    "S2": ("redispatch", "offload"),
    "S3": ("offload", "recompute"),
    "S4": ("redispatch", "recompute"),
    "k/off": ("keep", "offload"),
    "k/rec": ("keep", "recompute"),
    "off/k": ("offload", "keep"),
    "red/k": ("redispatch", "keep"),
}
WITHOUT_COPIES = ("S4", "k/rec", "red/k")
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
            activation="gelu",
            num_chunks=chunks,
            wgrad_mode="per_chunk",
            restore_input=restore_input,
            restore_middle=restore_middle,
        )
        self.seconds: list[float] = []
        self.pair_ratios: list[float] = []  # its step over that of `none` beside it
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


def run_pairs(cases: list[Case], plan: dict[str, Any], inputs: tuple[Any, ...], cotangent: torch.Tensor) -> None:
    """Each policy without copies directly beside `none` of the same n, in changing order: what drifts meets both."""
    none = {case.chunks: case for case in cases if case.policy == "none"}
    rivals = [case for case in cases if case.policy in WITHOUT_COPIES and case.chunks > 1]
    kept = {id(case): list(case.seconds) for case in cases}
    for number in range(plan["pairs"]):
        for rival in rivals:
            pair = [rival, none[rival.chunks]]
            for case in pair if number % 2 == 0 else reversed(pair):
                for parameter in [tensor for expert in inputs[3] for tensor in expert.values()]:
                    parameter.grad = None
                case.step(inputs, cotangent)
            rival.pair_ratios.append(rival.seconds[-1] / none[rival.chunks].seconds[-1])
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
        """One forward and backward; the slowest rank counts."""
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
        """Peak as the allocator's watch sees it (memory.py); after the timed rounds."""
        bench = self.bench
        if memory.Watch.available():
            self.bytes = memory.moe_peak_bytes([bench.stock], [bench.x], [bench.gradient], self.call)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed()
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
    cases: list[Case | Stock] = [Case(plan, group, policy, n) for n in plan["chunks"] for policy in POLICIES]
    bench = Bench(Cell("restore", W=W, **{name: plan[name] for name in "TMHEK"}), plan["seed"], {})
    cases += [Stock(bench, checkpointed) for checkpointed in (False, True)]
    rounds = plan["rounds"] + 1
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            for parameter in [tensor for expert in experts for tensor in expert.values()]:
                parameter.grad = None
            case.step((tokens, ids, weights, experts), cotangent)
        if rank == 0:
            launch.report(done=number + 1, of=rounds)
    run_pairs([case for case in cases if isinstance(case, Case)], plan, (tokens, ids, weights, experts), cotangent)
    for case in cases:
        if isinstance(case, Stock):
            case.measure_bytes()
    if rank == 0:
        lines = [
            {
                "policy": case.policy,
                "chunks": case.chunks,
                "median_s": statistics.median(case.seconds[1:]),
                "seconds": [round(s, 5) for s in case.seconds[1:]],
                "pair_ratios": [round(r, 4) for r in getattr(case, "pair_ratios", [])],
                **case.bytes,
            }
            for case in cases
        ]
        Path(plan["out"]).write_text(json.dumps(lines))
    dist.barrier()
    for case in cases:
        if isinstance(case, Case):
            case.context.close()
    group.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
