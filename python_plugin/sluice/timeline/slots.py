"""Which slot holds which chunk, when, and how many bytes that is: read off a schedule and the times of its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Slots that outlive the pass: kept rows and their host buffers.
_LASTING = ("kept T_DI", "kept T_M", "host T_DI", "host T_M")
# The host's own tensors: no slot of Sluice.
_FOREIGN = ("T_OUT", "dW")


@dataclass(frozen=True)
class Hold:
    """A slot holds rows of a chunk from the first op that touches them to the last."""

    tensor: str
    slot: int
    chunk: int
    begin: float
    end: float


def _slots_of(access: Sequence[Any], rings: Mapping[str, int]) -> list[tuple[str, int]]:
    tensor, slot = access
    return [(tensor, slot)] if slot >= 0 else [(tensor, index) for index in range(rings.get(tensor, 0))]


def occupancy(schedule: Mapping[str, Any], begin: Sequence[float], end: Sequence[float]) -> list[Hold]:
    """By slot and time. `schedule` is the parsed JSON; begin and end are by op."""
    _check(schedule, begin, end)
    last = max(end, default=0.0)
    first = min(begin, default=0.0)
    forward = schedule["direction"] == "forward"
    open_holds: dict[tuple[str, int], list[Any]] = {}
    done: list[Hold] = []

    def close(key: tuple[str, int]) -> None:
        chunk, since, until = open_holds.pop(key)
        done.append(Hold(key[0], key[1], chunk, since, until))

    for index, op in enumerate(schedule["ops"]):
        reads = {key for access in op["reads"] for key in _slots_of(access, schedule["rings"])}
        writes = {key for access in op["writes"] for key in _slots_of(access, schedule["rings"])}
        for key in sorted(reads | writes):
            if key[0] in _FOREIGN:
                continue
            held = open_holds.get(key)
            if held is not None and key not in reads:  # written without a look at what was there: that was dead
                close(key)
                held = None
            if held is None:
                # Read before it is written: an earlier pass left it there.
                chunk = op["chunk"] if op["chunk"] >= 0 else key[1]
                held = open_holds[key] = [chunk, first if key in reads else begin[index], end[index]]
            held[2] = max(held[2], end[index])
            if forward and key[0] in _LASTING:
                held[2] = last
    for key in list(open_holds):
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
    """Bytes of one slot of each tensor for chunks of `rows` rows (alignment left out)."""
    model, hidden = rows * model_width * element_bytes, rows * hidden_width * element_bytes
    middle = 2 * hidden if gated else hidden
    return {
        **dict.fromkeys(("T_SEND", "T_RECV", "T_DI", "T_DO", "dT_DO", "dT_DI", "kept T_DI", "host T_DI"), model),
        **dict.fromkeys(("T_M", "dT_M", "kept T_M", "host T_M"), middle),
        **dict.fromkeys(("T_ACT", "dT_ACT"), hidden),
        **dict.fromkeys(("T_ROUTE", "dGATE"), 4 * rows),
    }


def bytes_over_time(holds: Sequence[Hold], slot_bytes: Mapping[str, float]) -> list[tuple[float, float]]:
    """Steps (from this time on, bytes in slots that hold something). Tensors without an entry count nothing."""
    changes: dict[float, float] = {}
    for hold in holds:
        size = slot_bytes.get(hold.tensor, 0)
        changes[hold.begin] = changes.get(hold.begin, 0) + size
        changes[hold.end] = changes.get(hold.end, 0) - size
    steps, now = [], 0.0
    for time in sorted(changes):
        now += changes[time]
        steps.append((time, now))
    return steps
