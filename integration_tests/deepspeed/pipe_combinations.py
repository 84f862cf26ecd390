"""Twelve combinations of options of a pipeline engine: every two values of two axes meet in one of them.

Drawn from a committed seed: the first seed from it on that gives so few. The long runs are drawn too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "stages": (2, 4, 8),
    "replicas": (1, 2),
    "zero": (0, 1),
    "dtype": ("float32", "bfloat16"),
    "checkpointing": (None, "reentrant", "nonreentrant"),
    "dropout": (False, True),
    "tied": (False, True),
    "delays": (False, True),
    "policy": ("1f1b_hint", "backward_first", "message_driven"),
}
COUNT, LONG, SEED = 12, 3, 30


def pairs_of(row: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The pairs of values in a combination."""
    for one, other in itertools.combinations(AXES, 2):
        yield one, row[one], other, row[other]


def all_pairs() -> set[tuple[Any, ...]]:
    """The pairs that must occur."""
    return {
        (one, a, other, b) for one, other in itertools.combinations(AXES, 2) for a in AXES[one] for b in AXES[other]
    }


def _attempt(draw: random.Random) -> list[dict[str, Any]]:
    """The best of many rows, again and again, until everything has met."""
    missing, rows = all_pairs(), []
    while missing:
        candidates = [{name: draw.choice(values) for name, values in AXES.items()} for _ in range(300)]
        rows.append(max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row))))
        missing.difference_update(pairs_of(rows[-1]))
    return rows


def drawn() -> list[dict[str, Any]]:
    """Each with "steps" in addition to the values of the axes."""
    for seed in itertools.count(SEED):
        draw = random.Random(seed)
        rows = _attempt(draw)
        if len(rows) <= COUNT:
            break
    rows += [{name: draw.choice(values) for name, values in AXES.items()} for _ in range(COUNT - len(rows))]
    long = draw.sample(range(COUNT), LONG)
    return [{**row, "steps": 200 if number in long else 20} for number, row in enumerate(rows)]


def name_of(row: dict[str, Any]) -> str:
    """For a test's id."""
    words = [f"p{row['stages']}", f"dp{row['replicas']}", f"zero{row['zero']}", row["dtype"], row["policy"]]
    words += [row["checkpointing"]] if row["checkpointing"] else []
    words += [name for name in ("dropout", "tied", "delays") if row[name]]
    return "-".join(words)
