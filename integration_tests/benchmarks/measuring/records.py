# SPDX-License-Identifier: Apache-2.0
"""The results of a benchmark: a record, which is committed, and a raw file with all samples, which is not.

A record, records/CASE.json, is a list of runs. A run has its command, date, machine and versions, and a table with
the numbers that pages show. A run replaces an earlier run with the same command. CASE.raw.json has the samples of
the last run.
"""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring.machine import machine, versions

FOLDER = Path(__file__).resolve().parents[1] / "records"
_AVX512, _BF16, _AMX = {"avx2", "avx512f"}, {"avx512_bf16"}, {"amx_bf16", "amx_tile"}
# Machines by their name on the pages: the beginning of "cpu" in records, and the instruction sets.
MACHINES = {
    "A": ("Intel", _AVX512),
    "B": ("Intel", _AVX512 | _BF16 | _AMX),
    "C": ("AMD", _AVX512 | _BF16),
    "D": ("AMD", {"avx2"}),
}


def short(value: Any) -> Any:
    """The value with fractions rounded to five digits, which are enough for a page."""
    if isinstance(value, float):
        return round(value) if abs(value) >= 1e5 else float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): short(each) for key, each in value.items()}
    return [short(each) for each in value] if isinstance(value, (list, tuple)) else value


def told(row: Mapping[str, Any]) -> str:
    """Returns a row as text: names and short values, a median with its quartiles, and no missing values."""
    words = []
    for name, value in row.items():
        if value is None:
            continue
        if isinstance(value, Mapping) and {"median", "q1", "q3"} <= value.keys():
            value = f"{value['median']:.3g} [{value['q1']:.3g}, {value['q3']:.3g}]"
        words.append(f"{name} {short(value)}")
    return "  ".join(words)


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows as a list of column names and a list of values for each row; null for a missing field."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {"columns": columns, "rows": [[short(row.get(key)) for key in columns] for row in rows]}


def rows_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run, without missing fields."""
    pairs = (zip(run["columns"], row, strict=True) for row in run["rows"])
    return [{key: each for key, each in row if each is not None} for row in pairs]


def runs(folder: Path, name: str) -> list[dict[str, Any]]:
    """The runs of a record; none if there is no such record."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["runs"] if file.exists() else []


def rows(folder: Path, name: str, command: str) -> list[dict[str, Any]]:
    """The rows of the run with this command."""
    return [row for run in runs(folder, name) if run["command"] == command for row in rows_of(run)]


def machine_of(run: Mapping[str, Any]) -> str:
    """The name of the machine that a run was made on."""
    found = run["machine"]
    for name, (maker, isa) in MACHINES.items():
        if found["cpu"].startswith(maker) and set(found["isa"]) == isa:
            return name
    raise LookupError(f"records.MACHINES has no {found['cpu']} with {', '.join(found['isa'])}: add it, and to the page")


def write(folder: Path, name: str, command: str, rows: Sequence[Mapping[str, Any]], raw: Any = None) -> None:
    """Write a run into its record, and `raw` into the file next to it."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    run = {"command": command, "date": today, "machine": machine(), "versions": versions(), **table(rows)}
    found = runs(folder, name)
    at = next((number for number, each in enumerate(found) if each["command"] == command), len(found))
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / f"{name}.raw.json", json.dumps({**run, "raw": raw}, indent=1))
    replace(folder / f"{name}.json", text_of([*found[:at], run, *found[at + 1 :]]))


def text_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """The record as JSON with one line for each row, and for each other member of a run."""
    parts = []
    for run in runs:
        members = [f'"{key}": {json.dumps(value)}' for key, value in run.items() if key != "rows"]
        rows = ",\n".join(f"  {json.dumps(row)}" for row in run["rows"])
        parts.append(" {" + ",\n  ".join([*members, f'"rows": [\n{rows}]']) + "}")
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}"


def replace(file: Path, text: str) -> None:
    """Replace a file atomically, so that an interrupted run leaves the old file."""
    part = file.with_name(file.name + ".part")
    part.write_text(text + "\n")
    os.replace(part, file)
