# SPDX-License-Identifier: Apache-2.0
"""Decides on which rank each expert should be, and whether a move pays, by `sluice/placement.h`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._library import load
from .errors import BadInput

VERDICTS = ("pays", "no_gain", "small", "too_soon", "costs_more")


@dataclass(frozen=True)
class PlacementPlan:
    """Has the fields of sluice_placement_result_t. Loads are of the most loaded rank."""

    expert_rank: tuple[int, ...]
    expert_slot: tuple[int, ...]
    mean_load: float
    load_before: int
    load: int
    bound_load: int
    moved_bytes: int
    num_moves: int
    is_optimal: bool


def plan_placement(
    loads: Sequence[int],
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    num_ranks: int,
    expert_bytes: Sequence[int] | None = None,
    target: float = 1.05,
) -> PlacementPlan:
    """Plans the placement of fewest moved bytes whose most loaded rank has at most `target` x bound, or the least load.

    loads: rows of each expert. expert_rank, expert_slot: in force. expert_bytes: of each expert; None: 1. Pure: equal
    arguments give equal plans on all ranks. Raises InvalidArgument that names the entry. Any thread."""
    library, count = load(), len(loads)
    for name, given in (("expert_rank", expert_rank), ("expert_slot", expert_slot), ("expert_bytes", expert_bytes)):
        if given is not None and len(given) != count:
            raise BadInput(f"{name} has {len(given)} entries instead of one for each of the {count} loads")
    ffi = library.ffi
    problem, result = library.new("placement_problem"), library.new("placement_result")
    kept = [ffi.new("uint64_t[]", list(loads)), *(ffi.new("int32_t[]", list(g)) for g in (expert_rank, expert_slot))]
    problem.loads, problem.expert_rank, problem.expert_slot = kept
    if expert_bytes is not None:
        problem.expert_bytes = sizes = ffi.new("uint64_t[]", list(expert_bytes))
        kept.append(sizes)
    problem.target, problem.num_experts, problem.num_ranks = target, count, num_ranks
    ranks, slots = ffi.new("int32_t[]", max(count, 1)), ffi.new("int32_t[]", max(count, 1))
    result.expert_rank, result.expert_slot = ranks, slots
    library.check(library.lib.sluice_planner_placement(problem, result))
    loads_of = result.mean_load, result.load_before, result.load, result.bound_load
    moves = result.moved_bytes, result.num_moves, bool(result.is_optimal)
    return PlacementPlan(tuple(ranks[0:count]), tuple(slots[0:count]), *loads_of, *moves)


def move_verdict(
    step_seconds: float,
    planned_step_seconds: float,
    move_seconds: float,
    horizon_steps: float = 100.0,
    least_gain: float = 0.05,
    steps_since_move: int = -1,
    least_steps: int = 0,
) -> str:
    """Returns the word of VERDICTS that sluice_planner_move_verdict returns. Raises InvalidArgument. Any thread."""
    library = load()
    move, verdict = library.new("planner_move"), library.ffi.new("int32_t *")
    move.step_seconds, move.planned_step_seconds = step_seconds, planned_step_seconds
    move.move_seconds, move.horizon_steps, move.least_gain = move_seconds, horizon_steps, least_gain
    move.steps_since_move, move.least_steps = steps_since_move, least_steps
    library.check(library.lib.sluice_planner_move_verdict(move, verdict))
    return VERDICTS[verdict[0]]
