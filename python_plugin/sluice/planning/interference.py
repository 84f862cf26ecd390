# SPDX-License-Identifier: Apache-2.0
"""Computes alpha(y, x) and alpha(y, all): the share of speed that y keeps while x, or all, run [MPMoE Fig. 3]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STREAMS = {"comm": "comm", "comp": "compute", "mem": "copy_out"}  # the papers' names, and our lanes
FEASIBLE = 0.5  # overlap pays if communication and computation each keep more than this [MPMoE II-C]


COPIES = {"copy_out": "out", "copy_in": "in"}  # the lanes of copies, and their directions


def sizes(machine: Mapping[str, Any]) -> list[float]:
    """Returns the sizes of copies in bytes with which shares were measured, ascending. Empty for older files."""
    return sorted({float(one["bytes"]) for one in machine.get("copy_share", [])})


def alphas(
    machine: Mapping[str, Any], copies: str = "copy_out", size: float | None = None
) -> dict[tuple[str, str], float]:
    """Returns the factors by (y, x) in the papers' names; x is a stream or "all". 1: x does not slow y, or not known.

    For exchanges and computation, a calibration measures contention by size instead (docs/tuning.md). copies: the lane
    of copies; size: one of sizes(), by default the largest.
    """
    measured = sizes(machine)
    size = measured[-1] if measured and size is None else size
    told = [*machine.get("share", []), *(one for one in machine.get("copy_share", []) if one["bytes"] == size)]
    table = {(one["lane"], frozenset(one["beside"])): float(one["share"]) for one in told}
    found = {}
    streams = STREAMS | {"mem": copies}
    for y, lane in streams.items():
        others = {x: name for x, name in streams.items() if x != y}
        for x, name in others.items():
            found[y, x] = table.get((lane, frozenset((name,))), 1.0)
        found[y, "all"] = table.get((lane, frozenset(others.values())), 1.0)
    return found


def is_feasible(found: Mapping[tuple[str, str], float]) -> bool:
    """Returns whether communication and computation should overlap, by the papers' rule."""
    return min(found["comm", "comp"], found["comp", "comm"]) > FEASIBLE


def lines(found: Mapping[tuple[str, str], float]) -> list[str]:
    """Returns lines for people: one for each stream, then the rule."""
    text = []
    for y in STREAMS:
        words = ", ".join(f"{value:.2f} during {x}" for (one, x), value in found.items() if one == y)
        text.append(f"{y} keeps {words}")
    verdict = "overlap pays" if is_feasible(found) else "sequential is faster"
    return [*text, f"both comm and comp above {FEASIBLE:g}: {verdict}"]


def lines_by_copy(machine: Mapping[str, Any]) -> list[str]:
    """Returns a line for each size and direction of copies."""
    text = []
    for size in sizes(machine):
        for lane, where in COPIES.items():
            found = alphas(machine, lane, size)
            kept = ", ".join(f"{y} keeps {found[y, 'mem']:.2f}" for y in ("comm", "comp"))
            text.append(f"while copies of {size:.3g} bytes go {where}: {kept}")
    return text
