# SPDX-License-Identifier: Apache-2.0
"""Finds which layers of a model have experts, from configs of transformers and Megatron."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from . import files
from .errors import BadInput

MOST = 100_000  # layers of a model, and of a pattern
_WITH_EXPERTS = ("sparse", "moe", "hash_moe")  # kinds of MoE layers in lists of kinds


def count(data: Mapping[str, Any], layers: int | None) -> int | None:
    """Counts the layers with experts among `layers` ones. None: unknown. Raises BadInput if a field is unreadable."""
    for name in ("mlp_layer_types", "layers_block_type"):
        kinds = data.get(name)
        if isinstance(kinds, list) and (name == "mlp_layer_types" or "moe" in kinds):
            return sum(kind in _WITH_EXPERTS for kind in kinds)
    if data.get("is_moe") is False:
        return 0
    if isinstance(data.get("moe_layers"), list):
        return len(data["moe_layers"])
    stacks = _stacks(data)
    if stacks is not None:
        return stacks
    if layers is None:
        return None
    return sum(holds_experts(data, index, layers) for index in range(layers))


def by_stage(data: Mapping[str, Any], layers: int, stages: int) -> list[int]:
    """Returns the number of MoE layers of each stage of a pipeline whose stages have equal numbers of layers."""
    holds = [holds_experts(data, index, layers) for index in range(layers)]
    own = -(-layers // stages)
    return [sum(holds[first : first + own]) for first in range(0, layers, own)]


def _whole(data: Mapping[str, Any], name: str, default: int) -> int:
    value = data.get(name)
    if value is not None and type(value) is not int:
        raise files.refused(name, "a whole number", value)
    return default if value is None else value


def _every(data: Mapping[str, Any], name: str) -> int:
    found = _whole(data, name, 1)
    return found if found > 0 else 1


def _stacks(data: Mapping[str, Any]) -> int | None:
    """Returns the count for encoders and decoders with a step each (Switch, NLLB). None: another family."""
    if data.get("encoder_sparse_step") is None:
        return None
    total = 0
    is_switch = data.get("model_type") == "switch_transformers"
    names = ("num_layers", "num_decoder_layers") if is_switch else ("encoder_layers", "decoder_layers")
    for name, step_name in zip(names, ("encoder_sparse_step", "decoder_sparse_step")):
        step = _whole(data, step_name, 0)
        for index in range(_whole(data, name, 0)):
            total += step > 0 and (step == 1 or (index % step == 1 if is_switch else (index + 1) % step == 0))
    return total


def holds_experts(data: Mapping[str, Any], index: int, layers: int) -> bool:
    """Returns whether the layer with this index has experts. layers: of the model."""
    if index < max(_whole(data, "first_k_dense_replace", 0), _whole(data, "num_dense_layers", 0)):
        return False
    if index in (data.get("mlp_only_layers") or ()):
        return False
    if (index + 1) % _every(data, "decoder_sparse_step") or (index + 1) % _every(data, "interleave_moe_layer_step"):
        return False
    if data.get("expert_layer_period") is not None:
        return index % _every(data, "expert_layer_period") == _whole(data, "expert_layer_offset", 0)
    if data.get("moe_layer_start_index") is not None:
        last = _whole(data, "moe_layer_end_index", -1)
        inside = _whole(data, "moe_layer_start_index", 0) <= index <= (layers - 1 if last == -1 else last)
        return inside and (index + 1) % _every(data, "moe_layer_interval") == 0
    return _by_frequency(data.get("moe_layer_freq"), index, layers)


def _by_frequency(value: Any, index: int, layers: int) -> bool:
    """Reads moe_layer_freq: n for every n-th layer from the first, a list with 1 for MoE layers, or that as text."""
    if isinstance(value, str):
        value = int(value) if value.strip().isdigit() else pattern(value)
    if value is None:
        return True
    if isinstance(value, list):
        if len(value) != layers or not all(item in (0, 1) for item in value):
            raise BadInput(f"moe_layer_freq has {len(value)} items for {layers} layers; each must be 0 or 1")
        return bool(value[index])
    return index % _every({"moe_layer_freq": value}, "moe_layer_freq") == 0


def pattern(text: str) -> list[int]:
    """Parses a list as in Megatron's scripts, "([0]*3+[1]*5)*2", without evaluating it as code."""
    try:
        return _listed(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise BadInput(f"moe_layer_freq is {text!r}; it must be a number, or lists such as ([0]*3+[1]*5)") from None


def _listed(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List) and node.elts:
        return [_number(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left) + _listed(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        found, factor = _listed(node.left), _number(node.right)
        if len(found) * factor <= MOST:
            return found * factor
    raise ValueError(node)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MOST:
        return node.value
    raise ValueError(node)
