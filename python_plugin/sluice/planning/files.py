# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of the planning tools, and reads the fields of JSON.

`check` refuses an output path before the work begins. A reader of a field takes its path and its value; its error names
the path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..option_values import ConfigError, number_of_bytes
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


# ---- fields ----

Read = Callable[[str, Any], Any]


def refused(where: str, wanted: str, value: Any) -> BadInput:
    """Returns the error for a wrong value. wanted: a phrase for the values that are allowed."""
    return BadInput(f"{where} is {value!r}; it must be {wanted}")


def is_whole(value: Any, least: int = 0) -> bool:
    """Returns whether the value is a whole number of at least `least`. True and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def count(where: str, value: Any) -> int:
    """Reads a whole number of at least 1."""
    if not is_whole(value, 1):
        raise refused(where, "a whole number above 0", value)
    return value


def whole(least: int) -> Read:
    """Returns a reader of whole numbers of at least `least` that fit 32 bits."""

    def read(where: str, value: Any) -> int:
        if not is_whole(value, least) or value >= 1 << 31:
            raise refused(where, f"a whole number from {least} on", value)
        return value

    return read


def seconds(where: str, value: Any) -> float:
    """Reads a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise refused(where, "a number from 0 on", value)
    return float(value)


def size(where: str, value: Any) -> int:
    """Reads bytes as in the "sluice" section, or 0."""
    if value == 0 and not isinstance(value, bool):
        return 0
    try:
        return number_of_bytes(where, value)
    except ConfigError:
        raise refused(where, 'bytes, or text such as "20GiB"', value) from None


def flag(where: str, value: Any) -> bool:
    """Reads true or false."""
    if not isinstance(value, bool):
        raise refused(where, "true or false", value)
    return value


def text(where: str, value: Any) -> str:
    """Reads any text."""
    if not isinstance(value, str):
        raise refused(where, "text", value)
    return value


def one_of(known: tuple[str, ...]) -> Read:
    """Returns a reader of one of these words."""

    def read(where: str, value: Any) -> str:
        if value not in known:
            raise refused(where, f"one of {', '.join(known)}", value)
        return value

    return read


def list_of(read: Read) -> Read:
    """Returns a reader of a list; returns a tuple of what `read` returns."""

    def read_all(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise refused(where, "a list", value)
        return tuple(read(f"{where}[{i}]", one) for i, one in enumerate(value))

    return read_all


def each_or_list(read: Read) -> Read:
    """Returns a reader of a list, or of one value for all entries."""

    def read_any(where: str, value: Any) -> Any:
        return list_of(read)(where, value) if isinstance(value, list) else read(where, value)

    return read_any


def members(where: str, value: Any, known: Mapping[str, Read], needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads the fields of an object. The error for an unknown field lists the known ones."""
    place = where or "the file"
    if not isinstance(value, dict):
        raise refused(place, "an object", value)
    for key in value:
        if key not in known:
            raise BadInput(f"{place}: unknown field {key!r}; known are {', '.join(known)}")
    for key in needed:
        if key not in value:
            raise BadInput(f"{place}: the field {key!r} is missing")
    return {key: known[key](f"{where}.{key}" if where else key, one) for key, one in value.items()}
