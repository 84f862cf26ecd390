"""Writes the tables of the worst drawn cells into docs/benchmarks/experts.md, from the records of drawn.py.

    .venv/bin/python -m integration_tests.benchmarks.drawn_page

A house test compares page and records.
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
BEGIN, END = "<!-- worst cells: written by drawn_page -->", "<!-- end of worst cells -->"
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)
BESIDE = {"of_grouped_mm": "times as fast as `grouped_mm`", "of_dense": "share of the dense product"}
# Of each record, the ratios that have a table: torch's bf16 GEMMs of the second run in plain loops.
RECORDS = {"drawn.json": tuple(BESIDE), "drawn-bfloat16.json": ("of_grouped_mm",)}


def tables(record: Mapping[str, Any], ratios: Sequence[str] = tuple(BESIDE)) -> str:
    """A line of all cells of a record, and the worst by each of the ratios."""
    every = records.rows_of(record["cells"])
    cells = [cell for cell in every if "of_grouped_mm" in cell]
    medians = sorted(cell["of_grouped_mm"]["median"] for cell in cells)
    below = sum(cell["of_grouped_mm"]["q3"] < LEAST for cell in cells)
    lines = [
        f"{record['date']}, seed {record['seed']}: {len(cells)} cells, median {medians[len(medians) // 2]:.2f} of "
        f"`grouped_mm`; {below} stayed",
        f"below {LEAST} in all tries (bold), and {len(every) - len(cells)} an implementation refused.",
    ]
    for key in ratios:
        lines += ["", f"| {BESIDE[key]} | cell |", "|---|---|", *_rows(cells, key)]
    return "\n".join(lines)


def _rows(cells: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    rows = []
    for cell in sorted(cells, key=lambda cell: cell[key]["median"])[:WORST]:
        ratio = cell[key]
        told = f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"
        is_missed = key == "of_grouped_mm" and ratio["q3"] < LEAST
        rows.append(f"| {f'**{told}**' if is_missed else told} | {cell['cell']} |")
    return rows


def text() -> str:
    """What stands between the marks."""
    read = ((json.loads((records.FOLDER / name).read_text()), ratios) for name, ratios in RECORDS.items())
    return "\n\n".join(tables(record, ratios) for record, ratios in read)


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(BETWEEN.sub(lambda _: text(), page))


if __name__ == "__main__":
    main()
