"""Writes the tables of docs/benchmarks/hosts.md from the records of megatron_layer.py and autoep_layer.py.

    .venv/bin/python -m integration_tests.benchmarks.beside_page

A house test compares page and records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.hosts import beside
from integration_tests.benchmarks.measuring import records

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "hosts.md"
NAMES = ("megatron", "autoep")
NOTHING = "No record is committed yet."


def between(name: str) -> re.Pattern[str]:
    """What stands between the marks of a record's table."""
    begin, end = f"<!-- {name}: written by beside_page -->", f"<!-- end of {name} -->"
    return re.compile(rf"(?<={re.escape(begin)}\n).*?(?=\n{re.escape(end)})", re.DOTALL)


def table(name: str, record: Mapping[str, Any] | None) -> str:
    """A row for each link, a column for each shape. None: there is no record."""
    if record is None:
        return NOTHING
    lines = records.rows_of(record["lines"])
    shapes = list(dict.fromkeys(line["name"] for line in lines))
    links = list(dict.fromkeys(line["link"] for line in lines))
    cells = {(line["link"], line["name"]): _cell(line) for line in lines}
    rows = [[link, *(cells.get((link, shape), "") for shape in shapes)] for link in links]
    return "\n".join(
        [
            f"{record['date']}, record `{name}.json`, {record['ranks']} ranks. Bold: missed.",
            "",
            f"| link | {' | '.join(shapes)} |",
            f"|{'---|' * (len(shapes) + 1)}",
            *("| " + " ".join(f"{cell} |".lstrip() for cell in row) for row in rows),
        ]
    )


def _cell(line: Mapping[str, Any]) -> str:
    gain = line["speedup"]
    told = f"{gain['median']:.2f} [{gain['q1']:.2f}, {gain['q3']:.2f}]"
    return f"{f'**{told}**' if beside.missed(dict(line)) else told} of {line['possible']:.2f}"


def record(name: str) -> dict[str, Any] | None:
    file = records.FOLDER / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def main() -> None:
    text = PAGE.read_text()
    for name in NAMES:
        text = between(name).sub(lambda _, name=name: table(name, record(name)), text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
