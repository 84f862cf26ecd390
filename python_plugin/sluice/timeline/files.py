# SPDX-License-Identifier: Apache-2.0
"""Writes pictures and traces to disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .model import Event, Panel
from .svg import by_chunk, svg

PNG_ZOOM = 2
# resvg maps "sans-serif" to Arial and draws no letters if Arial is missing, so common fonts are listed by name.
_FONTS = "Arial, Helvetica, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"


def write(
    panels: Sequence[Panel],
    folder: str | os.PathLike[str],
    title: str,
    colour: Callable[[Event], str] = by_chunk,
    note: str = "",
) -> list[str]:
    """Writes timeline.svg, trace.json and, if resvg-py is installed, timeline.png; returns the names."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    picture = svg(panels, title, colour, note)
    (place / "trace.json").write_text(json.dumps(perfetto(panels)))
    (place / "timeline.svg").write_text(picture)
    written = ["timeline.svg", "trace.json"]
    with contextlib.suppress(PngUnavailable):
        write_png(picture, place / "timeline.png")
        written.append("timeline.png")
    return written


class PngUnavailable(ImportError):
    """No installed package converts SVG to PNG; the message says what to install."""


def write_png(picture: str, path: str | os.PathLike[str]) -> None:
    """Writes the picture at twice its size. Without resvg-py it raises PngUnavailable and writes no file."""
    try:
        import resvg_py  # optional: one wheel, without system libraries
    except ImportError as error:
        raise PngUnavailable(
            f"{os.fspath(path)}: PNG pictures need resvg-py: pip install 'sluice[png]', or take the SVG ({error})"
        ) from None
    named = picture.replace('font-family="sans-serif"', f'font-family="{_FONTS}"', 1)
    Path(path).write_bytes(bytes(resvg_py.svg_to_bytes(svg_string=named, zoom=PNG_ZOOM)))


def perfetto(panels: Sequence[Panel]) -> dict[str, Any]:
    """Makes a process per panel and rank, a thread per lane and slot, and a counter of bytes. Panels start at 0."""
    out: list[dict[str, Any]] = []
    for number, panel in enumerate(panels):
        if not panel.events:
            continue
        start = panel.span()[0]
        lanes = list(panel.lanes)
        ranks = sorted({event.rank for event in panel.events})
        for rank in ranks:
            process = number * 1000 + rank
            out.append(_name("process_name", process, 0, f"{panel.title} {panel.unit} {rank}"))
            out += [_name("thread_name", process, row, panel.lanes[lane]) for row, lane in enumerate(lanes)]
        for event in panel.events:
            row = {
                "ph": "X",
                "pid": number * 1000 + event.rank,
                "tid": lanes.index(event.lane),
                "name": event.title(),
                "cat": event.direction,
                "ts": (event.begin - start) * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"op": event.op, "lane": event.lane, "chunk": event.chunk, "layer": event.layer},
            }
            out.append(row)
        out += _arrows(panel, number, lanes, start)
        out += _slots(panel, number * 1000 + ranks[0], len(lanes), start)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _arrows(panel: Panel, number: int, lanes: list[str], start: float) -> list[dict[str, Any]]:
    """Makes flows between the events at both ends of each arrow."""
    out: list[dict[str, Any]] = []
    for count, arrow in enumerate(panel.arrows):
        if arrow.source_lane not in lanes or arrow.target_lane not in lanes:
            continue
        same = {"cat": "message", "name": "message", "id": number * 1_000_000 + count}
        ends = (
            ("s", arrow.source, arrow.source_lane, arrow.begin, {}),
            ("f", arrow.target, arrow.target_lane, arrow.end, {"bp": "e"}),
        )
        for phase, rank, lane, time, extra in ends:
            place = {"pid": number * 1000 + rank, "tid": lanes.index(lane), "ts": (time - start) * 1e6}
            out.append({"ph": phase, **same, **place, **extra})
    return out


def _slots(panel: Panel, process: int, first_row: int, start: float) -> list[dict[str, Any]]:
    rows = list(dict.fromkeys((hold.tensor, hold.slot) for hold in panel.holds))
    out = [
        _name("thread_name", process, first_row + place, f"slot {slot} of {tensor}")
        for place, (tensor, slot) in enumerate(rows)
    ]
    for hold in panel.holds:
        row = first_row + rows.index((hold.tensor, hold.slot))
        times = {"ts": (hold.begin - start) * 1e6, "dur": (hold.end - hold.begin) * 1e6}
        out.append({"ph": "X", "pid": process, "tid": row, "name": f"chunk {hold.chunk}", "cat": "slot", **times})
    for time, value in panel.bytes:
        ts = (time - start) * 1e6
        out.append({"ph": "C", "pid": process, "name": "bytes in slots", "ts": ts, "args": {"bytes": value}})
    return out
