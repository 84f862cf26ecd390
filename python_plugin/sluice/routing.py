# SPDX-License-Identifier: Apache-2.0
"""Records how many rows each local expert of each layer received, once per backward, if SLUICE_ROUTING_DIR names a
folder. Each rank writes its own files there; `sluice routing DIR` joins them into one that `sluice simulate` and
`sluice plan` replay.

The engine has the counts already, so recording needs no pass over tokens and no communication. Counts are written in
blocks of 512, and at exit.
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
_process = os.getpid()


class _File:
    """Writes the file of one group of ranks. Layers of another group have experts on other ranks, and another file."""

    def __init__(self, group: Any, number: int) -> None:
        folder = os.environ[FOLDER]
        os.makedirs(folder, exist_ok=True)
        rank = int(os.environ.get("RANK", getattr(group, "rank", 0) or 0))
        name = f"loads{rank}.jsonl" if number == 0 else f"loads{rank}-{number + 1}.jsonl"
        self.lines: list[tuple[int, list[int]]] = []
        self.file = open(os.path.join(folder, name), "w")
        self.file.write(json.dumps({"sluice_routing_rank": FORM, "rank": rank, "ranks": list(group.ranks)}) + "\n")

    def flush(self) -> None:
        self.file.write("".join(f"[{layer},{json.dumps(rows)}]\n" for layer, rows in self.lines))
        self.lines.clear()
        self.file.flush()


_files: dict[tuple[int, ...], _File] = {}


def note(layer: Any, step: Any, library: Any) -> None:
    """Adapters call it for each backward of a layer, with a step that is ready. It never fails the training."""
    global active
    if os.getpid() != _process:
        return
    kept = getattr(layer, "_routing", None)
    if kept is None:
        try:
            kept = layer._routing = (
                library.ffi.new("int64_t[]", max(1, layer.num_local_experts)),
                _file_of(layer.context.ep_group),
            )
        except OSError:
            active = False
            return
    buffer, file = kept
    if library.lib.sluice_step_info(step, library.ffi.NULL, buffer) == 0:
        file.lines.append((layer.layer_id, list(buffer[0 : layer.num_local_experts])))
        if len(file.lines) >= BLOCK:
            flush()


def _file_of(group: Any) -> _File:
    key = tuple(group.ranks)
    if key not in _files:
        _files[key] = _File(group, len(_files))
        if len(_files) == 1:
            atexit.register(flush)
    return _files[key]


def flush() -> None:
    """Writes the buffered counts."""
    global active
    if os.getpid() != _process:
        return
    for one in _files.values():
        try:
            one.flush()
        except (OSError, ValueError):  # the disk is full, or was when the file was closed: training continues
            active = False
            with contextlib.suppress(OSError):
                one.file.close()
