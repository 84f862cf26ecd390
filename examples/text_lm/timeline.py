"""Draws both timelines as one SVG and writes them as a trace that Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LANES = {"S": "S  dispatch", "C": "C  experts", "R": "R  combine"}
COLOURS = {"S": "#2f7ed8", "C": "#f2a13b", "R": "#3d9a50"}
OTHER = "#888888"
LEFT, RIGHT, LANE_HEIGHT, PANEL_GAP = 150, 20, 20, 46
WIDTH = 1180

Event = dict[str, Any]
Timelines = dict[str, list[Event]]


def _label(e: Event) -> str:
    chunk = "" if e["chunk"] < 0 else f" chunk {e['chunk']}"  # below 0: belongs to all chunks
    return f"{e.get('name', e['op'])} {e['direction']} layer {e['layer']}{chunk}"


def _span(events: list[Event]) -> tuple[int, int]:
    return min(e["begin_ns"] for e in events), max(e["end_ns"] for e in events)


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def svg(timelines: Timelines, title: str) -> str:
    """One panel per side on one time scale; lanes S, C, R of every rank."""
    panels = {side: events for side, events in timelines.items() if events}
    longest = max(_span(events)[1] - _span(events)[0] for events in panels.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    body: list[str] = [_text(12, 24, title, 15, weight="bold")]
    y = 40.0
    for side, events in panels.items():
        begin, end = _span(events)
        chunks = 1 + max(e["chunk"] for e in events)
        note = f"{side}: {(end - begin) / 1e6:.0f} ms from the first to the last MoE operation of a step"
        body.append(_text(12, y + 16, note + (f", {chunks} chunks" if side != "stock" else ""), 13, weight="bold"))
        y += 24
        for rank in sorted({e["rank"] for e in events}):
            for op, label in LANES.items():
                body.append(
                    f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE_HEIGHT - 3}" '
                    'fill="#f3f3f3"/>'
                )
                body.append(_text(LEFT - 8, y + 13, f"rank {rank}  {label}", 11, "end"))
                for e in events:
                    if e["rank"] == rank and e["op"][:1].upper() == op:
                        x = LEFT + (e["begin_ns"] - begin) * scale
                        wide = max(0.6, (e["end_ns"] - e["begin_ns"]) * scale)
                        shade = 1.0 if e["direction"] == "forward" else 0.62
                        tip = _label(e)
                        body.append(
                            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{LANE_HEIGHT - 3}" '
                            f'fill="{COLOURS.get(op, OTHER)}" fill-opacity="{shade}" stroke="#fff" stroke-width="0.4">'
                            f"<title>{escape(tip)}: {(e['end_ns'] - e['begin_ns']) / 1e6:.2f} ms</title></rect>"
                        )
                y += LANE_HEIGHT
            y += 5
        y += PANEL_GAP - 24
    step_ms = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if longest / 1e6 / s <= 14)
    for k in range(int(longest / 1e6 // step_ms) + 1):
        x = LEFT + k * step_ms * 1e6 * scale
        body.append(f'<line x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{y:.0f}" stroke="#bbb" stroke-width="0.5"/>')
        body.append(_text(x, y + 14, f"{k * step_ms} ms", 10, "middle"))
    body.append(_text(12, y + 34, "full colour: forward; pale: backward", 11))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 46:.0f}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"])


def perfetto(timelines: Timelines) -> str:
    """Chrome's trace format: a process per side and rank, a thread per lane."""
    out: list[dict[str, Any]] = []
    for number, (side, events) in enumerate(timelines.items()):
        if not events:
            continue
        begin = _span(events)[0]
        for rank in sorted({e["rank"] for e in events}):
            process = number * 1000 + rank
            out.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{side} rank {rank}"}})
            for thread, op in enumerate(LANES):
                out.append(
                    {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": LANES[op]}}
                )
        for e in events:
            out.append(
                {
                    "ph": "X",
                    "pid": number * 1000 + e["rank"],
                    "tid": list(LANES).index(e["op"][:1].upper()) if e["op"][:1].upper() in LANES else len(LANES),
                    "name": _label(e),
                    "ts": (e["begin_ns"] - begin) / 1e3,
                    "dur": (e["end_ns"] - e["begin_ns"]) / 1e3,
                    "args": {key: e[key] for key in ("lane", "op", "chunk", "direction", "layer")},
                }
            )
    return json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})


def write(timelines: Timelines, folder: Path, title: str) -> list[str]:
    """Write timeline.svg, trace.json and, where a library for it is at hand, timeline.png; returns the names."""
    (folder / "trace.json").write_text(perfetto(timelines))
    picture = svg(timelines, title)
    (folder / "timeline.svg").write_text(picture)
    written = ["timeline.svg", "trace.json"]
    try:
        import cairosvg  # optional: never installed for this alone

        cairosvg.svg2png(bytestring=picture.encode(), write_to=str(folder / "timeline.png"), scale=2)
        written.append("timeline.png")
    except (ImportError, OSError):
        pass
    return written
