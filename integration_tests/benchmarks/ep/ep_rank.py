"""Rank-side of ep.py: stock `all_to_all` and Sluice in turns, on the same rows and parameters, in one process group."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from integration_tests.benchmarks.experts.experts_block import Rows, Shape, make_module, make_rows
from integration_tests.benchmarks.measuring import launch

SIDES = ("stock", "sluice")
# (experts_implementation, ep_implementation) of each.
NAMES = {"stock": ("grouped_mm", "all_to_all"), "sluice": ("sluice", "sluice")}


class Cell:
    """Both sides of one shape. `experts` of stock is what transformers would run: grouped_mm."""

    def __init__(self, cell: dict[str, Any], ep: DeviceMesh, alone: DeviceMesh) -> None:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        world = ep.size()
        shape = Shape(cell["M"], cell["H"], cell["E"] // world, cell["K"])
        self.cell, self.dtype = cell, getattr(torch, cell["dtype"])
        modules = {"stock": make_module(shape, self.dtype)}
        modules["sluice"] = copy.deepcopy(modules["stock"])
        implementations = EPImplementationInterface()
        self.sides: dict[str, Any] = {}
        for side, (experts, transport) in NAMES.items():
            module = modules[side]
            module._is_expert_parallel = True
            module.config._experts_implementation = experts
            if side == "sluice" and cell["deduplicate"]:
                module.config.sluice = {"deduplicate": True}
            self.sides[side] = implementations[transport](module, ep, alone)
        self.modules = modules
        everything = Shape(cell["M"], cell["H"], cell["E"], cell["K"])
        torch.manual_seed(dist.get_rank())
        self.rows = make_rows(everything, cell["T"], self.dtype)
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self.outputs: dict[str, torch.Tensor] = {}

    def step(self, side: str) -> float:
        """One forward and backward with fresh gradients; the slowest rank counts."""
        rows: Rows = self.rows
        self.modules[side].zero_grad(set_to_none=True)
        tokens, weights = rows.tokens.detach().requires_grad_(), rows.weights.to(self.dtype).detach().requires_grad_()
        dist.barrier()
        began = time.perf_counter()
        out = self.sides[side](tokens, rows.ids, weights)
        out.backward(rows.grad)
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.outputs[side] = out.detach()
        return took.item()

    def difference(self) -> float:
        """The largest difference of the outputs over the largest output."""
        ours, stock = self.outputs["sluice"].float(), self.outputs["stock"].float()
        return ((ours - stock).abs().max() / stock.abs().max()).item()

    def parts(self) -> dict[str, float]:
        """Stock's exchanges alone, and its experts alone on as many rows as arrive here."""
        rows, world = self.rows, dist.get_world_size()
        routed = rows.tokens.repeat_interleave(self.cell["K"], 0)
        pieces = list(routed.chunk(world))
        got = [torch.empty_like(piece) for piece in pieces]
        comm = []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            dist.all_to_all_single(torch.cat(got), torch.cat(pieces))
            comm.append(time.perf_counter() - began)
        local = self.cell["E"] // world
        ids = torch.arange(len(routed)).remainder(local).unsqueeze(1)
        ones = torch.ones(len(routed), 1, dtype=self.dtype)
        compute = []
        for _ in range(3):
            tokens = routed.detach().requires_grad_()
            self.modules["stock"].zero_grad(set_to_none=True)
            dist.barrier()
            began = time.perf_counter()
            self.modules["stock"](tokens, ids, ones).backward(routed)
            compute.append(time.perf_counter() - began)
        found = torch.tensor([4 * min(comm), min(compute)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {"comm_s": found[0].item(), "compute_s": found[1].item()}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import sluice

    world, rank = dist.get_world_size(), dist.get_rank()
    ep = init_device_mesh("cpu", (world,))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "tp"))["tp"]
    lines, done, of = [], 0, len(plan["cells"]) * (plan["pairs"] + plan["warm_up"])
    for described in plan["cells"]:
        cell = Cell(described, ep, alone)
        for number in range(plan["pairs"] + plan["warm_up"]):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                took = cell.step(side)
                if number >= plan["warm_up"]:
                    cell.seconds[side].append(took)
            done += 1
            if rank == 0:
                launch.report(done=done, of=of, name=described["name"])
        stats = sluice.stats(cell.modules["sluice"])
        lines.append(
            {
                **described,
                **cell.parts(),
                "wall_s": cell.seconds,
                "difference": cell.difference(),
                "chunks": stats["last_num_chunks"],
                "gemm": stats["gemm"],
            }
        )
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(lines))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
