# SPDX-License-Identifier: Apache-2.0
"""Ranks of layer.py: cells one after another, all sides of a cell in turns.

The sides of a cell are modules that share their parameters: DeepSpeed's stock layer, the layer swapped with Sluice's
own choice of n, and the layer swapped with one chunk. All run forward and backward on the same tokens with the same
random state.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

from integration_tests.benchmarks.layer import routing
from integration_tests.benchmarks.layer.cells import CAPACITY_FACTOR, Cell
from integration_tests.benchmarks.measuring import parts, sluice_side
from integration_tests.benchmarks.measuring.rank import Rank, gather
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles
from integration_tests.benchmarks.measuring.stolen import Stolen
from integration_tests.benchmarks.memory import memory

WARM_UP = 2  # rounds that do not count
COUNTERS = ("last_num_chunks", "peak_bytes", "slot_bytes", "saved_bytes")
PART_ROUNDS = 5  # the parts are measured between the rounds of the sides, so that drift affects both


class Bench:
    """One cell on this rank."""

    def __init__(self, cell: Cell, seed: int, options: dict[str, object]) -> None:
        self.cell, self.seed, self.options = cell, seed, options
        self.rank = dist.get_rank()
        self.dtype = getattr(torch, cell.dtype)
        torch.manual_seed(seed + self.rank)
        expert = nn.Sequential(nn.Linear(cell.M, cell.H), nn.GELU(), nn.Linear(cell.H, cell.M))
        self.stock = MoE(
            cell.M,
            expert,
            num_experts=cell.E,
            ep_size=cell.W,
            k=cell.K,
            capacity_factor=CAPACITY_FACTOR,
            drop_tokens=cell.drop,
            min_capacity=4,
            top2_2nd_expert_sampling=False,  # otherwise the second expert would be drawn at random
        ).to(self.dtype)
        self.stock.set_deepspeed_parallelism()
        routing.control_gate(self.stock.deepspeed_moe.gate)
        chosen = routing.assignments(cell.T, cell.E, cell.K, cell.skew, seed * 13 + self.rank)
        self.x = routing.tokens(chosen, cell.E, cell.M, seed * 17 + self.rank).to(self.dtype)
        self.gradient = torch.randn(cell.T, cell.M, generator=torch.Generator().manual_seed(seed + 5)).to(self.dtype)

    def twin(self) -> MoE:
        """Copy the layer's modules but not its parameters and groups, so that sides compute with the same memory."""
        layer = self.stock.deepspeed_moe
        layer.__dict__.pop("l_aux", None)  # the last call's loss: deepcopy cannot copy a tensor with a graph
        shared = [*self.stock.parameters(), layer.ep_group]
        twin = copy.deepcopy(self.stock, {id(item): item for item in shared})
        for mine, other in zip(twin.parameters(), self.stock.parameters(), strict=True):
            assert mine is other
        return twin

    def once(self, module: MoE) -> tuple[float, torch.Tensor]:
        """One forward and backward: seconds, and the output."""
        for parameter in self.stock.parameters():
            parameter.grad = None
        x = self.x.detach().requires_grad_()
        torch.manual_seed(self.seed + self.rank)  # the selection of dropped tokens is random
        dist.barrier()
        begin = time.perf_counter()
        output, _aux, _counts = module(x)
        output.backward(self.gradient)
        return time.perf_counter() - begin, output.detach()

    def parts(self) -> dict[str, Any]:
        """Communication and computation of the real rows, measured separately, and numbers of rows."""
        cell = self.cell
        rows, capacity = routing.kept_rows(self.stock.deepspeed_moe.gate, self.x, self.seed + self.rank)
        matrix = parts.rows_matrix(rows)
        return {
            **parts.measured(self.stock.deepspeed_moe.experts.deepspeed_experts, matrix, cell.M, 1),
            "rows_received": matrix.sum(0).view(cell.W, -1).sum(1).tolist(),
            "rows_padded": capacity * cell.E,  # of each rank in stock: W sources x E / W experts x capacity
        }

    def memory(self) -> dict[str, object]:
        """Peak bytes of both sides on fresh swaps; memory.py describes what is counted."""

        def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(self.seed + self.rank)
            return layer(x)[0]

        def peak(layer: nn.Module, prepare: Callable[[], None] | None = None) -> dict[str, Any]:
            return memory.moe_peak_bytes([layer], [self.x], [self.gradient], call, prepare)

        found: dict[str, object] = {"stock": peak(self.stock)}
        # Import Sluice's modules before: the import may double the interpreter's table of strings (3.7 MiB).
        sluice_side.swap(self.twin(), self.options).unswap()
        twin, handles = self.twin(), []

        def swap() -> None:
            handles.append(sluice_side.swap(twin, self.options))

        found["sluice"] = peak(twin, swap)
        handles[0].unswap()
        return found


def settle(bench: Bench, module: MoE, most: int = 60) -> None:
    """Step a swapped layer until Sluice has chosen its number of chunks.

    Candidates are tried in ordinary steps, and all ranks choose the same one. A few steps later the context has freed
    the slots that only other candidates needed, and the peak of memory is reset.
    """
    for _ in range(most):
        bench.once(module)
        if sluice_side.stats(module.deepspeed_moe)["last_is_settled"]:
            break
    for _ in range(sluice_side.STEPS_UNTIL_SLOTS_RETURN):
        bench.once(module)
    sluice_side.stats(module.deepspeed_moe, reset_peak=True)


def typical(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds in which parts were measured, and the shortest possible step."""
    middle = {name: statistics.median(part[name] for part in found) for name in found[0] if name.endswith("_s")}
    return {**found[0], **middle, "possible_s": parts.possible_s(middle)}


def measure(cell: Cell, rank: Rank) -> dict[str, object]:
    """Run one cell; every rank returns the same record."""
    plan = rank.plan
    bench = Bench(cell, plan["seed"], plan["option"])
    record: dict[str, object] = {
        "cell": cell.as_dict(),
        "seed": plan["seed"],
        "link": os.environ.get("LINK_DESCRIPTION", "unknown"),
    }
    if plan["memory"] and memory.Watch.available():
        record["memory"] = gather(bench.memory())
    modules: dict[str, MoE] = {"stock": bench.stock}
    handles = []
    sides = {"sluice": bench.options}
    if plan["one_chunk"]:
        sides["one_chunk"] = {**bench.options, "chunks": 1}
    for side, options in sides.items():
        modules[side] = bench.twin()
        handles.append(sluice_side.swap(modules[side], options))
    wall: dict[str, list[float]] = {side: [] for side in modules}
    outputs: dict[str, torch.Tensor] = {}

    # In training a step follows a step of the same kind, which determines the state of the allocator's pages. So each
    # measured step follows an unmeasured step of its side, and every side follows every other side equally often.
    orders = list(itertools.permutations(modules))
    found_parts: list[dict[str, Any]] = []
    stolen = Stolen(plan["stolen"], plan["quiet_timeout"])
    spent, count = 0.0, 0
    while count < WARM_UP + plan["pairs"]:
        if count == WARM_UP and stolen.rounds == 0:
            for side in sides:
                settle(bench, modules[side])
        stolen.begin()
        timed: dict[str, float] = {}
        for side in orders[count % len(orders)]:
            bench.once(modules[side])
            timed[side], outputs[side] = bench.once(modules[side])
        if count >= WARM_UP:
            if stolen.spoiled():
                continue
            for side, seconds in timed.items():
                wall[side].append(seconds)
        if count >= WARM_UP and len(found_parts) < PART_ROUNDS:
            found_parts.append(bench.parts())
        count += 1
        rank.report(done=count, of=WARM_UP + plan["pairs"], name=cell.name)
        spent = parts.slowest([spent + sum(w[-1] for w in wall.values() if w)])[0]
        if spent > plan["max_seconds"] and count >= WARM_UP + plan["least_pairs"]:
            break
    record["sides"] = {}
    for side in modules:
        wall[side] = parts.slowest(wall[side])
        record["sides"][side] = {"wall_s": wall[side], "wall": quartiles(wall[side])}
    record["parts"] = typical(found_parts)
    record["stolen"] = stolen.found()
    possible_s = record["parts"]["possible_s"]
    record["possible"] = record["sides"]["stock"]["wall"]["median"] / possible_s
    speedup = pair_ratios(wall["stock"], wall["sluice"])
    difference = (outputs["stock"].float() - outputs["sluice"].float()).abs().max().item()
    scale = outputs["stock"].float().abs().max().item()
    stats = sluice_side.stats(modules["sluice"].deepspeed_moe)
    record.update(
        speedup=speedup,
        sluice_over_stock=pair_ratios(wall["sluice"], wall["stock"]),
        reached_over_possible=speedup["median"] / record["possible"],
        max_output_difference=max(gather(difference / max(scale, 1e-30))),
        sluice_stats=gather({name: stats[name] for name in COUNTERS}),
    )
    if plan["one_chunk"]:
        record["one_chunk_over_chosen"] = pair_ratios(wall["one_chunk"], wall["sluice"])
    for handle in handles:
        handle.unswap()
    return record


def main() -> None:
    """Measures all cells of the plan, and reports each record at once."""
    deepspeed.init_distributed()
    rank = Rank()
    for fields in rank.plan["cells"]:
        rank.found(measure(Cell(**fields), rank))
        gc.collect()
    rank.leave()


if __name__ == "__main__":
    main()
