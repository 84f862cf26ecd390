# SPDX-License-Identifier: Apache-2.0
"""Defines the class of a swapped AutoEP layer: the host's own with different steps between router and output.

Router, shared experts, parameters, names, state dict and checkpoints are those of the host.
"""

from __future__ import annotations

from typing import Any

import torch
from sluice.adapters.common.migration.away import Guarded
from sluice.adapters.deepspeed.moe.autoep_state import SCORES, AutoEPState
from sluice.adapters.deepspeed.moe.copies import as_host

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer


class SluiceAutoEPMoELayer(Guarded, AutoEPMoELayer):
    """An AutoEP layer whose dispatch, experts and combine are computed by Sluice."""

    _sluice: AutoEPState

    @torch.compiler.disable
    def _forward(self, hidden_states: torch.Tensor) -> Any:
        """Has the argument, result and side effects on the layer (tokens_per_expert) of the host's forward."""
        state = self._sluice
        try:
            batch, length, width = hidden_states.shape
            tokens = hidden_states.reshape(-1, width)
            runner, dtype = state.runner(self, tokens)
            scores, chosen, counts = self.router(tokens, self.expert_bias)
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
            place = SCORES[self.score_apply]
            rows, expert_ids, weights = place.route(tokens, scores, chosen)
            state.settle(rows, dtype)
        except Exception as error:
            # The other ranks are about to exchange rows: they must learn that this rank does not take part.
            state.refuse(f"{type(error).__name__}: {error}")
            raise
        before = state.communication() if state.measures(self) else None
        summed = state.run(runner, rows.to(dtype), expert_ids, weights, self.experts)
        state.profile(expert_ids)
        if before is not None:
            state.record(self, summed, before)
        output = place.by_token(summed, self.top_k).reshape(batch, length, width)
        return self._finalize_output(output, tokens, hidden_states, width)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See copies.as_host."""
        return as_host(self, AutoEPMoELayer)
