# SPDX-License-Identifier: Apache-2.0
"""Defines the class of a swapped layer: the host's own `MOELayer` with a different forward, and nothing else.

Parameters, names, hooks, state dict, isinstance checks, optimizers and checkpoints are those of the host. Copies and
pickles of a swapped layer are layers of the host, so that a saved model loads without Sluice.
"""

from __future__ import annotations

from typing import Any

import torch
from sluice.adapters.common.migration.away import Guarded
from sluice.adapters.deepspeed.moe import routes
from sluice.adapters.deepspeed.moe.copies import as_host
from sluice.adapters.deepspeed.moe.state import LayerState

from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer


class SluiceMOELayer(Guarded, MOELayer):
    """A MOELayer whose dispatch, experts and combine are computed by Sluice; the gate is the host's."""

    _sluice: LayerState

    @torch.compiler.disable
    def forward(self, *input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Has the arguments, result and side effects on the layer (l_aux, exp_counts, times) of the host's forward."""
        hidden, used_token = input[0], input[1] if len(input) > 1 else None
        if not self.wall_clock_breakdown:
            return _run(self, hidden, used_token)
        timer = self.timers(MOE_TIMER)
        timer.start()
        try:
            return _run(self, hidden, used_token)
        finally:  # also after a refused pass: a timer that still runs cannot be started again
            timer.stop()
            self.time_moe = timer.elapsed(reset=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See copies.as_host."""
        return as_host(self, MOELayer)


def _run(layer: SluiceMOELayer, hidden: torch.Tensor, used_token: torch.Tensor | None) -> torch.Tensor:
    state = layer._sluice
    try:
        runner, dtype = state.runner(layer)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        state.check_tokens(tokens, dtype)
        state.settle(tokens, dtype)
        route = routes.ask(layer.gate, state.finding.gate_format, tokens, used_token)
    except Exception as error:
        # The other ranks are about to exchange rows: they must learn that this rank does not take part.
        state.refuse(f"{type(error).__name__}: {error}")
        raise
    layer.l_aux, layer.exp_counts = route.l_aux, route.exp_counts
    before = state.communication() if state.measures(layer) else None
    experts = layer.experts.deepspeed_experts
    output = state.run(
        runner,
        tokens.to(dtype),
        route.expert_ids,
        route.weights,
        experts,
        lambda index, rows: state.call_expert(experts[index], index, rows),
    )
    state.profile(route.expert_ids)
    if before is not None:
        state.record(layer, output, before)
    return state.as_host(output, experts, tokens).reshape(hidden.shape)
