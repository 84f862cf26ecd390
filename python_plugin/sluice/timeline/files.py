"""Pictures and traces on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .model import Event, Panel
from .perfetto import perfetto
from .svg import by_chunk, svg


def write(
    panels: Sequence[Panel],
    folder: str | os.PathLike[str],
    title: str,
    colour: Callable[[Event], str] = by_chunk,
    note: str = "",
) -> list[str]:
    """Writes timeline.svg, trace.json and, where cairosvg can be imported, timeline.png; returns the names."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    picture = svg(panels, title, colour, note)
    (place / "trace.json").write_text(json.dumps(perfetto(panels)))
    (place / "timeline.svg").write_text(picture)
    written = ["timeline.svg", "trace.json"]
    if write_png(picture, place / "timeline.png"):
        written.append("timeline.png")
    return written


def write_png(picture: str, path: str | os.PathLike[str]) -> bool:
    """False, and no file, where no cairosvg is installed."""
    try:
        import cairosvg  # optional: never installed for this alone
    except (ImportError, OSError):
        return False
    cairosvg.svg2png(bytestring=picture.encode(), write_to=str(path), scale=2)
    return True
