"""Timelines of everything that this process runs through Sluice: start, train, stop, open in Perfetto.

Adapters register their contexts here when they make them; nothing is recorded until `start`.
"""

from __future__ import annotations

import json
import os
import weakref
from typing import Any

# Lanes as rows of the picture, from the top; events name them as the engine does.
LANES = {"comm": "S, R communication", "compute": "C compute", "copy_out": "M copy out", "copy_in": "M copy in"}

_contexts: weakref.WeakSet[Any] = weakref.WeakSet()
_capacity = 0


def register(context: Any) -> None:
    """Called by adapters for each context: an object with `trace_start(capacity)` and `trace_take()`."""
    _contexts.add(context)
    if _capacity:
        context.trace_start(_capacity)


def start(capacity: int = 1 << 16) -> None:
    """Keeps the newest `capacity` events of each context from now on, those of later contexts too."""
    global _capacity
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    _capacity = capacity
    for context in _alive():
        context.trace_start(capacity)


def stop(path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Ends recording and returns the events, oldest first; with `path`, also writes them for Perfetto."""
    global _capacity
    _capacity = 0
    events: list[dict[str, Any]] = []
    for context in _alive():
        events.extend(dict(event) for event in context.trace_take())
        context.trace_start(0)
    events.sort(key=lambda event: event["begin_ns"])
    if path is not None:
        with open(path, "w") as file:
            json.dump(chrome(events, rank=int(os.environ.get("RANK", "0"))), file)
    return events


def _alive() -> list[Any]:
    """Without those that were closed (a model was unswapped) or belong to the parent of a fork."""
    return [context for context in list(_contexts) if getattr(context, "alive", True)]


def chrome(events: list[dict[str, Any]], rank: int = 0) -> dict[str, Any]:
    """The events in the JSON form that Perfetto and chrome://tracing open; one process per rank, one row per lane."""
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            for row, name in enumerate(LANES.values())
        ),
    ]
    for event in events:
        chunk = event.get("chunk", -1)
        rows.append(
            {
                "ph": "X",
                "name": str(event["op"]) if chunk < 0 else f"{event['op']} {chunk}",
                "cat": event["direction"],
                "pid": rank,
                "tid": list(LANES).index(event["lane"]),
                "ts": event["begin_ns"] / 1e3,
                "dur": (event["end_ns"] - event["begin_ns"]) / 1e3,
                "args": {key: event[key] for key in ("layer", "chunk", "bytes") if key in event},
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}
