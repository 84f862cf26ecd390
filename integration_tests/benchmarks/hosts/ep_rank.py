# SPDX-License-Identifier: Apache-2.0
"""Ranks of compare.py: an experts block of transformers under `all_to_all` with grouped_mm, and under Sluice."""

import copy
from typing import Any

import sluice
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from integration_tests.benchmarks.experts.experts_block import Shape, make_module, make_rows
from integration_tests.benchmarks.hosts import compare_rank

# (experts_implementation, ep_implementation) of each side.
NAMES = {"stock": ("grouped_mm", "all_to_all"), "sluice": ("sluice", "sluice")}


class _Side(nn.Module):
    """A block under one implementation of expert parallelism."""

    def __init__(self, block: Any, forward: Any, rows: Any) -> None:
        super().__init__()
        self.block, self.run, self.rows = block, forward, rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = self.rows.weights.to(tokens.dtype).detach().requires_grad_()
        return self.run(tokens, self.rows.ids, weights)


def make(cell: dict[str, Any]) -> compare_rank.Sides:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    world, dtype = dist.get_world_size(), getattr(torch, cell["dtype"])
    ep = init_device_mesh("cpu", (world,))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "tp"))["tp"]
    torch.manual_seed(dist.get_rank())
    rows = make_rows(Shape(cell["M"], cell["H"], cell["E"], cell["K"]), cell["T"], dtype)
    stock = make_module(Shape(cell["M"], cell["H"], cell["E"] // world, cell["K"]), dtype)
    implementations, layers = EPImplementationInterface(), {}
    for side, block in {"stock": stock, "sluice": copy.deepcopy(stock)}.items():
        experts, transport = NAMES[side]
        block._is_expert_parallel = True
        block.config._experts_implementation = experts
        if side == "sluice" and cell["deduplicate"]:
            block.config.sluice = {"deduplicate": True}
        layers[side] = _Side(block, implementations[transport](block, ep, alone), rows)
    return compare_rank.Sides(
        layers=layers,
        call=lambda layer, tokens: layer(tokens),
        tokens=rows.tokens,
        rows=torch.bincount(rows.ids.flatten(), minlength=cell["E"]),
        stats=lambda: sluice.stats(layers["sluice"].block)["contexts"][0],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare_rank.run(make)
