"""Writes which record comes from which processor into docs/benchmarks/README.md, from what the records say.

    .venv/bin/python -m integration_tests.benchmarks.records_page

A house test compares page and records. A record of another processor is refused until MACHINES names that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import records

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "README.md"
BEGIN, END = "<!-- records by processor: written by records_page -->", "<!-- end of records by processor -->"
BETWEEN = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?=\n{re.escape(END)})", re.DOTALL)
_AVX512, _BF16, _AMX = {"avx2", "avx512f"}, {"avx512_bf16"}, {"amx_bf16", "amx_tile"}
# Name on the pages: maker, as records say it, instructions for people, and as records list them.
MACHINES = {
    "A": ("Intel", "AVX-512", _AVX512),
    "B": ("Intel", "AVX-512, AVX512-BF16, AMX", _AVX512 | _BF16 | _AMX),
    "C": ("AMD", "AVX-512, AVX512-BF16", _AVX512 | _BF16),
    "D": ("AMD", "AVX2", {"avx2"}),
}


def machine_of(found: Mapping[str, Any]) -> str:
    """The name of the machine that a record was made on."""
    for name, (maker, _, isa) in MACHINES.items():
        if found["cpu"].startswith(maker) and set(found["isa"]) == isa:
            return name
    raise LookupError(f"records_page.MACHINES has no {found['cpu']} with {', '.join(found['isa'])}")


def names_of(machines: Mapping[str, str], machine: str) -> list[str]:
    """Records of a machine; those of one benchmark together where all of them are its own. machines: by record."""
    families: dict[str, list[str]] = {}
    for name in sorted(machines):
        families.setdefault(name.partition("-")[0], []).append(name)
    found = []
    for family, names in families.items():
        own = [name for name in names if machines[name] == machine]
        found += [f"{family}*"] if len(own) == len(names) > 1 else own
    return found


def tables(machines: Mapping[str, str]) -> str:
    """What stands between the marks. machines: by record."""
    lines = ["| name here | processor | instructions | records |", "|---|---|---|---|"]
    for machine, (maker, words, _) in MACHINES.items():
        names = ", ".join(f"`{name}`" for name in names_of(machines, machine)) or "none yet"
        lines.append(f"| {machine} | {maker} | {words} | {names} |")
    return "\n".join(lines)


def by_record() -> dict[str, str]:
    """The machine of each committed record; raw files, which are not, are left out."""
    files = [file for file in records.FOLDER.glob("*.json") if not file.name.endswith(".raw.json")]
    return {file.stem: machine_of(json.loads(file.read_text())["machine"]) for file in files}


def main() -> None:
    PAGE.write_text(BETWEEN.sub(lambda _: tables(by_record()), PAGE.read_text()))


if __name__ == "__main__":
    main()
