# SPDX-License-Identifier: Apache-2.0
"""Puts the times of all ranks on one clock.

Ranks of one machine share CLOCK_MONOTONIC (equal boot ids). Across machines, recorded exchanges bound the offset: an
exchange cannot end on rank a before rank b has begun it. So with d = the offset to add to b's clock,

    begin_a - end_b <= d <= end_a - begin_b        for every exchange that both took part in,

and the middle of the tightest interval is off by at most half its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .passes import BACKWARD_EXCHANGES, FORWARD_EXCHANGES, Pass

EXCHANGES = frozenset(FORWARD_EXCHANGES + BACKWARD_EXCHANGES)


@dataclass(frozen=True)
class Alignment:
    """`shift` seconds to add to the rank's times, exact to `error`. how: "one machine", "exchanges", "unknown"."""

    rank: int
    shift: float
    error: float
    how: str


def exchange_key(one: Pass, op: str, chunk: int) -> tuple[object, ...]:
    """Returns a key that all ranks of an exchange share."""
    return one.ranks, one.layer, one.direction, one.number, op, chunk


def _exchanges(passes: Sequence[Pass]) -> dict[tuple[object, ...], tuple[float, float]]:
    found = {}
    for one in passes:
        for event in one.events:
            if event.op in EXCHANGES and len(one.ranks) > 1:
                found[exchange_key(one, event.op, event.chunk)] = event.begin, event.end
    return found


def align(passes_by_rank: dict[int, list[Pass]], boots: dict[int, str]) -> list[Alignment]:
    """Aligns all ranks with the first rank's clock, through other ranks if a rank has no exchange with the first."""
    ranks = sorted(passes_by_rank)
    exchanges = {rank: _exchanges(passes_by_rank[rank]) for rank in ranks}
    done = {ranks[0]: Alignment(ranks[0], 0.0, 0.0, "one machine")}
    changed = True
    while changed:
        changed = False
        for rank in ranks:
            if rank in done:
                continue
            found = _through(rank, done, exchanges, boots)
            if found is not None:
                done[rank] = found
                changed = True
    return [done.get(rank, Alignment(rank, 0.0, float("inf"), "unknown")) for rank in ranks]


def _through(
    rank: int,
    done: dict[int, Alignment],
    exchanges: dict[int, dict[tuple[object, ...], tuple[float, float]]],
    boots: dict[int, str],
) -> Alignment | None:
    for other, known in done.items():
        if boots[rank] and boots[rank] == boots[other]:
            return Alignment(rank, known.shift, known.error, known.how)
    best = None
    for other, known in done.items():
        both = exchanges[rank].keys() & exchanges[other].keys()
        if not both:
            continue
        low = max(exchanges[other][key][0] - exchanges[rank][key][1] for key in both)
        high = min(exchanges[other][key][1] - exchanges[rank][key][0] for key in both)
        error = abs(high - low) / 2 + known.error
        if best is None or error < best.error:
            best = Alignment(rank, known.shift + (low + high) / 2, error, "exchanges")
    return best


def shift(passes: Sequence[Pass], seconds: float) -> None:
    """Shifts the times of passes in place."""
    if seconds == 0:
        return
    for one in passes:
        one.begin, one.end = one.begin + seconds, one.end + seconds
        one.events = [replace(event, begin=event.begin + seconds, end=event.end + seconds) for event in one.events]
