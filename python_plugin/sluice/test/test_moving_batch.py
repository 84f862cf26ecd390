# SPDX-License-Identifier: Apache-2.0
"""Tests the simulated batch in which layers move between stages, against a slow search for the next op."""

import random
from collections.abc import Sequence

from sluice.planning.moving_batch import batch_of

Done = dict[tuple[str, int, int], float]


def _orders(stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """The ops of 1F1B: the last stage alternates from the start, and each earlier stage runs one more forward first."""
    orders = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        order = [("F", i) for i in range(warm_up)]
        for i in range(micro_batches):
            order += [("B", i)] + ([("F", warm_up + i)] if warm_up + i < micro_batches else [])
        orders.append(order)
    return orders


def _slow(
    seconds: Sequence[float], old: Sequence[int], new: Sequence[int], arrivals: Sequence[float], micro_batches: int
) -> tuple[float, list[int]]:
    """Searches all stages for the op that starts first, and all gradients for one that reports the arrival."""
    stages = len(old) - 1
    orders, done, free, triggers = _orders(stages, micro_batches), Done(), [0.0] * stages, [-1] * (stages + 1)
    while any(orders):
        starts = []
        for stage, order in enumerate(orders):
            if order:
                kind, i = order[0]
                last = stage == stages - 1
                needed = ("F", stage - 1, i) if kind == "F" else ("F", stage, i) if last else ("B", stage + 1, i)
                given = 0.0 if kind == "F" and stage == 0 else done.get(needed)
                starts += [] if given is None else [(max(free[stage], given), stage)]
        start, stage = min(starts)
        kind, i = orders[stage].pop(0)
        below = stage + 1
        if kind == "F" and below < stages and new[below] != old[below] and triggers[below] < 0:
            told = [end for (op, where, _), end in done.items() if (op, where) == ("B", below)]
            goes_down = new[below] < old[below]
            if any(arrivals[below] <= end <= start for end in (told if goes_down else [arrivals[below]])):
                triggers[below] = i
        first, end = ((new if 0 <= triggers[at] <= i else old)[at] for at in (stage, below))
        free[stage] = start + sum(seconds[first:end]) * (1 / 3 if kind == "F" else 2 / 3)
        done[kind, stage, i] = free[stage]
    return max(*free, *arrivals), triggers


def test_Batch_DrawnMoves_IsThatOfASlowSearch() -> None:
    draw, kinds = random.Random(4), {"down": 0, "up": 0, "late": 0}
    for _ in range(300):
        layers = draw.randint(4, 14)
        stages = draw.randint(2, min(4, layers))
        seconds = [float(draw.choice((1, 2, 3, 6))) for _ in range(layers)]
        old = (0, *sorted(draw.sample(range(1, layers), stages - 1)), layers)
        moved = [draw.randint(a + 1, b) for a, b in zip(old[:-2], old[1:-1])]
        new = (0, *(draw.choice((bound, down)) for bound, down in zip(old[1:-1], moved)), layers)
        if draw.random() < 0.5:
            old, new = new, old
        arrivals = [draw.choice((0.0, draw.uniform(0, 80))) if a != b else 0.0 for a, b in zip(old, new)]
        micro_batches = draw.randint(1, 12)
        found = batch_of(seconds, old, new, arrivals, micro_batches)
        took, triggers = _slow(seconds, old, new, arrivals, micro_batches)
        assert abs(found.seconds - took) < 1e-9 and list(found.triggers) == triggers
        for a, b, trigger in zip(old, new, triggers):
            if a != b:
                kinds["late" if trigger < 0 else "up" if b > a else "down"] += 1
    assert min(kinds.values()) >= 30, kinds
