# SPDX-License-Identifier: Apache-2.0
"""What streams keep of their speed while the others run, as MPMoE's Fig. 3 shows it: alpha(y, x) and alpha(y, all)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STREAMS = {"comm": "comm", "comp": "compute", "mem": "copy_out"}  # the papers' names, and our lanes
FEASIBLE = 0.5  # what both of communication and computation must keep, or they are faster one after the other [II-C]


def alphas(machine: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """By (y, x) in the papers' names, x another stream or "all"; 1: x takes nothing from y, or nothing is known.

    Of exchanges and computation a calibration measures contention by size in place of these (docs/tuning.md).
    """
    table = {(one["lane"], frozenset(one["beside"])): float(one["share"]) for one in machine.get("share", [])}
    found = {}
    for y, lane in STREAMS.items():
        others = {x: name for x, name in STREAMS.items() if x != y}
        for x, name in others.items():
            found[y, x] = table.get((lane, frozenset((name,))), 1.0)
        found[y, "all"] = table.get((lane, frozenset(others.values())), 1.0)
    return found


def is_feasible(found: Mapping[tuple[str, str], float]) -> bool:
    """The papers' rule for running communication during computation at all."""
    return min(found["comm", "comp"], found["comp", "comm"]) > FEASIBLE


def lines(found: Mapping[tuple[str, str], float]) -> list[str]:
    """For people: a line for each stream, then the rule."""
    text = []
    for y in STREAMS:
        words = ", ".join(f"{value:.2f} beside {x}" for (one, x), value in found.items() if one == y)
        text.append(f"{y} keeps {words}")
    verdict = "overlap pays" if is_feasible(found) else "one after the other is faster"
    return [*text, f"comm and comp beside each other above {FEASIBLE:g}: {verdict}"]
