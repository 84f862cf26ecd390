# SPDX-License-Identifier: Apache-2.0
"""Ranks of two_levels.py: the same layer, deduplicated by rank, by node and by the tuner's choice, in turns."""

from __future__ import annotations

import torch

from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.tuner.tuner_scenario import Choice, Scenario

SIDES = {"one": True, "two": "node", "chosen": "rank_or_node"}


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


def main() -> None:
    rank = Rank()
    plan = rank.plan
    case = Scenario(plan, {**plan["case"], "skew": 1.0})
    generator = torch.Generator().manual_seed(plan["seed"] + rank.number)
    case.ids = torch.rand(case.ids.shape[0], plan["case"]["E"], generator=generator).topk(plan["case"]["K"]).indices
    known = {"gemm": plan["gemm"], "ranks_per_node": plan["ranks_per_node"], "wire_dtype": plan["wire"]}
    contexts = {side: rank.context(**known) for side in SIDES}
    open_ = Choice(plan["chunks"], wgrad="adaptive")
    layers = {side: case.layer(contexts[side], open_, deduplicate=way) for side, way in SIDES.items()}
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
    row = 4 * plan["case"]["M"]
    nodes = rank.world_size // plan["ranks_per_node"]
    rank.leave(
        {
            "wall_s": walls,
            "n": {side: contexts[side].stats()["last_num_chunks"] for side in SIDES},
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
