"""Predicted beside measured step times, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

SIZE, LEFT, TOP, RIGHT, BOTTOM = 520, 64, 40, 20, 48
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1")
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
BAND = 0.12  # about the diagonal


def svg(points: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """{series: [(measured seconds, predicted seconds)]}; both axes logarithmic, with a band of 12 %."""
    values = [v for series in points.values() for both in series for v in both]
    low, high = math.log(min(values) / 1.2), math.log(max(values) * 1.2)

    def place(value: float) -> float:
        return (math.log(value) - low) / (high - low)

    def x(value: float) -> float:
        return LEFT + place(value) * (SIZE - LEFT - RIGHT)

    def y(value: float) -> float:
        return SIZE - BOTTOM - place(value) * (SIZE - TOP - BOTTOM)

    ends = (math.exp(low) / (1 - BAND), math.exp(high) / (1 + BAND))
    (x0, y0), (x1, y1) = ((f"{x(v):.1f}", f"{y(v):.1f}") for v in ends)
    corners = [(v, v * (1 + BAND)) for v in ends] + [(v, v * (1 - BAND)) for v in reversed(ends)]
    outline = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    body = [
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<polygon points="{outline}" fill="#eee"/>',
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#999"/>',
    ]
    for tick in TICKS_MS:
        if not math.exp(low) < tick / 1e3 < math.exp(high):
            continue
        at = f'font-size="11" text-anchor="middle" x="{x(tick / 1e3):.1f}" y="{SIZE - BOTTOM + 16}"'
        body.append(f"<text {at}>{tick}</text>")
        at = f'font-size="11" text-anchor="end" x="{LEFT - 6}" y="{y(tick / 1e3) + 4:.1f}"'
        body.append(f"<text {at}>{tick}</text>")
    body.append(f'<text x="{SIZE / 2}" y="{SIZE - 12}" font-size="12" text-anchor="middle">measured, ms</text>')
    turn = f'transform="rotate(-90 16 {SIZE / 2})"'
    body.append(f'<text x="16" y="{SIZE / 2}" font-size="12" text-anchor="middle" {turn}>predicted, ms</text>')
    for number, (name, series) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        dots = " ".join(f"M{x(measured):.0f} {y(predicted):.0f}h0" for measured, predicted in series)
        body.append(f'<path d="{dots}" stroke="{colour}" stroke-width="6" stroke-linecap="round" opacity="0.7"/>')
        at = f'x="{LEFT + 10}" y="{TOP + 12 + 16 * number}" font-size="12" fill="{colour}"'
        body.append(f"<text {at}>{escape(name)}</text>")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"])
