# SPDX-License-Identifier: Apache-2.0
"""Draws panels as one SVG: lanes of every rank on one time scale, then slots, then bytes over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..option_values import bytes_text
from . import colours, shapes
from .model import Arrow, Event, Panel

WIDTH, LEFT, RIGHT = 1180, 170, 20
LANE_HEIGHT, SLOT_HEIGHT, BYTES_HEIGHT = 20, 11, 44
# Labels inside the boxes.
SHORT = {
    "dispatch": "S", "unpack": "u", "gemm1": "G1", "activation": "a", "gemm2": "G2", "expert": "E", "combine": "R",
    "reduce": "y", "dispatch_grad": "S'", "unpack_grad": "u'", "gemm2_grad": "G2'", "activation_grad": "a'",
    "gemm1_grad": "G1'", "expert_grad": "E'", "combine_grad": "R'", "reduce_grad": "y'", "weight_grad": "dW",
    "copy_out": "out", "copy_in": "in", "redispatch": "S again", "recompute": "re", "node_dispatch": "Sn",
    "node_combine": "Rn", "node_dispatch_grad": "Sn'", "node_combine_grad": "Rn'", "copy_out T_DI": "DI",
    "copy_out T_M": "M", "copy_in T_DI": "DI", "copy_in T_M": "M",
}  # fmt: skip
# Labels of ops of a pipeline stage, which are not ops of a layer.
STAGE_SHORT = {"forward": "F", "backward": "B"}
IN_BOXES = SHORT | STAGE_SHORT


def by_chunk(event: Event) -> str:
    """Returns one colour per chunk, and grey for ops over all chunks."""
    return colours.ALL_CHUNKS.colour if event.chunk < 0 else colours.numbered(event.chunk)


def by_op(event: Event) -> str:
    """Returns one colour per letter of the papers."""
    return _op_mark(event).colour


def _op_mark(event: Event) -> colours.Mark:
    letter = event.op[:1].upper()
    if event.lane.startswith("copy"):
        letter = "M"
    elif event.op in SHORT:  # S or R for exchanges; all other ops of the library compute
        letter = SHORT[event.op][0] if SHORT[event.op][0] in "SR" else "C"
    return colours.OPS.get(letter, colours.OTHER_OP)


def svg(panels: Sequence[Panel], title: str, colour: Callable[[Event], str] = by_chunk, note: str = "") -> str:
    """Draws the picture. Panels without events are left out."""
    shown = [panel for panel in panels if panel.events]
    if not shown:
        raise ValueError("nothing to draw: no panel has an event")
    longest = max(end - begin for begin, end in (panel.span() for panel in shown)) or 1e-9
    scale = (WIDTH - LEFT - RIGHT) / longest
    body = [shapes.text(12, 24, title, 15, weight="bold")]
    most = max(
        (max(panel.reserved_bytes or 0.0, *(size for _, size in panel.bytes)) for panel in shown if panel.bytes),
        default=0.0,
    )
    y = 36.0
    for panel in shown:
        y = _panel(body, panel, y, scale, most, colour)
    _ruler(body, longest, scale, y)
    y += 20
    y = _legend(body, shown, y, colour)
    body.append(shapes.text(12, y + 12, note or "full colour: forward; pale: backward", 11))
    return shapes.document(WIDTH, y + 24, body)


def _panel(body: list[str], panel: Panel, y: float, scale: float, most: float, colour: Callable[[Event], str]) -> float:
    begin, _ = panel.span()
    body.append(shapes.text(12, y + 14, panel.title, 13, weight="bold"))
    y += 20
    ranks = sorted({event.rank for event in panel.events})
    used = {event.lane for event in panel.events}
    rows: dict[int, float] = {}  # y of the first lane of each rank
    for rank in ranks:
        rows[rank] = y
        for lane, label in panel.lanes.items():
            if lane not in used:
                continue
            name = f"{panel.unit} {rank}  {label}" if len(ranks) > 1 else label
            body.append(shapes.rect(LEFT, y, WIDTH - LEFT - RIGHT, LANE_HEIGHT - 3, colours.LANE))
            body.append(shapes.text(LEFT - 8, y + 13, name, 11, "end"))
            for event in panel.events:
                if event.rank == rank and event.lane == lane:
                    _event(body, event, LEFT + (event.begin - begin) * scale, y, event.seconds * scale, colour)
            y += LANE_HEIGHT
        y += 4
    for arrow in panel.arrows:
        if arrow.source != arrow.target:
            _arrow(body, arrow, rows, begin, scale)
    y = _slots(body, panel, y, begin, scale)
    y = _bytes(body, panel, y, begin, scale, most)
    return y + 10


def _arrow(body: list[str], arrow: Arrow, rows: dict[int, float], begin: float, scale: float) -> None:
    """Draws an arrow between the facing edges of two rows."""
    down = rows[arrow.target] > rows[arrow.source]
    y1 = rows[arrow.source] + (LANE_HEIGHT - 3 if down else 0)
    y2 = rows[arrow.target] + (0 if down else LANE_HEIGHT - 3)
    x1, x2 = LEFT + (arrow.begin - begin) * scale, LEFT + (arrow.end - begin) * scale
    place = f'x1="{x1:.2f}" y1="{y1:.1f}" x2="{x2:.2f}" y2="{y2:.1f}"'
    body.append(f'<line {place} stroke="{colours.LINE}" stroke-width="0.5" class="message"/>')
    body.append(f'<circle cx="{x2:.2f}" cy="{y2:.1f}" r="1.2" fill="{colours.LINE}"/>')


def _event(body: list[str], event: Event, x: float, y: float, width: float, colour: Callable[[Event], str]) -> None:
    shade = 1.0 if event.direction == "forward" else 0.62
    extra = f' fill-opacity="{shade}" stroke="{colours.PAPER}" stroke-width="0.4"'
    tip = f"{event.title()}: {_time(event.seconds)}"
    body.append(shapes.rect(x, y, max(0.6, width), LANE_HEIGHT - 3, colour(event), extra, tip))
    text = IN_BOXES.get(_name_in_box(event), "")
    if text and event.chunk >= 0:
        text += f" {event.chunk}"
    if text and width >= 6.2 * len(text) + 2:
        body.append(shapes.text(x + width / 2, y + 12.5, text, 10, "middle"))


def _slots(body: list[str], panel: Panel, y: float, begin: float, scale: float) -> float:
    """Draws one thin row per slot; the colour is the chunk in the slot."""
    rows = list(dict.fromkeys((hold.tensor, hold.slot) for hold in panel.holds))
    if not rows:
        return y
    body.append(shapes.text(12, y + 9, "slots", 10, weight="bold"))
    for tensor, slot in rows:
        body.append(shapes.text(LEFT - 8, y + 9, f"{tensor} [{slot}]", 9, "end"))
        body.append(shapes.rect(LEFT, y + 1, WIDTH - LEFT - RIGHT, SLOT_HEIGHT - 2, colours.SLOT))
        for hold in panel.holds:
            if (hold.tensor, hold.slot) != (tensor, slot):
                continue
            x, width = LEFT + (hold.begin - begin) * scale, (hold.end - hold.begin) * scale
            fill = colours.numbered(hold.chunk)
            tip = f"{tensor} [{slot}] holds chunk {hold.chunk}: {_time(hold.end - hold.begin)}"
            body.append(shapes.rect(x, y + 1, max(0.6, width), SLOT_HEIGHT - 2, fill, ' fill-opacity="0.75"', tip))
        y += SLOT_HEIGHT
    return y + 4


def _bytes(body: list[str], panel: Panel, y: float, begin: float, scale: float, most: float) -> float:
    """Draws bytes over time. `most` is the maximum of all panels, so that all have one scale."""
    if not panel.bytes:
        return y
    top = most or 1.0
    bottom = y + BYTES_HEIGHT
    points, level = [f"{LEFT:.1f},{bottom:.1f}"], 0.0
    for time, value in panel.bytes:
        x = LEFT + (time - begin) * scale
        points.append(f"{x:.1f},{bottom - level / top * (BYTES_HEIGHT - 6):.1f}")
        level = value
        points.append(f"{x:.1f},{bottom - level / top * (BYTES_HEIGHT - 6):.1f}")
    points.append(f"{x:.1f},{bottom:.1f}")
    paint = f'fill="{colours.BYTES}" stroke="{colours.BYTES_EDGE}" stroke-width="0.8"'
    body.append(f'<polygon points="{" ".join(points)}" {paint}/>')
    peak = max(value for _, value in panel.bytes)
    body.append(shapes.text(LEFT - 8, y + 16, panel.bytes_words[0], 10, "end"))
    body.append(shapes.text(LEFT - 8, y + 29, f"peak {bytes_text(peak)}", 9, "end"))
    if panel.reserved_bytes:
        line = bottom - panel.reserved_bytes / top * (BYTES_HEIGHT - 6)
        dash = f'stroke="{colours.LIMIT}" stroke-width="0.8" stroke-dasharray="4 3"'
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}" {dash}/>')
        words = f"{panel.bytes_words[1]} {bytes_text(panel.reserved_bytes)} (red)"
        body.append(shapes.text(LEFT - 8, y + 41, words, 9, "end"))
    return bottom + 6


def _ruler(body: list[str], longest: float, scale: float, y: float) -> None:
    step = next(s for e in range(-9, 9) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if longest / s <= 14)
    for k in range(int(longest / step + 1e-9) + 1):
        x = LEFT + k * step * scale
        place = f'x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{y:.0f}"'
        body.append(f'<line {place} stroke="{colours.GRID}" stroke-width="0.5"/>')
        body.append(shapes.text(x, y + 12, _time(k * step), 10, "middle"))


def _legend(body: list[str], panels: list[Panel], y: float, colour: Callable[[Event], str]) -> float:
    """Draws the meaning of the colours, then the ops of the boxes, then the tensors of the slots."""
    events = [event for panel in panels for event in panel.events]
    holds = [hold for panel in panels for hold in panel.holds]
    marks, numbers = [], {hold.chunk for hold in holds}
    if colour is by_op:
        known = [*colours.OPS.values(), colours.OTHER_OP]
        marks = sorted({_op_mark(event) for event in events}, key=known.index)
    elif colour is by_chunk:
        numbers |= {event.chunk for event in events}
    shown = sorted(number for number in numbers if number >= 0)[: len(colours.NUMBERED)]
    unit = "micro-batch" if panels[0].unit == "stage" else "chunk"
    marks += [colours.Mark(colours.numbered(number), f"{unit} {number}") for number in shown]
    if -1 in numbers:
        marks.append(colours.ALL_CHUNKS)
    if any(panel.bytes for panel in panels):
        marks.append(colours.Mark(colours.BYTES, "bytes"))
    y = shapes.legend(body, marks, LEFT, WIDTH - RIGHT, y)
    names = dict.fromkeys(map(_name_in_box, events))
    ops = [f"{IN_BOXES[name]} = {name}" for name in names if IN_BOXES.get(name, name) != name]
    y = shapes.listed(body, ops, LEFT, WIDTH - RIGHT, y)
    tensors = dict.fromkeys(hold.tensor for hold in holds)
    words = [f"{name} = {colours.TENSORS[name]}" for name in tensors if name in colours.TENSORS]
    return shapes.listed(
        body, [*(["a slot has the colour of its chunk"] if holds else []), *words], LEFT, WIDTH - RIGHT, y
    )


def _name_in_box(event: Event) -> str:
    return event.label if event.label in IN_BOXES else event.op


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
