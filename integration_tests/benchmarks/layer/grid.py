# SPDX-License-Identifier: Apache-2.0
"""57 cells over every axis: a cell misses its mark only where Sluice is clearly slower than stock.

Each cell has at least 20 pairs. The mark is missed if the *lower quartile* of time Sluice / stock is above 1.03. The
record is written after every cell. --resume measures the cells that the record lacks; --most N stops after N cells.
"""

from typing import Any

from integration_tests.benchmarks.layer import layer
from integration_tests.benchmarks.layer.cells import Cell
from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import Bench, Option, pairs

# T 256-4096, M 256-1024, H 1024-4096, E 8-64, K 1 2 4 8; balanced, 5x and 10x skewed; drop and no-drop; 2 and 4 ranks;
# loopback and links of 4, 1, 0.4 and 0.2 Gbit/s; f32 and bf16. Every value appears in the list. Most cells are small,
# because the benchmark checks that Sluice is nowhere slower, and overhead is largest in small cells.
#      link       W   T     M     H     E   K  skew  drop   dtype
_ROWS = """
       1gbit      2   1024  512   2048  8   1  1     no     float32
       1gbit      2   1024  512   2048  8   1  1     yes    float32
       1gbit      2   1024  512   2048  8   1  5     no     float32
       1gbit      2   1024  512   2048  8   1  5     yes    float32
       1gbit      2   1024  512   1024  8   1  10    no     float32
       1gbit      2   256   256   1024  8   1  1     no     float32
       1gbit      2   256   256   1024  8   2  1     no     float32
       1gbit      2   256   256   1024  64  8  1     no     float32
       1gbit      2   512   1024  1024  16  1  1     yes    float32
       1gbit      2   512   512   4096  16  2  1     yes    float32
       1gbit      2   2048  256   1024  32  2  1     no     float32
       1gbit      2   2048  256   1024  32  4  5     yes    float32
       1gbit      2   4096  256   1024  64  1  1     no     float32
       1gbit      2   1024  512   2048  8   1  1     no     bfloat16
       1gbit      2   256   256   1024  8   1  1     yes    bfloat16
       1gbit      4   512   256   1024  8   1  1     no     float32
       1gbit      4   512   256   1024  16  2  5     no     float32
       1gbit      4   256   512   2048  64  4  1     yes    float32
       none       2   1024  512   2048  8   1  1     no     float32
       none       2   1024  512   2048  8   1  1     yes    float32
       none       2   1024  512   2048  8   2  5     yes    float32
       none       2   256   256   1024  8   1  1     no     float32
       none       2   256   256   1024  8   1  1     yes    float32
       none       2   256   256   1024  16  4  1     no     float32
       none       2   256   1024  1024  8   1  1     no     float32
       none       2   512   256   1024  64  2  1     yes    float32
       none       2   512   256   1024  64  8  1     no     float32
       none       2   2048  256   1024  8   1  10    no     float32
       none       2   1024  1024  4096  8   1  1     no     float32
       none       2   256   256   1024  8   1  1     no     bfloat16
       none       2   1024  512   2048  8   2  1     yes    bfloat16
       none       4   256   256   1024  8   1  1     no     float32
       none       4   512   512   1024  16  2  1     yes    float32
       4gbit      2   1024  512   2048  8   1  1     no     float32
       4gbit      2   1024  512   2048  8   1  1     yes    float32
       4gbit      2   256   256   1024  8   1  1     no     float32
       4gbit      2   4096  256   1024  16  1  1     yes    float32
       4gbit      2   512   1024  2048  8   2  5     no     float32
       4gbit      2   1024  512   1024  32  4  1     no     float32
       4gbit      2   512   512   2048  8   1  1     no     bfloat16
       4gbit      4   256   256   1024  32  2  10    yes    float32
       0.4gbit    2   1024  512   2048  8   1  1     no     float32
       0.4gbit    2   1024  512   2048  8   1  1     yes    float32
       0.4gbit    2   256   256   1024  8   1  1     no     float32
       0.4gbit    2   2048  256   1024  16  2  1     yes    float32
       0.4gbit    2   512   1024  4096  8   1  5     no     float32
       0.4gbit    2   512   256   1024  64  8  1     yes    float32
       0.4gbit    2   512   512   2048  8   2  1     no     bfloat16
       0.4gbit    4   256   256   1024  8   1  1     no     float32
       0.2gbit    2   1024  512   2048  8   1  1     no     float32
       0.2gbit    2   1024  512   2048  8   1  1     yes    float32
       0.2gbit    2   256   256   1024  8   1  1     no     float32
       0.2gbit    2   1024  256   1024  8   1  10    yes    float32
       0.2gbit    2   512   256   1024  32  4  1     no     float32
       0.2gbit    2   512   512   1024  16  1  5     no     float32
       0.2gbit    2   256   256   1024  8   1  1     yes    bfloat16
       0.2gbit    4   256   256   1024  16  1  1     yes    float32
"""


def _cell(row: str) -> Cell:
    link, W, T, M, H, E, K, skew, drop, dtype = row.split()
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    routing = f"{'drop' if drop == 'yes' else 'nodrop'}{'' if skew == '1' else f'-skew{skew}'}"
    name = f"{link}-w{W}-t{T}-m{M}-h{H}-e{E}-k{K}-{routing}-{short}"
    sizes = {name: int(value) for name, value in zip("WTMHEK", (W, T, M, H, E, K), strict=True)}
    return Cell(name, link, skew=float(skew), drop=drop == "yes", dtype=dtype, **sizes)


CELLS = [_cell(row) for row in _ROWS.strip().splitlines()]

PAGE = "benchmarks/layer.md"
LEAST_PAIRS, LIMIT = 20, 1.03
OPTIONS = {
    "only": Option("", "cells whose name contains this"),
    "resume": Option(False, "only cells that the record lacks"),
    "most": Option(len(CELLS), "stop after so many cells"),
    "pairs": pairs(LEAST_PAIRS),
    **layer.COMMON,
}
SMOKE = {"pairs": 1, "only": "smoke"}
TINY = Cell("smoke", "none", T=64, M=32, H=64, E=4, K=2)


def row(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a cell; its name contains link and shape."""
    found = {"name": record["cell"]["name"]}
    found["over_stock"] = {name: record["sluice_over_stock"][name] for name in ("median", "q1", "q3")}
    return found | {
        "reached": record["reached_over_possible"],
        "n": max(s["last_num_chunks"] for s in record["sluice_stats"]),
    }


def run(bench: Bench) -> list[str]:
    options = bench.options
    if options.pairs < LEAST_PAIRS and not options.smoke:
        bench.refuse(f"a quartile that means something needs at least {LEAST_PAIRS} pairs")
    every = [TINY] if options.smoke else CELLS
    found = {each["name"]: each for each in bench.kept()} if options.resume else {}
    raw: list[dict[str, Any]] = []

    def on_record(record: dict[str, Any]) -> None:
        name = record["cell"]["name"]
        raw.append(record)
        found[name] = row(record)
        bench.line(f"{name:<58} sluice / stock {pages.spread(found[name]['over_stock'])}")
        bench.keep([found[cell.name] for cell in every if cell.name in found], raw)

    wanted = [cell for cell in every if options.only in cell.name and cell.name not in found][: options.most]
    layer.measure(bench, wanted, on_record, memory=False, one_chunk=False)
    bench.line(f"{len(found)} of {len(every)} cells measured")
    slower = [each for each in found.values() if each["over_stock"]["q1"] > LIMIT]
    return [f"{each['name']}: {each['over_stock']['q1']:.2f} of stock's time at the lower quartile" for each in slower]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """The smallest and largest ratio of Sluice's time to stock's, by link and kind of cell."""

    def kind(cell: Cell) -> str:
        return "bf16" if cell.dtype == "bfloat16" else "f32, balanced" if cell.skew == 1 else "f32, skewed"

    def told(rows: list[dict[str, Any]]) -> str:
        ratios = {row["name"]: row["over_stock"]["median"] for row in rows}
        kinds, lines = ("f32, balanced", "f32, skewed", "bf16"), []
        for link in ("none", "4gbit", "1gbit", "0.4gbit", "0.2gbit"):
            cells = [link]
            for what in kinds:
                among = [ratios[c.name] for c in CELLS if c.link == link and kind(c) == what and c.name in ratios]
                cells.append(f"{min(among):.2f} to {max(among):.2f} ({len(among)})" if among else "")
            lines.append(cells)
        return pages.table(["link", *kinds], lines)

    return {"cells": pages.each_run(runs, told)}
