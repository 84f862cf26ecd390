# SPDX-License-Identifier: Apache-2.0
"""What a step takes outside of the passes of its MoE layers: the rest of the model, the optimizer, data, and what
Python, autograd and the binding of tensors add to each call. No prediction has any of it.

A step lasts from the end of one backward to the end of the next, of the layer whose backward comes last.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .passes import Pass


def rows_of(by_rank: Mapping[int, Sequence[Pass]], steps: int) -> list[dict[str, Any]]:
    """Of each rank that has two backwards or more: medians over its newest `steps` steps, in seconds."""
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
    """(seconds of a step, of those in passes), oldest first. Steps whose first passes may have left a ring are none."""
    backwards = [one for one in passes if one.direction == "backward"]
    if not backwards:
        return []
    last = max(backwards, key=lambda one: one.end)
    ends = sorted(one.end for one in backwards if (one.ranks, one.layer) == (last.ranks, last.layer))[-steps - 1 :]
    firsts: dict[tuple[int, ...], float] = {}  # of each group, which has a ring of its own
    for one in passes:
        firsts[one.ranks] = min(firsts.get(one.ranks, one.end), one.end)
    known = max(firsts.values())
    spans = [(begin, end) for begin, end in zip(ends, ends[1:]) if begin >= known]
    return [(end - begin, covered(((one.begin, one.end) for one in passes), begin, end)) for begin, end in spans]


def covered(stretches: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """How much of [begin, end] lies in at least one of them."""
    total, free = 0.0, begin
    for first, last in sorted(stretches):
        first, last = max(first, free), min(last, end)
        if last > first:
            total += last - first
            free = last
    return total
