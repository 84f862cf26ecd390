# SPDX-License-Identifier: Apache-2.0
"""One MoE layer, forward and backward: Sluice and DeepSpeed in turns in one process group on the same data.

    layer --all                       the eight named cases; --cases NAME ... runs some of them
    layer --T 512 --M 256 --H 1024 --E 16 --K 2 --skew 5 --drop --link 0.2gbit --ranks 4 --dtype bfloat16

Marks: the speed-ups that the named cases must reach; a settled layer's peak memory is at most 1.1 times its slots and
saved tensors; and Sluice's peak is at most stock's peak times real rows over padded rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.layer.cells import NAMED, Cell
from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import LINK, QUIET_S, RANKS, STOLEN, Bench, Option, pairs
from integration_tests.benchmarks.measuring.stats import misses
from integration_tests.benchmarks.memory import memory

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/layer.md"
MOST_OVER_PARTS = 1.1
COMMON = {
    "seed": Option(1, "of tokens and weights"),
    "max_seconds": Option(120.0, "timed seconds per cell; at least 5 pairs are made"),
    "quiet_timeout": QUIET_S,
    "stolen": STOLEN,
    "option": Option([], "KEY=JSON of the ds_config key"),
}
OPTIONS = {
    "all": Option(False, "all named cases"),
    "cases": Option([], choices=[cell.name for cell in NAMED]),
    **{name: Option(value) for name, value in {"T": 2048, "M": 1024, "H": 4096, "E": 8, "K": 1}.items()},
    "skew": Option(1.0, "load of the first expert over the mean"),
    "drop": Option(False, "capacity 1.25 instead of no dropping"),
    "dtype": Option("float32", choices=("float32", "bfloat16")),
    "ranks": RANKS,
    "link": LINK,
    "pairs": pairs(10),
    **COMMON,
}
SMOKE = {"T": 64, "M": 32, "H": 64, "E": 4, "K": 2, "link": "none", "pairs": 1}


def measure(bench: Bench, cells: Sequence[Cell], on_record: Callable[[dict[str, Any]], None], **settings: Any) -> None:
    """Measure all cells. Cells with the same ranks and link share a process group. settings: more of the plan."""
    options = bench.options
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.W, cell.link), []).append(cell)
    for (world, link), members in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            preload, note = memory.build_watch(Path(folder)) if settings["memory"] else (None, "")
            if note:
                bench.line(note)
            plan = {
                "cells": [cell.as_dict() for cell in members],
                "option": {key: json.loads(value) for key, _, value in (o.partition("=") for o in options.option)},
                "least_pairs": min(5, options.pairs),
                **bench.picked("pairs", "seed", "max_seconds", "quiet_timeout", "stolen"),
                **settings,
            }
            deadline_s = 300 + len(members) * (300 + 10 * options.max_seconds)
            more = {"deadline_s": deadline_s, "preload": preload, "on_found": on_record, "title": link}
            bench.ask(HERE / "layer_rank.py", plan, ranks=world, link=link, **more)


def memory_over_parts(record: dict[str, Any]) -> float:
    """Peak memory of a settled layer over its slots and saved tensors: the maximum over ranks."""
    return max(s["peak_bytes"] / (s["slot_bytes"] + s["saved_bytes"]) for s in record["sluice_stats"])


def memory_of_bound(record: dict[str, Any]) -> float | None:
    """Sluice's peak of allocated bytes over stock's peak times real rows / padded rows, on the rank with the most rows.
    None: stock's memory was not watched."""
    if "memory" not in record:
        return None
    received, padded = record["parts"]["rows_received"], record["parts"]["rows_padded"]
    fullest = max(range(len(received)), key=received.__getitem__)
    allowed = record["memory"][fullest]["stock"]["peak_bytes"] * received[fullest] / padded
    return record["sluice_stats"][fullest]["peak_bytes"] / allowed


def row(record: dict[str, Any]) -> dict[str, Any]:
    """The committed record of a cell."""
    cell, wall = record["cell"], {side: found["wall"]["median"] for side, found in record["sides"].items()}
    return {
        "name": cell["name"],
        "stock_s": wall["stock"],
        "possible": record["possible"],
        "speedup": {name: record["speedup"][name] for name in ("median", "q1", "q3")},
        "must_reach": cell["must_reach"],
        "one_chunk_over_chosen": record["one_chunk_over_chosen"]["median"],
        "must_pipeline": cell["must_pipeline"],
        "n": max(s["last_num_chunks"] for s in record["sluice_stats"]),
        "over_parts": memory_over_parts(record),
        "of_bound": memory_of_bound(record),
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The marks that a cell misses."""
    wanted = (
        ("x stock", row["speedup"]["median"], ">=", row.get("must_reach")),
        ("for one chunk over the chosen number", row["one_chunk_over_chosen"], ">=", row.get("must_pipeline")),
        ("of slots and saved tensors is the peak", row["over_parts"], "<=", MOST_OVER_PARTS),
        ("of stock's share of memory", row.get("of_bound"), "<=", 1.0),
    )
    return misses(row["name"], wanted)


def run(bench: Bench) -> list[str]:
    options = bench.options
    if options.all or options.cases:
        cells = [cell for cell in NAMED if options.all or cell.name in options.cases]
    else:
        shape = bench.picked("T", "M", "H", "E", "K", "skew", "drop", "dtype", "link")
        cells = [Cell("custom", W=options.ranks, **shape)]
    found: list[dict[str, Any]] = []

    def on_record(record: dict[str, Any]) -> None:
        bench.tell({"link": record["link"], **row(record), "outputs_differ": record["max_output_difference"]})
        found.append(record)
        bench.keep([row(each) for each in found], found)

    measure(bench, cells, on_record, memory=True, one_chunk=True)
    return [text for record in found for text in missed(row(record))]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        short = row["speedup"]["median"] < row["must_reach"]
        speedup = pages.bold(pages.spread(row["speedup"]), short)
        times = [f"{row['stock_s']:.2f} s", f"{row['possible']:.2f}", speedup, f"{row['must_reach']}"]
        memory = [f"{row[name]:.2f}" for name in ("one_chunk_over_chosen",)] + [str(row["n"])]
        return [row["name"], *times, *memory, f"{row['over_parts']:.2f}", f"{row['of_bound']:.2f}"]

    heads = ["case", "stock", "possible", "Sluice's speed-up", "wanted", "one chunk ÷ chosen", "n"]
    heads += ["peak ÷ (slots + saved)", "peak ÷ stock's × real rows"]
    named = [run for run in runs if {row["name"] for row in records.rows_of(run)} <= {cell.name for cell in NAMED}]
    return {"cases": pages.run_tables(named, heads, cells)}
