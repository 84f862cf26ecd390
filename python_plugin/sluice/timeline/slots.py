# SPDX-License-Identifier: Apache-2.0
"""Computes which slot holds which chunk at which time, and the bytes, from a schedule and the times of its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

# Tensors of the host, which are not in slots of Sluice.
_FOREIGN = ("T_OUT", "dW")


@dataclass(frozen=True)
class Hold:
    """Describes when a slot has rows of a chunk: from the op that writes them to the last op that releases it."""

    tensor: str
    slot: int
    chunk: int
    begin: float
    end: float


@dataclass
class _Use:
    chunk: int
    came: bool  # read before it is written: the rows come from an earlier pass
    begin: float
    touched: float
    released: float | None = None


def _keys_of(accesses: Sequence[Sequence[Any]], rings: Mapping[str, int]) -> set[tuple[str, int]]:
    """Returns (tensor, slot) of each access; a slot of -1 is the whole ring."""
    return {
        (tensor, each) for tensor, slot in accesses for each in ([slot] if slot >= 0 else range(rings.get(tensor, 0)))
    }


def occupancy(schedule: Mapping[str, Any], begin: Sequence[float], end: Sequence[float]) -> list[Hold]:
    """Returns the holds by slot and time. `schedule` is the parsed JSON; begin and end are by op.

    A hold ends with the last release of its slot. Without a release, rows that the pass keeps for a later pass are held
    to the end of the pass, and rows from an earlier pass are held until the last op that touches them.
    """
    _check(schedule, begin, end)
    first, last = min(begin, default=0.0), max(end, default=0.0)
    uses: dict[tuple[str, int], _Use] = {}
    done: list[Hold] = []

    def close(key: tuple[str, int]) -> None:
        use = uses.pop(key)
        until = use.released if use.released is not None else use.touched if use.came else last
        done.append(Hold(*key, use.chunk, use.begin, until))

    for index, op in enumerate(schedule["ops"]):
        reads, writes, released = (_keys_of(op[name], schedule["rings"]) for name in ("reads", "writes", "releases"))
        for key in sorted(reads | writes):
            if key[0] in _FOREIGN:
                continue
            if key not in reads and key in uses:  # overwritten without a read
                close(key)
            if key not in uses:
                came = key in reads
                chunk = op["chunk"] if op["chunk"] >= 0 else key[1]
                uses[key] = _Use(chunk, came, first if came else begin[index], end[index])
            use = uses[key]
            use.touched = max(use.touched, end[index])
            if key in released:  # several ops may release it, on lanes that do not wait for each other
                use.released = max(use.released or 0.0, end[index])
    for key in list(uses):
        close(key)
    order = {tensor: place for place, tensor in enumerate(schedule["rings"])}
    return sorted(done, key=lambda hold: (order.get(hold.tensor, 99), hold.slot, hold.begin))


def _check(schedule: Mapping[str, Any], begin: Sequence[float], end: Sequence[float]) -> None:
    for name in ("direction", "ops", "rings"):
        if name not in schedule:
            raise ValueError(f"schedule: the field {name!r} is missing; pass the JSON of sluice_schedule_json")
    if not len(schedule["ops"]) == len(begin) == len(end):
        counts = f"{len(schedule['ops'])} ops, {len(begin)} begins and {len(end)} ends"
        raise ValueError(f"schedule: {counts}; there must be one of each per op")


def tensor_bytes(
    rows: int, model_width: int, hidden_width: int, element_bytes: int, gated: bool = False
) -> dict[str, int]:
    """Returns the bytes of one slot of each tensor for chunks of `rows` rows, without alignment."""
    model, hidden = rows * model_width * element_bytes, rows * hidden_width * element_bytes
    pre_activation = 2 * hidden if gated else hidden
    return {
        **dict.fromkeys(
            ("T_SEND", "T_RECV", "T_NODE", "T_DI", "T_DO", "dT_DO", "dT_DI", "kept T_DI", "host T_DI"), model
        ),
        **dict.fromkeys(("T_M", "dT_M", "kept T_M", "host T_M"), pre_activation),
        **dict.fromkeys(("T_ACT", "dT_ACT"), hidden),
        **dict.fromkeys(("T_ROUTE", "dGATE"), 4 * rows),
    }


def bytes_over_time(holds: Sequence[Hold], slot_bytes: Mapping[str, float]) -> list[tuple[float, float]]:
    """Returns steps (start time, bytes in slots that are held). Tensors without an entry count as 0."""
    changes: dict[float, float] = {}
    for hold in holds:
        size = slot_bytes.get(hold.tensor, 0)
        changes[hold.begin] = changes.get(hold.begin, 0) + size
        changes[hold.end] = changes.get(hold.end, 0) - size
    return levels(changes)


def levels(changes: Mapping[float, float]) -> list[tuple[float, float]]:
    """Returns (time, level from then on) of a level that begins at 0. changes: by time."""
    times = sorted(changes)
    return list(zip(times, [*accumulate((changes[time] for time in times), initial=0.0)][1:]))
