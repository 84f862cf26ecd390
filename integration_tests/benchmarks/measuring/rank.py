# SPDX-License-Identifier: Apache-2.0
"""Code that the ranks of benchmarks share: begin and end of a rank, experts, timed steps."""

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
    """This rank of a benchmark, started by launch.ask, with one thread and a process group of all ranks.

    A host that makes its own process group must do this before.
    """

    def __init__(self) -> None:
        self.plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.number, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group: EpGroup | None = None
        self._contexts: list[Context] = []

    @property
    def group(self) -> EpGroup:
        """The group of all ranks, made at the first use."""
        if self._group is None:
            self._group = EpGroup.for_ranks(list(range(self.world_size)))
        return self._group

    def context(self, **options: Any) -> Context:
        """A new context, which `leave` closes."""
        self._contexts.append(Context(self.group, ContextOptions(**options)))
        return self._contexts[-1]

    def report(self, **fields: Any) -> None:
        """Reports progress: "done", "of", and the "name" of the measured case."""
        if self.number == 0:
            launch.report(**fields)

    def found(self, part: Any) -> None:
        """Reports a part of the answer, which is kept even if a later part fails."""
        self.report(found=part)

    def leave(self, found: Any = None) -> NoReturn:
        """End all ranks; rank 0 writes the answer."""
        if self.number == 0:
            Path(self.plan["out"]).write_text(json.dumps(found))
        dist.barrier()
        for context in self._contexts:
            context.close()
        if self._group is not None:
            self._group.close()
        sys.stdout.flush()
        os._exit(0)


def gather(value: object) -> list[Any]:
    """The values of all ranks, in order of rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def make_experts(M: int, H: int, count: int, generator: torch.Generator | None = None) -> Experts:
    def leaf(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).requires_grad_()

    return [{"w1": leaf(H, M), "w2": leaf(M, H)} for _ in range(count)]


def balanced_ids(T: int, E: int, K: int) -> torch.Tensor:
    """Expert ids with which every rank sends each expert the same number of rows, in every block of tokens."""
    return (torch.arange(T * K) % E).view(T, K)


def forget_gradients(experts: Experts) -> None:
    for expert in experts:
        for parameter in expert.values():
            parameter.grad = None


def seconds_of(step: Callable[[], Any]) -> float:
    """Seconds of one step, which all ranks begin together, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    step()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())
