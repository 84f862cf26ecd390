"""Where the experts of a swapped layer live. DeepSpeed knows one place for each, which follows from its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sluice.adapters.deepspeed.unsupported import UnsupportedError


class Placement(NamedTuple):
    """Of each expert the rank of its group, and its slot among that rank's modules."""

    expert_rank: tuple[int, ...]
    expert_slot: tuple[int, ...]

    def experts_of(self, rank: int) -> list[int]:
        """The experts of a rank in the order of its slots."""
        mine = [(slot, e) for e, (owner, slot) in enumerate(zip(*self)) if owner == rank]
        return [e for _, e in sorted(mine)]


def contiguous(num_experts: int, world_size: int) -> Placement:
    """The host's own."""
    local = num_experts // world_size
    experts = range(num_experts)
    return Placement(tuple(e // local for e in experts), tuple(e % local for e in experts))


def checked(name: str, home: Placement, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> Placement:
    """A placement with as many experts on each rank as the host has modules there; all ranks refuse another alike."""
    given = Placement(tuple(map(int, expert_rank)), tuple(map(int, expert_slot)))
    if sorted(zip(*given)) != sorted(zip(*home)):
        raise UnsupportedError(
            f"MoE layer '{name}': DeepSpeed has a fixed number of experts on each rank: put each of the "
            f"{len(home.expert_rank)} experts into one of the places (rank, slot) {sorted(zip(*home))}"
        )
    return given
