# SPDX-License-Identifier: Apache-2.0
"""Concludes what limits a recorded step, and what would help: the last line of `sluice trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_OUTSIDE = 0.5  # share of a step outside of passes above which passes are not the first thing to change
_LATE = 0.1  # share of the time in passes above which ranks that begin late are named first
_LIMITS = 0.85  # share of the time in passes above which a busy lane leaves nothing to overlap
_IDLE = 0.15  # share of the time in passes in which a pass was prepared or an op was late to start


def of(report: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]) -> str:
    """Returns one or two sentences. shares: text.lane_shares of the same passes. "": no pass was explained."""
    if not shares:
        return ""
    parts = [_outside(report.get("outside", [])), _in_passes(report, shares)]
    return " ".join(part for part in parts if part)


def _outside(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    row = max(rows, key=lambda each: each["step_s"])
    share = row["outside_s"] / row["step_s"] if row["step_s"] else 0.0
    if share < _MOST_OUTSIDE:
        return ""
    what = "attention, optimizer, data, Python"
    return f"{100 * share:.0f} % of a step lie outside of MoE passes ({what}): look there first."


def _in_passes(report: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]) -> str:
    total = sum(row["total"] for row in {row["rank"]: row for row in shares}.values())
    busy = {
        lane: sum(row["busy"] for row in shares if row["lane"] == lane) / total
        for lane in dict.fromkeys(row["lane"] for row in shares)
    }
    late = sum(row["seconds"] for row in report["peers"]) / total
    said = " and ".join(f"{lane} is busy {100 * share:.0f} %" for lane, share in busy.items() if lane in _NAMES)
    said = f"Of the time in passes {said}"
    if late > _LATE:
        return (
            f"{said}; ranks wait {100 * late:.0f} % for a rank that begins later: even out what ranks do before the "
            "layer, or the rows that they receive (placement)."
        )
    lane = max(busy, key=lambda each: busy[each])
    if busy[lane] >= _LIMITS:
        return f"{said}: {_WHAT[lane]}"
    compute = [row for row in shares if row["lane"] == "compute"]
    unready = sum(row["preparing"] + row["starting"] for row in compute) / total
    waiting = sum(row["waiting"] for row in compute) / total
    if unready > max(_IDLE, waiting):
        return (
            f"{said}; {100 * unready:.0f} % pass before ops begin: fewer chunks, or more tokens in a batch, would help."
        )
    return (
        f"{said}; compute waits {100 * waiting:.0f} %: other chunks, or adaptive ones, may hide more of it, and no "
        f"order of these ops takes less than {100 * max(busy.values()):.0f} % of today's time."
    )


_NAMES = ("comm", "compute")
_WHAT = {
    "compute": "computation limits, and more chunks would not help; faster GEMMs (16 bits, another library) would.",
    "comm": "communication limits, and more chunks would not help; fewer bytes (deduplicate, wire_dtype) would.",
    "copy_out": "copies to host memory limit; another restore policy would help.",
    "copy_in": "copies from host memory limit; another restore policy would help.",
}
