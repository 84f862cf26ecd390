# SPDX-License-Identifier: Apache-2.0
"""Draws a batch of a pipeline as a panel: a row for each stage, an arrow for each message."""

from __future__ import annotations

from collections.abc import Sequence

from .model import Arrow, Event, Panel

COMPUTED = ("forward", "backward", "weight_grad")
# Maps a send to the op that reads the message, and to the virtual stage of that op relative to the sender's.
_READERS = {"send_activation": ("forward", 1), "send_gradient": ("backward", -1)}


def panel(title: str, events: Sequence[Event], with_messages: bool = False) -> Panel:
    """Makes the panel.

    events         as of `from_trace`, with the stage as rank, the virtual stage as layer, the micro-batch as chunk
    with_messages  messages have their own rows, too
    """
    lanes = {"compute": "computes", **({"comm": "messages"} if with_messages else {})}
    shown = [event for event in events if event.lane in lanes]
    return Panel(title, shown, lanes, arrows=arrows(events), unit="stage")


def arrows(events: Sequence[Event]) -> list[Arrow]:
    """Returns an arrow from the post of each message to the begin of the op that reads it, if both are in `events`."""
    begun = {(event.op, event.layer, event.chunk): event for event in events if event.op in COMPUTED}
    found = []
    for event in events:
        if event.op not in _READERS:
            continue
        op, step = _READERS[event.op]
        reader = begun.get((op, event.layer + step, event.chunk))
        if reader is not None:
            found.append(Arrow(event.rank, event.begin, reader.rank, reader.begin, event.lane, reader.lane))
    return found


def busy(events: Sequence[Event]) -> dict[int, float]:
    """Returns the seconds in forwards, backwards and weight gradients, by stage."""
    sums: dict[int, float] = {}
    for event in events:
        if event.op in COMPUTED:
            sums[event.rank] = sums.get(event.rank, 0.0) + event.seconds
    return sums


def seconds(events: Sequence[Event]) -> float:
    """Returns the seconds from the first compute op to the end of the last."""
    shown = [event for event in events if event.op in COMPUTED]
    return max(event.end for event in shown) - min(event.begin for event in shown) if shown else 0.0


def bubble(events: Sequence[Event]) -> float:
    """Returns the share of all stages' time that is idle."""
    total = seconds(events) * len(busy(events))
    return 1 - sum(busy(events).values()) / total if total else 0.0
