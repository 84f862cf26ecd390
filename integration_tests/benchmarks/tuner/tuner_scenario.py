# SPDX-License-Identifier: Apache-2.0
"""A scenario of tuner.py: its inputs, the configurations of its layers, and their predictions by the planner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, MoeConfig, MoeLayer
from sluice.planning.machines import Machine
from sluice.planning.planner import Choice, Planner, Prediction, Workload

from integration_tests.benchmarks.measuring.rank import balanced_ids, forget_gradients, make_experts, seconds_of

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
MODELS = ("schedule", "mpmoe", "mpipemoe")


OPEN = Choice()


class Scenario:
    """The inputs of a scenario, the same for every layer that runs it."""

    def __init__(self, plan: dict[str, Any], case: dict[str, Any]) -> None:
        rank, W = dist.get_rank(), dist.get_world_size()
        self.plan, self.case = plan, case
        generator = torch.Generator().manual_seed(plan["seed"] + rank)
        T, M, H, E, K = (case[name] for name in "TMHEK")
        self.tokens = torch.randn(T, M, generator=generator).requires_grad_()
        ids = balanced_ids(T, E, K)
        # All routes of this share of tokens go to different experts of rank 0, which then gets `skew` times the mean.
        share = (case["skew"] - 1) / max(W - 1, 1)
        hot = torch.rand(T, generator=generator) < share
        ids[hot] = (torch.arange(int(hot.sum())).view(-1, 1) + torch.arange(K)) % (E // W)
        self.ids, self.weights = ids, torch.full((T, K), 1.0 / K)
        self.experts = make_experts(M, H, E // W)
        self.cotangent = torch.randn(T, M, generator=generator)

    def layer(self, context: Context, choice: Choice, **changes: Any) -> MoeLayer:
        case = self.case
        # Without a budget the mode is fixed, so that sides differ only in n.
        free = "adaptive" if context.options.memory_budget else "deferred"
        policy: Any = (choice.restore_input or "adaptive", choice.restore_pre_activation or "adaptive")
        if choice.kept_chunks:
            policy = choice.restores(choice.num_chunks, under_plan=True)
        options = {"top_k": case["K"], "chunks": choice.num_chunks, "wgrad_mode": choice.wgrad or free, **changes}
        sizes = {"model_width": case["M"], "hidden_width": case["H"], "num_experts": case["E"]}
        return MoeLayer(context, MoeConfig(**{"activation": "relu", "policy": policy, **sizes, **options}))

    def forward(self, layer: MoeLayer) -> torch.Tensor:
        return layer(self.tokens, self.ids, self.weights, self.experts)

    def run(self, layer: MoeLayer) -> None:
        """One forward and backward."""
        forget_gradients(self.experts)
        self.forward(layer).backward(self.cotangent)

    def step(self, layer: MoeLayer) -> float:
        """Seconds of one forward and backward on the slowest rank."""
        return seconds_of(lambda: self.run(layer))


# ---- predictions ---------------------------------------------------------------------------------------


def key_of(choice: Choice) -> str:
    """The name of a choice in records: n, or a plan."""
    if choice.restore_input is None:
        return str(choice.num_chunks)
    part = f"/first {choice.kept_chunks}" if choice.kept_chunks else ""
    return f"{choice.num_chunks}/{choice.restore_input}/{choice.restore_pre_activation}/{choice.wgrad}{part}"


def predicted_of(p: Prediction) -> dict[str, float]:
    """Seconds of a step by the schedule, by MPMoE's phases and by MPipeMoE eq. 10."""
    return {"schedule": p.seconds, "mpmoe": p.mpmoe, "mpipemoe": p.mpipemoe}


def workload_of(case: dict[str, Any], world_size: int) -> Workload:
    T, M, H, E, K = (case[name] for name in "TMHEK")
    return Workload(M, H, T, E, K, world_size, dtype="f32", skew=case["skew"], activation="relu")


def predictions(
    machine: dict[str, Any], case: dict[str, Any], world_size: int, choices: Iterable[Choice], budget: int | None
) -> dict[str, dict[str, float]]:
    """The planner's predictions for these choices on the machine, by key_of."""
    planner = Planner(Machine(machine, {}))
    work = workload_of(case, world_size).with_(memory_budget=budget or 0)
    fixed = {"restore_input": "keep", "restore_pre_activation": "keep", "wgrad": "deferred"}
    found = {}
    for choice in choices:
        unset = {name: value for name, value in fixed.items() if getattr(choice, name) is None}
        found[key_of(choice)] = predicted_of(planner.predict(work, replace(choice, kept_chunks=0, **unset)))
    return found


def candidates(case: dict[str, Any], machine: bytes, world_size: int) -> tuple[list[Choice], int | None]:
    """Every n without a budget; or every plan that fits the scenario's budget on this machine, and the budget."""
    if case["budget_share"] is None:
        return [Choice(n) for n in SIZES], None
    planner = Planner(Machine(json.loads(machine), {}))
    work = workload_of(case, world_size).with_(memory_budget=1 << 40)
    wide = planner.choose(work).candidates
    least = min(c.total_bytes for c in wide)
    all_kept = (1, "keep", "keep")
    most = next(
        c for c in wide if (c.choice.num_chunks, c.choice.restore_input, c.choice.restore_pre_activation) == all_kept
    )
    # The planner's base is that of a small context; the torch adapter's GEMMs need more.
    budget = int(least + case["budget_share"] * (most.total_bytes - least)) + (4 << 20)
    chosen = planner.choose(work.with_(memory_budget=budget)).candidates
    return [replace(c.choice, kept_chunks=0) for c in chosen if not c.verdict.startswith("over")], budget


def choices_of_models(
    case: dict[str, Any], machine: bytes, world_size: int, among: list[Choice], budget: int | None
) -> dict[str, Choice]:
    """The choices of the schedule's prediction and of the papers' models."""
    said = predictions(json.loads(machine), case, world_size, among, budget)
    return {name: min(among, key=lambda choice: said[key_of(choice)][name]) for name in MODELS}
