"""Writes the tables of measured scenarios into docs/benchmarks/tuner.md, from the records of scenarios.py.

    .venv/bin/python -m integration_tests.benchmarks.scenarios_page

Records that share a table are runs of one list over different links. A house test compares page and records.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import records
from integration_tests.benchmarks.scenarios.scenarios import MARKS, gains, gains_too_little, over_best_fixed

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "tuner.md"
TABLES = {  # by what is said of them
    "Batches of 64 to 1,024 tokens": ("scenarios.json", "scenarios-0.2gbit.json"),
    "Batches of 64 to 4,096 tokens": ("scenarios-4096.json",),
}
BEGIN, END = "<!-- measured scenarios: written by scenarios_page -->", "<!-- end of measured scenarios -->"
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)
COLUMNS = 100
MISSED = " (**missed**)"
KINDS = ("kept", "reuse", "budget")
SIDES = {
    "best fixed": "the best one pair of the run",
    "list's pair": "the one pair that is best over the list",
    "pb": "MPMoE-pb",
    "pm": "MPMoE-pm",
    "mpipemoe": "MPipeMoE",
    "pipemoe": "PipeMoE with its best n",
    "split": "split by destination",
    "unsplit": "unsplit",
}


def lines_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of all records, each with the sides that it has."""
    lines = [line for record in found for line in records.rows_of(record["lines"])]
    return [
        {**line, "over_adaptive": {side: ratio for side, ratio in line["over_adaptive"].items() if ratio is not None}}
        for line in lines
    ]


def marks(lines: list[dict[str, Any]]) -> str:
    """Adaptive over each run's best pair, beside what is wanted."""
    words = {"median": "in the median", "p90": "at the 90th percentile", "worst": "at worst"}
    told = (
        f"{value:.3f} {words[name]}{MISSED if value > MARKS[name] else ''}"
        for name, value in over_best_fixed(lines).items()
    )
    return f"Of a run's best pair `adaptive` takes {', '.join(told)}."


def gain(found: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float] | None:
    """Of the list's pair over adaptive, measured and simulated: the mean of records, each by its runs."""
    parts = []
    for record in found:
        count = sum(line["kind"] == kind for line in records.rows_of(record["lines"]))
        if kind in record["summary"]["gain"]:
            parts.append((count, record["summary"]["gain"][kind]))
    if not parts:
        return None
    total = sum(count for count, _ in parts)
    return {
        what: math.exp(sum(count * math.log(each[what]) for count, each in parts) / total)
        for what in ("measured", "simulated")
    }


def gained(found: Sequence[Mapping[str, Any]]) -> str:
    """The gain of each kind in words."""
    every = {kind: both for kind in KINDS if (both := gain(found, kind)) is not None}
    told = (
        f"{kind} {both['measured'] - 1:.3f} of {both['simulated'] - 1:.3f}{MISSED if gains_too_little(both) else ''}"
        for kind, both in every.items()
    )
    return f"Gain over the list's pair, of the simulated one: {', '.join(told)}."


def table(title: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Lines of one list."""
    lines = lines_of(found)
    by_kind = gains(lines)
    kinds = [kind for kind in KINDS if kind in by_kind]
    counts = [sum(line["kind"] == kind for line in lines) for kind in kinds]
    heads = [f"{kind} ({count} runs)" for kind, count in zip(kinds, counts, strict=True)]
    links = ", ".join(dict.fromkeys(line["link"] for line in lines))
    rows = []
    for side, words in SIDES.items():
        cells = (by_kind[kind].get(side) for kind in kinds)
        told = [f"{one['mean']:.2f} [{one['least']:.2f}, {one['most']:.2f}]" if one else "" for one in cells]
        if any(told):
            rows.append(f"| {words} | {' | '.join(told)} |")
    return "\n".join(
        [
            f"{title}, {len(lines)} runs over {links}:",
            "",
            f"| time of a run over adaptive's, mean [least, most] | {' | '.join(heads)} |",
            "|---" * (1 + len(kinds)) + "|",
            *rows,
            "",
            textwrap.fill(f"{marks(lines)} {gained(found)}", COLUMNS),
        ]
    )


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads((records.FOLDER / name).read_text()) for name in names if (records.FOLDER / name).exists()]


def tables() -> str:
    """What stands between the marks."""
    every = ((title, read(names)) for title, names in TABLES.items())
    return "\n\n".join(table(title, found) for title, found in every if found)


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(BETWEEN.sub(lambda _: tables(), text))


if __name__ == "__main__":
    main()
