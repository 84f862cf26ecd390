"""Writes the table of the worst drawn cells into docs/benchmarks/experts.md, from the record of drawn.py.

    .venv/bin/python -m integration_tests.benchmarks.drawn_page

A house test compares page and record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.drawn.drawn import LEAST, WORST
from integration_tests.benchmarks.measuring import records

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "experts.md"
RECORD = records.FOLDER / "drawn.json"
BEGIN, END = "<!-- worst cells: written by drawn_page -->", "<!-- end of worst cells -->"
NOTHING = "No record is committed yet."
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)
BESIDE = {"of_grouped_mm": "times as fast as `grouped_mm`", "of_dense": "share of the dense product"}


def tables(record: Mapping[str, Any] | None) -> str:
    """What stands between the marks. None: there is no record."""
    if record is None:
        return NOTHING
    every = records.rows_of(record["cells"])
    cells = [cell for cell in every if "of_grouped_mm" in cell]
    medians = sorted(cell["of_grouped_mm"]["median"] for cell in cells)
    below = sum(cell["of_grouped_mm"]["q3"] < LEAST for cell in cells)
    lines = [
        f"{record['date']}, seed {record['seed']}: {len(cells)} cells, median {medians[len(medians) // 2]:.2f} of "
        f"`grouped_mm`; {below} stayed",
        f"below {LEAST} in all tries (bold), and {len(every) - len(cells)} an implementation refused.",
    ]
    for key, words in BESIDE.items():
        lines += ["", f"| {words} | cell |", "|---|---|", *_rows(cells, key)]
    return "\n".join(lines)


def _rows(cells: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    rows = []
    for cell in sorted(cells, key=lambda cell: cell[key]["median"])[:WORST]:
        ratio = cell[key]
        told = f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"
        is_missed = key == "of_grouped_mm" and ratio["q3"] < LEAST
        rows.append(f"| {f'**{told}**' if is_missed else told} | {cell['cell']} |")
    return rows


def record() -> dict[str, Any] | None:
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(BETWEEN.sub(lambda _: tables(record()), text))


if __name__ == "__main__":
    main()
