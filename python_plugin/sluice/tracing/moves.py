# SPDX-License-Identifier: Apache-2.0
"""Reports the moves during a recording: experts between ranks, layers between stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .passes import BadRecord, files_of


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the moves for report.json, by begin: the bytes that all ranks sent, and the longest time that a rank
    spent in the move and in its commit. BadRecord names the file."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for name, data in files_of(folder):
        try:
            for each in data.get("moves", []) if isinstance(data, Mapping) else ():
                _add(found, each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"{name}: moves: {type(error).__name__}: {error}") from error
    return [found[key] for key in sorted(found, key=lambda key: key[2])]


def _add(found: dict[tuple[str, str, int], dict[str, Any]], each: Mapping[str, Any]) -> None:
    key = str(each["what"]), str(each["of"]), int(each["number"])
    row = found.setdefault(
        key,
        {"what": key[0], "of": key[1], "number": key[2], "ranks": 0, "moved": int(each["moved"]), "left_bytes": 0}
        | {"hidden_bytes": 0, "seconds": 0.0, "commit_s": 0.0},
    )
    row["ranks"] += 1
    for name in ("left_bytes", "hidden_bytes"):
        row[name] += int(each[name])
    row["seconds"] = max(row["seconds"], (int(each["end_ns"]) - int(each["begin_ns"])) / 1e9)
    row["commit_s"] = max(row["commit_s"], float(each["commit_s"]))


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines for a terminal."""
    lines = ["", "moves:"] if rows else []
    for row in rows:
        hidden = 100 * row["hidden_bytes"] / row["left_bytes"] if row["left_bytes"] else 0.0
        lines.append(
            f"  {row['number']:4}: {row['moved']} {row['what']} of {row['of']}, {row['left_bytes'] / 1e6:.2f} MB in "
            f"{row['seconds'] * 1e3:.1f} ms, {hidden:.0f} % of it hidden; commit {row['commit_s'] * 1e3:.2f} ms"
        )
    return lines
