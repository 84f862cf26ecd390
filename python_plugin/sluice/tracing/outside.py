# SPDX-License-Identifier: Apache-2.0
"""Computes the time of a step outside of the passes of its MoE layers: the rest of the model, the optimizer, data, and
the overhead of Python, autograd and the binding of tensors in each call. Predictions do not include this time.

A step lasts from the end of one backward to the end of the next, for the layer whose backward comes last.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .passes import Pass


def rows_of(by_rank: Mapping[int, Sequence[Pass]], steps: int) -> list[dict[str, Any]]:
    """Returns, for each rank with at least two backwards, medians over its newest `steps` steps, in seconds."""
    rows = []
    for rank in sorted(by_rank):
        found = steps_of(by_rank[rank], steps)
        if not found:
            continue
        rows.append(
            {
                "rank": rank,
                "steps": len(found),
                "step_s": statistics.median(whole for whole, _ in found),
                "passes_s": statistics.median(inside for _, inside in found),
                "outside_s": statistics.median(whole - inside for whole, inside in found),
            }
        )
    return rows


def steps_of(passes: Sequence[Pass], steps: int) -> list[tuple[float, float]]:
    """Returns (seconds of a step, its seconds in passes), oldest first, without steps that a ring may hold in part."""
    backwards = [one for one in passes if one.direction == "backward"]
    if not backwards:
        return []
    last = max(backwards, key=lambda one: one.end)
    ends = sorted(one.end for one in backwards if (one.ranks, one.layer) == (last.ranks, last.layer))[-steps - 1 :]
    firsts: dict[tuple[int, ...], float] = {}  # by group, as each group has its own ring
    for one in passes:
        firsts[one.ranks] = min(firsts.get(one.ranks, one.end), one.end)
    known = max(firsts.values())
    spans = [(begin, end) for begin, end in zip(ends, ends[1:]) if begin >= known]
    return [(end - begin, covered(((one.begin, one.end) for one in passes), begin, end)) for begin, end in spans]


def covered(stretches: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Returns how much of [begin, end] is in at least one interval."""
    total, free = 0.0, begin
    for first, last in sorted(stretches):
        first, last = max(first, free), min(last, end)
        if last > first:
            total += last - first
            free = last
    return total
