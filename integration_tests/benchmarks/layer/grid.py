"""Runs the committed list of cells (grid_cells.py) and fails only where Sluice is clearly slower than stock.

    grid [--pairs 20] [--only SUBSTRING] [--resume] [--most CELLS]

In each cell at least 20 interleaved pairs; a cell fails if the *lower quartile* of time Sluice / stock is above 1.03.
All cells go to one record, written after every cell, so that a run that is cut loses one cell, and cells that are not
asked for keep their rows; --resume goes on with those that the record lacks, --most stops after so many, --list names
them. The raw file has the cells of the last run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from integration_tests.benchmarks.layer.cell_runs import Settings, run_cells
from integration_tests.benchmarks.layer.grid_cells import CELLS
from integration_tests.benchmarks.measuring import quiet, records, sluice_side, stolen

LEAST_PAIRS = 20
LIMIT = 1.03
MOST_CELLS = 60


def is_slower(record: dict) -> bool:
    """Whether Sluice is clearly slower than stock in this cell."""
    return "sluice_over_stock" in record and record["sluice_over_stock"]["q1"] > LIMIT


def kept(file: Path) -> dict[str, dict]:
    """Cells of the list that an earlier run measured, by name: their rows."""
    if not file.exists():
        return {}
    rows = records.rows_of(json.loads(file.read_text()).get("cells", []))
    names = {c.name for c in CELLS}
    found = {record["cell"]["name"]: record for record in rows}
    return {name: record for name, record in found.items() if name in names}


def row(record: dict) -> dict:
    """What the table has of a cell; of a row it is the same. The name has link and shape."""
    if "sides" not in record:
        return record
    found = {"cell": {"name": record["cell"]["name"]}}
    found |= {f"{side}_s": sides["wall"]["median"] for side, sides in record["sides"].items()}
    if "sluice_over_stock" in record:
        found["sluice_over_stock"] = record["sluice_over_stock"]
        found["reached_over_possible"] = record["reached_over_possible"]
        found["n"] = max(stats["chunks"] for stats in record["sluice_stats"])
    return found


def write(file: Path, found: dict[str, dict]) -> list[str]:
    """Write all cells in the order of the list; return the names of those in which Sluice is slower."""
    ordered = [found[c.name] for c in CELLS if c.name in found]
    slower = [record["cell"]["name"] for record in ordered if is_slower(record)]
    measured = [record for record in ordered if "sides" in record]
    rows = {"cells": [row(record) for record in ordered]}
    records.write(file, {"limit": LIMIT, "slower": slower, "cells": measured}, rows)
    return slower


def main() -> int:
    """Run, print one line per cell, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the names of what would be measured and stop")
    parser.add_argument("--resume", action="store_true", help="only cells that the record lacks")
    parser.add_argument("--most", type=int, default=MOST_CELLS, help="stop after so many cells")
    parser.add_argument("--stock-only", action="store_true")
    parser.add_argument("--record", type=Path, default=records.FOLDER / "grid.json")
    quiet.arguments(parser)
    stolen.arguments(parser)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    assert len(CELLS) <= MOST_CELLS
    assert len({c.name for c in CELLS}) == len(CELLS)
    found = kept(args.record)  # what is not measured now stays
    cells = [c for c in CELLS if args.only in c.name and not (args.resume and c.name in found)][: args.most]
    if args.list:
        print("\n".join(c.name for c in cells))
        return 0
    if args.pairs < LEAST_PAIRS and not args.stock_only:
        parser.error(f"at least {LEAST_PAIRS} pairs are needed for a quartile that means something")
    why = "" if args.stock_only else sluice_side.missing()
    if why:
        print(f"{why} Use --stock-only to measure stock alone.", file=sys.stderr)
        return 3

    began = time.monotonic()

    def on_record(record: dict) -> None:
        nonlocal began
        name, stock = record["cell"]["name"], record["sides"]["stock"]["wall"]["median"]
        found[name] = record
        write(args.record, found)
        now = time.monotonic()
        text = f"{name:<58} in {now - began:4.0f} s  stock {stock * 1e3:7.1f} ms"
        began = now
        if "sluice_over_stock" in record:
            ratio = record["sluice_over_stock"]
            text += f"  sluice / stock {ratio['median']:.2f} [{ratio['q1']:.2f} .. {ratio['q3']:.2f}]"
            text += "  SLOWER" if is_slower(record) else ""
        print(text, flush=True)

    settings = Settings(
        pairs=args.pairs,
        least_pairs=args.pairs,
        seed=args.seed,
        memory=False,
        one_chunk=False,
        stock_only=args.stock_only,
        verbose=args.verbose,
        quiet_gflops=args.quiet,
        quiet_timeout_s=args.quiet_timeout,
        most_stolen=args.stolen,
    )
    status = run_cells(cells, settings, on_record)
    slower = write(args.record, found)
    print(f"{len(found)} of {len(CELLS)} cells measured, {len(slower)} slower than stock", *slower, sep="\n  ")
    return status or (1 if slower else 0)


if __name__ == "__main__":
    sys.exit(main())
