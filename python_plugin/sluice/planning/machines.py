# SPDX-License-Identifier: Apache-2.0
"""Loads machines: profiles of the package by name, files of the user, calibrations.

A profile file is {"sluice_profile": 1, "sources": {field: source of its number}, "machine": {...}}; a bare machine
(docs/tuning.md) is read as well. The C library checks the fields. "devices" of a profile lists words that occur in the
driver's names of its GPUs, and "memory_bytes" is the memory of one GPU.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import cache_folder, decision_cache, file_trust
from . import files
from .errors import BadInput

CACHED = "cached"
BY_DEVICE = "device"  # instead of a name or path: the profile of this GPU
FOLDER = Path(__file__).resolve().parent / "profiles"


@dataclass(frozen=True)
class Machine:
    """Describes a machine. data: its parsed JSON; sources: where its numbers are from."""

    data: dict[str, Any]
    sources: dict[str, str]
    memory_bytes: int = 0  # of a rank's device; 0: unknown

    @property
    def name(self) -> str:
        return str(self.data.get("name", "unnamed"))

    def gemm_rate(self, dtype: str, form: str, rows: float) -> float:
        """Returns FLOP/s of GEMMs with this number of rows."""
        gemm = self.data["gemm"].get(dtype)
        if gemm is None:
            known = ", ".join(self.data["gemm"])
            raise BadInput(f"machine {self.name} has no GEMMs of {dtype}; it has those of {known}: give another dtype")
        gemm = gemm.get(form, gemm)
        return float(gemm["flops_per_second"]) * rows / (rows + float(gemm.get("half_rows", 0)))


def names() -> list[str]:
    """Returns the named profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path: str) -> Machine:
    """Loads a named profile, or a file."""
    if name_or_path == BY_DEVICE:
        raise BadInput(f"machine {BY_DEVICE!r} is the profile of the GPU that trains: name one of {', '.join(names())}")
    path = Path(name_or_path)
    if name_or_path in names():
        path = FOLDER / f"{name_or_path}.json"
    elif not path.is_file():
        known = ", ".join(names())
        raise BadInput(
            f"machine {name_or_path!r}: neither a file nor a named profile, nor {CACHED!r}; named ones are {known}"
        )
    return parse(files.read(f"machine {name_or_path}", path), name_or_path)


def for_device(device: str) -> Machine:
    """Returns the profile of a GPU by the driver's name for it. If there is none, BadInput lists the known ones."""
    known = []
    for name in names():
        profile = json.loads((FOLDER / f"{name}.json").read_text())
        words = profile.get("devices", [])
        known += words
        if any(word in device.replace("-", " ").split() for word in words):
            return load(name)
    raise BadInput(
        f"machine {BY_DEVICE!r}: no profile is of a {device or 'CPU'}; there are those of {', '.join(known)}: "
        "calibrate, or name a profile or a file"
    )


def parse(text: str, where: str) -> Machine:
    """Parses a profile or a bare machine."""
    data = files.from_json(f"machine {where}: ", text)
    if not isinstance(data, dict):
        raise BadInput(f"machine {where}: it must be an object, not {type(data).__name__}")
    if "sluice_profile" not in data:
        return Machine(data, {})
    known = ("sluice_profile", "sources", "devices", "memory_bytes", "machine")
    for key in data:
        if key not in known:
            raise BadInput(f"machine {where}: unknown field {key!r} in a profile; known are {', '.join(known)}")
    if data["sluice_profile"] != 1:
        raise BadInput(f"machine {where}: sluice_profile is {data['sluice_profile']!r}; this version reads 1")
    if not isinstance(data.get("machine"), dict):
        raise BadInput(f"machine {where}: the field 'machine' is missing; it holds the costs (docs/tuning.md)")
    sources = data.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise BadInput(f"machine {where}: sources must be an object that says of fields where their numbers are from")
    devices = data.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(word, str) and word for word in devices):
        raise BadInput(f"machine {where}: devices must be a list of words in the names of GPUs")
    memory = data.get("memory_bytes", 0)
    if not isinstance(memory, int) or isinstance(memory, bool) or memory < 0:
        raise BadInput(f"machine {where}: memory_bytes is {memory!r}; it is a whole number of bytes, 0 if not known")
    return Machine(data["machine"], sources, memory)


# ---- calibrations of this machine, which the C library stores in the cache folder (backend/calibrate/cache.c) ----

FORM = "sluice cache 6"  # the first line of a file
MOST_WIDTH = 4096  # wider layers are measured with this width
_KEY = re.compile(
    r"version (?P<version>[^;]+); device (?P<device>[^,]+), (?P<processor>.+), "
    r"(?P<cores>\d+ of \d+ cores)(?:, \S+ of them at a time)?, "
    r"(?P<threads>\S+) threads; link (?P<link>.+), (?P<ranks>\d+) ranks on (?P<hosts>[^;]+); "
    r"GEMMs (?P<gemm>.+), (?P<dtype>[^,]+), M (?P<model_width>\d+), H (?P<hidden_width>\d+)"
)


@dataclass(frozen=True)
class Entry:
    """Describes one file. problem: "" or why the file cannot be used: "damaged", "of another form", "not ours".

    refusal: for a file that is not ours, which users can change the file, and what to do
    """

    path: str
    written: float
    key: dict[str, str]
    machine: dict[str, Any]
    problem: str = ""
    refusal: str = ""

    def words(self) -> str:
        """Returns the sizes of the calibration, for people."""
        k = self.key
        return f"{k['ranks']} ranks over {k['link']}, {k['dtype']}, M {k['model_width']}, H {k['hidden_width']}"


def entries(folder: str | None = None) -> Iterator[Entry]:
    """Yields all entries of a folder. None: the cache folder."""
    for path in sorted(glob.glob(os.path.join(glob.escape(cache_folder.place(folder)), "machine-*.json"))):
        yield _read(path)


def _read(path: str) -> Entry:
    try:
        with file_trust.open_data(path) as file:
            head, key, machine = file.read().split("\n", 2)
        data = json.loads(machine)
        if not head.startswith("sluice cache ") or not isinstance(data, dict):
            raise ValueError(head)
    except file_trust.NotOurs as error:
        return Entry(path, 0, {}, {}, "not ours", error.strerror)
    except (OSError, ValueError):
        return Entry(path, 0, {}, {}, "damaged")
    found = _KEY.fullmatch(key)
    if head != FORM or found is None:
        return Entry(path, 0, {}, {}, "of another form")
    return Entry(path, os.path.getmtime(path), found.groupdict(), data)


def from_cache(
    folder: str | None, ranks: int | None, dtype: str | None, model_width: int | None, hidden_width: int | None
) -> Machine:
    """Returns the calibration of this processor for such layers, the newest among equal ones, with its file and sizes.

    None: any value (of ranks: the most). The nearest width is taken; ranks and dtype must be equal.
    """
    place = cache_folder.place(folder)
    here = (decision_cache._processor(), decision_cache._cores())
    mine = [e for e in entries(place) if not e.problem and (e.key["processor"], e.key["cores"]) == here]
    fitting = [
        e
        for e in mine
        if (ranks is None or e.key["ranks"] == str(ranks)) and (dtype is None or e.key["dtype"] == dtype)
    ]
    if not fitting:
        there = "; ".join(e.words() for e in mine) or "nothing of this processor"
        launcher = f"torchrun --nproc-per-node {ranks} -m " if ranks is not None and ranks > 1 else ""
        raise BadInput(
            f"machine cached: no calibration of {'any number of' if ranks is None else ranks} ranks"
            f"{'' if dtype is None else ' in ' + dtype} in {place} (there: {there}); `{launcher}sluice tune "
            "--model-width M --hidden-width H` makes one"
        )

    def distance(entry: Entry) -> float:
        pairs = ((model_width, "model_width"), (hidden_width, "hidden_width"))
        return sum(
            abs(math.log(int(entry.key[name]) / min(wanted, MOST_WIDTH)))
            for wanted, name in pairs
            if wanted is not None
        )

    def most_ranks(entry: Entry) -> int:
        return int(entry.key["ranks"]) if ranks is None else 0

    found = min(fitting, key=lambda e: (-most_ranks(e), distance(e), -e.written))
    return Machine(found.machine, {"cache": found.path, "measured at": found.words()})
