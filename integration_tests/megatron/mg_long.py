# SPDX-License-Identifier: Apache-2.0
"""Compares long trainings, in which rounding matters: Sluice with stock, and stock with itself in other orders of sums.

The allowed difference of a correct training from stock cannot be derived, because Adam divides by the root of second
moments, the smallest of which are only rounding. So the difference is measured: permuting the hidden units of the
experts only changes the order in which GEMMs sum.
"""

from __future__ import annotations

import itertools
from typing import Any

import mg_models
import sluice
import torch

SEEDS = (1, 2, 3)


def permute(host: mg_models.Host, seed: int, back: bool = False) -> None:
    """Permutes the hidden units of every expert, or undoes that."""
    generator = torch.Generator().manual_seed(seed)
    hidden = host.config.moe_ffn_hidden_size
    for module in host.model.modules():
        for expert in getattr(module, "local_experts", ()):
            order = torch.randperm(hidden, generator=generator)
            order = order.argsort() if back else order
            with torch.no_grad():
                up, down = expert.linear_fc1.weight, expert.linear_fc2.weight
                up.copy_(torch.cat([half[order] for half in up.split(hidden)]))  # gate above up
                down.copy_(down[:, order].clone())


def train(steps: int) -> dict[str, Any]:
    """Returns the largest distances of losses, norms and parameters of Sluice from stock, and of any two runs of stock.
    All runs use the routes of stock's first run, so that near ties do not change."""
    tape = mg_models.Tape()
    runs: list[tuple[dict[str, list[float]], dict[str, torch.Tensor]]] = []
    for seed in (None, *SEEDS, "sluice"):
        tape.rewind()
        how = "decorated" if seed == "sluice" else "stock"
        host = mg_models.Host(4, how, {"gemm": "host"}, moe_enable_routing_replay=True)
        first = host.parameters()
        if isinstance(seed, int):
            permute(host, seed)
        curve = host.train(steps, around=tape.record if seed is None else tape.replay)
        if isinstance(seed, int):
            permute(host, seed, back=True)
        runs.append((curve, host.parameters()))
    *stock, mine = runs
    own = [_distances(one, other) for one, other in itertools.combinations(stock, 2)]
    return {
        "stock": [max(column) for column in zip(*own)],
        "sluice": _distances(stock[0], mine),
        "moved": mg_models.gaps(first, mine[1]),
        "computed_by": sorted({each["computed_by"] for each in sluice.stats(host.model)["layers"]}),
    }


def _distances(one: Any, other: Any) -> list[float]:
    (curve, parameters), (other_curve, other_parameters) = one, other
    return [
        max(abs(a - b) for a, b in zip(curve["losses"], other_curve["losses"], strict=True)),
        max(abs(a - b) / a for a, b in zip(curve["norms"], other_curve["norms"], strict=True)),
        mg_models.gaps(parameters, other_parameters),
    ]
