# SPDX-License-Identifier: Apache-2.0
"""Ranks of two_levels.py: the same layer, deduplicated by rank, by node and by the tuner's choice, in turns."""

from __future__ import annotations

import torch
from sluice.adapters.torch import Context, MoeConfig, MoeLayer

from integration_tests.benchmarks.measuring.rank import Rank, forget_gradients, make_experts, seconds_of

SIDES = {"one": True, "two": "node", "chosen": "rank_or_node"}


class Case:
    """The inputs of a rank, the same for all sides."""

    def __init__(self, rank: Rank) -> None:
        T, M, H, E, K = (rank.plan["case"][name] for name in "TMHEK")
        generator = torch.Generator().manual_seed(rank.plan["seed"] + rank.number)
        self.tokens = torch.randn(T, M, generator=generator).requires_grad_()
        self.ids = torch.rand(T, E, generator=generator).topk(K).indices
        self.weights = torch.full((T, K), 1.0 / K)
        self.experts = make_experts(M, H, E // rank.world_size, generator)
        self.cotangent = torch.randn(T, M, generator=generator)
        self.sizes = {"model_width": M, "hidden_width": H, "num_experts": E, "top_k": K}
        self.chunks = rank.plan["chunks"]

    def layer(self, context: Context, deduplicate: bool | str) -> MoeLayer:
        return MoeLayer(
            context, MoeConfig(activation="relu", chunks=self.chunks, deduplicate=deduplicate, **self.sizes)
        )

    def forward(self, layer: MoeLayer) -> torch.Tensor:
        return layer(self.tokens, self.ids, self.weights, self.experts)

    def step(self, layer: MoeLayer) -> float:
        """Seconds of one forward and backward on the slowest rank."""
        forget_gradients(self.experts)
        return seconds_of(lambda: self.forward(layer).backward(self.cotangent))


def copies(rank: Rank, ids: torch.Tensor, groups: int) -> int:
    """The number of token copies that this rank sends to other nodes, if ranks are divided into `groups` groups and
    each group gets a token at most once."""
    owner = ids * groups // rank.plan["case"]["E"]
    own = rank.number // rank.plan["ranks_per_node"]
    sent = 0
    for group in range(groups):
        node = group * rank.world_size // groups // rank.plan["ranks_per_node"]
        sent += int((owner == group).any(1).sum()) if node != own else 0
    return sent


def bytes_of(case: Case, layer: MoeLayer) -> int:
    """Payload bytes that one step sends."""
    before = layer.context.stats()["bytes_sent"]
    case.step(layer)
    return layer.context.stats()["bytes_sent"] - before


def main() -> None:
    rank = Rank()
    plan = rank.plan
    case = Case(rank)
    known = {"gemm": plan["gemm"], "ranks_per_node": plan["ranks_per_node"], "wire_dtype": plan["wire"]}
    contexts = {side: rank.context(**known) for side in SIDES}
    layers = {side: case.layer(contexts[side], deduplicate) for side, deduplicate in SIDES.items()}
    for count in range(plan["warm_up"]):
        for side in SIDES:
            case.step(layers[side])
        rank.report(done=count + 1, of=plan["warm_up"], name="choosing")
    walls: dict[str, list[float]] = {side: [] for side in SIDES}
    for count in range(plan["pairs"]):
        for side in SIDES if count % 2 == 0 else [*SIDES][::-1]:
            walls[side].append(case.step(layers[side]))
        rank.report(done=count + 1, of=plan["pairs"], name="in turns")
    with torch.no_grad():
        outputs = {side: case.forward(layer) for side, layer in layers.items()}
    row = 4 * case.sizes["model_width"]
    nodes = rank.world_size // plan["ranks_per_node"]
    rank.leave(
        {
            "wall_s": walls,
            "n": {side: contexts[side].stats()["last_num_chunks"] for side in SIDES},
            "bytes_sent": {side: bytes_of(case, layer) for side, layer in layers.items()},
            # Four exchanges, in each of which a rank is taken to send as many rows.
            "between_bytes": {
                "one": 4 * row * copies(rank, case.ids, rank.world_size),
                "two": 4 * row * copies(rank, case.ids, nodes),
            },
            "difference": float((outputs["one"] - outputs["two"]).abs().max()),
        }
    )


if __name__ == "__main__":
    main()
