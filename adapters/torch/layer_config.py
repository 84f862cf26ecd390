"""What a layer is and how it runs, as the library's config says it: names to numbers, and the names themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import restore
from ..._library import load
from ...errors import InvalidArgument
from .descriptors import config_dtype

ACTIVATIONS = {"identity": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "relu2": 5, "swiglu": 6}
WGRAD_MODES = {"adaptive": -1, "deferred": 0, "per_chunk": 1}
RESTORE_INPUT = {"adaptive": restore.ADAPTIVE, **restore.INPUT}
RESTORE_PRE_ACTIVATION = {"adaptive": restore.ADAPTIVE, **restore.PRE_ACTIVATION}
CHUNKINGS = {"adaptive": 0, "tokens": 1}
DEDUPLICATIONS: dict[Any, int] = {False: 0, True: 1, "node": 2, "adaptive": 3}
GROUPINGS = {"adaptive": 0, "off": 1, "on": 2}
_MEMBERS = ("w1", "w3", "w2", "b1", "b3", "b2")
_INTERLEAVED = 2
_EXACT, _CAPACITY = 0, 1


def _number(table: dict[Any, int], name: Any, what: str) -> int:
    if name not in table:
        raise InvalidArgument(f"{what} {name!r} is unknown: use one of {', '.join(map(str, table))}")
    return table[name]


def _restore(config: Any, name: str, table: dict[str, int], value: str | Sequence[str]) -> Any:
    """Writes a policy, of all chunks or of each, into a layer's config; returns what the config points to."""
    if isinstance(value, str):
        setattr(config, name, _number(table, value, name))
        return None
    if len(value) != config.num_chunks:
        raise InvalidArgument(
            f"{name} names {len(value)} chunks, and num_chunks is {config.num_chunks}"
            f"{'' if config.num_chunks else ', chosen by Sluice'}: give one policy for each chunk"
        )
    items = load().ffi.new("int32_t[]", [_number(table, item, f"{name}[{i}]") for i, item in enumerate(value)])
    setattr(config, f"{name}_of", items)
    return items


@dataclass(frozen=True)
class Swiglu:
    """The numbers of activation "swiglu" (sluice/moe.h); a limit of infinity does not clamp."""

    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


def member_names(gated: bool, bias: bool, interleaved: bool = False) -> tuple[str, ...]:
    """The parameters that one expert has."""
    absent = set() if gated and not interleaved else {"w3", "b3"}
    if not bias:
        absent |= {"b1", "b3", "b2"}
    return tuple(name for name in _MEMBERS if name not in absent)


def say_what(
    config: Any, dtype: torch.dtype, activation: str, gated: bool, interleaved: bool, swiglu: Swiglu | None
) -> None:
    """The mathematics of the experts."""
    config.dtype = config_dtype(dtype)
    config.activation = _number(ACTIVATIONS, activation, "activation")
    config.gated = _INTERLEAVED if gated and interleaved else int(gated)
    if swiglu is not None:
        config.swiglu_alpha, config.swiglu_offset = swiglu.alpha, swiglu.offset
        config.swiglu_limit = min(swiglu.limit, torch.finfo(torch.float32).max)


def say_how(
    config: Any,
    *,
    num_chunks: int,
    wgrad_mode: str,
    restore_input: str | Sequence[str],
    restore_pre_activation: str | Sequence[str],
    chunking: str,
    grouping: str,
    deduplicate: bool | str,
    reuse: bool,
    capacity_rows: int,
) -> list[Any]:
    """How passes run. The result keeps alive what the config points to until the library has copied it."""
    config.num_chunks = num_chunks
    config.wgrad_mode = _number(WGRAD_MODES, wgrad_mode, "wgrad_mode")
    by_chunk = [
        _restore(config, "restore_input", RESTORE_INPUT, restore_input),
        _restore(config, "restore_pre_activation", RESTORE_PRE_ACTIVATION, restore_pre_activation),
    ]
    config.chunking = _number(CHUNKINGS, chunking, "chunking")
    config.grouping = _number(GROUPINGS, grouping, "grouping")
    config.deduplicate, config.reuse = _number(DEDUPLICATIONS, deduplicate, "deduplicate"), int(reuse)
    config.exchange_mode, config.capacity_rows = (_CAPACITY if capacity_rows else _EXACT), capacity_rows
    return by_chunk
