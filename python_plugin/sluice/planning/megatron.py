# SPDX-License-Identifier: Apache-2.0
"""Reads Megatron's configs: a TransformerConfig as JSON or YAML, a recipe of its tests, or a script with flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import files

# Fields that no other host's config has.
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
_RECIPE = "MODEL_ARGS"  # key of the flags in a recipe
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S+)\s*$")


def is_megatron(data: Mapping[str, Any]) -> bool:
    """Returns whether a config, flattened, is one of Megatron's."""
    return any(data.get(name) is not None for name in SIGNS)


def flags_of_recipe(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a recipe's flags ("MODEL_ARGS": {"--num-layers": 8, ...}) in the form of `flags_of`. None: no recipe."""
    flags = data.get(_RECIPE)
    if not isinstance(flags, Mapping):
        return None
    named = {str(name).lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    return {name: value for name, value in named.items() if not (isinstance(value, str) and "$" in value)}


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of all sections ("language_model", "model_parallel") of a YAML file in one dictionary."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found = {**flat(value), **found}
        else:
            found[str(key).replace("-", "_")] = value
    return found


def flags_of(text: str) -> dict[str, Any]:
    """Returns the flags of a script by the names of configs. A flag without a value is True. Variables that the script
    sets to plain values are substituted; a flag with any other variable counts as not given.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    variables = {found[1]: found[2].strip("'\"") for line in lines if (found := _ASSIGNMENT.match(line))}
    words = re.findall(r"'[^']*'|[^\s\\]+", " ".join(lines).replace('"', " "))  # quoted text may contain flags
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
        text = text.rstrip(")")  # closes a shell array
    return True if text == "" else int(text) if text.isdigit() else text


def dtype_of(data: Mapping[str, Any]) -> str | None:
    """Returns the dtype in torch's words, such as "bfloat16". None: not given."""
    word = data.get("params_dtype")
    if word is not None:
        return str(word).removeprefix("torch.")
    return "bfloat16" if data.get("bf16") is True else "float16" if data.get("fp16") is True else None


def is_gated(data: Mapping[str, Any]) -> bool:
    """Returns whether experts are gated; Megatron's default is no."""
    return data.get("swiglu") is True or data.get("gated_linear_unit") is True


def token_shares(data: Mapping[str, Any]) -> int:
    """Returns the number of ranks over which a sample's tokens are split before a MoE layer."""
    tensor = _size(data, "tensor_model_parallel_size") if data.get("sequence_parallel") is True else 1
    return tensor * _size(data, "context_parallel_size")


def stages(data: Mapping[str, Any]) -> int:
    """Returns the number of stages of the pipeline."""
    return _size(data, "pipeline_model_parallel_size")


def parts_of_a_stage(data: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Returns (virtual stages of each rank, their forwards in flight on the first rank) for 1F1B or interleaved 1F1B
    (adapters/megatron/in_flight.py)."""
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
    return 1 if data.get(name) is None else files.count(name, data[name])
