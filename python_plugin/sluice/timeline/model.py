# SPDX-License-Identifier: Apache-2.0
"""Defines the parts of a picture: panels with events on lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .slots import Hold

# Rows of a panel from the top, with the papers' letters: S and R on the communication lane, C compute, M copies.
LANES = {"comm": "S R  communication", "compute": "C  compute", "copy_out": "M  copy out", "copy_in": "M  copy in"}


@dataclass(frozen=True)
class Event:
    """Describes one op, with times in seconds from a common start. chunk -1: all chunks."""

    op: str
    lane: str
    begin: float
    end: float
    chunk: int = -1
    direction: str = "forward"
    layer: int = 0
    rank: int = 0
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def title(self) -> str:
        """Returns the text of the tooltip, which is also the name in Perfetto."""
        chunk = "" if self.chunk < 0 else f" chunk {self.chunk}"
        return f"{self.label or self.op} {self.direction} layer {self.layer}{chunk}"


@dataclass(frozen=True)
class Arrow:
    """Describes an arrow from one rank and time to another, with the lane of the event at each end."""

    source: int
    begin: float
    target: int
    end: float
    source_lane: str
    target_lane: str


@dataclass
class Panel:
    """Describes one timeline with its title: lanes of each rank, and below them the slots and bytes if they are known.

    unit: the word before a rank's number in the label of a row.
    """

    title: str
    events: list[Event]
    lanes: Mapping[str, str] = field(default_factory=lambda: dict(LANES))
    holds: list[Hold] = field(default_factory=list)
    bytes: list[tuple[float, float]] = field(default_factory=list)  # (start time, bytes)
    reserved_bytes: float | None = None  # bytes of all slots together
    arrows: list[Arrow] = field(default_factory=list)
    unit: str = "rank"
    bytes_words: tuple[str, str] = ("bytes in slots", "all slots")  # labels of `bytes` and `reserved_bytes`

    def __post_init__(self) -> None:
        for event in self.events:
            if event.lane not in self.lanes:
                known = ", ".join(self.lanes)
                raise ValueError(
                    f"panel {self.title!r}: event {event.op!r} is on lane {event.lane!r}; known are {known}"
                )
            if event.end < event.begin:
                raise ValueError(f"panel {self.title!r}: event {event.op!r} ends before it begins")

    def span(self) -> tuple[float, float]:
        """Returns the first begin and the last end, (0, 0) when empty."""
        if not self.events:
            return 0.0, 0.0
        return min(event.begin for event in self.events), max(event.end for event in self.events)


def from_trace(events: Iterable[Mapping[str, Any]], rank: int = 0) -> list[Event]:
    """Converts the events that `sluice.trace` records, and leaves out those of whole passes."""
    return [
        Event(
            op=str(event["op"]),
            lane=str(event["lane"]),
            begin=event["begin_ns"] / 1e9,
            end=event["end_ns"] / 1e9,
            chunk=int(event.get("chunk", -1)),
            direction=str(event["direction"]),
            layer=int(event.get("layer", 0)),
            rank=int(event.get("rank", rank)),
        )
        for event in events
        if event["op"] != "pass"
    ]
