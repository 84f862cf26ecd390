# SPDX-License-Identifier: Apache-2.0
"""Defines the ranks and slots of a layer's experts. A host assumes a place for each, which follows from its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sluice.errors import Unsupported


class Placement(NamedTuple):
    """Has for each expert the rank of its group, and its slot among the host's slots there."""

    expert_rank: tuple[int, ...]
    expert_slot: tuple[int, ...]

    def experts_of(self, rank: int) -> list[int]:
        """Returns the experts of a rank in the order of its slots."""
        mine = [(slot, e) for e, (owner, slot) in enumerate(zip(*self)) if owner == rank]
        return [e for _, e in sorted(mine)]

    def place(self, expert: int) -> tuple[int, int]:
        """Returns the (rank, slot) of an expert."""
        return self.expert_rank[expert], self.expert_slot[expert]


def contiguous(num_experts: int, world_size: int) -> Placement:
    """Returns the placement that the host assumes."""
    local = num_experts // world_size
    experts = range(num_experts)
    return Placement(tuple(e // local for e in experts), tuple(e % local for e in experts))


class Replaceable(Protocol):
    """Describes an engine layer."""

    def replace_experts(self, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> None:
        """Sets the placement. Collective. After an error nothing has changed."""
        ...


def replace_in_all(layers: Sequence[Replaceable], old: Placement, new: Placement) -> Placement:
    """Sets the placement of all engine layers of one layer of the host, or of none. Collective over its group."""
    done: list[Replaceable] = []
    try:
        for layer in layers:
            layer.replace_experts(*new)
            done.append(layer)
    except Exception:
        for layer in done:  # all ranks have failed at the same layer
            layer.replace_experts(*old)
        raise
    return new


def checked(name: str, home: Placement, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> Placement:
    """Returns the placement. If it does not fill the host's slots on each rank, all ranks raise Unsupported."""
    given = Placement(tuple(map(int, expert_rank)), tuple(map(int, expert_slot)))
    if sorted(zip(*given)) != sorted(zip(*home)):
        raise Unsupported(
            f"{name}: the host has a fixed number of experts on each rank: put each of the "
            f"{len(home.expert_rank)} experts into one of the places (rank, slot) {sorted(zip(*home))}"
        )
    return given


def rounds(old: Placement, new: Placement) -> list[Placement]:
    """Returns a sequence of placements from `old` to `new`. In each a rank sends at most one expert and receives at
    most one: experts change places in cycles of ranks. A cycle that comes back to a rank is cut there, and the expert
    that is left over waits for the next round in the free place."""
    wanted = {place: e for e, place in enumerate(zip(*new))}
    now, found = list(zip(*old)), []
    while now != list(zip(*new)):
        there = {place: e for e, place in enumerate(now)}
        busy: set[int] = set()
        for place in sorted(wanted):
            circle = _circle(place, wanted, now, busy)
            leaving = [there[each] for each in circle]
            for e, to in zip(leaving, [*circle[-1:], *circle[:-1]]):
                now[e] = to
            busy.update(rank for rank, _ in circle)
        found.append(Placement(*(tuple(numbers) for numbers in zip(*now))))
    return found


def _circle(
    first: tuple[int, int], wanted: dict[tuple[int, int], int], now: Sequence[tuple[int, int]], busy: set[int]
) -> list[tuple[int, int]]:
    """Returns a cycle of places on ranks that are not busy, with no rank twice: each gets the expert of the next one.
    Or two places of one rank. Empty: there is no cycle."""
    circle, ranks, place = [first], {first[0]}, now[wanted[first]]
    if place[0] == first[0] and place != first:
        return [] if first[0] in busy else [first, place]
    while place != first and place[0] not in ranks:
        circle.append(place)
        ranks.add(place[0])
        place = now[wanted[place]]
    return circle if len(circle) > 1 and not ranks & busy else []
