"""Writes the tables of docs/benchmarks/stages.md from the record of stages.py.

    .venv/bin/python -m integration_tests.benchmarks.stages_page

A house test compares page and record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import records

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "stages.md"
RECORD = records.FOLDER / "stages.json"
BEGIN, END = "<!-- tables: written by stages_page -->", "<!-- end of tables -->"
NOTHING = "No record is committed yet."
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)


def tables(record: Mapping[str, Any] | None) -> str:
    """What stands between the marks. None: there is no record."""
    if record is None:
        return NOTHING
    cases, settings = record["cases"], record["settings"]
    lines = [
        f"{record['date']}, record `stages.json`: link {settings['link']}, {settings['megabytes']:g} MiB a message,",
        f"{settings['micro_batches']} micro-batches. Bold: missed.",
        "",
        "| case | p | L | stock, s | Sluice, s | stock ÷ Sluice | simulated | wanted | over a fixed order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, found) for name, found in cases.items() if name != "bubbles"]
    if "bubbles" in cases:
        lines += ["", "| policy | bubble, % | simulated, % | with its times, % | in flight | held |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_bubble(name, found) for name, found in cases["bubbles"]["policies"].items()]
    return "\n".join(lines)


def _row(name: str, found: Mapping[str, Any]) -> str:
    case, ratio = found["case"], found["speedup"]
    told = f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]"
    fixed = f"{found['over_fixed']['median']:.3f}" if "over_fixed" in found else ""
    simulated = f"{found['simulated']['speedup']:.2f}" if "simulated" in found else ""
    cells = [
        name,
        case["stages"],
        case["in_flight"],
        f"{found['stock_s']['median']:.2f}",
        f"{found['sluice_s']['median']:.2f}",
        f"**{told}**" if ratio["median"] < found["wanted"] else told,
        simulated,
        f"{found['wanted']:.2f}",
        f"**{fixed}**" if fixed and found["over_fixed"]["median"] > found["most_over_fixed"] else fixed,
    ]
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |").replace("|  |", "| |")


def _bubble(name: str, found: Mapping[str, Any]) -> str:
    measured, wanted = 100 * found["bubble"]["median"], 100 * found["simulated"]
    told = f"{measured:.1f}" if abs(measured - wanted) <= found["points"] else f"**{measured:.1f}**"
    own = f"{100 * found['predicted']:.1f} " if "predicted" in found else ""
    return f"| `{name}` | {told} | {wanted:.1f} | {own}| {found['most_in_flight']} | {found['most_held']} |"


def record() -> dict[str, Any] | None:
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(BETWEEN.sub(lambda _: tables(record()), text))


if __name__ == "__main__":
    main()
