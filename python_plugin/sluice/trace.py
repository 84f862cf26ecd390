# SPDX-License-Identifier: Apache-2.0
"""Records timelines of all passes that this process runs through Sluice: start, train, stop, open in Perfetto.

Adapters register their contexts here. Recording begins with `start`. If the process runs under `sluice trace`, which
sets SLUICE_TRACE_DIR, every context is recorded from the beginning, and written to that folder when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import weakref
from typing import Any

# Rows of the picture from the top, by the engine's names of lanes.
LANES = {"comm": "S, R communication", "compute": "C compute", "copy_out": "M copy out", "copy_in": "M copy in"}
FOLDER = "SLUICE_TRACE_DIR"
CAPACITY = "SLUICE_TRACE_EVENTS"
FORM = 2
_MOST_MOVES = 10_000

_contexts: weakref.WeakSet[Any] = weakref.WeakSet()
_capacity = 0
_closed: list[dict[str, Any]] = []  # events of closed contexts, for the record
_batches: dict[int, dict[str, Any]] = {}  # the last batch of each pipeline, for the record
_moves: list[dict[str, Any]] = []  # moves of experts and layers, for the record
_kept: list[Any] = []  # under `sluice trace`: keeps contexts alive until they are written, after their model is freed
_process = os.getpid()


def register(context: Any) -> None:
    """Registers a context, which has `trace_start(capacity)` and `trace_take()`. Adapters call it for each context."""
    global _capacity, _process
    _contexts.add(context)
    if os.environ.get(FOLDER):
        _capacity = _capacity or int(os.environ.get(CAPACITY, 1 << 16))
        _process = os.getpid()
        _kept.append(context)
        # The handler that is registered last runs first, before the adapters' handlers close the contexts.
        atexit.unregister(_write_record)
        atexit.register(_write_record)
    if _capacity:
        context.trace_start(_capacity)


def closing(context: Any) -> None:
    """Keeps a context's events for the record. Adapters call it before a context is closed."""
    if os.environ.get(FOLDER) and _capacity and context in _contexts and os.getpid() == _process:
        with contextlib.suppress(Exception):
            _closed.append(_taken(context))


def keeps_batches() -> bool:
    """Returns whether pipelines should call `keep_batch`: only under `sluice trace`."""
    return bool(os.environ.get(FOLDER))


def keep_batch(pipeline: int, ranks: list[int], events: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> None:
    """Keeps a pipeline's training batch, after the batch, for the record, which has the last one. events: this rank's
    ops; predicted: the predicted ops of all ranks, on one of them. pipeline: its number, the same on all ranks."""
    global _process
    _process = os.getpid()
    _batches[pipeline] = {"number": pipeline, "ranks": ranks, "events": events, "predicted": predicted}
    atexit.unregister(_write_record)
    atexit.register(_write_record)


def keep_move(what: str, of: str, begin_ns: int, moved: int, left: int, hidden: int, commit_s: float) -> None:
    """Keeps a move for the record, only under `sluice trace`. Adapters call it after each move, on all ranks that took
    part. what: "experts" or "layers"; of: their owner; begin_ns: by time.monotonic_ns; moved: their number; left,
    hidden: bytes that this rank sent, and the part of them that it sent while training ran."""
    if os.environ.get(FOLDER) and len(_moves) < _MOST_MOVES:
        times = {"begin_ns": begin_ns, "end_ns": time.monotonic_ns(), "commit_s": commit_s}
        sizes = {"moved": moved, "left_bytes": left, "hidden_bytes": hidden}
        _moves.append({"what": what, "of": of, "number": len(_moves), **times, **sizes})


def recording() -> bool:
    """Returns whether events are kept."""
    return _capacity > 0


def start(capacity: int = 1 << 16) -> None:
    """Starts recording: the newest `capacity` events of each context are kept, also of contexts made later."""
    global _capacity
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    _capacity = capacity
    for context in _alive():
        context.trace_start(capacity)


def stop(path: str | os.PathLike[str] | None = None, of: Any = None) -> list[dict[str, Any]]:
    """Ends recording and returns the events, oldest first; with `path`, also writes them for Perfetto.

    of: a layer, a model, an engine or a list of these, as `sluice.stats` takes. Other events are discarded. None: all
    events. If nothing of it runs on Sluice, an error is raised and recording continues.
    """
    global _capacity
    wanted = None if of is None else _sources(of)
    _capacity = 0
    events: list[dict[str, Any]] = []
    for context in _alive():
        taken = [dict(event) for event in context.trace_take()]
        events.extend(event for event in taken if wanted is None or (id(context), event["layer"]) in wanted)
        context.trace_start(0)
    events.sort(key=lambda event: event["begin_ns"])
    if path is not None:
        with open(path, "w") as file:
            json.dump(chrome(events, rank=int(os.environ.get("RANK", "0"))), file)
    return events


def _sources(of: Any) -> set[tuple[int, int]]:
    """Returns (context, number) of each layer. Other models may use the same numbers, or share the context."""
    from sluice import layer_lookup  # not loaded with every `import torch`

    return {(id(context), layer.layer_id) for layer in layer_lookup.layers(of) for context in layer.contexts()}


def record() -> dict[str, Any]:
    """Returns and clears the events and moves, by context in program order, with the data that aligns clocks."""
    torch = sys.modules.get("torch")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    contexts = [*_closed, *(_taken(context) for context in _alive())]
    _closed.clear()
    found = {"form": FORM, "rank": rank, "world_size": world_size, "boot": _boot(), "contexts": contexts}
    found.update({"moves": list(_moves)} if _moves else {})
    _moves.clear()
    return {**found, "pipelines": list(_batches.values())} if _batches else found


def _taken(context: Any) -> dict[str, Any]:
    group = getattr(context, "ep_group", None)
    layers = dict(getattr(context, "layer_facts", {}))  # also of layers that no longer exist
    ranks = [int(rank) for rank in getattr(group, "ranks", (0,))]
    events = [dict(event) for event in context.trace_take(_capacity or 1 << 16)]
    return {"ranks": ranks, "layers": layers, "memory": _memory(context), "events": events}


def _memory(context: Any) -> dict[str, int]:
    """Returns peak bytes of passes, the most outstanding forwards at one time, and their planned number."""
    found = context.stats()
    return {name: found[name] for name in ("peak_bytes", "most_outstanding", "planned_outstanding")}


def facts_of(layer: Any) -> dict[str, Any]:
    """Returns the record's description of a layer. Adapters call it while they record."""
    return {
        "activation": None if layer.experts is not None else layer.config.activation,
        "gated": layer.config.gated,
        "deduplicate": bool(layer.context.last_deduplicate()),
        "model_width": layer.model_width,
        "hidden_width": layer.hidden_width,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "received_rows": layer.received_rows,
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "chunking": layer.config.chunking or "adaptive",
        "callback": layer.experts is not None,
    }


def _boot() -> str:
    """Returns the id of the kernel's boot. Processes with equal ids share CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _write_record() -> None:
    folder = os.environ.get(FOLDER)
    if not folder or os.getpid() != _process:  # a forked child has no recording of its own
        return
    written = record()
    if not any(context["events"] for context in written["contexts"]) and not _batches:
        return
    with contextlib.suppress(OSError):
        path = os.path.join(folder, f"rank{written['rank']}-{os.getpid()}.json")
        with open(path + ".part", "w") as file:
            json.dump(written, file)
        os.replace(path + ".part", path)


def _alive() -> list[Any]:
    """Returns the contexts without those that were closed (a model was unswapped) or belong to the parent of a fork."""
    return [context for context in list(_contexts) if getattr(context, "alive", True)]


def chrome(events: list[dict[str, Any]], rank: int = 0) -> dict[str, Any]:
    """Returns events in the JSON form of Perfetto and chrome://tracing; one process per rank, one row per lane."""
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
