# SPDX-License-Identifier: Apache-2.0
"""Draws both timelines as one SVG and writes them as a trace that Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.timeline import Event, Panel, by_op
from sluice.timeline import write as write_panels

# Rows are named by the papers' letters, because stock DeepSpeed has no lanes.
LANES = {"S": "S  dispatch", "C": "C  experts", "R": "R  combine", "M": "M  other"}

Timelines = dict[str, list[dict[str, Any]]]


def panel(side: str, recorded: list[dict[str, Any]]) -> Panel:
    """One side of the comparison."""
    events = [
        Event(
            op=e["op"],
            lane=e["op"][:1].upper() if e["op"][:1].upper() in LANES else "M",
            begin=e["begin_ns"] / 1e9,
            end=e["end_ns"] / 1e9,
            chunk=e["chunk"],
            direction=e["direction"],
            layer=e["layer"],
            rank=e["rank"],
            label=e.get("name", ""),
        )
        for e in recorded
    ]
    begin, end = Panel(side, events, LANES).span()
    title = f"{side}: {(end - begin) * 1e3:.0f} ms from the first to the last MoE operation of a step"
    if side != "stock":
        title += f", {1 + max(e['chunk'] for e in recorded)} chunks"
    return Panel(title, events, LANES)


def write(timelines: Timelines, folder: Path, title: str) -> list[str]:
    """Writes timeline.svg, trace.json and, where a library for it is at hand, timeline.png; returns the names."""
    panels = [panel(side, recorded) for side, recorded in timelines.items() if recorded]
    return write_panels(panels, folder, title, by_op)
