# SPDX-License-Identifier: Apache-2.0
"""Ranks of compare.py: both sides of each cell in turns, on the same rows and weights, in one process group."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from integration_tests.benchmarks.measuring import parts
from integration_tests.benchmarks.measuring.rank import Rank

SIDES = ("stock", "sluice")
MOST_SETTLING = 60
FEWEST_PAIRS = 3


@dataclass
class Sides:
    """The layers and inputs of one cell."""

    layers: dict[str, nn.Module]  # by side
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor]  # runs a layer on tokens
    tokens: torch.Tensor  # inputs of this rank
    rows: torch.Tensor  # [E], the rows that this rank sends to each expert
    stats: Callable[[], dict[str, Any]]  # counters of the context of Sluice's layer


class _Expert(nn.Module):
    """One expert, whose computation is timed separately."""

    def __init__(self, M: int, H: int, gated: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(M, 2 * H if gated else H, bias=False, dtype=dtype)
        self.down = nn.Linear(H, M, bias=False, dtype=dtype)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.down(nn.functional.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def _step(sides: Sides, side: str, gradient: torch.Tensor) -> tuple[float, torch.Tensor]:
    """One forward and backward with fresh gradients: seconds of the slowest rank, and the output."""
    layer = sides.layers[side]
    layer.zero_grad(set_to_none=True)
    tokens = sides.tokens.detach().requires_grad_()
    dist.barrier()
    began = time.perf_counter()
    output = sides.call(layer, tokens)
    output.backward(gradient)
    took = time.perf_counter() - began
    return parts.slowest([took])[0], output.detach()


def _settle(sides: Sides, gradient: torch.Tensor) -> None:
    """Steps until Sluice has chosen its chunks, which all ranks do in the same step."""
    for _ in range(MOST_SETTLING):
        _step(sides, "sluice", gradient)
        if sides.stats()["last_is_settled"]:
            return


def _parts(cell: dict[str, Any], sides: Sides) -> dict[str, float]:
    """Seconds of the communication and the computation of the real rows, and the shortest possible step."""
    local = cell["E"] // dist.get_world_size()
    experts = nn.ModuleList(_Expert(cell["M"], cell["H"], cell["gated"], sides.tokens.dtype) for _ in range(local))
    found = parts.measured(experts, parts.rows_matrix(sides.rows), cell["M"], 3)
    return {**found, "possible_s": parts.possible_s(found)}


def _measure(cell: dict[str, Any], sides: Sides, pairs: int, until: float, tell: Callable[[], None]) -> dict[str, Any]:
    """Measures one cell. until: its deadline by this rank's clock; FEWEST_PAIRS are measured in any case."""
    gradient = torch.randn(sides.tokens.shape, generator=torch.Generator().manual_seed(5)).to(sides.tokens.dtype)
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    outputs: dict[str, torch.Tensor] = {}
    _settle(sides, gradient)
    for number in range(pairs):
        if number >= FEWEST_PAIRS and parts.slowest([time.monotonic() - until])[0] > 0:
            break
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            _step(sides, side, gradient)  # a measured step follows a step of the same side
            took, outputs[side] = _step(sides, side, gradient)
            wall[side].append(took)
        tell()
    gap = (outputs["stock"].float() - outputs["sluice"].float()).abs().max() / outputs["stock"].float().abs().max()
    return {
        **cell,
        **_parts(cell, sides),
        "wall_s": wall,
        "difference": parts.slowest([gap.item()])[0],
        "chunks": sides.stats()["last_num_chunks"],
    }


def run(make: Callable[[dict[str, Any]], Sides]) -> NoReturn:
    """Measures all cells of the plan in the process group that the host has made."""
    rank = Rank()
    plan, lines = rank.plan, []
    pairs, of = plan["pairs"], len(plan["cells"])
    end = time.monotonic() + plan["seconds"]
    for number, cell in enumerate(plan["cells"]):
        done = [number * pairs]

        def tell(name: str = cell["name"], done: list[int] = done) -> None:
            done[0] += 1
            rank.report(done=done[0], of=of * pairs, name=name)

        now = time.monotonic()
        until = now + (end - now) / (of - number)  # the time that a cell does not use goes to the next cells
        lines.append(_measure(cell, make(cell), pairs, until, tell))
    rank.leave(lines)
