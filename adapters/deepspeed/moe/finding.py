# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a probe for a layer of any kind: all that the adapter needs to know of the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sluice.adapters.torch import CastingLayer, Context, Lora, MoeConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MODULES_HIDDEN = 4  # H / M that is assumed for experts that run as modules


class Form(Protocol):
    """The mathematics of experts that C computes, and where their weights are in the host's modules."""

    @property
    def model_width(self) -> int:
        """Returns M."""

    @property
    def hidden_width(self) -> int:
        """Returns H."""

    @property
    def gated(self) -> bool:
        """Returns whether act(w1 x) is multiplied by w3 x."""

    def make_layer(self, context: Context, config: MoeConfig) -> CastingLayer:
        """Returns the engine layer. config: without the fields that the form sets."""

    def parameters_of(self, experts: Any) -> Any:
        """Returns the current weights, as that layer takes them."""

    def lora_of(self, experts: Any, dtype: torch.dtype) -> Lora | None:
        """Returns the active adapters, as a layer of this dtype takes them. Called for layers with a lora_rank."""


@dataclass(frozen=True)
class Finding:
    """The description of one layer."""

    layer_id: int
    name: str
    ranks: tuple[int, ...]  # the global ranks of its expert-parallel group, in group order
    num_experts: int
    top_k: int
    model_width: int
    dtype: torch.dtype
    device: torch.device  # of the experts
    form: Form | None  # None: the host's modules are called
    why_not_fused: str = ""
    gate_format: str = ""  # how a native layer's gate is called (probe.py)

    def row_bytes(self) -> int:
        """Returns the bytes that the layer may keep of one token on balanced routing: T_DI and T_M of K routes."""
        hidden = _MODULES_HIDDEN * self.model_width
        if self.form is not None:
            hidden = self.form.hidden_width * (2 if self.form.gated else 1)
        return self.top_k * (self.model_width + hidden) * self.dtype.itemsize

    def compared(self) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks of the group."""
        width = self.form.hidden_width if self.form else 0
        return {
            "layer": self.name,
            "experts": self.num_experts,
            "top_k": self.top_k,
            "model_width": self.model_width,
            "hidden_width": width,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "computed by": "Sluice" if self.form else "the host's modules",
        }


def ranks_of(layer: Any, refuse: Callable[[str], Exception]) -> tuple[int, ...]:
    """Returns the global ranks of a layer's expert-parallel group, or raises the error that `refuse` makes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    own = torch.distributed.get_rank() if distributed else 0
    if layer.ep_size == 1:
        return (own,)
    if layer.ep_group is None:
        raise refuse("it has no expert-parallel group yet: swap after deepspeed.initialize, or set the groups up first")
    ranks = tuple(torch.distributed.get_process_group_ranks(layer.ep_group))
    if len(ranks) != layer.ep_size:
        raise refuse(f"its group has {len(ranks)} ranks, its ep_size is {layer.ep_size}")
    return ranks
