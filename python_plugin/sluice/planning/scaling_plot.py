# SPDX-License-Identifier: Apache-2.0
"""Plots efficiency against ranks as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from ..timeline import colours, shapes

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 360, 70, 40, 50


def svg(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """Returns the plot. curves: {name: [(ranks, efficiency)]}. The axis of ranks is logarithmic."""
    every = [ranks for points in curves.values() for ranks, _ in points]
    low, high = math.log2(min(every)), math.log2(max(every))
    span = max(high - low, 1.0)
    top = max(1.0, *(value for points in curves.values() for _, value in points))

    def x(ranks: int) -> float:
        return LEFT + (math.log2(ranks) - low) / span * (WIDTH - LEFT - 30)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    body = [shapes.text(12, 22, title, 14, weight="bold")]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = f'x1="{LEFT}" x2="{WIDTH - 30}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        body.append(f'<line {place} stroke="{colours.GRID}"/>')
        body.append(shapes.text(LEFT - 8, y(value) + 4, f"{100 * value:.0f} %", 11, "end"))
    body += [shapes.text(x(ranks), HEIGHT - BOTTOM + 18, str(ranks), 11, "middle") for ranks in sorted(set(every))]
    body.append(shapes.text(WIDTH / 2, HEIGHT - 12, "ranks", 12, "middle"))
    for number, (name, points) in enumerate(curves.items()):
        colour = colours.numbered(number)
        line = " ".join(f"{x(ranks):.1f},{y(value):.1f}" for ranks, value in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for ranks, value in points:
            tip = f"<title>{escape(name)}, {ranks} ranks: {100 * value:.1f} %</title>"
            body.append(f'<circle cx="{x(ranks):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}">{tip}</circle>')
        row = HEIGHT - BOTTOM - 12 - 16 * number
        body += [shapes.rect(LEFT + 12, row - 9, 10, 10, colour), shapes.text(LEFT + 27, row, name)]
    return shapes.document(WIDTH, HEIGHT, body)
