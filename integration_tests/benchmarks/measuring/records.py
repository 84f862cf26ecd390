"""What a benchmark leaves: a summary, which is committed, and beside it all that was measured, which is not.

`write` makes both of one record. The summary has what tables are made of:

    lists of more than two numbers   are samples: quartiles and their count stand for them, of RANGES the two ends
    lists of more than two truths    are counted
    MEDIANS                          of quartiles below these names the median alone
    lists of more than two objects   are tables: their columns once, and rows (`rows_of` gives the objects again)
    sluice_stats                     the counters that a table shows (STATS)
    LEFT_OUT, nothing, empty lists   are in the raw file alone
    fractions                        have five digits

SETTINGS stand as they were given. A summary's own summary is the same, so that a record can be extended.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring.machine import machine, versions
from integration_tests.benchmarks.measuring.stats import quartiles

FOLDER = Path(__file__).resolve().parents[1] / "records"
SETTINGS = {"plan", "settings", "cell", "case", "shape", "config", "machine", "versions"}
RANGES = {"gflops_before_rounds", "share_of_rounds"}
MEDIANS = {"seconds", "roofline_s", "roofline_with_fresh_pages_s", "of_roofline", "of_roofline_with_fresh_pages"}
MEDIANS |= {"sides", "stock", "sluice", "pair_ratios"}
STATS = {"chunks", "gemm", "bytes_sent", "comm_cpu_s", "peak_bytes", "slot_bytes", "saved_bytes", "passes_in_place"}
# Samples whose quartiles stand beside them, what explains a single run, and lines of which there are short ones.
LEFT_OUT = {"wall_s", "cpu_s_all_ranks", "loss", "decisions", "blocks", "counters", "in_full"}
PAIR = 2  # two numbers are of two ranks, or of first and again
WIDTH = 120


def reduced(value: Any, name: str = "") -> Any:
    """What the summary has of a value, whatever it is in."""
    if name in SETTINGS:
        return value
    if isinstance(value, Mapping):
        return reduced_fields(value, name)
    if isinstance(value, (list, tuple)):
        return reduced_list(value, name)
    if isinstance(value, float):
        return round(value) if abs(value) >= 1e5 else float(f"{value:.5g}")
    return value


def reduced_fields(fields: Mapping[str, Any], name: str) -> Any:
    """The same of what has names."""
    if is_table(fields):
        return fields
    if name in MEDIANS and "median" in fields:
        return reduced(fields["median"])
    if name == "sluice_stats":
        fields = {key: each for key, each in fields.items() if key in STATS}
    # What stands below a name of MEDIANS is its own, by side and by half of a step.
    below = {key: name if name in MEDIANS else key for key in fields}
    found = {key: reduced(each, below[key]) for key, each in fields.items() if key not in LEFT_OUT}
    return {key: each for key, each in found.items() if each not in (None, [], {})}


def reduced_list(values: Sequence[Any], name: str) -> Any:
    """The same of a list; its members have its name."""
    if len(values) > PAIR and all(isinstance(each, bool) for each in values):
        return {"count": len(values), "true": sum(values)}
    if len(values) > PAIR and all(isinstance(each, (int, float)) for each in values):
        ends = {"count": len(values), "least": min(values), "most": max(values)}
        return reduced(ends if name in RANGES else quartiles(values), name)
    if len(values) > PAIR and all(isinstance(each, Mapping) for each in values):
        return table([reduced(each, name) for each in values])
    return [reduced(each, name) for each in values]


def table(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Objects of like fields, a row each; null where one has not what others have."""
    columns = list(dict.fromkeys(key for each in objects for key in each))
    return {"columns": columns, "rows": [[each.get(key) for key in columns] for each in objects]}


def is_table(value: object) -> bool:
    return isinstance(value, Mapping) and list(value) == ["columns", "rows"]


def rows_of(value: Any) -> list[dict[str, Any]]:
    """The objects of a table, or of the list that it would be if it had not more than two."""
    if not is_table(value):
        return list(value)
    pairs = (zip(value["columns"], row) for row in value["rows"])
    return [{key: each for key, each in row if each is not None} for row in pairs]


def text_of(value: Any, indent: str = "", before: int = 0) -> str:
    """JSON for readers: lines are filled; what does not fit on one begins its own. `before`: what its line has."""
    line = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or len(indent) + before + len(line) < WIDTH:
        return line
    inner = indent + " "
    names = [f"{json.dumps(str(key))}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    parts = value.values() if isinstance(value, dict) else value
    is_filled = isinstance(value, dict) or not all(isinstance(part, (dict, list)) for part in value)
    rows = [""]
    for name, part in zip(names, parts):
        text = name + text_of(part, inner, len(name))
        fits = rows[-1] and len(inner) + len(rows[-1]) + len(text) + 2 < WIDTH
        if fits and is_filled and "\n" not in text + rows[-1]:
            rows[-1] += f", {text}"
        else:
            rows.append(text)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{inner}" + f",\n{inner}".join(rows[1:]) + f"\n{indent}{end}"


def command(argv: Sequence[str]) -> str:
    """How to repeat the run: the benchmark and its options, without the places of this machine."""
    words, given = [], iter(argv[1:])
    for word in given:
        if word in ("--records", "--record"):
            next(given, None)
        else:
            words.append(os.path.basename(word) if os.path.isabs(word) else word)
    return shlex.join(["python", "-m", f"integration_tests.benchmarks.{Path(argv[0]).stem}", *words])


def raw_file(file: Path) -> Path:
    """Where all that was measured stands."""
    return file.with_suffix(".raw.json")


def write(file: Path, fields: Mapping[str, Any], rows: Mapping[str, Any] | None = None) -> None:
    """Write a record's summary and its raw file.

    fields   all that was measured; machine and versions are those of this process where it has none
    rows     fields that the summary has in another form
    """
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    head = {"command": command(sys.argv), "date": today, "machine": machine(), "versions": versions()}
    whole = {**head, **fields}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(raw_file(file), json.dumps(whole, indent=1))
    replace(file, text_of(reduced({**whole, **(rows or {})})))


def replace(file: Path, text: str) -> None:
    """Whoever is stopped while writing leaves the file as it was."""
    beside = file.with_name(file.name + ".part")
    beside.write_text(text + "\n")
    os.replace(beside, file)
