"""Files that the planning tools write: refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from .errors import BadInput


def check(option: str, path: str | None) -> None:
    """Raise BadInput where no file could be written there; None: none is wanted."""
    if path is None:
        return
    if Path(path).is_dir():
        raise BadInput(f"{option} {path}: it is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {Path(path).parent}; make it, or name another")


def write(option: str, path: str, text: str) -> None:
    """Write it, or raise BadInput naming the option."""
    check(option, path)
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}") from error
