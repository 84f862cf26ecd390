"""Peaks under a memory budget: a model of several layers in one context, or one layer with a hot expert.

The peak must stay within the budget, and the output within 1e-4 of a run without a budget in one chunk. --hot 10: one
expert gets ten times the rows of each other expert; --hot all: every row. Without --budget it is half of what T_DI and
T_M of all layers take in f32 under balanced routing, and what `gemm` "auto" plans for packing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice import config

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import RANKS, Bench, Option

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/memory.md"
MOST_DIFFERENCE = 1e-4  # of the largest output: the same GEMMs, cut and added in another order
MIB = 1 << 20
PACKING = 12 * MIB


def bytes_of(text: str) -> int:
    """A "memory_budget" of a config in bytes."""
    try:
        return config.parse({"memory_budget": int(text) if text.isdigit() else text})[1].memory_budget or 0
    except config.ConfigError as error:
        raise ValueError(str(error)) from error


OPTIONS = {
    **{name: Option(value) for name, value in {"T": 2048, "M": 512, "H": 2048, "E": 8, "K": 1}.items()},
    "layers": Option(4),
    "hot": Option(None, 'rows of one expert over those of each other one, or "all"'),
    "budget": Option(None, "bytes, or text such as 24MiB", type=bytes_of),
    "rounds": Option(6),
    "ranks": RANKS,
    "link": Option("0.1gbit"),
    "gemm": Option("auto"),
    "seed": Option(1),
}
SMOKE = {"T": 256, "M": 32, "H": 64, "hot": "10", "layers": 2, "rounds": 1, "link": "none"}


def row(options: Any, found: dict[str, Any]) -> dict[str, Any]:
    hot = {None: "balanced", "all": "all rows to one expert"}.get(options.hot, f"one expert {options.hot} times")
    what = f"{options.layers} layer{'s' * (options.layers > 1)} of M {options.M}, {hot}"
    names = ("budget_bytes", "peak_bytes", "free_peak_bytes", "n", "largest_difference")
    return {"what": what, **{name: found[name] for name in names}}


def run(bench: Bench) -> list[str]:
    options = bench.options
    if options.hot not in (None, "all") and not options.hot.isdigit():
        bench.refuse(f'--hot is {options.hot!r}; it must be a whole number or "all"')
    rows = options.T * options.K
    budget = options.budget or options.layers * rows * (options.M + options.H) * 4 // 2 + PACKING
    plan = {**bench.picked(*"TMHEK", "layers", "hot", "rounds", "gemm", "seed"), "budget": budget}
    found = bench.ask(HERE / "budget_rank.py", plan, ranks=options.ranks, link=options.link)
    told = row(options, found)
    bench.line("  ".join(f"{key} {value}" for key, value in told.items()))
    bench.keep([told], found)
    said = [] if found["peak_bytes"] <= budget else [f"a peak of {found['peak_bytes']} bytes, budget {budget}"]
    is_same = found["largest_difference"] <= MOST_DIFFERENCE
    return said + ([] if is_same else [f"outputs differ by {found['largest_difference']:.1e}"])


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(run: dict[str, Any]) -> list[str]:
        (row,) = records.rows_of(run)
        sizes = [f"{row[name] / MIB:.1f}" for name in ("budget_bytes", "peak_bytes", "free_peak_bytes")]
        return [row["what"], f"`{run['command']}`", *sizes, str(row["n"])]

    heads = ["what", "command", "budget, MiB", "peak", "peak without, n = 1", "n"]
    return {"peaks": f"{pages.made(runs)}\n\n{pages.table(heads, map(cells, runs))}"}
