# SPDX-License-Identifier: Apache-2.0
"""Writes pictures and traces to disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .model import Event, Panel
from .perfetto import perfetto
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
