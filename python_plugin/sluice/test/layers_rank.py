# SPDX-License-Identifier: Apache-2.0
"""Runs a rank of a tiny training for tests of the tools, without a framework. Rank 0 prints what its first layer ran.

Arguments: steps, tokens, layers, chunks and policy (`-`: chosen), and a file of decisions (`-`: none).
"""

import json
import sys

import torch
import torch.distributed as dist
from sluice import trace
from sluice.adapters.torch.context import Context, ContextOptions
from sluice.adapters.torch.group import EpGroup
from sluice.adapters.torch.layer import MoeLayer
from sluice.adapters.torch.layer_config import MoeConfig
from sluice.config import TunerOptions
from sluice.restore import SETS

M, H, E, K = 64, 128, 4, 2


def main() -> list[MoeLayer]:
    """Runs forward and backward of all layers `steps` times; returns the layers, which must live until the exit."""
    steps, tokens, count = map(int, sys.argv[1:4])
    chunks, policy, decisions = (None if word == "-" else word for word in sys.argv[4:7])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    kept = ContextOptions(gemm="native", tuner=TunerOptions(decisions=decisions)) if decisions else None
    context = Context(EpGroup.for_ranks(range(dist.get_world_size())), kept)
    trace.register(context)
    options = dict(model_width=M, hidden_width=H, num_experts=E, top_k=K, activation="relu" if decisions else "silu")
    if chunks is not None:  # otherwise the tuner tries both modes, and each has its own row in a trace
        options.update(chunks=int(chunks), policy=SETS[policy], wgrad_mode="deferred")
    layers = [MoeLayer(context, MoeConfig(layer_id=index, **options)) for index in range(count)]
    params = [
        [{"w1": torch.randn(H, M).requires_grad_(), "w2": torch.randn(M, H).requires_grad_()} for _ in range(local)]
        for local in (layer.num_local_experts for layer in layers)
    ]
    ids, weights = (torch.arange(tokens * K) % E).view(tokens, K), torch.full((tokens, K), 1 / K)
    found: dict[str, list[object]] = {"settled": [], "chunks": []}
    for _ in range(steps):
        out = torch.randn(tokens, M, requires_grad=True)
        for layer, experts in zip(layers, params):
            out = layer(out, ids, weights, experts)
        out.sum().backward()
        stats = context.stats()
        found["settled"].append(bool(stats["last_is_settled"]))
        found["chunks"].append(stats["last_num_chunks"])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return layers


if __name__ == "__main__":
    running = main()
