# SPDX-License-Identifier: Apache-2.0
"""Draws the best split of the ranks as SVG: its stages as `sluice plan --stages` draws them, and below them seconds
against bytes of all simulated splits."""

from __future__ import annotations

from collections.abc import Sequence

from ..timeline import colours
from ..timeline.shapes import document, text
from .planner import size
from .split import Found, Priced
from .stages import KEEP, RECOMPUTE
from .stages_picture import LEFT, RIGHT, WIDTH, drawn

HEIGHT, TOP = 220, 30


def svg(found: Found, budget: int, title: Sequence[str]) -> str:
    """Returns the picture. At least one split must fit."""
    best = found.priced[0]
    body, y = drawn(best.problem, best.plan, title)
    return document(WIDTH, y + TOP + HEIGHT + 48, [*body, *_frontier(found, budget, y + TOP)])


def _colour(each: Priced) -> str:
    return colours.POLICIES[RECOMPUTE if each.recomputed else KEEP].colour


def _frontier(found: Found, budget: int, top: float) -> list[str]:
    room, slowest = WIDTH - LEFT - RIGHT, max(each.seconds for each in found.priced)
    most = max(budget, *(each.bytes for each in found.priced))

    def place(each: Priced) -> tuple[float, float]:
        return LEFT + each.bytes / most * room, top + HEIGHT - each.seconds / slowest * (HEIGHT - 20)

    body = [text(LEFT, top - 8, "seconds of a step against bytes of the fullest rank; line: the frontier", 12)]
    body.append(f'<path d="M{LEFT} {top} V{top + HEIGHT} H{LEFT + room}" fill="none" stroke="{colours.LINE}"/>')
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, sorted(found.frontier, key=lambda each: each.bytes)))
    body.append(f'<polyline points="{points}" fill="none" stroke="{colours.LINE}"/>')
    for each in found.priced:
        x, y = place(each)
        tip = f"<title>{each.split}: {each.seconds:.4g} s, {size(each.bytes)}</title>"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(each)}">{tip}</circle>')
        body.append(text(x + 8, y - 4, f"{each.split.pipeline}x{each.split.data}", 10))
    line = LEFT + budget / most * room
    ends = f'x1="{line:.1f}" x2="{line:.1f}" y1="{top:.1f}" y2="{top + HEIGHT:.1f}"'
    body.append(f'<line {ends} stroke="{colours.LIMIT}"/>')
    body.append(text(line, top + HEIGHT + 16, f"budget {size(budget)}", 11, "end"))
    body.append(text(LEFT - 8, top + 20, f"{slowest:.4g} s", 11, "end"))
    return body
