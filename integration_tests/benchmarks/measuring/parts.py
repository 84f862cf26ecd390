# SPDX-License-Identifier: Apache-2.0
"""Measures the parts of `possible`, the shortest possible step, separately in the same run.

possible = sum over forward and backward of max(communication, computation). Communication is two exchanges of the real
rows per pass, as plain sends and receives. All receives are posted first, so that both directions of the link are busy.
Computation is the experts' own modules on the rows that a rank receives, one call per expert. Each number is the median
over rounds of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn


def slowest(values: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Elementwise maximum over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def exchange(sends: list[torch.Tensor], receives: list[torch.Tensor]) -> None:
    """One all-to-all-v, made of sends and receives. The entries of this rank itself are ignored."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = [(rank + shift) % world for shift in range(1, world)]
    work = [dist.irecv(receives[p], src=p) for p in peers if receives[p].numel()]
    work += [dist.isend(sends[p], dst=p) for p in peers if sends[p].numel()]
    for item in work:
        assert item is not None
        item.wait()


def rows_matrix(rows_per_expert: torch.Tensor) -> torch.Tensor:
    """[W, E] rows that each rank sends to each expert."""
    gathered = [torch.empty_like(rows_per_expert) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, rows_per_expert)
    return torch.stack(gathered)


def communication(matrix: torch.Tensor, width: int, dtype: torch.dtype, rounds: int) -> float:
    """Seconds of the two exchanges of one pass."""
    rank, world = dist.get_rank(), dist.get_world_size()
    to = matrix.view(world, world, -1).sum(2)  # [source, destination] rows
    out = [torch.zeros(int(to[rank, p]) if p != rank else 0, width, dtype=dtype) for p in range(world)]
    back = [torch.zeros(int(to[p, rank]) if p != rank else 0, width, dtype=dtype) for p in range(world)]
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        exchange(out, back)
        exchange(back, out)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(slowest(seconds[1:]))


def computation(experts: nn.ModuleList, matrix: torch.Tensor, width: int, rounds: int) -> tuple[float, float]:
    """Seconds of the local experts on their real rows, forward and backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = matrix.sum(0).view(world, -1)[rank].tolist()
    dtype = next(experts.parameters()).dtype
    forward, backward = [], []
    for _ in range(rounds + 1):
        inputs = [torch.randn(rows, width).to(dtype).requires_grad_() for rows in mine]
        for parameter in experts.parameters():
            parameter.grad = None
        dist.barrier()
        begin = time.perf_counter()
        outputs = [expert(x) for expert, x in zip(experts, inputs, strict=True)]
        middle = time.perf_counter()
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        end = time.perf_counter()
        forward.append(middle - begin)
        backward.append(end - middle)
    for parameter in experts.parameters():
        parameter.grad = None
    return statistics.median(slowest(forward[1:])), statistics.median(slowest(backward[1:]))


def measured(experts: nn.ModuleList, matrix: torch.Tensor, width: int, rounds: int) -> dict[str, float]:
    """Seconds of the communication of a pass, and of the computation of forward and backward."""
    comm_s = communication(matrix, width, next(experts.parameters()).dtype, rounds)
    forward_s, backward_s = computation(experts, matrix, width, rounds)
    return {"comm_per_pass_s": comm_s, "forward_compute_s": forward_s, "backward_compute_s": backward_s}


def possible_s(found: Mapping[str, float]) -> float:
    """The shortest possible step."""
    return sum(max(found["comm_per_pass_s"], found[f"{way}_compute_s"]) for way in ("forward", "backward"))
