# SPDX-License-Identifier: Apache-2.0
"""Explains why a lane was idle: what its next op waited for, by the dependencies of the schedule.

Within a pass every lane is busy or idle, and every idle second has one of these reasons:

  preparing       no op of the pass had begun: header, counts, binding
  OP CHUNK        this op ran, and the next op of the lane had to wait for it, directly or through other ops
  starting        the next op was ready but had not begun: thread wake-up, launch, a busy processor
  nothing left    from the lane's last op until the pass ended
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .clocks import EXCHANGES, exchange_key
from .passes import Pass

LANES = ("compute", "comm", "copy_out", "copy_in")


@dataclass(frozen=True)
class Idle:
    """Describes an interval in which a lane was idle. `before`: the next op, or ""."""

    rank: int
    layer: int
    direction: str
    lane: str
    reason: str
    before: str
    seconds: float


def name(op: str, chunk: int) -> str:
    return op if chunk < 0 else f"{op} {chunk}"


def idle_of(one: Pass) -> list[Idle]:
    """Returns the idle intervals of every lane of the pass; a lane's busy and idle seconds add up to the pass."""
    if one.schedule is None:
        return []
    found: list[Idle] = []
    ops = one.schedule.data["ops"]
    started = min(event.begin for event in one.events)

    def add(lane: str, reason: str, before: str, seconds: float) -> None:
        if seconds > 0:
            found.append(Idle(one.rank, one.layer, one.direction, lane, reason, before, seconds))

    previous = _previous_on_lane(ops)
    for lane in LANES:
        mine = [index for index, op in enumerate(ops) if op["lane"] == lane]
        if not mine:
            continue
        free = one.begin
        for index in mine:
            begin, before = one.events[index].begin, name(ops[index]["kind"], ops[index]["chunk"])
            if begin > free:
                add(lane, "preparing", before, min(started, begin) - free)
                free = max(free, min(started, begin))
                for reason, seconds in _chain(one, previous, index, free):
                    add(lane, reason, before, seconds)
            free = max(free, one.events[index].end)
        add(lane, "nothing left", "", one.end - free)
    return found


def _previous_on_lane(ops: Sequence[Mapping[str, Any]]) -> list[int | None]:
    newest: dict[str, int] = {}
    found = []
    for index, op in enumerate(ops):
        found.append(newest.get(op["lane"]))
        newest[op["lane"]] = index
    return found


def _chain(one: Pass, previous: Sequence[int | None], index: int, free: float) -> Iterator[tuple[str, float]]:
    """Yields what ran from `free` until op `index` began: walks back to the dependency that ended last of each op."""
    ops = one.schedule.data["ops"]
    until = one.events[index].begin
    while until > free:
        waits = [*ops[index]["waits_for"], *([] if previous[index] is None else [previous[index]])]
        last = max(waits, key=lambda other: one.events[other].end, default=None)
        ended = free if last is None else max(free, min(one.events[last].end, until))
        if until > ended:
            yield "starting", until - ended
        if last is None or ended <= free:
            return
        event = one.events[last]
        yield name(event.op, event.chunk), ended - max(free, event.begin)
        index, until = last, max(free, event.begin)


def late_peers(passes: Sequence[Pass]) -> list[Idle]:
    """Returns the waits in exchanges for the rank that began last. The clocks must be aligned."""
    groups: dict[tuple[object, ...], list[tuple[Pass, int]]] = {}
    for one in passes:
        for index, event in enumerate(one.events):
            if event.op in EXCHANGES and len(one.ranks) > 1:
                groups.setdefault(exchange_key(one, event.op, event.chunk), []).append((one, index))
    found = []
    for members in groups.values():
        last, place = max(members, key=lambda member: member[0].events[member[1]].begin)
        late = last.events[place].begin
        for one, index in members:
            event = one.events[index]
            waited = min(late, event.end) - event.begin
            if one.rank != last.rank and waited > 0:
                op = name(event.op, event.chunk)
                found.append(Idle(one.rank, one.layer, one.direction, "comm", f"rank {last.rank}", op, waited))
    return found
