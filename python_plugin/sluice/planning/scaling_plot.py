"""Efficiency against ranks as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 360, 70, 40, 50
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1")


def svg(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """{name: [(ranks, efficiency)]}; ranks in powers of two along the bottom."""
    every = [ranks for points in curves.values() for ranks, _ in points]
    low, high = math.log2(min(every)), math.log2(max(every))
    span = max(high - low, 1.0)
    top = max(1.0, *(value for points in curves.values() for _, value in points))

    def x(ranks: int) -> float:
        return LEFT + (math.log2(ranks) - low) / span * (WIDTH - LEFT - 30)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    body = [f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>']
    for step in range(0, 5):
        value = step / 4
        body.append(f'<line x1="{LEFT}" x2="{WIDTH - 30}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        label = (
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" font-size="11" text-anchor="end">{100 * value:.0f} %</text>'
        )
        body.append(label)
    for ranks in sorted(set(every)):
        place = f'x="{x(ranks):.1f}" y="{HEIGHT - BOTTOM + 18}" font-size="11" text-anchor="middle"'
        body.append(f"<text {place}>{ranks}</text>")
    body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" font-size="12" text-anchor="middle">ranks</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(ranks):.1f},{y(value):.1f}" for ranks, value in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for ranks, value in points:
            tip = f"<title>{escape(name)}, {ranks} ranks: {100 * value:.1f} %</title>"
            body.append(f'<circle cx="{x(ranks):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}">{tip}</circle>')
        place = f'x="{LEFT + 12}" y="{HEIGHT - BOTTOM - 12 - 16 * number}" font-size="12" fill="{colour}"'
        body.append(f"<text {place}>{escape(name)}</text>")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"])
