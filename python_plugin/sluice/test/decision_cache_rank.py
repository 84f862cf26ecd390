# SPDX-License-Identifier: Apache-2.0
"""Runs a rank of a tiny training from kept decisions, and prints what its first steps ran. Argument: the file."""

import json
import sys

import torch
import torch.distributed as dist
from sluice.adapters.torch.context import Context, ContextOptions
from sluice.adapters.torch.group import EpGroup
from sluice.adapters.torch.layer import MoeLayer
from sluice.adapters.torch.layer_config import MoeConfig
from sluice.config import TunerOptions

T, M, H, E, K = 64, 64, 128, 4, 2


def main() -> None:
    """Runs four steps of one layer."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    options = ContextOptions(gemm="native", tuner=TunerOptions(decisions=sys.argv[1]))
    context = Context(EpGroup.for_ranks(range(dist.get_world_size())), options)
    layer = MoeLayer(context, MoeConfig(model_width=M, hidden_width=H, num_experts=E, top_k=K, activation="relu"))
    experts = [
        {"w1": torch.randn(H, M).requires_grad_(), "w2": torch.randn(M, H).requires_grad_()}
        for _ in range(layer.num_local_experts)
    ]
    found: dict[str, list[object]] = {"settled": [], "chunks": []}
    for _ in range(4):
        ids = (torch.arange(T * K) % E).view(T, K)
        layer(torch.randn(T, M, requires_grad=True), ids, torch.full((T, K), 1 / K), experts).sum().backward()
        stats = context.stats()
        found["settled"].append(bool(stats["last_is_settled"]))
        found["chunks"].append(stats["last_num_chunks"])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    context.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
