"""One exchange after the other, exchanges in groups, and PipeMoE's form, in turns, over skews and links.

single     one exchange after the other, with its best n of those that are screened
grouped    the same layer with a chunk's return and a later chunk's dispatch under way together, with its best n
pipemoe    chunks of tokens, weight gradients chunk by chunk, n of 2, 4, 8: PipeMoE's form without reuse
adaptive   what the tuner settles on, which may be either

The best n of single, grouped and pipemoe is screened first; then all four run in fresh rounds, each step after one of
its own kind that does not count. Next to the ratios stands what the simulator says of a machine that is calibrated in
the same run. Adaptive may take at most 1.03 of single, and of pipemoe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import GEMM, RANKS, SEED, Bench, Option, links, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/tuner.md"
# T, M, H, E, K: steps of 20 to 500 ms on one core.
SHAPES = {"long": (2048, 128, 256, 8, 2), "square": (2048, 256, 512, 4, 2), "fine": (1024, 256, 128, 16, 4)}
SHAPES["smoke"] = (64, 32, 64, 4, 2)
OPTIONS = {
    "links": links("none", "1gbit", "0.4gbit", "0.2gbit", "0.1gbit"),
    "shapes": Option(["long", "square", "fine"], choices=list(SHAPES)),
    "skews": Option([1.0, 1.6, 2.0], "rows of the fullest rank over the mean"),
    "ranks": RANKS,
    "gemm": GEMM,
    "seed": SEED,
    "screen": Option(3, "steps of each n"),
    "pairs": pairs(12),
    "steps": Option(60, "of the adaptive tuner, or until it has settled"),
    "calibrate_s": Option(4.0),
}
SMOKE = {"links": ["none"], "shapes": ["smoke"], "skews": [1.6], "pairs": 2, "steps": 20, "calibrate_s": 0.2}
MOST = 1.03  # of adaptive over every other side
PAIRS = (("grouped", "single"), ("adaptive", "single"), ("adaptive", "pipemoe"))


def run(bench: Bench) -> list[str]:
    options, cells = bench.options, []
    for link in options.links:
        cases = [
            {"shape": name, "skew": skew, "link": link, **dict(zip("TMHEK", SHAPES[name], strict=True))}
            for name in options.shapes
            for skew in options.skews
        ]
        plan = {"cases": cases, **bench.picked("pairs", "screen", "steps", "seed", "gemm", "calibrate_s")}
        for cell in bench.ask(HERE / "grouping_rank.py", plan, ranks=options.ranks, link=link, title=link):
            cell |= {f"{a}_over_{b}": pair_ratios(cell["seconds"][a], cell["seconds"][b])["median"] for a, b in PAIRS}
            told = ", ".join(f"{a} / {b} {cell[f'{a}_over_{b}']:.3f}" for a, b in PAIRS)
            bench.line(
                f"{cell['shape']} {link} x{cell['skew']:g}: {told} (predicted {cell['predicted']:.3f}); n {cell['n']}"
            )
            cells.append(cell)
        bench.keep([row(cell) for cell in cells], cells)
    names = [f"{a}_over_{b}" for a, b in PAIRS[1:]]
    slow = [(cell, name) for cell in cells for name in names if cell[name] > MOST]
    return [f"{cell['shape']} {cell['link']} x{cell['skew']:g}: {name} {cell[name]:.3f}" for cell, name in slow]


def row(cell: dict[str, Any]) -> dict[str, Any]:
    names = ("shape", "skew", "link", "predicted", *(f"{a}_over_{b}" for a, b in PAIRS))
    return {name: cell[name] for name in names}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    told = []
    for run in runs:
        rows, groups = records.rows_of(run), {}
        for each in rows:
            groups.setdefault((each["link"], each["skew"]), []).append(each)
        columns = ("grouped_over_single", "predicted", "adaptive_over_single", "adaptive_over_pipemoe")
        lines = []
        for (link, skew), among in groups.items():
            cells = [
                ", ".join(pages.bold(f"{x[name]:.2f}", "adaptive" in name and x[name] > MOST) for x in among)
                for name in columns
            ]
            lines.append([f"{link}, {skew:g}", *cells])
        shapes = ", ".join(dict.fromkeys(each["shape"] for each in rows))
        heads = [f"link, skew ({shapes})", "groups over one after the other", "predicted"]
        heads += ["the tuner's choice over one after the other", "over PipeMoE's form"]
        told.append(f"{pages.said(run)}\n\n{pages.table(heads, lines)}")
    return {"cells": "\n\n".join(told)}
