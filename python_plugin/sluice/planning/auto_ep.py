# SPDX-License-Identifier: Apache-2.0
"""Reads the section "expert_parallel" of a DeepSpeed config, which tells AutoEP how to convert MoE blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import fields

# Activations of transformers configs, by AutoEP's names.
_ACTIVATIONS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "swiglu_clamped": "swiglu", "swiglu_oai": "swiglu"}
# Keys of the section that name the fields of the model's config with these numbers.
_ATTRIBUTES = {"num_experts": "num_experts_attr", "top_k": "top_k_attr"}


def section_of(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the section of a DeepSpeed config, if it is enabled."""
    section = data.get("expert_parallel")
    return section if isinstance(section, Mapping) and section.get("enabled") is True else None


def names_of(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns names of fields in the model's config that hold its sizes, as given by the sections of these configs."""
    found: dict[str, str] = {}
    for section in filter(None, map(section_of, configs)):
        for field, key in _ATTRIBUTES.items():
            if isinstance(section.get(key), str):
                found[field] = section[key]
    return found


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section's values for the layers, by field of `Model`."""
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
