"""The class that a swapped layer becomes: the host's own `MOELayer` with another forward, and nothing else.

Parameters, names, hooks, state dict, isinstance checks, optimizers and checkpoints are those of the host. Copies and
pickles of a swapped layer are layers of the host, so that a saved model loads where Sluice is not.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from sluice.adapters.deepspeed import moving, routes
from sluice.adapters.deepspeed.state import LayerState
from sluice.errors import InvalidState, Mismatch, OverBudget

from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer


class SluiceMOELayer(MOELayer):
    """dispatch -> experts -> combine by Sluice; the gate stays the host's."""

    _sluice: LayerState

    @torch.compiler.disable
    def forward(self, *input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Same arguments, result and side effects on the layer (l_aux, exp_counts, times) as the host's."""
        hidden, used_token = input[0], input[1] if len(input) > 1 else None
        if not self.wall_clock_breakdown:
            return _run(self, hidden, used_token)
        timer = self.timers(MOE_TIMER)
        timer.start()
        try:
            return _run(self, hidden, used_token)
        finally:  # of a pass that was refused too: a timer that runs on refuses the next start
            timer.stop()
            self.time_moe = timer.elapsed(reset=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """deepcopy and pickle give a layer of the host: handles into the library cannot be copied.

        Made by the standard library's own function, so that no name of Sluice's stands in a pickle.
        """
        if moving.has_moved(self):
            raise InvalidState("a layer whose experts have moved cannot be copied: move them home first")
        values = {key: value for key, value in self.__dict__.items() if key != "_sluice"}
        return copyreg._reconstructor, (MOELayer, object, None), values  # type: ignore[attr-defined]


def _run(layer: SluiceMOELayer, hidden: torch.Tensor, used_token: torch.Tensor | None) -> torch.Tensor:
    state = layer._sluice
    try:
        runner, dtype = state.runner(layer)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        state.check_tokens(tokens, dtype)
        state.settle(tokens, dtype)
        route = routes.ask(layer.gate, state.finding.gate_format, tokens, used_token)
    except Exception as error:
        # The others are on their way into the exchange: they must learn that this rank is not coming.
        state.refuse(f"{type(error).__name__}: {error}")
        raise
    layer.l_aux, layer.exp_counts = route.l_aux, route.exp_counts
    before = state.communication() if state.measures(layer) else None
    experts = layer.experts.deepspeed_experts
    try:
        output = runner.run(
            tokens.to(dtype),
            route.expert_ids,
            route.weights,
            experts,
            lambda index, rows: state.call_expert(experts[index], index, rows),
        )
    except Mismatch as error:
        raise state.explain(error) from error
    except OverBudget as error:
        raise state.explain_budget(error, tokens) from error
    state.profile(route.expert_ids)
    if before is not None:
        state.record(layer, output, before)
    return state.as_host(output, experts, tokens).reshape(hidden.shape)
