# SPDX-License-Identifier: Apache-2.0
"""Defines `MoeConfig`, the shape and options of a layer, and writes it into the library's config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import restore
from ..._library import load
from ...errors import InvalidArgument
from ...options import LayerOptions, by_name
from .descriptors import config_dtype
from .options import fill, number_of

ACTIVATIONS = {"identity": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "relu2": 5, "swiglu": 6}
RESTORE = (
    ("input", "restore_input", {"adaptive": restore.ADAPTIVE, **restore.INPUT}),
    ("pre_activation", "restore_pre_activation", {"adaptive": restore.ADAPTIVE, **restore.PRE_ACTIVATION}),
)
_MEMBERS = ("w1", "w3", "w2", "b1", "b3", "b2")
WEIGHTS = {"plain": 0, "mxfp4": 1, "fp8": 2, "int8": 3, "int4": 4}
SCALES = ("s1", "s3", "s2")
_INTERLEAVED = 2
_EXACT, _CAPACITY = 0, 1


@dataclass(frozen=True)
class Swiglu:
    """Has the numbers of activation "swiglu" (sluice/moe.h); a limit of infinity does not clamp."""

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


@dataclass(frozen=True)
class LayerShape:
    """Describes the shape of a layer, and its computation.

    hidden_width  H; left out if the experts are modules
    interleaved   for gated experts: rows of w1 [2H, M] and b1 [2H] alternate gate and up, w3 and b3 are absent
    swiglu        numbers of activation "swiglu"
    layer_id      its number in the model, for messages and traces
    expert_rank, expert_slot  for each expert the rank of the group that owns it, and its index among the parameters
                  there; None: contiguous, in the order of ids
    lora_rank     largest rank of the adapters that calls may be given (lora.py); 0: none. Above 0 the weights are
                  frozen
    weight_format  "plain", or "mxfp4", "fp8", "int8", "int4": weights are frozen codes (uint8), and members s1, s3 and
                  s2 are their scales, in the shapes of sluice/weights.h
    weight_block  for int8 and int4: how many inputs share a scale; 0: 128
    capacity_rows  if not 0, each rank sends this many rows to each expert in each chunk, for any routing; unused rows
                  are zeros. On CUDA the host then reads nothing back, and calls may be captured into a graph
    """

    model_width: int
    num_experts: int
    top_k: int
    hidden_width: int = 1
    dtype: torch.dtype = torch.float32
    activation: str = "gelu"
    gated: bool = False
    bias: bool = False
    interleaved: bool = False
    swiglu: Swiglu | None = None
    layer_id: int = 0
    expert_rank: Sequence[int] | None = None
    expert_slot: Sequence[int] | None = None
    capacity_rows: int = 0
    lora_rank: int = 0
    weight_format: str = "plain"
    weight_block: int = 0


@by_name
@dataclass(frozen=True)
class MoeConfig(LayerOptions, LayerShape):
    """Describes the shape of a layer, and the options of its passes by the names of the "sluice" section
    (docs/deepspeed.md#options).

    policy is a pair (for dispatched rows, for pre-activations). Each is one word for all chunks, or a word for each of
    `chunks`. None, "adaptive" and 0 chunks: chosen by Sluice.
    """


def fill_config(config: Any, moe: MoeConfig) -> list[Any]:
    """Writes the library's config, except for the placement of experts. The caller keeps the result, to which the
    config points, until the library has copied it."""
    config.model_width, config.hidden_width = moe.model_width, moe.hidden_width
    config.num_experts, config.top_k, config.layer_id = moe.num_experts, moe.top_k, moe.layer_id
    config.dtype, config.bias = config_dtype(moe.dtype), int(moe.bias)
    config.activation = number_of(ACTIVATIONS, moe.activation, "activation")
    config.gated = _INTERLEAVED if moe.gated and moe.interleaved else int(moe.gated)
    if moe.swiglu is not None:
        config.swiglu_alpha, config.swiglu_offset = moe.swiglu.alpha, moe.swiglu.offset
        config.swiglu_limit = min(moe.swiglu.limit, torch.finfo(torch.float32).max)
    config.exchange_mode = _CAPACITY if moe.capacity_rows else _EXACT
    config.capacity_rows = moe.capacity_rows
    config.lora_rank = moe.lora_rank
    config.weight_format = number_of(WEIGHTS, moe.weight_format, "weight_format")
    config.weight_block = moe.weight_block
    kept = fill(config, moe, LayerOptions)
    for (key, field, numbers), value in zip(RESTORE, moe.policy or ("adaptive", "adaptive")):
        kept.append(_restore(config, field, numbers, f"policy.{key}", value))
    return kept


def _restore(config: Any, field: str, numbers: dict[str, int], key: str, value: str | Sequence[str]) -> Any:
    """Writes a policy, for all chunks or for each; returns the memory to which the config points."""
    if isinstance(value, str):
        setattr(config, field, number_of(numbers, value, key))
        return None
    if len(value) != config.num_chunks:
        raise InvalidArgument(
            f"{key} names {len(value)} chunks, and chunks is {config.num_chunks}"
            f"{'' if config.num_chunks else ', chosen by Sluice'}: give one policy for each chunk"
        )
    items = load().ffi.new("int32_t[]", [number_of(numbers, item, f"{key}[{i}]") for i, item in enumerate(value)])
    setattr(config, f"{field}_of", items)
    return items


def member_names(gated: bool, bias: bool, interleaved: bool = False, packed: bool = False) -> tuple[str, ...]:
    """Returns the names of one expert's parameters. packed: its weights are codes, which have scales."""
    absent = set() if gated and not interleaved else {"w3", "b3", "s3"}
    if not bias:
        absent |= {"b1", "b3", "b2"}
    return tuple(name for name in (*_MEMBERS, *(SCALES if packed else ())) if name not in absent)
