# SPDX-License-Identifier: Apache-2.0
"""Reads PEFT's LoRA on the Linears of experts, in the form that the library takes.

PEFT replaces a Linear by a wrapper, and the wrapper's `weight` is that of the Linear inside. A layer that only read
weights by name would leave the adapter out without an error. So each forward checks the classes of these modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch import Lora
from sluice.adapters.torch.lora import Factors, joined
from torch import nn


class Term(NamedTuple):
    """One active adapter of a Linear: `scale * b @ a` is added to its weight."""

    a: torch.Tensor  # [r, in]
    b: torch.Tensor  # [out, r]
    scale: float


# The adapters of a Linear in each expert, by the name of its weight (w1). Weights without adapters are left out.
Terms = Mapping[str, Sequence[Sequence[Term]]]


def base_of(linear: Any) -> Any:
    """Returns the Linear inside PEFT's wrapper, or the module itself if it is not such a wrapper."""
    return linear.base_layer if _is_wrapper(linear) else linear


def read(linears: Mapping[str, Sequence[Any]]) -> Terms | str:
    """Returns the adapters that are active now, or why the library cannot compute these Linears.

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
        kinds = {tuple((term.a.shape, term.b.shape, term.scale) for term in one) for one in found}
        if len(kinds) > 1:
            return "the adapters of its experts differ in number, rank or scale"
        if any(found):
            terms[name] = found
    if not terms:
        return terms
    for modules in linears.values():
        if any(p is not None and p.requires_grad for m in modules for p in (base_of(m).weight, base_of(m).bias)):
            return "a weight or bias under the adapters requires a gradient, which the library does not support"
    return terms


def rank_of(terms: Terms) -> int:
    """Returns the largest rank of a weight's adapters together; 0: there are none."""
    return max((sum(term.a.shape[0] for term in found[0]) for found in terms.values()), default=0)


def lora_of(terms: Terms, dtype: torch.dtype) -> Lora:
    """Returns all adapters, as a layer of this dtype takes them."""
    factors: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for name, found in terms.items():
        number = name.removeprefix("w")
        stacks = [
            Factors(torch.stack([term.a for term in terms]), torch.stack([term.b for term in terms]), terms[0].scale)
            for terms in zip(*found)
        ]
        factors[f"la{number}"], factors[f"lb{number}"], scales[f"la{number}"] = joined(stacks, dtype)
    return Lora(factors, scales)


def _is_wrapper(module: Any) -> bool:
    return type(module) is getattr(sys.modules.get("peft.tuners.lora.layer"), "Linear", None)


def _terms_of(module: Any) -> list[Term] | str:
    if type(module) is nn.Linear:
        return []
    base = base_of(module)
    if base is module or type(base) is not nn.Linear:
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
