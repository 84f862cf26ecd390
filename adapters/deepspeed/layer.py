"""The class that a swapped layer becomes: the host's own `MOELayer` with another forward, and nothing else.

Parameters, names, hooks, state dict, isinstance checks, optimizers and checkpoints are those of the host. Copies and
pickles of a swapped layer are layers of the host, so that a saved model loads where Sluice is not.
"""

from __future__ import annotations

from typing import Any

import torch
from sluice.adapters.deepspeed import routes
from sluice.adapters.deepspeed.state import LayerState
from sluice.errors import Mismatch, OverBudget

from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer


class SluiceMOELayer(MOELayer):
    """dispatch -> experts -> combine by Sluice; the gate stays the host's."""

    _sluice: LayerState

    @torch.compiler.disable
    def forward(self, *input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Same arguments, result and side effects on the layer (l_aux, exp_counts, times) as the host's."""
        if self.wall_clock_breakdown:
            self.timers(MOE_TIMER).start()
        hidden, used_token = input[0], input[1] if len(input) > 1 else None
        state = self._sluice
        try:
            runner, dtype = state.runner(self)
            tokens = hidden.reshape(-1, hidden.shape[-1])
            state.check_tokens(tokens, dtype)
            state.settle(tokens, dtype)
            route = routes.ask(self.gate, state.finding.gate_format, tokens, used_token)
        except Exception as error:
            # The others are on their way into the exchange: they must learn that this rank is not coming.
            state.refuse(f"{type(error).__name__}: {error}")
            raise
        self.l_aux, self.exp_counts = route.l_aux, route.exp_counts
        before = state.communication() if state.measures(self) else None
        experts = self.experts.deepspeed_experts
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
        if before is not None:
            state.record(self, output, before)
        output = state.as_host(output, experts, tokens)
        if self.wall_clock_breakdown:
            self.timers(MOE_TIMER).stop()
            self.time_moe = self.timers(MOE_TIMER).elapsed(reset=False)
        return output.reshape(hidden.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """deepcopy and pickle give a layer of the host: handles into the library cannot be copied."""
        values = {key: value for key, value in self.__dict__.items() if key != "_sluice"}
        return _bare_host_layer, (), values


def _bare_host_layer() -> MOELayer:
    return MOELayer.__new__(MOELayer)
