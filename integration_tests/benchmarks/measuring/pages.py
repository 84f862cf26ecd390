# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/benchmarks from the committed records.

A table is between `<!-- CASE TABLE: written by the benchmark -->` and `<!-- end -->`.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks import cases
from integration_tests.benchmarks.measuring import records

PAGES = Path(__file__).resolve().parents[3] / "docs"
COLUMNS = 100


def between(case: str, table: str) -> re.Pattern[str]:
    """The text between the marks of a table."""
    return re.compile(
        rf"(?<=<!-- {re.escape(case)} {re.escape(table)}: written by the benchmark -->\n).*?(?=\n<!-- end -->)", re.S
    )


def write(names: Iterable[str]) -> None:
    """Write the tables of these cases."""
    for name in names:
        module = cases.CASES[name].load()
        if not hasattr(module, "PAGE"):
            continue
        file = PAGES / module.PAGE
        text = file.read_text()
        for table, words in module.tables(records.runs(records.FOLDER, name)).items():
            place = between(name, table)
            if not place.search(text):
                raise SystemExit(f"{file.name} has no place for table {table!r} of {name}")
            text = place.sub(lambda _, words=words: words, text, count=1)
        file.write_text(text)


def spread(found: Mapping[str, float], digits: int = 2) -> str:
    """A median with its quartiles."""
    return f"{found['median']:.{digits}f} [{found['q1']:.{digits}f}, {found['q3']:.{digits}f}]"


def bold(text: str, is_missed: bool) -> str:
    """Bold where a mark is missed."""
    return f"**{text}**" if is_missed else text


def filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), COLUMNS, break_long_words=False, break_on_hyphens=False)


def said(run: Mapping[str, Any]) -> str:
    """The machine, date and command of a run."""
    return filled(f"Machine {records.machine_of(run)}, {run['date']}: `{run['command']}`.")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [list(map(str, heads)), ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("|" + "|".join(c if c == "---" else f" {c} " if c else " " for c in line) + "|" for line in lines)


def each_run(runs: Iterable[Mapping[str, Any]], told: Callable[[list[dict[str, Any]]], str]) -> str:
    """For each run a line with its machine, date and command, and what `told` makes of its rows."""
    return "\n\n".join(f"{said(run)}\n\n{told(records.rows_of(run))}" for run in runs)


def run_tables(runs: Iterable[Mapping[str, Any]], heads: Sequence[str], cells: Callable[[dict[str, Any]], list]) -> str:
    """A table for each run."""
    return each_run(runs, lambda rows: table(heads, map(cells, rows)))


def by_link(rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """A line for each link, a column for each shape."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = list(dict.fromkeys(row["link"] for row in rows))
    found = {(row["link"], row["name"]): cell(row) for row in rows}
    return table(["link", *names], ([link, *(found.get((link, name), "") for name in names)] for link in lines))


def made(runs: Sequence[Mapping[str, Any]]) -> str:
    """The machines and dates of the runs of a table. The rows contain the commands."""
    places = dict.fromkeys(f"Machine {records.machine_of(run)}, {run['date']}" for run in runs)
    return f"{'; '.join(places)}."
