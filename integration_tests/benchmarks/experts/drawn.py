"""Experts blocks drawn from all model families of transformers, against grouped_mm and dense GEMMs.

A cell is a family at its published widths over 2 or 4, a number of tokens, threads and a dtype (families.py); its
gradients are fresh in each step. Sides run in turns. A cell whose upper quartile against grouped_mm stays below 1.0 is
tried again, three times in all. A cell ends with the round in which its seconds are over. Without AVX-512 torch
multiplies bf16 in plain loops, minutes for each cell: `--dtypes float32` draws none of them.
"""

from __future__ import annotations

import time
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.experts.experts import Dense, step
from integration_tests.benchmarks.experts.experts_block import Shape, make_rows, seconds
from integration_tests.benchmarks.experts.families import DTYPES, Cell, drawn, families, make_module
from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.stats import pair_ratios

PAGE = "benchmarks/experts.md"
OPTIONS = {
    "cells": Option(40),
    "seed": Option(1, "of the draw"),
    "rounds": Option(3),
    "cell_seconds": Option(300.0, "that a cell takes, about"),
    "most_tokens": Option(4096, "leave out cells of more"),
    "families": Option([], "of these alone, such as lfm2_moe"),
    "dtypes": Option(list(DTYPES), choices=DTYPES),
    "list": Option(False, "show what is drawn, and measure nothing"),
}
SMOKE = {
    "cells": 10,
    "rounds": 1,
    "cell_seconds": 1.0,
    "most_tokens": 64,
    "dtypes": ["float32"],
    "families": ["qwen3_moe"],
}
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


def run(bench: Bench) -> list[str]:
    options = bench.options
    every = drawn(options.cells, options.seed, options.families, options.dtypes)
    chosen = [cell for cell in every if cell.tokens <= options.most_tokens]
    known, others = families()
    bench.line(f"{len(known)} families; without a block by their defaults: {', '.join(others)}")
    if options.list:
        bench.line("\n".join(cell.name for cell in chosen))
        return []
    found: list[dict[str, Any]] = []
    for cell in chosen:
        found.append(run_cell(cell, options.rounds, options.cell_seconds))
        ratios = [f"{key} {found[-1][key]['median']:.2f}" for key in ("of_grouped_mm", "of_dense") if key in found[-1]]
        bench.line(f"{cell.name}: {', '.join(ratios) or found[-1]['refused']}")
        sluice.give_back()
        bench.keep([row(each) for each in found], found)
    return [
        f"{each['cell']}: {pages.spread(each['of_grouped_mm'])} of grouped_mm in {TRIES} tries"
        for each in found
        if "of_grouped_mm" in each and each["of_grouped_mm"]["q3"] < LEAST
    ]


def row(record: dict[str, Any]) -> dict[str, Any]:
    """The committed record of a cell."""
    if "refused" in record:
        return {"cell": record["cell"], "refused": next(iter(record["refused"]))}
    ratios = {name: record["of_grouped_mm"][name] for name in ("median", "q1", "q3")}
    return {"cell": record["cell"], "of_grouped_mm": ratios, "of_dense": record["of_dense"]["median"]}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Of each run how all cells did, and the worst."""
    told = []
    for run in runs:
        rows = records.rows_of(run)
        cells = sorted((row for row in rows if "refused" not in row), key=lambda row: row["of_grouped_mm"]["median"])
        below = sum(row["of_grouped_mm"]["q3"] < LEAST for row in cells)
        middle = cells[len(cells) // 2]["of_grouped_mm"]["median"]
        lines = [
            f"{len(cells)} cells, median {middle:.2f} of `grouped_mm`; {below} stayed below {LEAST}, and",
            f"{len(rows) - len(cells)} an implementation refused. The {WORST} worst:",
        ]
        worst = ([pages.spread(r["of_grouped_mm"]), f"{r['of_dense']:.2f}", r["cell"]] for r in cells[:WORST])
        heads = ["times as fast as `grouped_mm`", "of the dense product", "cell"]
        told += ["\n".join([pages.said(run), *lines]), pages.table(heads, worst)]
    return {"worst": "\n\n".join(told)}
