# SPDX-License-Identifier: Apache-2.0
"""A batch of a pipeline as a panel: a row for each stage, an arrow for each message."""

from __future__ import annotations

from collections.abc import Sequence

from .model import Arrow, Event, Panel

COMPUTED = ("forward", "backward", "weight_grad")
# What a message is sent by: what reads it at its other end, and in which virtual stage beside the sender's.
_READERS = {"send_activation": ("forward", 1), "send_gradient": ("backward", -1)}


def panel(title: str, events: Sequence[Event], with_messages: bool = False) -> Panel:
    """events: as `from_trace` has them, the stage as rank, the virtual stage as layer, the micro-batch as chunk.

    with_messages: messages have rows of their own, too.
    """
    lanes = {"compute": "computes", **({"comm": "messages"} if with_messages else {})}
    shown = [event for event in events if event.lane in lanes]
    return Panel(title, shown, lanes, arrows=arrows(events), unit="stage")


def arrows(events: Sequence[Event]) -> list[Arrow]:
    """From when a message was posted to when what reads it began; of those whose both ends are there."""
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
    """Seconds in forwards, backwards and weight gradients, by stage."""
    sums: dict[int, float] = {}
    for event in events:
        if event.op in COMPUTED:
            sums[event.rank] = sums.get(event.rank, 0.0) + event.seconds
    return sums


def seconds(events: Sequence[Event]) -> float:
    """From the first computed op to the end of the last."""
    shown = [event for event in events if event.op in COMPUTED]
    return max(event.end for event in shown) - min(event.begin for event in shown) if shown else 0.0


def bubble(events: Sequence[Event]) -> float:
    """Share of all stages' time that is not busy."""
    total = seconds(events) * len(busy(events))
    return 1 - sum(busy(events).values()) / total if total else 0.0
