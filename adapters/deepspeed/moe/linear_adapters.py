# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA on the Linears of experts: its factors as the library takes them.

PEFT puts a wrapper in the place of a Linear, and the wrapper's `weight` is that of the Linear inside. Reading weights
by name would therefore leave the adapter out, without an error: each forward looks what stands in a Linear's place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch import Lora
from torch import nn


class Term(NamedTuple):
    """One active adapter of a linear: `scale * b @ a` is added to its weight."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float


# By the name of a weight (w1), for each expert the adapters of that linear; weights without any are left out.
Terms = Mapping[str, Sequence[Sequence[Term]]]


def base_of(linear: Any) -> Any:
    """The Linear inside PEFT's wrapper, or the module itself if it is no such wrapper."""
    return linear.base_layer if _is_wrapper(linear) else linear


def read(linears: Mapping[str, Sequence[Any]]) -> Terms | str:
    """The adapters of this moment, or why the library cannot compute these Linears.

    linears  by the name of a weight, one for each expert
    """
    terms: dict[str, Sequence[Sequence[Term]]] = {}
    for name, modules in linears.items():
        found: list[list[Term]] = []
        for module in modules:
            one = _terms_of(module)
            if isinstance(one, str):
                return one
            found.append(one)
        shapes = {tuple((term.a.shape, term.b.shape) for term in one) for one in found}
        if len(shapes) > 1:
            return "the adapters of its experts differ in number or rank"
        if any(found):
            terms[name] = found
    if not terms:
        return terms
    for modules in linears.values():
        if any(p is not None and p.requires_grad for m in modules for p in (base_of(m).weight, base_of(m).bias)):
            return "a weight or bias below the adapters wants a gradient, which the library does not give with adapters"
    return terms


def rank_of(terms: Terms) -> int:
    """The largest rank; 0: there is no adapter."""
    return max((sum(term.a.shape[0] for term in found[0]) for found in terms.values()), default=0)


class Factors(NamedTuple):
    """The adapters of one weight, stacked over experts."""

    a: torch.Tensor  # [E_local, r, in]
    b: torch.Tensor  # [E_local, out, r]
    scale: float


def stacked(found: Sequence[Sequence[Term]], dtype: torch.dtype) -> Factors:
    """As a layer of this dtype takes them: float32, or its own. Several adapters lie one after the other in the rank,
    and each B then has its scale in it."""
    scales = {term.scale for terms in found for term in terms}
    scale = scales.pop() if len(scales) == 1 else 1.0
    factor = [[1.0 if scale == term.scale else term.scale for term in terms] for terms in found]
    a = torch.stack([_joined([term.a for term in terms], 0) for terms in found])
    b = torch.stack(
        [
            _joined([t.b if f == 1.0 else t.b * f for t, f in zip(terms, factors)], 1)
            for terms, factors in zip(found, factor)
        ]
    )
    if a.dtype != b.dtype or a.dtype not in (torch.float32, dtype):
        a, b = a.to(dtype), b.to(dtype)
    return Factors(a, b, scale)


def lora_of(terms: Terms, dtype: torch.dtype) -> Lora:
    """All of them, as a layer of this dtype takes them."""
    factors: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for name, found in terms.items():
        number = name.removeprefix("w")
        factors[f"la{number}"], factors[f"lb{number}"], scales[f"la{number}"] = stacked(found, dtype)
    return Lora(factors, scales)


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _is_wrapper(module: Any) -> bool:
    return type(module) is getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)


def _terms_of(module: Any) -> list[Term] | str:
    if type(module) is nn.Linear:
        return []
    base = base_of(module)
    if type(base) is not nn.Linear:
        return f"{type(base).__name__} is not exactly torch.nn.Linear"
    if module.merged:
        return "an adapter is merged and disabled" if module.disable_adapters else []
    if module.disable_adapters:
        return []
    terms = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if name in module.lora_variant:
            return f"adapter {name} is a variant of LoRA ({type(module.lora_variant[name]).__name__})"
        dropout = module.lora_dropout[name]
        if type(dropout) is not nn.Identity and dropout.training and getattr(dropout, "p", 1) > 0:
            return f"adapter {name} has dropout"
        a, b = module.lora_A[name], module.lora_B[name]
        if getattr(a, "bias", None) is not None or getattr(b, "bias", None) is not None:
            return f"adapter {name} has a bias of its own (lora_bias)"
        terms.append(Term(a.weight, b.weight, float(module.scaling[name])))
    return terms
