# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of the planning tools. `check` refuses an output path before the work begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import BadInput


def check(option: str, path: str | None) -> None:
    """Raises BadInput if no file can be written at the path. None: no file is wanted."""
    if path is None:
        return
    if Path(path).is_dir():
        raise BadInput(f"{option} {path}: it is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {Path(path).parent}; make it, or name another")


def write(option: str, path: str, text: str) -> None:
    """Writes the text, or raises BadInput that names the option."""
    check(option, path)
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}") from error


def read(what: str, path: str | Path) -> str:
    """Returns the file's text, or raises BadInput that begins with `what`."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{what}: {getattr(error, 'strerror', None) or error}") from error


def from_json(what: str, text: str) -> Any:
    """Parses JSON, or raises BadInput that begins with `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what}not JSON: {error}") from error
