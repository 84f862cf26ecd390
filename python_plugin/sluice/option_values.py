# SPDX-License-Identifier: Apache-2.0
"""Readers of option values: each checks one value of the "sluice" section and returns the internal value.

A reader is called with the key's path and the value. It raises ConfigError, whose message names both and says what to
write. sluice.config.parse handles None and the word "auto" before it calls a reader.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from sluice.errors import InvalidArgument

Reader = Callable[[str, Any], Any]

MAX_CHUNKS = 256
MOST_SECONDS = 1e9  # 31 years: larger values do not fit into nanoseconds
CALIBRATION_SECONDS = 8.0
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BINARY = [(name, UNITS[name]) for name in ("TiB", "GiB", "MiB", "KiB", "B")]


class ConfigError(InvalidArgument):
    """The section is invalid. The message names the key, the value and what to write."""


def bytes_text(value: float) -> str:
    """Formats a number of bytes: "20 GiB", "12.5 MiB"."""
    unit, factor = next(item for item in _BINARY if item == _BINARY[-1] or abs(value) >= item[1])
    return f"{value / factor:.4g} {unit}"


def the_word_auto(key: str, instead: str) -> ConfigError:
    """Returns the error for the word "auto"."""
    return ConfigError(
        f'"sluice": "{key}": the word "auto" is not used here, because some trainers rewrite it: {instead}'
    )


def parts(key: str, value: Mapping[Any, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Reads the keys of an object, each by its own reader, and leaves out null ones."""
    check_parts(key, value, readers)
    return {name: readers[name](f"{key}.{name}", item) for name, item in value.items() if item is not None}


def check_parts(key: str, value: Mapping[Any, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for unknown keys of an object."""
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ConfigError(f'"sluice": "{key}" has no key {unknown[0]!r}: known are {", ".join(known)}')


def boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f'"sluice": "{key}" must be true or false, not {value!r}')
    return value


def one_of(*allowed: str) -> Reader:
    def read(key: str, value: Any) -> str:
        if value not in allowed:
            lower = {name.lower(): name for name in allowed}
            near = difflib.get_close_matches(str(value).lower(), lower, n=1, cutoff=0.5)
            hint = f'; did you mean "{lower[near[0]]}"?' if near else ""
            raise ConfigError(f'"sluice": "{key}" must be one of {", ".join(allowed)}, not {value!r}{hint}')
        return str(value)

    return read


def deduplicate(key: str, value: Any) -> bool | str:
    if isinstance(value, bool) or value in ("adaptive", "node", "rank_or_node"):
        return value
    raise ConfigError(f'"sluice": "{key}" must be "adaptive", true, false, "node" or "rank_or_node", not {value!r}')


def chunks(key: str, value: Any) -> int | None:
    if value == "adaptive":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CHUNKS:
        raise ConfigError(f'"sluice": "{key}" must be 1 to {MAX_CHUNKS} (a whole number) or "adaptive", not {value!r}')
    return value


def count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ConfigError(f'"sluice": "{key}" must be a whole number above 0, not {value!r}')
    return value


def count_or_adaptive(key: str, value: Any) -> int | None:
    return None if value == "adaptive" else count(key, value)


def number(least: float, most: float) -> Reader:
    def read(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise ConfigError(f'"sluice": "{key}" must be a number from {least:g} to {most:g}, not {value!r}')
        return float(value)

    return read


def seconds(key: str, value: Any) -> float:
    # `not (0 < value ...)` refuses NaN as well.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        most = f"{MOST_SECONDS:.0e}"
        raise ConfigError(f'"sluice": "{key}" must be a number of seconds above 0, at most {most}, not {value!r}')
    return float(value)


def calibrate(key: str, value: Any) -> float | None:
    """Reads seconds; true means the default number of seconds, false means None."""
    if isinstance(value, bool):
        return CALIBRATION_SECONDS if value else None
    return seconds(key, value)


def number_of_bytes(key: str, value: Any) -> int:
    """Reads a number of bytes, or text with a unit: "20GiB", "1.5 GB"."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found and (found[2] or "B") in UNITS and float(found[1]) < 1 << 63:
        value = int(float(found[1]) * UNITS[found[2] or "B"])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 63:
        units = ", ".join(UNITS)
        raise ConfigError(f'"sluice": "{key}" must be bytes, or text such as "20GiB" (units: {units}), not {value!r}')
    return value


def bytes_or_false(key: str, value: Any) -> int:
    """Reads a number of bytes as number_of_bytes does; false means 0."""
    return 0 if value is False else number_of_bytes(key, value)


def _is_path(value: Any) -> bool:
    """Returns whether a file can have this name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def path(key: str, value: Any) -> str:
    if not _is_path(value):
        raise ConfigError(f'"sluice": "{key}" must be a path, not {value!r}')
    return str(value)


def path_or_adaptive(key: str, value: Any) -> str:
    if value == "auto":
        raise the_word_auto(key, 'write the path of a plan, or "adaptive"')
    return path(key, value)


def path_or_true(key: str, value: Any) -> str | bool | None:
    """Reads a path; true means a file in the cache folder, false means no file."""
    if value == "auto":
        raise the_word_auto(key, "write true for a file in the cache folder, or a path")
    if isinstance(value, bool):
        return value or None
    return path(key, value)


def by_chunk(*allowed: str) -> Reader:
    """Returns a reader of a policy for all chunks, or of a list with one policy per chunk."""
    read_one = one_of(*allowed)

    def read(key: str, value: Any) -> str | tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            return read_one(key, value)
        if not value:
            raise ConfigError(f'"sluice": "{key}" is an empty list: name a policy for each chunk, or one for all')
        return tuple(read_one(f"{key}[{index}]", item) for index, item in enumerate(value))

    return read
