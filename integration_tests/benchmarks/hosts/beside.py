"""A MoE layer of a host and the same on Sluice, in turns, over shaped links: what megatron_layer.py and autoep_layer.py
have in common. Their rank-side is beside_rank.py.

One layer per cell, forward and backward, fresh gradients. Beside the ratio stands what is possible: stock's time over
the sum over forward and backward of max(communication, computation), each alone in the same run, of real rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import launch, records
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

HERE = Path(__file__).resolve().parent
LINKS = ("1gbit", "0.4gbit", "0.2gbit")
MOST_SLOWER = 1.03  # where nothing can be overlapped (grid.py)
LEAST_OF_POSSIBLE = 0.9  # a mark above what is possible is out of reach, and this much of it is wanted

Shapes = Mapping[str, Mapping[str, Any]]


def show(line: dict[str, Any]) -> str:
    """A line of the table."""
    stock, ours, gain = line["stock"], line["sluice"], line["speedup"]
    return (
        f"{line['name']:<9} {line['dtype']:<9} {line['link']:>8}  stock {1000 * stock['median']:6.0f} ms  "
        f"Sluice {1000 * ours['median']:6.0f} ms with {line['chunks']} chunks  "
        f"{gain['median']:.2f}x [{gain['q1']:.2f} .. {gain['q3']:.2f}] of {line['possible']:.2f} possible  "
        f"outputs differ by {line['difference']:.1e}"
    )


def missed(line: dict[str, Any]) -> list[str]:
    """What a line should reach and does not, in words: faster than stock over every shaped link, nowhere slower by more
    than 3 % in three of four pairs, and what the cell names for its link ("must_reach") if that is possible at all."""
    said, gain, shaped = [], line["speedup"], line["link"] != "none"
    wanted = line.get("must_reach", {}).get(line["link"])
    if wanted is not None and line["possible"] < wanted:
        wanted = LEAST_OF_POSSIBLE * line["possible"]
    if wanted is not None and gain["median"] < wanted:
        said.append(f"{gain['median']:.2f} x stock, wanted {wanted:.3g}")
    if shaped and gain["median"] <= 1.0:
        said.append(f"{gain['median']:.2f} x stock over a shaped link, wanted more than 1")
    if 1 / gain["q3"] > MOST_SLOWER:
        said.append(f"slower than stock: {1 / gain['q3']:.2f} of its time in the best quarter of pairs")
    return said


def verdicts(lines: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """A line for each promise that is missed, or one that there is none; and whether there is none."""
    said = [f"missed: {x['name']} {x['dtype']} {x['link']}: {text}" for x in lines for text in missed(x)]
    return said or [f"all {len(lines)} cells keep the marks"], not said


def cells_of(options: argparse.Namespace, shapes: Shapes, smoke: Shapes) -> dict[str, list[dict[str, Any]]]:
    """By link, in the order of the run. A shape has links of its own ("links"), unless some were named."""
    chosen = smoke if options.smoke else {name: shapes[name] for name in shapes if name in options.shapes}
    found: dict[str, list[dict[str, Any]]] = {}
    for link in options.links or LINKS:
        for name, shape in chosen.items():
            if options.links is None and link not in shape.get("links", LINKS):
                continue
            for dtype in options.dtypes:
                found.setdefault(link, []).append({"name": name, "dtype": dtype, **shape})
    return found


def _run_link(
    options: argparse.Namespace,
    program: str,
    cells: list[dict[str, Any]],
    link: str,
    seconds: float,
    progress: launch.Progress,
) -> list[dict[str, Any]]:
    lines, _ = launch.ask(
        HERE / program,
        {"cells": cells, "pairs": options.pairs, "seconds": seconds},
        world_size=options.ranks,
        rate=link,
        deadline_s=1800,
        progress=progress,
        title=link,
    )
    for line in lines:
        line["link"] = link
        line["speedup"] = pair_ratios(line["wall_s"]["stock"], line["wall_s"]["sluice"])
        for side in ("stock", "sluice"):
            line[side] = quartiles(line["wall_s"][side])
        line["possible"] = line["stock"]["median"] / line["possible_s"]
        progress.line(show(line))
    return list(lines)


def main(doc: str | None, program: str, name: str, shapes: Shapes, smoke: Shapes) -> int:
    """Runs the cells over each link, writes one record, NAME.json; with --check 1 where a mark is missed.

    program  its rank-side, a file beside this one
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--links", nargs="+", help="or none: loopback; else each shape has its own")
    parser.add_argument("--shapes", nargs="+", choices=sorted(shapes), default=list(shapes))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8, help="at most; fewer where there is no time")
    parser.add_argument("--minutes", type=float, default=8, help="for all; each cell has three pairs in any case")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a mark is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape: does it run?")
    parser.add_argument("--records", type=Path, help="folder for the record")
    options = parser.parse_args()
    progress = launch.Progress()
    lines: list[dict[str, Any]] = []
    cells = cells_of(options, shapes, smoke)
    until = time.monotonic() + 60 * options.minutes
    left = sum(map(len, cells.values()))
    for link, of_link in cells.items():
        seconds = (until - time.monotonic()) * len(of_link) / left
        left -= len(of_link)
        lines += _run_link(options, program, of_link, link, seconds, progress)
        if options.records:  # after each link: what is done is kept
            records.write(options.records / f"{name}.json", {"ranks": options.ranks, "lines": lines})
    if not options.check:
        return 0
    said, good = verdicts(lines)
    for text in said:
        progress.line(text)
    return 0 if good else 1
