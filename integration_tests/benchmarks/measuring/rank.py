"""What the ranks of the benchmarks have in common: how they begin and end, their experts, one step on the clock."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup

from integration_tests.benchmarks.measuring import launch

Experts = list[dict[str, torch.Tensor]]


class Rank:
    """This process of a benchmark: what `launch.ask` wants of it, on one thread, in a group of all ranks."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.number, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = EpGroup.for_ranks(list(range(self.world_size)))
        self._contexts: list[Context] = []

    def context(self, **options: Any) -> Context:
        """One that ends with the rank."""
        self._contexts.append(Context(self.group, ContextOptions(**options)))
        return self._contexts[-1]

    def report(self, **fields: Any) -> None:
        if self.number == 0:
            launch.report(**fields)

    def leave(self, found: Any) -> NoReturn:
        """Rank 0 writes what was found, where that is not None; all end."""
        if self.number == 0 and found is not None:
            Path(self.plan["out"]).write_text(json.dumps(found))
        dist.barrier()
        for context in self._contexts:
            context.close()
        self.group.close()
        dist.destroy_process_group()
        os._exit(0)


def make_experts(M: int, H: int, count: int, generator: torch.Generator | None = None) -> Experts:
    def leaf(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).requires_grad_()

    return [{"w1": leaf(H, M), "w2": leaf(M, H)} for _ in range(count)]


def balanced_ids(T: int, E: int, K: int) -> torch.Tensor:
    """Every rank sends each expert the same number of rows, in every block of tokens."""
    return (torch.arange(T * K) % E).view(T, K)


def forget_gradients(experts: Experts) -> None:
    for expert in experts:
        for parameter in expert.values():
            parameter.grad = None


def seconds_of(step: Callable[[], Any]) -> float:
    """One step that all ranks begin together; the slowest rank's."""
    dist.barrier()
    began = time.perf_counter()
    step()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())
