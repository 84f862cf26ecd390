"""Records how many rows each local expert of each layer received, once per backward, while SLUICE_ROUTING_DIR names a
folder. Every rank writes a file of its own there; `sluice routing DIR` joins them into one that `sluice simulate` and
`sluice plan` replay.

The counts are those that the engine has anyway: no pass over tokens, no communication. They are written in blocks of
512, and at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from typing import Any

FOLDER = "SLUICE_ROUTING_DIR"
BLOCK = 512
FORM = 1

active = bool(os.environ.get(FOLDER))
_lines: list[tuple[int, list[int]]] = []
_file: Any = None
_process = os.getpid()


def note(layer: Any, step: Any, library: Any) -> None:
    """Called by adapters for each backward of a layer with a step that is ready. Never fails the training."""
    global active
    if os.getpid() != _process:
        return
    buffer = getattr(layer, "_routing_rows", None)
    if buffer is None:
        buffer = layer._routing_rows = library.ffi.new("int64_t[]", max(1, layer.num_local_experts))
        try:
            _open(layer)
        except OSError:
            active = False
            return
    if library.lib.sluice_step_info(step, library.ffi.NULL, buffer) == 0:
        _lines.append((layer.layer_id, list(buffer[0 : layer.num_local_experts])))
        if len(_lines) >= BLOCK:
            flush()


def _open(layer: Any) -> None:
    global _file
    if _file is not None:
        return
    folder = os.environ[FOLDER]
    os.makedirs(folder, exist_ok=True)
    group = layer.context.ep_group
    rank = int(os.environ.get("RANK", getattr(group, "rank", 0) or 0))
    _file = open(os.path.join(folder, f"loads{rank}.jsonl"), "w")
    _file.write(json.dumps({"sluice_routing_rank": FORM, "rank": rank, "ranks": list(group.ranks)}) + "\n")
    atexit.register(flush)


def flush() -> None:
    """Writes what is held back."""
    global active
    if _file is None or os.getpid() != _process:
        return
    try:
        _file.write("".join(f"[{layer},{json.dumps(rows)}]\n" for layer, rows in _lines))
        _file.flush()
    except OSError:
        active = False  # the disk is full: training goes on
        with contextlib.suppress(OSError):
            _file.close()
    _lines.clear()
