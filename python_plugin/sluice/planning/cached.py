# SPDX-License-Identifier: Apache-2.0
"""Finds calibrations of this machine, which the C library stores in the cache folder (backend/calibrate/cache.c)."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import cache_folder, decision_cache, file_trust
from .errors import BadInput

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


def find(
    folder: str | None, ranks: int | None, dtype: str | None, model_width: int | None, hidden_width: int | None
) -> Entry:
    """Returns the calibration of this processor for such layers, the newest among equal ones.

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

    return min(fitting, key=lambda e: (-most_ranks(e), distance(e), -e.written))
