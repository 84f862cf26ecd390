# SPDX-License-Identifier: Apache-2.0
"""The two-level exchange against the one-level exchange: nodes of two ranks, loopback in a node, a shaped link between.

One layer, forward and backward, in turns: `deduplicate` by rank, by node, and "rank_or_node", in the same group over
the same sockets. The ranks of a node share one link to the other nodes. All sides use the same random routing.
"""

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, SEED, Bench, Option, links, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/layer.md"
OPTIONS = {
    "links": links("0.2gbit", "1gbit"),
    "nodes": Option(2),
    "per_node": Option(2, "ranks of each node"),
    **{name: Option(value) for name, value in {"T": 1024, "M": 1024, "H": 512, "E": 32, "K": 8}.items()},
    "chunks": Option(0, "of all sides; 0: chosen by each"),
    "pairs": pairs(10),
    "warm_up": Option(40, "turns before that, in which each chooses n, and levels"),
    "wire": Option(None, "rows travel rounded", choices=("bf16", "int8")),
    "gemm": GEMM,
    "seed": SEED,
}
SMOKE = {"T": 64, "M": 32, "H": 32, "E": 8, "K": 2, "links": ["1gbit"], "pairs": 2, "warm_up": 2}
MARKS = {"0.2gbit": 1.25, "1gbit": 0.98}  # least ratio of the time with one level to the time with two
MOST_OF_BEST = 1.03  # largest ratio of the chosen exchange's time to that of the faster exchange


def run(bench: Bench) -> list[str]:
    options, lines = bench.options, []
    for link in options.links:
        plan = {"case": bench.picked(*"TMHEK"), "ranks_per_node": options.per_node}
        plan |= bench.picked("pairs", "warm_up", "seed", "gemm", "chunks", "wire")
        nodes = {"ranks": options.nodes * options.per_node, "ranks_per_node": options.per_node}
        line = bench.ask(HERE / "two_levels_rank.py", plan, link=link, title=link, **nodes)
        walls = line.pop("wall_s")
        line |= {"link": link, "speedup": pair_ratios(walls["one"], walls["two"])}
        line |= {side: quartiles(walls[side])["median"] for side in ("one", "two", "chosen")}
        line["of_best"] = line["chosen"] / min(line["one"], line["two"])
        bench.line(
            f"{link:>8}  one level {line['one']:.3f} s, two {line['two']:.3f} s, chosen {line['chosen']:.3f} s "
            f"({line['of_best']:.2f} of the better); n {line['n']}; {pages.spread(line['speedup'])}x; bytes between "
            f"nodes {line['between_bytes']}; outputs differ by {line['difference']:.1e}"
        )
        lines.append({**line, "walls": walls})
        bench.keep([row(each) for each in lines], lines)
    if options.smoke:
        (line,) = lines
        return [] if line["between_bytes"]["two"] < line["between_bytes"]["one"] else ["by node sends no less"]
    missed = [f"{x['link']}: {x['speedup']['median']:.2f} x one level" for x in lines if is_short(x)]
    chosen = [f"{x['link']}: chosen {x['of_best']:.2f} of the better" for x in lines if x["of_best"] > MOST_OF_BEST]
    return missed + chosen


def is_short(line: dict[str, Any]) -> bool:
    return line["speedup"]["median"] < MARKS.get(line["link"], 0.0)


def row(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("link", "one", "two", "n", "speedup", "between_bytes")}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        sides = [f"{row[side]:.2f} s (n {row['n'][side]})" for side in ("one", "two")]
        sent = " → ".join(f"{row['between_bytes'][side] / 1e6:.1f}" for side in ("one", "two"))
        gain = pages.bold(pages.spread(row["speedup"]), is_short(row))
        return [row["link"], *sides, gain, f"{MARKS.get(row['link'], '')}", f"{sent} MB"]

    heads = ["link between nodes", "by rank", "by node", "speed-up", "wanted", "rows between nodes"]
    return {"links": pages.run_tables(runs, heads, cells)}
