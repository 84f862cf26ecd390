# SPDX-License-Identifier: Apache-2.0
"""Stores the last decisions of tuners on this machine in the cache folder, for `sluice doctor`.

The file `decisions.json` has at most KEPT entries, the newest last. It is replaced whole, under a lock, so that runs
that end at the same time do not lose entries. An unreadable file is renamed with a message, and a new one is begun.
Entries that cannot be written are dropped, since training must not fail because of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from typing import Any

from . import cache_folder, file_lock, file_trust

FORM = 2
KEPT = 64
NAME = "decisions.json"


class Damaged(ValueError):
    """A file of ours that cannot be used."""


def load(path: str, missing: Any) -> Any:
    """Returns a file's JSON; `missing` if there is no file. Raises Damaged if it is not JSON."""
    try:
        with file_trust.open_data(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return missing
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {error}") from error


def read(path: str) -> list[dict[str, Any]]:
    """Returns the entries, oldest first; none if there is no file. Raises Damaged, which says what is wrong."""
    data = load(path, {"sluice_last_decisions": FORM, "entries": []})
    if not isinstance(data, dict) or data.get("sluice_last_decisions") != FORM:
        raise Damaged("written by another version, or has no list of decisions")
    entries = data.get("entries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Damaged("its entries are not a list of objects")
    return entries


def append(new: list[dict[str, Any]], named: str | None = None) -> str | None:
    """Adds entries with the current time. Returns the file's path, or None if nothing was written."""
    if not new:
        return None
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        place = cache_folder.place(named)
        path = os.path.join(place, NAME)
        file_trust.make_folder(place)
        with open(path + ".lock", "a") as lock:
            file_lock.take(lock.fileno(), lock.name)
            try:
                known = read(path)
            except Damaged as problem:
                move_aside(path, problem)
                known = []
            entries = (known + [{"when": stamp, **entry} for entry in new])[-KEPT:]
            replace(path, json.dumps({"sluice_last_decisions": FORM, "entries": entries}, indent=1) + "\n")
    except file_trust.NotOurs as error:
        print(f"sluice: {path} is not written: {error.strerror}", file=sys.stderr)
        return None
    except OSError:
        return None
    return path


def move_aside(path: str, problem: Exception) -> None:
    """Renames a damaged file, with a message."""
    with contextlib.suppress(OSError):
        os.replace(path, path + ".damaged")
    text = f"{path} is damaged ({problem}): kept as {path}.damaged, and a new file is begun; training continues"
    print(f"sluice: {text}", file=sys.stderr, flush=True)


def replace(path: str, text: str) -> None:
    """Replaces a file atomically: a reader sees the old content or the new one."""
    handle, written = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=os.path.basename(path) + ".")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave an empty file
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(written)
        raise


_SENT = {True: "deduplicated by rank", "node": "deduplicated by node"}


def line(entry: dict[str, Any]) -> str:
    """Returns one entry as a line for people. Missing fields are left out."""
    shape = f"M {entry.get('model_width')}, H {entry.get('hidden_width')}, E {entry.get('num_experts')}"
    choice = f"n {entry.get('num_chunks')}"
    if entry.get("restore_input"):
        choice += f", T_DI {entry['restore_input']}, T_M {entry.get('restore_pre_activation')}"
        if 0 < entry.get("kept_chunks", 0) < entry["num_chunks"]:
            choice += f" in the first {entry['kept_chunks']}"
    if entry.get("chose_deduplication"):
        choice += f", {_SENT.get(entry.get('deduplicate'), 'rows sent')}"
    ranks = f" on {entry['ranks']} ranks" if entry.get("ranks") else ""
    return f"{entry.get('when')}: {shape}{ranks}, {entry.get('rows')} rows: {choice} ({entry.get('why')})"
