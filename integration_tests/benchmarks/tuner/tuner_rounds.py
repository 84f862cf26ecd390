# SPDX-License-Identifier: Apache-2.0
"""Runs the sides of tuner.py in turns: candidates, choices and baselines of a scenario."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeLayer
from sluice.errors import OverBudget

from integration_tests.benchmarks.measuring.stolen import Stolen, in_turns
from integration_tests.benchmarks.tuner.tuner_scenario import SIZES, Choice, Scenario, key_of

FIXED = 4  # chunks of the baseline with a fixed n
PIPEMOE = (2, 4, 8)  # n that PipeMoE's pipeline may take


class Side:
    """One layer that runs in turns with others."""

    def __init__(self, scenario: Scenario, layer: MoeLayer) -> None:
        self.scenario, self.layer = scenario, layer
        self.screened: list[float] = []

    def step(self) -> float:
        return self.scenario.step(self.layer)


# ---- baselines -------------------------------------------------------------------------------------------------


class ByDestination(Scenario):
    """FasterMoE's split: in part j each rank sends only to the rank j places after it, and computes meanwhile.

    This runs on Sluice's own GEMMs and transport, so that only the split differs. Every route becomes a token. Tokens
    are sorted by the distance of their rank into W chunks, which are padded with tokens without an expert. A token's
    routes are not summed, which favours this baseline.
    """

    def __init__(self, scenario: Scenario) -> None:
        W, rank = dist.get_world_size(), dist.get_rank()
        self.plan, self.case, self.experts = scenario.plan, scenario.case, scenario.experts
        K, E = self.case["K"], self.case["E"]
        ids = scenario.ids.flatten()
        part = (ids // (E // W) - rank) % W
        most = torch.tensor([int((part == j).sum()) for j in range(W)]).max()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        routes = torch.full((W, int(most)), -1)
        for j in range(W):
            mine = torch.nonzero(part == j).flatten()
            routes[j, : len(mine)] = mine
        routes = routes.flatten()
        there, token = routes >= 0, routes.clamp(min=0) // K
        self.tokens = scenario.tokens.detach()[token].requires_grad_()
        self.ids = torch.where(there, ids[routes.clamp(min=0)], -1).unsqueeze(1)
        self.weights = torch.full((len(routes), 1), 1.0 / K)
        self.cotangent = scenario.cotangent[token]

    def layer(self, context: Context, choice: Choice, **changes: Any) -> MoeLayer:
        """The scenario's layer with one route per token."""
        return super().layer(context, choice, top_k=1, **changes)


def baselines(scenario: Scenario, context: Context) -> dict[str, Side]:
    """Other methods. Neither defers weight gradients to the end, and both make chunks of tokens.

    "pipemoe N" is PipeMoE's pipeline with N chunks, each an all-to-all of all ranks, without reuse of slots.
    """
    by_tokens = {"chunking": "tokens"}
    split = ByDestination(scenario)
    sides = {
        "by destination": Side(
            split, split.layer(context, Choice(dist.get_world_size(), wgrad="per_chunk"), **by_tokens)
        )
    }
    for n in PIPEMOE:
        sides[f"pipemoe {n}"] = Side(scenario, scenario.layer(context, Choice(n, wgrad="per_chunk"), **by_tokens))
    return sides


# ---- rounds ----------------------------------------------------------------------------------------------------


def candidates_of(
    scenario: Scenario, group: EpGroup, shared: Context | None, wanted: set[Choice], budget: int | None
) -> dict[Choice, Side]:
    """The choices that fit, after one step. With a budget each has its own context, because a budget belongs to a
    context."""
    found = {}
    for choice in sorted(wanted, key=str):
        options = ContextOptions(gemm=scenario.plan["gemm"], memory_budget=budget)
        side = Side(scenario, scenario.layer(shared or Context(group, options), choice))
        try:
            side.step()
        except OverBudget:  # raised on all ranks
            side.layer.context.close()
            continue
        found[choice] = side
    return found


class Rounds:
    """Screens every candidate in turns. Then the best five, all choices and the baselines run in new rounds.

    Each measured step follows an unmeasured step of the same kind, as in training. The baselines are one chunk, FIXED
    chunks, and the sides of `baselines`, PipeMoE's with its best n.
    """

    def __init__(self, scenario: Scenario, group: EpGroup, chosen: set[Choice], budget: int | None) -> None:
        plan = scenario.plan
        wanted = {Choice(n) for n in SIZES}
        if budget is not None:
            rest = [(di, m) for di in ("keep", "redispatch") for m in ("keep", "recompute")]
            wanted = {Choice(n, di, m, "deferred") for n in SIZES for di, m in rest}
        shared = Context(group, ContextOptions(gemm=plan["gemm"])) if budget is None else None
        self.sides = candidates_of(scenario, group, shared, wanted | chosen, budget)
        others = {} if shared is None else baselines(scenario, shared)
        for side in others.values():
            side.step()
        for _ in range(plan["screen"]):
            for side in (*self.sides.values(), *others.values()):
                side.screened.append(side.step())

        def fastest(among: dict[Any, Side]) -> list[Any]:
            return sorted(among, key=lambda key: statistics.median(among[key].screened))

        counted = {*fastest(self.sides)[:5], *chosen} & self.sides.keys()
        self.final: dict[Any, Side] = {choice: self.sides[choice] for choice in sorted(counted, key=str)}
        if shared is not None:
            pipelines = {name: side for name, side in others.items() if name != "by destination"}
            for name in ("by destination", fastest(pipelines)[0]):
                self.final[name] = others[name]
            for n in (1, FIXED):
                self.final[Choice(n)] = self.sides[Choice(n)]
        self.names = {key: key if isinstance(key, str) else key_of(key) for key in self.final}

    def run(self, count: int, stolen: Stolen) -> dict[str, dict[str, list[float]]]:
        """Seconds of the final sides in `count` new rounds."""
        found = in_turns({key: side.step for key, side in self.final.items()}, count, stolen)
        return {
            "measured": {self.names[key]: took for key, took in found.items() if not isinstance(key, str)},
            "baselines": {self.names[key]: took for key, took in found.items() if isinstance(key, str)},
        }

    def close(self) -> None:
        for side in self.sides.values():
            side.layer.context.close()
