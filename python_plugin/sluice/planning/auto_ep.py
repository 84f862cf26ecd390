# SPDX-License-Identifier: Apache-2.0
"""The section "expert_parallel" of a DeepSpeed config: what AutoEP makes of a model's MoE blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import fields

# AutoEP's words for activations, by those of configs.
_ACTIVATIONS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "swiglu_clamped": "swiglu", "swiglu_oai": "swiglu"}
# What names the fields of a model's config that hold these numbers.
_ATTRIBUTES = {"num_experts": "num_experts_attr", "top_k": "top_k_attr"}


def section_of(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of a DeepSpeed config, where it is switched on."""
    section = data.get("expert_parallel")
    return section if isinstance(section, Mapping) and section.get("enabled") is True else None


def names_of(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Which fields of the model's own config hold its sizes, as far as a section among these says so."""
    found: dict[str, str] = {}
    for section in filter(None, map(section_of, configs)):
        for field, key in _ATTRIBUTES.items():
            if isinstance(section.get(key), str):
                found[field] = section[key]
    return found


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the section says of the layers, by the names of `Model`."""
    section = section_of(data)
    if section is None:
        return {}
    found: dict[str, Any] = {"gated": True, "ranks": _number(section, "autoep_size", 1)}
    if section.get("top_k", "auto") != "auto":
        found["top_k"] = _number(section, "top_k", 1)
    if section.get("expert_activation") is not None:
        found["activation"] = _ACTIVATIONS.get(str(section["expert_activation"]))
    if section.get("score_apply") == "pre":
        found["scores_first"] = True
    return found


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    return fields.count(f'"expert_parallel": {key}', section.get(key, default))
