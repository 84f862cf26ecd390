# SPDX-License-Identifier: Apache-2.0
"""`sluice.plan_model` under ten budgets, against the usual ways of checkpointing: activation memory and time of a step.

The model consists of Transformer blocks with different feed-forward widths. The sides, in turns within each round: all
blocks kept; ten budgets, evenly spaced from the least possible to the bytes of all kept; every block checkpointed, as
the hosts' switches do; runs of sqrt(N) blocks checkpointed (Chen et al. 2016); and torch's own budget
(`torch._functorch.config.activation_memory_budget`), which needs a compiled model, so it runs through `aot_eager` with
eager kernels. Each of the last three also has a side with a plan for just its bytes. The last side offloads every block
but the last over a link on which the tightest copy takes 0.8 of its gap. Marks: no peak is over its budget; no budget
takes over 3 % longer than the next smaller one; no plan takes over 3 % longer than the side whose bytes it has; and
offloading takes at most 5 % longer than all kept.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import sluice
import torch
from sluice.adapters.torch import memory_meter
from sluice.adapters.torch.offloaded import Offloaded
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.stats import misses, pair_ratios, quartiles

PAGE = "planner.md"
OPTIONS = {
    "blocks": Option(16),
    "width": Option(256),
    "tokens": Option(1024, "four sequences"),
    "threads": Option(1),
    "rounds": Option(9),
}
SMOKE = {"blocks": 4, "width": 64, "tokens": 32, "rounds": 2}
MIB = 1 << 20
MOST = 1.03
OFFLOADED, GAP, MOST_OFFLOADED = "all but one offloaded", 0.8, 1.05
BUDGETS, ITS_BYTES = 10, "its bytes: "


class Block(nn.Module):
    """Attention and a feed-forward network of width `hidden`, each with a residual connection."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A model whose attribute `way` runs the blocks."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, width * (1, 4, 2, 8)[i % 4]) for i in range(blocks))
        self.way: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor] = in_turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self.blocks, x).square().mean()


def in_turn(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def each_checkpointed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def runs_checkpointed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(list(blocks), round(math.sqrt(len(blocks))), x, use_reentrant=False)


class Side:
    """A copy of the model, and the seconds of its steps."""

    def __init__(self, name: str, model: Model, batch: torch.Tensor, budget: int | None = None) -> None:
        self.name, self.batch, self.budget = name, batch, budget
        self.model = copy.deepcopy(model)
        self.call: Callable[[torch.Tensor], torch.Tensor] = self.model
        self.seconds: list[float] = []
        self.recomputed = 0
        if budget is not None:
            self.recomputed = len(sluice.plan_model(self.model, budget, batch).recomputed)

    def step(self) -> None:
        self.call(self.batch).backward()

    def settle(self) -> int:
        """Runs two steps; returns the peak memory of a third, which accumulates into existing gradients."""
        for _ in range(2):
            self.step()
        self.peak = memory_meter.measure(self.step).peak("start", "end")
        return self.peak

    def round(self) -> None:
        """Runs a step that does not count and a step that does, both with new gradients."""
        for _ in range(2):
            self.model.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            self.step()
            seconds = time.perf_counter() - begin
        self.seconds.append(seconds)


def checkpointed(name: str, model: Model, batch: torch.Tensor, way: Any) -> Side:
    side = Side(name, model, batch)
    side.model.way = way
    return side


def compiled(model: Model, batch: torch.Tensor, share: float) -> Side:
    """The side with torch's own budget: a share between all recomputed and all kept, for the backward's graph."""
    side = Side(f"torch's budget {share}", model, batch)
    torch._functorch.config.activation_memory_budget = share
    side.call = torch.compile(side.model, backend="aot_eager_decomp_partition")
    side.step()  # compiles with the present budget
    torch._functorch.config.activation_memory_budget = 1.0
    return side


def offloaded(model: Model, batch: torch.Tensor) -> Side:
    """The side that offloads. At the link's rate the tightest copy takes GAP of the next block's forward."""
    side = Side(OFFLOADED, model, batch)
    plan = sluice.plan_model(side.model, 1 << 40, batch)
    plan.undo()
    layers = {block.name: side.model.get_submodule(block.name) for block in plan.blocks}
    away = list(layers)[:-1]
    trial = Offloaded(layers, away)
    side.step()
    trial.undo()
    rate = max(sent / (GAP * block.forward_seconds) for sent, block in zip(trial.out_bytes, plan.blocks[1:]))
    Offloaded(layers, away, bytes_per_second=rate)
    return side


def all_sides(model: Model, batch: torch.Tensor, with_compiled: bool) -> list[Side]:
    kept = Side("all kept", model, batch)
    most = kept.settle()
    least = sluice.plan_model(copy.deepcopy(model), 2 * most, batch).recompute_bytes
    budgets = [least + (most - least) * i // (BUDGETS - 1) for i in range(BUDGETS)]
    sides = [kept, *(Side(f"budget {i + 1}", model, batch, budget) for i, budget in enumerate(budgets))]
    others = [
        checkpointed("every block checkpointed", model, batch, each_checkpointed),
        checkpointed("runs of sqrt(N)", model, batch, runs_checkpointed),
    ]
    if with_compiled:
        others.append(compiled(model, batch, 0.5))
    for other in others:
        other.settle()
    sides += [*others, *(Side(ITS_BYTES + other.name, model, batch, max(least, other.peak)) for other in others)]
    sides.append(offloaded(model, batch))
    for side in sides:
        side.settle()
    return sides


def over_bytes(sides: list[Side]) -> list[str]:
    return [f"{side.name} is over its bytes" for side in sides if side.budget is not None and side.peak > side.budget]


def missed(sides: list[Side]) -> list[str]:
    """The missed marks."""
    named = {side.name: side for side in sides}
    pairs = [(f"budget {i + 1}", f"budget {i}", MOST) for i in range(1, BUDGETS)]
    pairs += [(name, name.removeprefix(ITS_BYTES), MOST) for name in named if name.startswith(ITS_BYTES)]
    found = over_bytes(sides)
    for name, other, most in [*pairs, (OFFLOADED, "all kept", MOST_OFFLOADED)]:
        ratio = pair_ratios(named[name].seconds, named[other].seconds)["median"]
        found += misses(name, [(f"of the time of {other}", ratio, "<=", most)])
    return found


def run(bench: Bench) -> list[str]:
    options = bench.options
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    batch = torch.randn(4, options.tokens // 4, options.width)
    sides = all_sides(Model(options.blocks, options.width), batch, with_compiled=not options.smoke)
    for number in range(options.rounds):
        for side in sides:
            side.round()
        bench.progress.show(f"round {number + 1} of {options.rounds}")
    rows = [
        {
            "side": side.name,
            "budget_bytes": side.budget,
            "peak_bytes": side.peak,
            "recomputed": side.recomputed if side.budget is not None else None,
            "over_all_kept": pair_ratios(side.seconds, sides[0].seconds)["median"],
            "seconds": quartiles(side.seconds)["median"],
        }
        for side in sides
    ]
    for row in rows:
        bench.tell(row)
    bench.keep(rows)
    return over_bytes(sides) if options.smoke else missed(sides)


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        again = str(row.get("recomputed", ""))
        return [row["side"], f"{row['peak_bytes'] / MIB:.0f} MiB", f"{row['over_all_kept']:.2f}", again]

    heads = ["side", "peak of activations", "step over that of all kept", "blocks computed again"]
    return {"budgets": pages.run_tables(runs, heads, cells)}
