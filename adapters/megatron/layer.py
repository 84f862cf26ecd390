# SPDX-License-Identifier: Apache-2.0
"""Defines the class of MoE layers in a spec of `with_sluice`: the host's own `MoELayer` with different steps inside.

Router, shared experts, parameters, names, checkpoints and recomputation stay the host's. The host's forward calls its
steps one by one; between two steps gradients flow only through their arguments, as in the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.migration.away import Guarded, knowing
from sluice.adapters.common.migration.moving import has_moved
from sluice.adapters.megatron.moving import MARK, OTHER_PLACES, marked, sharded_state_dict
from sluice.adapters.megatron.state import LayerState, take_over
from sluice.errors import InvalidState
from sluice.planning.stages_chosen import MoeChoice

from megatron.core.transformer.moe.moe_layer import MoELayer

_STEPS = ("route", "preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess")


def missing_steps() -> list[str]:
    """Returns steps that this release's layer lacks, so that it cannot be taken over."""
    return [step for step in _STEPS if not hasattr(MoELayer, step)]


class SluiceMoELayer(Guarded, MoELayer):
    """Computes dispatch, experts and combine of a MoELayer by Sluice.

    sluice       options of the layer's spec, by the names of the "sluice" section; other arguments are the host's
    sluice_plan  the plans of all MoE layers of the model, in order
    """

    _sluice: LayerState | None = None

    def __init__(
        self,
        *args: Any,
        sluice: dict[str, Any] | None = None,
        sluice_plan: Sequence[MoeChoice] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sluice = take_over(self, sluice, sluice_plan)

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> Any:
        """Runs the host's step, before it routes; the other ranks are notified of a failure."""
        if self._sluice is None:
            return super().shared_experts_compute(hidden_states)
        with self._sluice.told():
            return super().shared_experts_compute(hidden_states)

    def route(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the host's step; the other ranks are notified of a failure."""
        if self._sluice is None:
            return super().route(hidden_states, *args, **kwargs)
        with self._sluice.told():
            return super().route(hidden_states, *args, **kwargs)

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """Returns (tokens [T, M], route weights [T, K]). Shared experts that overlap begin here."""
        state = self._sluice
        if state is None:
            return super().preprocess(hidden_states, probs, routing_map)
        with state.told():
            if self.use_shared_expert and self.shared_expert_overlap:
                self._begin_shared_experts(hidden_states)
            return state.routed(self, hidden_states, probs, routing_map)

    def _begin_shared_experts(self, hidden_states: torch.Tensor) -> None:
        """Runs the steps that the host's dispatcher would run between its exchanges, on the host's side stream."""
        shared = self.shared_experts
        shared.pre_forward_comm(hidden_states)
        shared.linear_fc1_forward_and_act()
        shared.linear_fc2_forward()
        shared.post_forward_comm()

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Does nothing: the next step dispatches, computes and combines."""
        if self._sluice is None:
            return super().dispatch(hidden_states, probs)
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Returns (the experts' weighted outputs [T, M], no bias). Collective over the expert-parallel group."""
        if self._sluice is None:
            return super().routed_experts_compute(hidden_states, probs)
        return self._sluice.run(self.experts, hidden_states, probs), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Does nothing: the outputs are combined already."""
        return super().combine(output) if self._sluice is None else output

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Returns the output in the shape of the hidden states, plus the output of shared experts."""
        if self._sluice is None:
            return super().postprocess(output, shared_expert_output)
        output = output.view(self._sluice.shape)
        if self.use_shared_expert and self.shared_expert_overlap:
            output = output + self.shared_experts.get_output()
        return output if shared_expert_output is None else output + shared_expert_output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Returns the host's sharded state dict, with the experts' own numbers on any rank."""
        with knowing():
            found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._sluice is None or not has_moved(self._sluice):
            return found
        own = f"{prefix}experts."
        kept = {name: entry for name, entry in found.items() if not name.startswith(own)}
        mine = self._sluice.placement.experts_of(self.ep_group.rank())
        moved = sharded_state_dict(self.experts, mine, self._sluice.finding.num_experts, own, sharded_offsets, metadata)
        return marked({**kept, **moved}, prefix, self._sluice.placement)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Loads a plain state dict with experts at home, or one that sharded_state_dict made for their placement."""
        mark = state_dict.pop(f"{prefix}{MARK}", None)
        if mark is None or self._sluice is None:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        elif mark != self._sluice.placement:
            raise InvalidState(OTHER_PLACES)
        else:
            with knowing():
                super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Leaves routed experts out, because their weight gradients are computed in the backward."""
        super().backward_dw(routed_experts and self._sluice is None, shared_experts)
