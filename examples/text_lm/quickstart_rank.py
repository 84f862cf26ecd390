# SPDX-License-Identifier: Apache-2.0
"""The job of each rank of the quickstart: the same training twice in one process, stock and with Sluice.

Two engines start from equal parameters and see equal data and equal random draws (the gate's token selection draws
from torch's generator, which is seeded per step). They alternate in blocks, A B B A, so that a slow moment of the
machine affects both. A step's time is that of its slowest rank, from a common start.
"""

from __future__ import annotations

import time
from typing import Any

import deepspeed
import sluice
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from model import Shape, TextLM
from runner import Runner
from sluice.errors import OverBudget
from torch import nn

from integration_tests.benchmarks.layer.stock_parts import StockParts
from integration_tests.benchmarks.measuring import sluice_side
from integration_tests.benchmarks.measuring.machine import versions
from integration_tests.benchmarks.measuring.rank import Rank, gather
from integration_tests.benchmarks.memory import memory

SIDES = {"A": "stock", "B": "sluice"}
BUDGET_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the bytes that Sluice allocates without a budget


def measure_memory(plan: dict) -> dict[str, dict[str, int]]:
    """Peak bytes of the MoE layers, stock and swapped, on fresh layers before anything else has run."""
    torch.manual_seed(plan["seed"])
    shape = Shape(**plan["shape"])
    model = TextLM(shape)
    batch = plan["config"]["train_micro_batch_size_per_gpu"]
    for module in model.modules():
        if hasattr(module, "set_deepspeed_parallelism"):
            module.set_deepspeed_parallelism()
    layers = [module for module in model.modules() if isinstance(module, MOELayer)]
    inputs = [torch.randn(batch, shape.length, shape.width) for _ in layers]
    gradients = [torch.randn(batch, shape.length, shape.width) for _ in layers]

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, None)

    def measure(prepare: object = None) -> dict[str, int]:
        torch.manual_seed(plan["seed"] + dist.get_rank())
        return memory.moe_peak_bytes(layers, inputs, gradients, call, prepare)

    measured = {"stock": measure()}
    handles: list[Any] = []
    options = {k: v for k, v in plan["config"].get("sluice", {}).items() if k != "enabled"}
    measured["sluice"] = measure(lambda: handles.append(sluice_side.swap(model, options)))
    used = torch.tensor(max(sluice_side.stats(layer)["peak_bytes"] for layer in layers))
    handles.pop().unswap()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for share in BUDGET_SHARES:  # until the first share with a plan; a refusal fails on all ranks
        options["memory_budget"] = int(share * used.item())
        try:
            measured["budget"] = measure(lambda: handles.append(sluice_side.swap(model, options)))
            own = max(sluice_side.stats(layer)["peak_bytes"] for layer in layers)
        except OverBudget:
            continue
        finally:
            handles.pop().unswap()
        measured["budget"].update(budget=options["memory_budget"], own_peak_bytes=own)
        break
    return measured


def train(runners: dict[str, Runner], rank: Rank) -> list[int]:
    """Take turns; after `train_s` seconds stop where both sides have taken equally many steps.

    Returns the number of chunks that Sluice used in each of its steps: it chooses while it trains.
    """
    plan, chunks = rank.plan, []
    total, done = sum(count for _, count in plan["turns"]), 0
    begin = time.monotonic()
    for side, count in plan["turns"]:
        if len({len(runner.losses) for runner in runners.values()}) == 1:
            late = torch.tensor([plan["train_s"] is not None and time.monotonic() - begin > plan["train_s"]])
            dist.broadcast(late, 0)
            if late.item() and done >= 2 * plan["block"] * len(runners):
                return chunks
        for _ in range(count):
            seconds = runners[side].step()
            done += 1
            if side == "B":
                chunks.append(sluice_side.stats(runners[side].layers()[0])["last_num_chunks"])
            name, loss = SIDES[side], runners[side].losses[-1]
            said = {"side": name, "step": len(runners[side].losses), "loss": loss, "s": seconds}
            rank.report(phase="train", done=done / total, **said)
    return chunks


def trace(runners: dict[str, Runner], rank: int) -> dict[str, list[dict[str, Any]]]:
    """The operations of one more step of each side."""
    with StockParts(runners["A"].layers(), rank) as parts:
        runners["A"].step(record=False)
    sluice.trace.start()
    runners["B"].step(record=False)
    return {"stock": parts.events, "sluice": sluice_side.trace_stop(rank)}


def one_chunk(runners: dict[str, Runner], rank: Rank) -> dict[str, list[float]]:
    """Sluice with one chunk against Sluice as configured, A B B A: the first engine is swapped for it."""
    plan = rank.plan
    options = {k: v for k, v in plan["config"].get("sluice", {}).items() if k != "enabled"}
    handle = sluice_side.swap(runners["A"].engine.module, {**options, "chunks": 1})
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    for side in "AABB":
        runners[side].step(record=False)
    for count, side in enumerate("ABBA" * plan["one_chunk_rounds"]):
        seconds[side].append(runners[side].step(record=False))
        rank.report(phase="one chunk", done=(count + 1) / (4 * plan["one_chunk_rounds"]))
    handle.unswap()
    return {"one_chunk": seconds["A"], "chosen": seconds["B"]}


def main() -> None:
    """Measure memory, train both sides, trace one step, compare with one chunk; rank 0 writes the result."""
    deepspeed.init_distributed()
    rank = Rank()
    plan, result = rank.plan, {"versions": versions(), "memory": None}
    if memory.Watch.available():
        rank.report(phase="memory", done=0.0)
        result["memory"] = gather(measure_memory(plan))
    rank.report(phase="warm-up", done=0.0)
    runners = {side: Runner(plan, with_sluice=side == "B") for side in SIDES}
    kinds = {side: [sluice_side.is_swapped(layer) for layer in runners[side].layers()] for side in SIDES}
    if any(kinds["A"]) or not all(kinds["B"]):
        raise SystemExit(f"the key should have swapped all layers of one engine and none of the other, got {kinds}")
    result["chunks"] = train(runners, rank)
    for side, runner in runners.items():
        result[SIDES[side]] = {"loss": runner.losses, "step_s": runner.step_s}
    rank.report(phase="trace", done=0.0)
    result["events"] = gather(trace(runners, rank.number))
    result["sluice_stats"] = [sluice_side.stats(layer) for layer in runners["B"].layers()]
    result["one_chunk"] = one_chunk(runners, rank)
    rank.leave(result)


if __name__ == "__main__":
    main()
