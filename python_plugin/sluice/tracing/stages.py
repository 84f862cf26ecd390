# SPDX-License-Identifier: Apache-2.0
"""Reports pipelines in a recording: the last batch of each, measured and predicted. Also reports moves of experts and
layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..timeline import stages
from ..timeline.model import Event, Panel, from_trace
from .passes import BadRecord, files_of


@dataclass
class Batch:
    """Has the last training batch of one pipeline. boots: boot ids of the machines that recorded the events."""

    ranks: tuple[int, ...]
    measured: list[Event] = field(default_factory=list)
    predicted: list[Event] = field(default_factory=list)
    boots: set[str] = field(default_factory=set)


def read(folder: str | os.PathLike[str]) -> list[Batch]:
    """Reads the last batch of all pipelines that ran. BadRecord names the file."""
    found: dict[tuple[Any, ...], Batch] = {}
    for name, data in files_of(folder):
        try:
            for entry in data.get("pipelines", []) if isinstance(data, Mapping) else ():
                ranks = tuple(int(rank) for rank in entry["ranks"])
                batch = found.setdefault((ranks, int(entry["number"])), Batch(ranks))
                batch.measured += from_trace(entry["events"])
                batch.predicted += from_trace(entry["predicted"])
                batch.boots.add(str(data.get("boot", "")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"{name}: pipelines: {type(error).__name__}: {error}") from error
    return [found[key] for key in sorted(found)]


def rows_of(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Returns the rows for report.json."""
    return [
        {
            "ranks": list(batch.ranks),
            "one_clock": len(batch.boots) == 1,
            "measured_s": stages.seconds(batch.measured),
            "predicted_s": stages.seconds(batch.predicted),
            "bubble": stages.bubble(batch.measured),
            "predicted_bubble": stages.bubble(batch.predicted),
            "busy_s": stages.busy(batch.measured),
            "predicted_busy_s": stages.busy(batch.predicted),
        }
        for batch in batches
    ]


def panels(batches: Sequence[Batch], with_messages: bool = False) -> list[Panel]:
    """Returns measured and predicted panels. Ranks of several machines have no common clock and no measured panel."""
    drawn = []
    for batch in batches:
        where = f"pipeline of ranks {', '.join(map(str, batch.ranks))}"
        both = (("measured", batch.measured if len(batch.boots) == 1 else []), ("predicted", batch.predicted))
        drawn += [
            stages.panel(f"{word}: {where}: {stages.seconds(events) * 1e3:.2f} ms", events, with_messages)
            for word, events in both
            if events
        ]
    return drawn


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines for a terminal."""
    lines = []
    for row in rows:
        stages_of = sorted(row["busy_s"])
        lines += [
            "",
            f"pipeline of {len(stages_of)} stages, ranks {', '.join(map(str, row['ranks']))}: its last batch took "
            f"{row['measured_s'] * 1e3:.2f} ms, predicted {row['predicted_s'] * 1e3:.2f}; bubble "
            f"{100 * row['bubble']:.1f} %, predicted {100 * row['predicted_bubble']:.1f}"
            if row["one_clock"]
            else f"pipeline of ranks {', '.join(map(str, row['ranks']))}: on several machines, whose clocks are not "
            "compared",
        ]
        lines += [
            f"  stage {stage}: {row['busy_s'][stage] * 1e3:9.2f} ms computing, "
            f"{row['predicted_busy_s'].get(stage, 0.0) * 1e3:.2f} predicted"
            for stage in stages_of
        ]
    return lines


# ---- moves: experts between ranks, layers between stages ----


def read_moves(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the moves for report.json, by begin: the bytes that all ranks sent, and the longest time that a rank
    spent in the move and in its commit. BadRecord names the file."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for name, data in files_of(folder):
        try:
            for each in data.get("moves", []) if isinstance(data, Mapping) else ():
                _add_move(found, each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"{name}: moves: {type(error).__name__}: {error}") from error
    return [found[key] for key in sorted(found, key=lambda key: key[2])]


def _add_move(found: dict[tuple[str, str, int], dict[str, Any]], each: Mapping[str, Any]) -> None:
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


def lines_of_moves(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines for a terminal."""
    lines = ["", "moves:"] if rows else []
    for row in rows:
        hidden = 100 * row["hidden_bytes"] / row["left_bytes"] if row["left_bytes"] else 0.0
        lines.append(
            f"  {row['number']:4}: {row['moved']} {row['what']} of {row['of']}, {row['left_bytes'] / 1e6:.2f} MB in "
            f"{row['seconds'] * 1e3:.1f} ms, {hidden:.0f} % of it hidden; commit {row['commit_s'] * 1e3:.2f} ms"
        )
    return lines
