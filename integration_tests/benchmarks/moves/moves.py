# SPDX-License-Identifier: Apache-2.0
"""Gain of moved experts: steps of one DeepSpeed layer with skewed loads, stock, Sluice, and Sluice with "placement":
"adaptive", in turns over one link.

The experts of the first rank are drawn `--skew` times as often as with even loads, all of them, so that swaps can
spread them. They get fewer rows than that, because the experts of a token differ. The adaptive side decides
automatically, and its experts move during its steps, while it trains alone. It is also compared with moving weights in
each step [Symi, FlexMoE]: a step with moved experts plus the messages that this needs at least, over the same link. The
cost of deciding and moving is a share of a run of 500 steps: the larger of the time in which steps waited, and the time
by which steps became longer. `--ranks 8 --E 64 --skew 5 --link 0.2gbit` is the larger case. With `--skew 1` loads are
even and nothing moves; then the CPU time of deciding is judged.
"""

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import LINK, Bench, Option, pairs
from integration_tests.benchmarks.measuring.stats import misses

HERE = Path(__file__).resolve().parent
PAGE = "placement.md"
OPTIONS = {
    **{name: Option(value) for name, value in {"T": 512, "M": 256, "H": 256, "E": 16, "K": 2}.items()},
    "skew": Option(2.5, "rows of the first rank over the mean"),
    "pairs": pairs(12),
    "ranks": Option(4),
    "link": Option("0.4gbit", LINK.help),
}
SMOKE = {"T": 96, "M": 64, "H": 64, "E": 8, "skew": 1.7, "pairs": 2, "ranks": 2, "link": "none"}
MOST = {"of_unmoved": 0.65, "of_stock": 0.55}
MOST_SHARE = 0.03  # share of 500 steps for deciding and moving
MOST_EVEN = 0.01  # share of CPU time for deciding with even loads
STEPS_OF_A_RUN = 500


def missed(found: dict[str, Any], is_even: bool) -> list[str]:
    """The missed marks."""
    moved = found["moved_experts"]
    if is_even:
        share = found["processor_share"]
        marks = (("experts moved", moved, "<=", 0), ("of processor time for deciding", share, "<=", MOST_EVEN))
        return misses("even loads", marks)
    ratios = ((name, found[name]["median"], "<=", most) for name, most in MOST.items())
    cost = ("of a run for deciding and moving", found["share"], "<=", MOST_SHARE)
    return misses("skewed loads", (*ratios, ("experts moved", moved, ">=", 1), cost))


def run(bench: Bench) -> list[str]:
    options = bench.options
    if options.E % options.ranks != 0 or not 1 <= options.skew < options.ranks:
        bench.refuse("E must be a multiple of --ranks, and --skew at least 1 and below --ranks")
    plan = {**bench.picked(*"TMHEK", "skew", "pairs"), "steps_of_a_run": STEPS_OF_A_RUN}
    found = bench.ask(HERE / "moves_rank.py", plan, ranks=options.ranks, link=options.link)
    is_even = options.skew == 1
    bench.tell(found)
    row = {name: found[name] for name in ("imbalance", "planned", "of_unmoved", "of_stock", "share") if name in found}
    if not is_even:
        row["of_weights"] = found["of_weights"]["median"]
    bench.keep([{"link": options.link, "ranks": options.ranks, **row}], found)
    return [] if options.smoke else missed(found, is_even)


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(run: dict[str, Any]) -> list[str]:
        (row,) = records.rows_of(run)
        ratios = (pages.bold(pages.spread(row[name]), row[name]["median"] > most) for name, most in MOST.items())
        loads = f"{row['imbalance']:.1f}, after moves {row['planned']:.2f}"
        return [f"`{run['command']}`", loads, *ratios, f"{row['of_weights']:.2f}", f"{100 * row['share']:.2f} %"]

    heads = ["command", "heaviest rank over the mean", "of unmoved", "of stock", "of weights that move in each step"]
    heads.append(f"deciding and moving, of {STEPS_OF_A_RUN} steps")
    return {"gains": f"{pages.made(runs)}\n\n{pages.table(heads, map(cells, runs))}"}
