# SPDX-License-Identifier: Apache-2.0
"""Calls the host's gate, and returns expert ids and route weights.

The gate stays the host's module, with its hooks, its random draws and their order. Two things differ from the stock
call: old hosts are asked for their dense masks, and in no-drop mode the gate is kept from all-reducing its capacity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sluice.adapters.deepspeed.moe.probe import SPARSE

from deepspeed.moe.sharded_moe import TopKGate


class Routes(NamedTuple):
    """The gate's decisions for [T, M] tokens."""

    expert_ids: torch.Tensor  # [T, K] i32, -1 = dropped
    weights: torch.Tensor  # [T, K] f32, with gradient
    l_aux: torch.Tensor
    exp_counts: torch.Tensor


def ask(gate: TopKGate, layout: str, tokens: torch.Tensor, used_token: torch.Tensor | None) -> Routes:
    """Calls the gate as the host does."""
    if tokens.shape[0] == 0:
        return _no_tokens(gate, tokens)
    with _alone(gate):
        if layout == SPARSE:
            l_aux, _capacity, _experts, indices, _locations, weights, counts = gate(tokens, used_token, True, False)
            return Routes(indices.t(), weights.t().float(), l_aux, counts)
        l_aux, combine, mask, counts = gate(tokens, used_token)
    return _from_masks(combine, mask, int(gate.k), l_aux, counts)


@contextlib.contextmanager
def _alone(gate: TopKGate) -> Iterator[None]:
    """Takes the gate's group away, so that the gate does not all-reduce (MAX) the capacity in no-drop mode.

    That value sizes the padded buffers of the host, which do not exist here. No other result of the gate depends on it:
    exp_counts and l_aux are made from this rank's tokens, and a capacity of this rank's own largest count already keeps
    every route. In stock, ranks that call a layer unequally often hang in this collective.
    """
    group, gate.ep_group = gate.ep_group, None
    try:
        yield
    finally:
        gate.ep_group = group


def _no_tokens(gate: TopKGate, tokens: torch.Tensor) -> Routes:
    """Returns routes for no tokens. The host's gate takes means over tokens: NaN as loss, and k = 1 would assert.

    The gate draws no random number without tokens, so skipping the gate changes no random stream. l_aux and the route
    weights both depend on the gate's weight, so that the weight gets a gradient of zeros from either: ZeRO's ranks must
    reduce the same parameters.
    """
    num_experts = gate.wg.weight.shape[0]
    ids = torch.empty((0, gate.k), dtype=torch.int32, device=tokens.device)
    weights = torch.nn.functional.linear(tokens.float(), gate.wg.weight.float())[:, : gate.k].float()
    l_aux = gate.wg.weight.float().sum() * 0.0
    return Routes(ids, weights, l_aux, torch.zeros(num_experts, dtype=torch.int64, device=tokens.device))


def _from_masks(combine: torch.Tensor, mask: torch.Tensor, k: int, l_aux: Any, counts: Any) -> Routes:
    """Returns routes from the [T, E, C] weights and booleans of old hosts, without routes of weight 0, as stock."""
    weights = combine.sum(dim=2)
    kept = mask.any(dim=2)
    ids = kept.to(weights.dtype).topk(k, dim=1).indices
    chosen = kept.gather(1, ids)
    # Sorted by expert, so that the order of the sum over a token's routes does not depend on topk's ties.
    order = torch.where(chosen, ids, torch.full_like(ids, combine.shape[1])).sort(dim=1).values
    present = order < combine.shape[1]
    ids = torch.where(present, order, torch.zeros_like(order))
    picked = weights.gather(1, ids).float() * present
    return Routes(torch.where(present, ids, -torch.ones_like(ids)).to(torch.int32), picked, l_aux, counts)
