# SPDX-License-Identifier: Apache-2.0
"""Writes SVG: text, boxes, legends and whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from . import colours

_BOX, _LETTER = 12, 6.2


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    """Returns one line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(words)}</text>"


def rect(x: float, y: float, width: float, height: float, fill: str, extra: str = "", tip: str = "") -> str:
    """Returns a box with a tooltip."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"{extra}>{inside}</rect>'


def legend(body: list[str], marks: Sequence[colours.Mark], left: float, right: float, y: float) -> float:
    """Appends boxes with their text, in as many rows as needed; returns the y of the next row."""
    if not marks:
        return y
    x = left
    for colour, words in marks:
        width = _BOX + 20 + _LETTER * len(words)
        if x > left and x + width > right:
            x, y = left, y + 18
        body.append(rect(x, y, _BOX, _BOX, colour))
        body.append(text(x + _BOX + 4, y + 10, words, 10))
        x += width
    return y + 18


def listed(body: list[str], words: Sequence[str], left: float, right: float, y: float) -> float:
    """Appends words, separated by commas, in as many rows as needed; returns the y of the next row."""
    row = ""
    for number, each in enumerate(words):
        last = number + 1 == len(words)
        row += each + ("" if last else ",  ")
        if last or left + _LETTER * (len(row) + len(words[number + 1])) > right:
            body.append(text(left, y + 10, row.rstrip(), 10))
            row, y = "", y + 14
    return y


def document(width: float, height: float, body: Sequence[str]) -> str:
    """Returns a document with a white background."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="100%" height="100%" fill="{colours.PAPER}"/>', *body, "</svg>\n"])
