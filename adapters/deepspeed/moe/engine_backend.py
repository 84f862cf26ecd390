# SPDX-License-Identifier: Apache-2.0
"""Runs swapped layers on the C library through the torch adapter, with a context for each list of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sluice.adapters.common.contexts import OwnContext
from sluice.adapters.common.modules import CallExpert, HostModules
from sluice.adapters.torch import CastingLayer, Context, Lora, MoeConfig, layer_options
from sluice.config import Options


class Form(Protocol):
    """The mathematics of experts that C computes, and where their weights are in the host's modules."""

    @property
    def model_width(self) -> int:
        """Returns M."""
        ...

    @property
    def hidden_width(self) -> int:
        """Returns H."""
        ...

    @property
    def gated(self) -> bool:
        """Returns whether act(w1 x) is multiplied by w3 x."""
        ...

    def make_layer(self, context: Context, config: MoeConfig) -> CastingLayer:
        """Returns the engine layer. config: without the fields that the form sets."""
        ...

    def parameters_of(self, experts: Any) -> Any:
        """Returns the current weights, as that layer takes them."""
        ...

    def lora_of(self, experts: Any, dtype: torch.dtype) -> Lora | None:
        """Returns the active adapters, as a layer of this dtype takes them. Called for layers with a lora_rank."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    """Everything that is fixed over the life of one engine layer."""

    layer_id: int
    num_experts: int
    top_k: int
    model_width: int
    dtype: torch.dtype  # of the rows on the wire and of the GEMMs
    form: Form | None  # None: `call_expert` computes
    hidden_width: int = 1  # equal on all ranks, also on those without a form
    expert_rank: tuple[int, ...] | None = None  # the owner of each expert; None: contiguous
    expert_slot: tuple[int, ...] | None = None  # its index among the local ones; None: in the order of ids
    lora_rank: int = 0  # the largest of adapters on the weights, which are then frozen
    one_chunk: bool = False  # unless the options give a number: a hooked module sees its rows in one call


class EngineRunner:
    """One engine layer."""

    def __init__(self, context: Context, spec: LayerSpec, options: Options) -> None:
        self._form = spec.form
        self._modules: HostModules | None = None
        config = MoeConfig(
            model_width=spec.model_width,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden_width=spec.hidden_width,
            dtype=spec.dtype,
            layer_id=spec.layer_id,
            expert_rank=spec.expert_rank,
            expert_slot=spec.expert_slot,
            lora_rank=spec.lora_rank,
            **layer_options(options, spec.form is not None, 1 if spec.one_chunk else 0),
        )
        if spec.form is not None:
            self.layer = spec.form.make_layer(context, config)
        else:
            local = spec.num_experts // context.ep_group.world_size
            self._modules = HostModules(local)
            self.layer = CastingLayer(context, config, self._modules)

    def run(
        self,
        tokens: torch.Tensor,  # [T, M]
        expert_ids: torch.Tensor,  # [T, K] i32, -1 = dropped, any strides
        route_weights: torch.Tensor,  # [T, K] f32, any strides
        experts: Any,  # the local ones as the form takes them, read in each call: their storage may have moved
        call_expert: CallExpert | None = None,  # given if there is no form
    ) -> torch.Tensor:
        """Returns the output [T, M] in the spec's dtype, with a backward. Collective."""
        if self._modules is None:
            assert self._form is not None
            lora = self._form.lora_of(experts, self.layer.dtype) if self.layer.config.lora_rank else None
            return self.layer(tokens, expert_ids, route_weights, self._form.parameters_of(experts), lora)
        self._modules.bind(experts, call_expert)
        try:
            return self.layer(tokens, expert_ids, route_weights)
        finally:
            self._modules.bind((), None)

    def replace_experts(self, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> None:
        """Sets a new placement with as many experts on each rank. Collective. After an error nothing has changed."""
        self.layer.replace_experts(expert_rank, expert_slot)

    def loads(self) -> tuple[list[int], list[int]]:
        """Returns rows so far: of this rank's tokens by expert; and received by each rank, equal on all ranks."""
        return self.layer.loads()

    def refuse(self, message: str) -> None:
        """Makes the collective call with a refusal, so that the other ranks fail and do not wait."""
        self.layer.refuse(RuntimeError(message))


class EngineBackend(OwnContext):
    """The context of a model's layers on these ranks, and the engine layers on it."""

    def __init__(self, ranks: Sequence[int], options: Options, device: torch.device) -> None:
        super().__init__(ranks, options, device)
        self._options = options

    def layer(self, spec: LayerSpec) -> EngineRunner:
        """Makes a layer; no communication."""
        return EngineRunner(self.context, spec, self._options)
