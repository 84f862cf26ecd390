"""Text, boxes and whole documents of SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    """One line."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(words)}</text>"


def rect(x: float, y: float, width: float, height: float, fill: str, extra: str = "", tip: str = "") -> str:
    """A box; the tip shows where the pointer rests on it."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"{extra}>{inside}</rect>'


def document(width: float, height: float, body: Sequence[str]) -> str:
    """On white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *body, "</svg>\n"])
