"""Writes the tables of docs/benchmarks/optimizer.md from the records of the optimizer's three benchmarks.

    .venv/bin/python -m integration_tests.benchmarks.optimizer_page

A house test compares page and records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import records
from integration_tests.benchmarks.optimizer.optimizer import LEAST_OF_HOST, LEAST_OF_STREAM
from integration_tests.benchmarks.optimizer.optimizer_overlap import LEAST_OF_SERIAL

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "optimizer.md"
BEGIN, END = "<!-- tables: written by optimizer_page -->", "<!-- end of tables -->"
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)


def tables(plain: Mapping[str, Any], mixed: Mapping[str, Any], overlap: Mapping[str, Any]) -> str:
    """What stands between the marks: of the records optimizer, optimizer_mixed and optimizer_overlap."""
    lines = [f"{plain['date']}, record `optimizer.json`. Bold: missed.", ""]
    lines += ["| threads | Sluice, ms | DeepSpeed ÷ Sluice | torch ÷ Sluice | stream ÷ Sluice | looked at first |"]
    lines += ["|---|---|---|---|---|---|"]
    for threads, found in plain["threads"].items():
        cells = [
            _ms(found["seconds"]["sluice"]),
            _ratio(found["over_deepspeed"], LEAST_OF_HOST),
            _ratio(found["over_torch_fused"], LEAST_OF_HOST),
            _ratio(found["over_stream"], LEAST_OF_STREAM, by="median"),
            _ratio(found["over_checked"], 0.0),
        ]
        lines.append(f"| {threads} | {' | '.join(cells)} |")
    lines += ["", f"{mixed['date']}, record `optimizer_mixed.json`.", ""]
    lines += ["| threads | DeepSpeed, ms | Sluice, ms | DeepSpeed ÷ Sluice |", "|---|---|---|---|"]
    for threads, found in mixed["threads"].items():
        cells = [_ms(found["seconds"][side]) for side in ("stock", "sluice")]
        lines.append(f"| {threads} | {' | '.join(cells)} | {_ratio(found['stock_over_sluice'], mixed['wanted'])} |")
    seconds, most = overlap["seconds"], overlap["at_most"]
    beside = _ms(seconds["beside"]) if seconds["beside"] <= most else f"**{_ms(seconds['beside'])}**"
    lines += ["", f"{overlap['date']}, record `optimizer_overlap.json`.", ""]
    lines += [
        "| update, ms | sum | in turns | beside | wanted, at most | in turns ÷ beside | k |",
        "|---|---|---|---|---|---|---|",
    ]
    cells = [_ms(seconds[name]) for name in ("update", "sum", "serial")] + [beside, _ms(most)]
    cells += [_ratio(overlap["serial_over_beside"], LEAST_OF_SERIAL, by="median"), f"{overlap['k']}"]
    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _ratio(found: Mapping[str, float], least: float, by: str = "low") -> str:
    """A ratio with its interval: bold where what is judged is below what is wanted."""
    told = f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
    return told if found[by] >= least else f"**{told}**"


def of_records() -> str:
    """The tables of the committed records."""
    names = ("optimizer", "optimizer_mixed", "optimizer_overlap")
    return tables(*(json.loads((records.FOLDER / f"{name}.json").read_text()) for name in names))


def main() -> None:
    """Writes the page."""
    text = PAGE.read_text()
    PAGE.write_text(BETWEEN.sub(lambda _: of_records(), text))


if __name__ == "__main__":
    main()
