#!/usr/bin/env python3
"""Runs the committed list of cells (grid_cells.py) and fails only where Sluice is clearly slower than stock.

    grid.py [--pairs 20] [--only SUBSTRING]

In each cell at least 20 interleaved pairs; a cell fails if the *lower quartile* of time Sluice / stock is above 1.03.
All records go to one file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integration_tests.benchmarks import quiet, sluice_side
from integration_tests.benchmarks.cell_runs import Settings, run_cells
from integration_tests.benchmarks.grid_cells import CELLS

LEAST_PAIRS = 20
LIMIT = 1.03
MOST_CELLS = 60


def main() -> int:
    """Run, print one line per cell, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--stock-only", action="store_true")
    parser.add_argument("--record", type=Path, default=Path(__file__).resolve().parent / "records" / "grid.json")
    quiet.arguments(parser)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    assert len(CELLS) <= MOST_CELLS
    assert len({c.name for c in CELLS}) == len(CELLS)
    cells = [c for c in CELLS if args.only in c.name]
    if args.list:
        print("\n".join(c.name for c in cells))
        return 0
    if args.pairs < LEAST_PAIRS and not args.stock_only:
        parser.error(f"at least {LEAST_PAIRS} pairs are needed for a quartile that means something")
    why = "" if args.stock_only else sluice_side.missing()
    if why:
        print(f"{why} Use --stock-only to measure stock alone.", file=sys.stderr)
        return 3
    records: list[dict] = []
    slower: list[str] = []

    def on_record(record: dict) -> None:
        records.append(record)
        name, stock = record["cell"]["name"], record["sides"]["stock"]["wall"]["median"]
        text = f"{name:<58} stock {stock * 1e3:7.1f} ms"
        if "sluice_over_stock" in record:
            ratio = record["sluice_over_stock"]
            if ratio["q1"] > LIMIT:
                slower.append(name)
            text += f"  sluice / stock {ratio['median']:.2f} [{ratio['q1']:.2f} .. {ratio['q3']:.2f}]"
            text += "  SLOWER" if ratio["q1"] > LIMIT else ""
        print(text, flush=True)

    settings = Settings(
        pairs=args.pairs,
        least_pairs=args.pairs,
        seed=args.seed,
        memory=False,
        stock_only=args.stock_only,
        verbose=args.verbose,
        quiet_gflops=args.quiet,
        patience_s=args.patience,
    )
    status = run_cells(cells, settings, on_record)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    args.record.write_text(json.dumps({"limit": LIMIT, "slower": slower, "cells": records}, indent=1) + "\n")
    print(f"{len(records)} of {len(cells)} cells measured, {len(slower)} slower than stock", *slower, sep="\n  ")
    return status or (1 if slower else 0)


if __name__ == "__main__":
    sys.exit(main())
