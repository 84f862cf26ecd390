# SPDX-License-Identifier: Apache-2.0
"""Compares a host's MoE layer with the same layer on Sluice, in turns, over shaped links: used by megatron, autoep, ep.

Each cell is one layer, forward and backward, with fresh gradients. The possible speed-up is stock's time over the sum
over forward and backward of max(communication, computation). Both are measured separately in the same run, for the rows
that the layer really sends.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import RANKS, Bench, Option, links, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

HERE = Path(__file__).resolve().parent
MOST_SLOWER = 1.03  # if nothing can overlap (grid.py)
LEAST_OF_POSSIBLE = 0.9  # this part of the possible speed-up is wanted if a mark is above the possible speed-up
SMOKE = {"links": ["none"], "pairs": 2, "shapes": ["smoke"]}

Shapes = Mapping[str, Mapping[str, Any]]
Line = dict[str, Any]


def options(shapes: Shapes, *default_links: str) -> dict[str, Option]:
    return {
        "links": links(*default_links),
        "shapes": Option([name for name in shapes if name != "smoke"], choices=list(shapes)),
        "dtypes": Option(["float32"], choices=("float32", "bfloat16")),
        "ranks": RANKS,
        "pairs": pairs(8),
        "minutes": Option(8.0, "for all cells; each has three pairs in any case"),
    }


def show(line: Line) -> str:
    """A line of the table."""
    stock, ours, gain = line["stock"], line["sluice"], line["speedup"]
    return (
        f"{line['name']:<9} {line['dtype']:<9} {line['link']:>8}  stock {1000 * stock['median']:6.0f} ms  "
        f"Sluice {1000 * ours['median']:6.0f} ms with {line['chunks']} chunks  "
        f"{gain['median']:.2f}x [{gain['q1']:.2f} .. {gain['q3']:.2f}] of {line['possible']:.2f} possible  "
        f"outputs differ by {line['difference']:.1e}"
    )


def slower(line: Line) -> list[str]:
    """The mark of every cell: at most 3 % slower than stock in the fastest quarter of the pairs."""
    over = 1 / line["speedup"]["q3"]
    return [f"slower than stock: {over:.2f} of its time in the best quarter of pairs"] if over > MOST_SLOWER else []


def missed(line: Line) -> list[str]:
    """The missed marks of a cell: faster than stock over every shaped link, and the cell's "must_reach" for its link if
    that is possible."""
    said, gain, wanted = slower(line), line["speedup"]["median"], line.get("must_reach")
    if wanted is not None and line["possible"] < wanted:
        wanted = LEAST_OF_POSSIBLE * line["possible"]
    if wanted is not None and gain < wanted:
        said.append(f"{gain:.2f} x stock, wanted {wanted:.3g}")
    if line["link"] != "none" and gain <= 1.0:
        said.append(f"{gain:.2f} x stock over a shaped link, wanted more than 1")
    return said


def cells_of(options: Any, shapes: Shapes, more: Mapping[str, Any]) -> dict[str, list[Line]]:
    """The cells by link. A shape with its own "links" has cells only for these and for "none"."""
    found: dict[str, list[Line]] = {}
    for link in options.links:
        for name, dtype in ((name, dtype) for name in options.shapes for dtype in options.dtypes):
            shape = dict(shapes[name])
            own, marks = shape.pop("links", None), shape.pop("must_reach", {})
            if own is None or link in own or link == "none":
                cell = {"name": name, "link": link, "dtype": dtype, "ranks": options.ranks, **shape, **more}
                found.setdefault(link, []).append({**cell, "must_reach": marks.get(link)})
    return found


def row(line: Line) -> Line:
    """The record of a cell."""
    names = ("name", "link", "dtype", "ranks", "speedup", "possible", "chunks", "must_reach", "is_balanced")
    found = {name: line[name] for name in names if line.get(name) is not None}
    found["speedup"] = {name: line["speedup"][name] for name in ("median", "q1", "q3")}
    return found | {"stock_s": line["stock"]["median"], "sluice_s": line["sluice"]["median"]}


def run(
    bench: Bench, program: str, shapes: Shapes, marks: Callable[[Line], list[str]] = missed, **more: Any
) -> list[str]:
    """Measures all cells; returns a line for each missed mark. program: run by the ranks. more: fields of all cells."""
    options, lines = bench.options, []
    cells = cells_of(options, shapes, more)
    until, left = time.monotonic() + 60 * options.minutes, sum(map(len, cells.values()))
    for link, of_link in cells.items():
        seconds = (until - time.monotonic()) * len(of_link) / left
        left -= len(of_link)
        plan = {"cells": of_link, "pairs": options.pairs, "seconds": seconds}
        for line in bench.ask(HERE / program, plan, ranks=options.ranks, link=link, title=link):
            stock, ours = line["wall_s"]["stock"], line["wall_s"]["sluice"]
            line |= {"speedup": pair_ratios(stock, ours), "stock": quartiles(stock), "sluice": quartiles(ours)}
            line["possible"] = line["stock"]["median"] / line["possible_s"]
            compute = line["forward_compute_s"] + line["backward_compute_s"]
            line["is_balanced"] = 0.5 <= 2 * line["comm_per_pass_s"] / compute <= 2.0
            bench.line(show(line))
            lines.append(line)
        bench.keep([row(line) for line in lines], lines)
    return [f"{line['name']} {line['dtype']} {line['link']}: {text}" for line in lines for text in marks(line)]


def tables(runs: list[Line]) -> dict[str, str]:
    """The speed-up of each cell, and the possible speed-up."""

    def cell(line: Line) -> str:
        return f"{pages.bold(pages.spread(line['speedup']), bool(missed(line)))} of {line['possible']:.2f}"

    told = (f"{pages.said(run)}\n\n{pages.by_link(records.rows_of(run), cell)}" for run in runs)
    return {"cells": "\n\n".join(told)}
