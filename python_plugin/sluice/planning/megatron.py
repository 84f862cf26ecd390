# SPDX-License-Identifier: Apache-2.0
"""Megatron's configs: a TransformerConfig as JSON or YAML, a recipe of its tests, or a script with `--flag value`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import fields

# Words that no other host's config has.
SIGNS = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
NAMES = {
    "model_width": ("moe_latent_size", "hidden_size"),
    "hidden_width": ("moe_ffn_hidden_size", "ffn_hidden_size"),
    "num_experts": ("num_moe_experts", "num_experts"),
    "top_k": ("moe_router_topk",),
    "layers": ("num_layers",),
    "micro_batch": ("micro_batch_size",),
    "sequence_length": ("seq_length", "encoder_seq_length"),
    "ranks": ("expert_model_parallel_size",),
}
DEFAULT_TOP_K = 2  # Megatron's own
_PARTS = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
_LAYERS_OF_A_PART = "num_layers_per_virtual_pipeline_stage"
_GROUP = ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage")
_RECIPE = "MODEL_ARGS"  # under which recipes have the flags of a script
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S+)\s*$")


def is_megatron(data: Mapping[str, Any]) -> bool:
    """Whether a config, flattened, is one of Megatron's."""
    return any(data.get(name) is not None for name in SIGNS)


def flags_of_recipe(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a recipe ("MODEL_ARGS": {"--num-layers": 8, ...}), as `flags_of` gives a script's; None: it is none."""
    flags = data.get(_RECIPE)
    if not isinstance(flags, Mapping):
        return None
    named = {str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    return {name: value for name, value in named.items() if not (isinstance(value, str) and "$" in value)}


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Its YAML lays keys into sections ("language_model", "model_parallel"): all of them beside each other."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found = {**flat(value), **found}
        else:
            found[str(key).replace("-", "_")] = value
    return found


def flags_of(text: str) -> dict[str, Any]:
    """What a script gives as `--flag value`, by the names of configs; a flag alone is True. Variables that the script
    sets to plain values are put in; of others the flag counts as not given.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    variables = {found[1]: found[2].strip("'\"") for line in lines if (found := _ASSIGNMENT.match(line))}
    words = re.findall(r"'[^']*'|[^\s\\]+", " ".join(lines).replace('"', " "))  # a text of flags is flags
    found: dict[str, Any] = {}
    for word, after in zip(words, [*words[1:], "--"]):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.rstrip(")").replace("-", "_")
        if not equals:
            value = after if not after.startswith("--") and after != ")" and not word.endswith(")") else ""
        found[name] = _value(value.strip("'\""), variables)
    return {name: value for name, value in found.items() if value is not None}


def _value(text: str, variables: Mapping[str, str]) -> Any:
    text = re.sub(r"\$\{?(\w+)(?::-(\w+))?\}?", lambda m: variables.get(m[1], m[2] or m[0]), text)
    if "$" in text:
        return None
    if text.count("(") < text.count(")"):
        text = text.rstrip(")")  # of the shell's array around it
    return True if text == "" else int(text) if text.isdigit() else text


def dtype_of(data: Mapping[str, Any]) -> str | None:
    """ "bfloat16" and the like; None where nothing says it."""
    word = data.get("params_dtype")
    if word is not None:
        return str(word).removeprefix("torch.")
    return "bfloat16" if data.get("bf16") is True else "float16" if data.get("fp16") is True else None


def is_gated(data: Mapping[str, Any]) -> bool:
    """Its experts have two matrices unless told otherwise."""
    return data.get("swiglu") is True or data.get("gated_linear_unit") is True


def token_shares(data: Mapping[str, Any]) -> int:
    """Ranks that a sample's tokens are split over before they come to a MoE layer."""
    tensor = _size(data, "tensor_model_parallel_size") if data.get("sequence_parallel") is True else 1
    return tensor * _size(data, "context_parallel_size")


def stages(data: Mapping[str, Any]) -> int:
    """Of its pipeline."""
    return _size(data, "pipeline_model_parallel_size")


def parts_of_a_stage(data: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """(parts of the model that each stage has, micro-batches of a part that wait in the first stage): of 1F1B, or of
    its interleaved form (adapters/megatron/in_flight.py)."""
    count = stages(data)
    given = next((name for name in _PARTS if data.get(name) is not None), None)
    if given is not None:
        parts = _size(data, given)
    elif data.get(_LAYERS_OF_A_PART) is not None:
        parts = max(1, layers // count // _size(data, _LAYERS_OF_A_PART))
    else:
        return 1, count
    group = next((_size(data, name) for name in _GROUP if data.get(name) is not None), count)
    return parts, 2 * (count - 1) + (parts - 1) * group + 1


def _size(data: Mapping[str, Any], name: str) -> int:
    return 1 if data.get(name) is None else fields.count(name, data[name])
