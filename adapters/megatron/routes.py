# SPDX-License-Identifier: Apache-2.0
"""Converts the router's [T, E] tensors to expert ids and route weights [T, K]."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routes(NamedTuple):
    """Has the router's decisions for T tokens."""

    expert_ids: torch.Tensor  # [T, K] i32, ascending, -1 = none
    weights: torch.Tensor  # [T, K] f32, with gradient


def of_map(probs: torch.Tensor, chosen: torch.Tensor, top_k: int, padded: bool = False) -> Routes:
    """Returns the routes of `chosen` [T, E] bool. Weights are gathered from `probs` [T, E], so that gradients reach
    `probs` itself, to which aux losses are attached.

    Routes are in the order of expert numbers, in which the host sums a token's outputs. Nothing waits for the device.

    padded  the host has filled experts up to their capacity with tokens that did not choose them. Their probability is
            0 and they have no effect: they are left out, so that a token keeps at most K routes
    """
    num_experts = probs.shape[1]
    if padded:
        chosen = chosen & (probs.detach() > 0)
    numbers = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs.device)
    first = (chosen * numbers).topk(top_k, dim=1).values  # descending, so expert numbers ascend; 0: none
    absent = first == 0
    ids = (num_experts - first).masked_fill(absent, -1)
    weights = probs.gather(1, ids.clamp(min=0).long()).masked_fill(absent, 0)
    return Routes(ids, weights.float())
