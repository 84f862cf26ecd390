# SPDX-License-Identifier: Apache-2.0
"""Defines the state of a swapped AutoEP layer: its engine layers, and where its scores are multiplied in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sluice.adapters.common.migration.moving import Expert, of_stacks
from sluice.adapters.deepspeed.moe import flops_profile
from sluice.adapters.deepspeed.moe.engine_backend import EngineRunner
from sluice.adapters.deepspeed.moe.runners import Key, Runners

# Rows, expert ids [rows, K'] and weights f32 [rows, K'] of tokens [T, M], scores [T, K] and chosen experts [T, K].
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ScorePlace(NamedTuple):
    """Where a token's scores are multiplied in."""

    route: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Routed]
    by_token: Callable[[torch.Tensor, int], torch.Tensor]  # (outputs of the rows, K) -> outputs of the tokens [T, M]


def _after(tokens: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> Routed:
    return tokens, chosen, scores.float()


def _before(tokens: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> Routed:
    """Returns a row for each route of a token, as stock does."""
    rows = tokens.repeat_interleave(scores.shape[1], 0)
    rows = (rows.float() * scores.reshape(-1, 1)).to(tokens.dtype)
    return rows, chosen.reshape(-1, 1), torch.ones_like(scores, dtype=torch.float32).reshape(-1, 1)


SCORES = {
    "post": ScorePlace(_after, lambda outputs, top_k: outputs),
    "pre": ScorePlace(_before, lambda outputs, top_k: outputs.view(-1, top_k, outputs.shape[-1]).sum(dim=1)),
}


class AutoEPState(Runners):
    """One swapped `AutoEPMoELayer`."""

    def slots(self, container: Any) -> list[Expert]:
        """See Runners."""
        return of_stacks({"w1": container.w1, "w3": container.w3, "w2": container.w2}, container.w1.shape[0])

    def runner(self, layer: Any, tokens: torch.Tensor) -> tuple[EngineRunner, torch.dtype]:
        """Returns the engine layer for these tokens, and the dtype of its rows."""
        self.check_container(layer.experts)
        self.check_width(tokens)
        dtype = self._dtype(layer, tokens)
        return self.runner_for(Key(dtype, True)), dtype

    def profile(self, expert_ids: torch.Tensor) -> None:
        """Adds GEMMs to the host's count, since no module was called for them."""
        assert self.finding.form is not None
        flops_profile.count(self.finding.form, expert_ids)

    def _dtype(self, layer: Any, tokens: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the host's GEMMs. The host casts weights to the rows' dtype, and its loop multiplies in
        autocast's dtype, which its grouped GEMMs ignore."""
        dtype = tokens.dtype
        if self._autocast() and not layer.experts.use_grouped_mm:
            dtype = torch.get_autocast_dtype(self.finding.device.type)
        self.check_dtype(dtype)
        return dtype
