# SPDX-License-Identifier: Apache-2.0
"""Compares a host's MoE layer with the same layer on Sluice, in turns, over shaped links: used by megatron, autoep, ep.

Each cell is one layer, forward and backward, with fresh gradients. The possible speed-up is stock's time over the sum
over forward and backward of max(communication, computation). Both are measured separately in the same run, for the rows
that the layer really sends.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.layer.cells import NAMED
from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import RANKS, Bench, Option, links, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

HERE = Path(__file__).resolve().parent
MOST_SLOWER = 1.03  # if nothing can overlap (grid.py)
LEAST_IF_BALANCED = 1.5
LEAST_OF_POSSIBLE = 0.9  # this part of the possible speed-up is wanted if a mark is above the possible speed-up

Shapes = Mapping[str, Mapping[str, Any]]
Line = dict[str, Any]


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


def gain_of_possible(line: Line) -> str:
    """The speed-up of a cell, and the possible speed-up."""
    return f"{pages.bold(pages.spread(line['speedup']), bool(missed(line)))} of {line['possible']:.2f}"


class Host:
    """A case of the benchmarks: cells of one host."""

    SMOKE = {"links": ["none"], "pairs": 2, "shapes": ["smoke"]}

    def __init__(
        self,
        doc: str,
        page: str,
        program: str,
        shapes: Shapes,
        default_links: Sequence[str],
        marks: Callable[[Line], list[str]] = missed,
        cell: Callable[[Line], str] = gain_of_possible,
        **more: Option,
    ) -> None:
        """program: run by the ranks. marks: the missed marks of a line. more: options that all cells contain."""
        self.__doc__, self.PAGE, self.program, self.shapes = doc, page, program, shapes
        self.marks, self.cell, self.more = marks, cell, tuple(more)
        self.OPTIONS = {
            "links": links(*default_links),
            "shapes": Option([name for name in shapes if name != "smoke"], choices=list(shapes)),
            "dtypes": Option(["float32"], choices=("float32", "bfloat16")),
            "ranks": RANKS,
            "pairs": pairs(8),
            "minutes": Option(8.0, "for all cells; each has three pairs in any case"),
            **more,
        }

    def run(self, bench: Bench) -> list[str]:
        """Measures all cells; returns a line for each missed mark."""
        options, lines = bench.options, []
        cells = cells_of(options, self.shapes, bench.picked(*self.more))
        until, left = time.monotonic() + 60 * options.minutes, sum(map(len, cells.values()))
        for link, of_link in cells.items():
            seconds = (until - time.monotonic()) * len(of_link) / left
            left -= len(of_link)
            plan = {"cells": of_link, "pairs": options.pairs, "seconds": seconds}
            for line in bench.ask(HERE / self.program, plan, ranks=options.ranks, link=link, title=link):
                stock, ours = line["wall_s"]["stock"], line["wall_s"]["sluice"]
                line |= {"speedup": pair_ratios(stock, ours), "stock": quartiles(stock), "sluice": quartiles(ours)}
                line["possible"] = line["stock"]["median"] / line["possible_s"]
                compute = line["forward_compute_s"] + line["backward_compute_s"]
                line["is_balanced"] = 0.5 <= 2 * line["comm_per_pass_s"] / compute <= 2.0
                bench.tell({**row(line), "outputs_differ": line["difference"]})
                lines.append(line)
            bench.keep([row(line) for line in lines], lines)
        return [f"{x['name']} {x['dtype']} {x['link']}: {text}" for x in lines for text in self.marks(x)]

    def tables(self, runs: list[Line]) -> dict[str, str]:
        """A table for each run, with a line for each link and a column for each shape."""
        return {"cells": pages.each_run(runs, lambda rows: pages.by_link(rows, self.cell))}


def missed_if_balanced(line: Line) -> list[str]:
    said, gain = slower(line), line["speedup"]["median"]
    if line["is_balanced"] and gain < LEAST_IF_BALANCED:
        said.append(f"{gain:.2f} x stock where communication takes about as long as computation, wanted 1.5")
    return said


SHAPED = ("1gbit", "0.4gbit", "0.2gbit")
# Widths are scaled so that a cell takes seconds.
EP = Host(
    """transformers' expert parallelism, against `all_to_all` with `grouped_mm`.

A cell is balanced if communication takes between half and twice as long as computation. There the gain can be largest,
and a speed-up of at least 1.5 is wanted.
""",
    "benchmarks/expert-parallelism.md",
    "ep_rank.py",
    {
        "mixtral": {"T": 1024, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True},
        "qwen3": {"T": 512, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True},
        "deepseek": {"T": 512, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True},
        "tiny": {"T": 256, "M": 256, "H": 256, "E": 8, "K": 2, "gated": True},
        "smoke": {"T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True},
    },
    ("none", "4gbit", "1gbit", "0.4gbit"),
    missed_if_balanced,
    lambda line: pages.bold(f"{line['speedup']['median']:.2f}", line["is_balanced"]),
    deduplicate=Option(False, "Sluice sends a token once to each rank"),
)
AUTOEP = Host(
    """A layer of DeepSpeed's AutoEP, against the same layer on Sluice.

On both sides `deepspeed.initialize` converts a model of one layer with an "expert_parallel" section. Experts run in a
loop. The router is the host's, with random weights.
""",
    "benchmarks/hosts.md",
    "autoep_rank.py",
    {
        "deepseek": {"kind": "deepseek_v2", "T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True},
        "qwen3": {"kind": "qwen3_moe", "T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True},
        "mixtral": {"kind": "mixtral", "T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True},
        "smoke": {"kind": "mixtral", "T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True},
    },
    SHAPED,
)
_EVEN = {case.link: case.must_reach for case in NAMED if not case.drop and case.skew == 1}
_LAYER = {"M": 1024, "H": 4096, "E": 8, "K": 1, "gated": False}
_GATED = {"gated": True, "skew": 1.0, "links": ("1gbit", "0.2gbit")}
MEGATRON = Host(
    """A layer of Megatron-Core, against the same layer on Sluice.

Stock is `MoELayer` with `MoEAlltoAllTokenDispatcher` and `SequentialMLP` on gloo. `layer` is the shape of the eight
cases of the benchmark `layer`, whose marks for even loads apply here. In `layer5` one expert has five times the mean
load. Stock does not pad rows here, so the possible gain is smaller than over DeepSpeed's layer.
""",
    "benchmarks/hosts.md",
    "megatron_rank.py",
    {  # the longest cells come last, because they get the time that the others do not use
        "deepseek": {"T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, **_GATED},
        "qwen3": {"T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, **_GATED},
        "mixtral": {"T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, **_GATED},
        "layer5": {"T": 1024, **_LAYER, "skew": 5.0, "links": ("1gbit", "0.2gbit")},
        "layer": {"T": 2048, **_LAYER, "skew": 1.0, "must_reach": _EVEN},
        "smoke": {"T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True, "skew": 1.0},
    },
    SHAPED,
)
