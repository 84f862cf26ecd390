# SPDX-License-Identifier: Apache-2.0
"""Runs a rank of a tiny training for tests of the tools: two layers, no framework. Arguments: steps, chunks, policy."""

import sys

import torch
import torch.distributed as dist
from sluice import trace
from sluice.adapters.torch.context import Context
from sluice.adapters.torch.group import EpGroup
from sluice.adapters.torch.layer import MoeLayer
from sluice.adapters.torch.layer_config import MoeConfig
from sluice.restore import SETS

T, M, H, E, K = 256, 64, 256, 4, 2


def main() -> list[MoeLayer]:
    """Runs forward and backward of both layers `steps` times; returns the layers, which must live until the exit."""
    steps, chunks, policy = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    context = Context(EpGroup.for_ranks(range(dist.get_world_size())))
    trace.register(context)
    options = dict(model_width=M, hidden_width=H, num_experts=E, top_k=K, chunks=chunks)
    options["activation"] = "silu"
    options["wgrad_mode"] = "deferred"  # otherwise the tuner tries both modes, and each has its own row
    layers = [MoeLayer(context, MoeConfig(layer_id=index, **options, policy=SETS[policy])) for index in range(2)]
    params = [
        [{"w1": torch.randn(H, M).requires_grad_(), "w2": torch.randn(M, H).requires_grad_()} for _ in range(count)]
        for count in (layer.num_local_experts for layer in layers)
    ]
    for _ in range(steps):
        tokens = torch.randn(T, M, requires_grad=True)
        ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
        weights = torch.full((T, K), 1 / K)
        out = tokens
        for layer, experts in zip(layers, params):
            out = layer(out, ids, weights, experts)
        out.sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return layers


if __name__ == "__main__":
    kept = main()
