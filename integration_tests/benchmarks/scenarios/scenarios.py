# SPDX-License-Identifier: Apache-2.0
"""Runs with different best (n, S): the adaptive tuner against fixed pairs and the papers' selectors.

A committed seed draws the list of scenarios (scenarios_drawn.py). First the whole list is simulated on invented
machines (scenarios_priced.py), which gives "the list's pair": the one fixed pair that is best over the list. Then every
scenario is measured on ranks over its link. Pairs that the calibrated machine predicts within 1.3 of the best are
screened, with one pair for all sizes. The best of them runs again in new rounds, in turns with the adaptive tuner, the
list's pair and the other sides, because the minimum of many noisy medians is too low. A round is a step of each size on
each side. Each step follows an unmeasured step of the same kind.
"""

import statistics
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import GEMM, QUIET_S, RANKS, SEED, STOLEN, Bench, Option, pairs
from integration_tests.benchmarks.measuring.stats import pair_ratios
from integration_tests.benchmarks.scenarios.scenarios_drawn import LINKS, Drawn, draw
from integration_tests.benchmarks.scenarios.scenarios_priced import (
    Priced,
    best_over_list,
    geometric,
    hypotheses,
    made_up,
    name_of,
)

MARKS = {"median": 1.01, "p90": 1.04, "worst": 1.08}  # adaptive over the best fixed pair of a scenario
LEAST_OF_GAIN = 0.9  # measured over simulated gain, both over the list's pair
HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/tuner.md"
OPTIONS = {
    "simulate": Option(False, "the whole list, and nothing is measured"),
    "links": Option([], "of the list, those over these links"),
    "most_tokens": Option(16384, "larger batches shrink, with the others"),
    "ranks": RANKS,
    "gemm": GEMM,
    "seed": SEED,
    "screen": Option(3, "rounds over the fixed pairs"),
    "pairs": pairs(9),
    "steps": Option(30, "of each size that the tuner trains at least"),
    "calibrate_s": Option(4.0),
    "stolen": STOLEN,
    "quiet_timeout": QUIET_S,
}
SMOKE = {"most_tokens": 128, "pairs": 2, "screen": 1, "steps": 4, "calibrate_s": 0.2}


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulate(drawn: list[Drawn], ranks: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A line for each scenario; for each kind the list's pair, and adaptive's gain over each side."""
    priced = [Priced(made_up(LINKS[one.link]), one, ranks) for one in drawn]
    fixed = best_over_list(priced)
    lines = []
    for one in priced:
        totals = one.totals()
        if one.drawn.kind in fixed:
            totals["list's pair"] = one.total(one.fixed(fixed[one.drawn.kind]))
        lines.append(
            {
                **one.drawn.as_dict(),
                "picks": {str(tokens): name_of(pair) for tokens, pair in one.adaptive.items()},
                "over_adaptive": {name: took / totals["adaptive"] for name, took in totals.items()},
            }
        )
    held = {name: list(counts) for name, counts in hypotheses(priced).items()}
    pairs = {kind: name_of(pair) for kind, pair in fixed.items()}
    return lines, {"pairs": pairs, "hypotheses": held, **gains(lines)}


def gains(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Time of each side over adaptive's, by kind and side: geometric mean, minimum and maximum over scenarios."""
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(line["kind"] for line in lines):
        sides: dict[str, list[float]] = {}
        for line in lines:
            for name, ratio in line["over_adaptive"].items() if line["kind"] == kind else ():
                sides.setdefault(name, []).append(ratio)
        found[kind] = {
            name: {"mean": geometric(each), "least": min(each), "most": max(each), "count": len(each)}
            for name, each in sides.items()
            if name != "adaptive"
        }
    return found


# ---- measured ------------------------------------------------------------------------------------------------------


def measure(bench: Bench, drawn: list[Drawn], link: str, fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures the scenarios of one link in one process group. fixed: the list's pair, by kind."""
    options = bench.options
    of_list = {
        kind: [pair.num_chunks, pair.restore_input, pair.restore_pre_activation, pair.wgrad]
        for kind, pair in fixed.items()
    }
    plan = {
        "cases": [one.as_dict() for one in drawn],
        "list": of_list,
        "most_stolen": options.stolen,
        "quiet_timeout_s": options.quiet_timeout,
        **bench.picked("pairs", "screen", "steps", "seed", "gemm", "calibrate_s"),
    }
    more = {"ranks": options.ranks, "link": link, "title": link, "deadline_s": 7200}
    return [judge(line) for line in bench.ask(HERE / "scenarios_rank.py", plan, **more)]


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """Adds each side's time over adaptive's. Sizes are weighted so that a run has as many tokens in each size."""
    largest = max(line["tokens"])
    steps = {tokens: largest / int(tokens) for tokens in line["seconds"]["adaptive"]}
    rounds = {
        name: [sum(one) for one in zip(*([steps[t] * s for s in each] for t, each in by_size.items()), strict=True)]
        for name, by_size in line["seconds"].items()
    }
    line["quartiles_over_adaptive"] = {
        name: pair_ratios(took, rounds["adaptive"]) for name, took in rounds.items() if name != "adaptive"
    }
    line["over_adaptive"] = {name: found["median"] for name, found in line["quartiles_over_adaptive"].items()}
    return line


def row(line: dict[str, Any]) -> dict[str, Any]:
    """The record of a scenario: measured times over adaptive's, and the simulated time of the list's pair."""
    found = {name: line[name] for name in ("name", "link", "kind", "over_adaptive")}
    return found | {"simulated": line["predicted_over_adaptive"].get("list's pair")}


def over_best_fixed(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Adaptive's time over each scenario's best fixed pair, by the names of MARKS."""
    ratios = sorted(1 / line["over_adaptive"]["best fixed"] for line in lines)
    return {
        "median": statistics.median(ratios),
        "p90": ratios[min(len(ratios) - 1, int(0.9 * len(ratios)))],
        "worst": ratios[-1],
    }


def gains_too_little(gain: dict[str, float]) -> bool:
    """Whether the measured gain over the list's pair is less than the required part of the simulated one."""
    return gain["measured"] - 1 < LEAST_OF_GAIN * (gain["simulated"] - 1)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adaptive over each scenario's best fixed pair; by kind the gain over the list's pair, measured and simulated."""
    gain = {}
    for kind in KINDS:
        both = [
            (r["over_adaptive"]["list's pair"], r["simulated"])
            for r in rows
            if r["kind"] == kind and r.get("simulated")
        ]
        if both:
            measured, said = (geometric(column) for column in zip(*both))
            gain[kind] = {"measured": measured, "simulated": said}
    return {"over_best_fixed": over_best_fixed(rows), "gain": gain}


def missed(found: dict[str, Any]) -> list[str]:
    """The missed marks."""
    over = found["over_best_fixed"]
    short = [
        f"adaptive over the best fixed pair, {n}: {over[n]:.3f}, at most {m}" for n, m in MARKS.items() if over[n] > m
    ]
    return short + [
        f"gain over the list's pair, {kind}: {gain['measured']:.3f}, simulated {gain['simulated']:.3f}"
        for kind, gain in found["gain"].items()
        if gains_too_little(gain)
    ]


def lines_of(found: dict[str, Any], what: str) -> list[str]:
    """Gains as text."""
    return [
        f"{what}, {kind}: {name} over adaptive {each['mean']:.3f} [{each['least']:.3f}, {each['most']:.3f}]"
        for kind in KINDS
        for name, each in found.get(kind, {}).items()
    ]


def chosen(options: Any) -> list[Drawn]:
    """The scenarios to measure; in a smoke run one of each kind."""
    drawn = [one.at_most(options.most_tokens) for one in draw() if not options.links or one.link in options.links]
    return drawn if not options.smoke else [next(one for one in drawn if one.kind == kind) for kind in KINDS]


def run(bench: Bench) -> list[str]:
    options, whole = bench.options, draw()
    lines, found = simulate(whole, options.ranks)
    for line in lines:
        bench.tell(line)
    for text in lines_of(found, "simulated"):
        bench.line(text)
    for name, (held, of) in found["hypotheses"].items():
        bench.line(f"simulated: {name}: in {held} of {of}; best pairs over the list: {found['pairs']}")
    if options.simulate:
        return []
    fixed = best_over_list([Priced(made_up(LINKS[one.link]), one, options.ranks) for one in whole])
    measured: list[dict[str, Any]] = []
    drawn = chosen(options)
    for link in dict.fromkeys(one.link for one in drawn):
        here = measure(bench, [one for one in drawn if one.link == link], "none" if options.smoke else link, fixed)
        for line in here:
            bench.tell(row(line))
        measured += here
        bench.keep([row(line) for line in measured], measured)
    for text in lines_of(gains(measured), "measured"):
        bench.line(text)
    return [] if options.smoke else missed(summary([row(line) for line in measured]))


KINDS = ("kept", "reuse", "budget")
SIDES = {
    "best fixed": "the best one pair of the run",
    "list's pair": "the one pair that is best over the list",
    "pb": "MPMoE-pb",
    "pm": "MPMoE-pm",
    "mpipemoe": "MPipeMoE",
    "pipemoe": "PipeMoE with its best n",
    "split": "split by destination",
    "unsplit": "unsplit",
}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """A table with a row for each side and a column for each run and kind; and each run's marks."""
    told, heads = [], ["time of a run over adaptive's, mean [least, most]"]
    columns: list[dict[str, Any]] = []  # by side
    for letter, run in zip("abcdef", runs):
        rows = records.rows_of(run)
        by_kind, found = gains(rows), summary(rows)
        for kind in (kind for kind in KINDS if kind in by_kind):
            heads.append(f"{letter}: {kind} ({sum(row['kind'] == kind for row in rows)} runs)")
            columns.append(by_kind[kind])
        over = ", ".join(
            pages.bold(f"{value:.3f}", value > MARKS[name]) + f" ({name})"
            for name, value in found["over_best_fixed"].items()
        )
        gained = ", ".join(
            f"{kind} "
            + pages.bold(f"{each['measured'] - 1:.3f}", gains_too_little(each))
            + f" of {each['simulated'] - 1:.3f}"
            for kind, each in found["gain"].items()
        )
        text = (
            f"Of a run's best pair `adaptive` takes {over}. Gain over the list's pair, of the simulated one: {gained}."
        )
        told.append(pages.filled(f"({letter}) {pages.said(run)} {text}"))
    cells = {side: [column.get(side) for column in columns] for side in SIDES}
    lines = (
        [words, *(f"{c['mean']:.2f} [{c['least']:.2f}, {c['most']:.2f}]" if c else "" for c in cells[side])]
        for side, words in SIDES.items()
    )
    return {"measured": "\n\n".join([pages.table(heads, lines), *told])}
