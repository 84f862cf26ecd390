"""Experts blocks that nobody chose: cells drawn from all families of transformers, beside grouped_mm and dense GEMMs.

    .venv/bin/python -m integration_tests.benchmarks.drawn [--cells 40] [--seed 1] [--rounds 3] [--cell-seconds 300]
        [--families NAME ...] [--dtypes float32] [--list] [--check]

A cell is a family at its published widths over 2 or 4, a number of tokens, threads and a dtype (families.py); its
gradients are fresh in each step, as torch's optimizers leave them. Sides run in turns. A cell whose upper quartile
against grouped_mm stays below 1.0 is tried again, three times in all. A cell ends with the round in which its seconds
are over. Without AVX-512 torch multiplies bf16 in plain loops, minutes for each: `--dtypes float32` draws none.

Ends with the ten worst against grouped_mm and against the dense product of the same flops. --check: exit code 1 where
a cell stayed below.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.drawn.families import DTYPES, Cell, drawn, families, make_module
from integration_tests.benchmarks.experts.experts import Dense, step
from integration_tests.benchmarks.experts.experts_block import Shape, make_rows, seconds
from integration_tests.benchmarks.measuring import records
from integration_tests.benchmarks.measuring.stats import pair_ratios

LEAST, TRIES, WORST = 1.0, 3, 10


def run_cell(cell: Cell, rounds: int, most_seconds: float) -> dict[str, Any]:
    """Ratios of one cell; an implementation that refuses the block is named in its place.

    most_seconds: then the round that has begun is the last, also where nothing but the one that warms up has run.
    """
    end = time.monotonic() + most_seconds
    torch.set_num_threads(cell.threads)
    dtype = getattr(torch, cell.dtype)
    shape = Shape(*cell.widths, cell.family.experts, cell.family.top_k)
    module, rows = make_module(cell), make_rows(shape, cell.tokens, dtype)
    dense = Dense(shape, cell.tokens, dtype, cell.family.gated)
    record: dict[str, Any] = {"cell": cell.name, "tries": 0}
    for _ in range(TRIES):
        record["tries"] += 1
        times: dict[str, list[float]] = {"sluice": [], "grouped_mm": [], "dense": []}
        for number in range(rounds + 1):
            if number > 0 and time.monotonic() > end:
                break
            sides = ["sluice", "grouped_mm"] if number % 2 else ["grouped_mm", "sluice"]
            for side in sides:
                try:
                    step(module, side, rows, False)  # each follows one of its own kind
                    took = sum(step(module, side, rows, False))
                except Exception as error:
                    record["refused"] = {side: f"{type(error).__name__}: {error}"[:300]}
                    return record
                times[side].append(took)
            times["dense"].append(seconds(dense.forward)[0] + seconds(dense.backward)[0])
        counted = {side: took[1:] or took for side, took in times.items()}  # the first warms up
        record["rounds"] = len(counted["dense"])
        record["of_grouped_mm"] = pair_ratios(counted["grouped_mm"], counted["sluice"])
        record["of_dense"] = pair_ratios(counted["dense"], counted["sluice"])
        if record["of_grouped_mm"]["q3"] >= LEAST or time.monotonic() > end:
            break
    record["computed_by"] = sluice.stats(module)["computed_by"]
    return record


def verdicts(found: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The worst cells in lines, and whether none stayed below."""
    measured = [record for record in found if "of_grouped_mm" in record]
    lines = []
    for key, words in (("of_grouped_mm", "times as fast as grouped_mm"), ("of_dense", "of a dense product")):
        lines.append(f"the worst, {words}: median [quartiles]")
        for record in sorted(measured, key=lambda record: record[key]["median"])[:WORST]:
            ratio = record[key]
            lines.append(
                f"  {ratio['median']:5.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]  {record['cell']}"
                f"{'' if record['computed_by'] == 'sluice' else ' (its own functions)'}"
            )
    below = [record for record in measured if record["of_grouped_mm"]["q3"] < LEAST]
    lines += [f"below {LEAST} in {TRIES} tries: {record['cell']}" for record in below]
    refused = [record for record in found if "refused" in record]
    lines += [f"refused: {record['cell']}: {record['refused']}" for record in refused]
    medians = sorted(record["of_grouped_mm"]["median"] for record in measured)
    if medians:
        lines.append(
            f"{len(measured)} cells, median {medians[len(medians) // 2]:.2f} of grouped_mm, {len(below)} below {LEAST}"
        )
    return lines, bool(measured) and not below


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell-seconds", type=float, default=300, help="that a cell takes, about (%(default)s)")
    parser.add_argument("--most-tokens", type=int, default=4096, help="leave out cells of more")
    parser.add_argument("--families", nargs="+", default=[], help="of these alone, such as lfm2_moe")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--list", action="store_true", help="show what is drawn, and measure nothing")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a cell stayed below grouped_mm")
    parser.add_argument("--record", type=Path, default=records.FOLDER / "drawn.json")
    options = parser.parse_args()
    every = drawn(options.cells, options.seed, options.families, options.dtypes)
    chosen = [cell for cell in every if cell.tokens <= options.most_tokens]
    known, others = families()
    print(f"{len(known)} families; without a block by their defaults: {', '.join(others)}", flush=True)
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    found: list[dict[str, Any]] = []
    for cell in chosen:
        found.append(run_cell(cell, options.rounds, options.cell_seconds))
        ratios = [f"{key} {found[-1][key]['median']:.2f}" for key in ("of_grouped_mm", "of_dense") if key in found[-1]]
        print(f"{cell.name}: {', '.join(ratios) or found[-1]['refused']}", flush=True)
        sluice.give_back()
        records.write(options.record, {"seed": options.seed, "cells": found})  # what is done is kept
    lines, good = verdicts(found)
    print("\n".join(lines))
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
