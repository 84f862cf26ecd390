# SPDX-License-Identifier: Apache-2.0
"""Describes low-rank adapters of a layer's experts (LoRA): the factors of a call, and their C members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._library import load
from ...errors import InvalidArgument
from .descriptors import Descriptors
from .placement import Placement

FACTORS = ("la1", "lb1", "la3", "lb3", "la2", "lb2")
_SCALES = {"la1": "lora_scale1", "la3": "lora_scale3", "la2": "lora_scale2"}


class Lora(NamedTuple):
    """Has the adapters of one call: the layer computes with W + scale * B A in place of each W that has one.

    factors  by name: la1, la3, la2 of w1, w3, w2 are A [E_local, r, in], and lb1, lb3, lb2 are B [E_local, out, r]. f32
             or the layer's dtype, any strides. lb3 without la3: w3 shares la1. Interleaved: lb1 is [E_local, 2H, r]
    scales   by the name of A: la1, la3, la2; 1 if none is given
    """

    factors: Mapping[str, torch.Tensor]
    scales: Mapping[str, float] = {}

    @property
    def rank(self) -> int:
        """Returns the largest rank of the factors."""
        return max(factor.shape[1] for name, factor in self.factors.items() if name in _SCALES)


def check(lora: Lora, lora_rank: int, num_experts: int) -> None:
    """Refuses factors that cannot be described to the library. The library checks ranks, widths and dtypes."""
    if lora_rank == 0:
        raise InvalidArgument("the layer takes no adapters: give its MoeConfig lora_rank, their largest rank")
    for name, factor in lora.factors.items():
        if name not in FACTORS:
            raise InvalidArgument(f"{name} is not a factor of an adapter: known are {', '.join(FACTORS)}")
        if factor.dim() != 3 or factor.shape[0] != num_experts:
            raise InvalidArgument(
                f"{name} has shape {list(factor.shape)}: a factor is stacked over the {num_experts} local experts, "
                "[E_local, r, in] or [E_local, out, r]"
            )
    for name in lora.scales:
        if name not in _SCALES:
            raise InvalidArgument(f"{name} has no scale: scales are those of {', '.join(_SCALES)}")


def without_tensors(lora: Lora) -> Lora:
    """Returns the names and scales alone, which a graph may keep, since save_for_backward keeps the tensors."""
    return Lora(dict.fromkeys(lora.factors), dict(lora.scales))  # type: ignore[arg-type]


class FactorFrame:
    """Has descriptors of all factors of a call, and of their gradients. A layer keeps them from pass to pass."""

    def __init__(self, placement: Placement, num_experts: int) -> None:
        self._num_experts = num_experts
        self._factors = Descriptors(len(FACTORS) * num_experts, placement)
        self._grads = Descriptors(len(FACTORS) * num_experts, placement)

    def fill(self, struct: Any, lora: Lora | None, factors: Sequence[torch.Tensor]) -> None:
        """Writes the adapters' members of the params struct. factors: in the order of lora.factors."""
        names = () if lora is None else tuple(lora.factors)
        self._point(struct, self._factors, dict(zip(names, factors)))
        for name, member in _SCALES.items():
            setattr(struct, member, 1.0 if lora is None else float(lora.scales.get(name, 1.0)))

    def fill_grads(self, struct: Any, names: Sequence[str], grads: Sequence[torch.Tensor | None]) -> None:
        """Writes the adapters' members of the gradients' struct; None: not needed."""
        self._point(struct, self._grads, {name: grad for name, grad in zip(names, grads) if grad is not None})

    def _point(self, struct: Any, items: Descriptors, given: Mapping[str, torch.Tensor]) -> None:
        null = load().ffi.NULL
        for number, name in enumerate(FACTORS):
            first = number * self._num_experts
            if name in given:
                items.fill_stack(first, given[name], name)
            setattr(struct, name, items.pointer(first) if name in given else null)


class Factors(NamedTuple):
    """Describes an adapter, which adds `scale * b[e] @ a[e]` to the weight of expert e."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]
    scale: float


def joined(adapters: Sequence[Factors], dtype: torch.dtype) -> Factors:
    """Joins adapters into one, in a dtype that a layer of `dtype` takes: float32 or `dtype`. Their ranks are
    concatenated. If there is more than one, B contains the scales."""
    if len(adapters) == 1:
        a, b, scale = adapters[0]
    else:
        a = torch.cat([each.a for each in adapters], 1)
        b = torch.cat([each.b * each.scale for each in adapters], 2)
        scale = 1.0
    if a.dtype != b.dtype or a.dtype not in (torch.float32, dtype):
        a, b = a.to(dtype), b.to(dtype)
    return Factors(a, b, scale)
