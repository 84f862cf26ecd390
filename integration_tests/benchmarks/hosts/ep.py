# SPDX-License-Identifier: Apache-2.0
"""transformers' expert parallelism: Sluice against stock `all_to_all` with grouped_mm, in turns, over shaped links.

A cell is balanced if communication takes between half and twice as long as computation. There the gain can be largest,
and a speed-up of at least 1.5 is wanted.
"""

from integration_tests.benchmarks.hosts import compare
from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import Bench, Option

PAGE = "benchmarks/expert-parallelism.md"
LEAST_SPEEDUP = 1.5
# Widths are scaled so that a cell takes seconds.
SHAPES = {
    "mixtral": {"T": 1024, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True},
    "qwen3": {"T": 512, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True},
    "deepseek": {"T": 512, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True},
    "tiny": {"T": 256, "M": 256, "H": 256, "E": 8, "K": 2, "gated": True},
    "smoke": {"T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True},
}
OPTIONS = {
    **compare.options(SHAPES, "none", "4gbit", "1gbit", "0.4gbit"),
    "deduplicate": Option(False, "Sluice sends a token once to each rank"),
}
SMOKE = compare.SMOKE


def missed(line: compare.Line) -> list[str]:
    said, gain = compare.slower(line), line["speedup"]["median"]
    if line["is_balanced"] and gain < LEAST_SPEEDUP:
        said.append(f"{gain:.2f} x stock where communication takes about as long as computation, wanted 1.5")
    return said


def run(bench: Bench) -> list[str]:
    return compare.run(bench, "ep_rank.py", SHAPES, missed, deduplicate=bench.options.deduplicate)


def tables(runs: list[compare.Line]) -> dict[str, str]:
    """The speed-up of each cell; balanced cells are bold."""

    def cell(line: compare.Line) -> str:
        return pages.bold(f"{line['speedup']['median']:.2f}", line["is_balanced"])

    told = (f"{pages.said(run)}\n\n{pages.by_link(records.rows_of(run), cell)}" for run in runs)
    return {"cells": "\n\n".join(told)}
