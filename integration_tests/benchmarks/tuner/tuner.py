# SPDX-License-Identifier: Apache-2.0
"""Quality of the tuner's choices and predictions: regret against exhaustive search, and error.

For each scenario (shape, link, skew) and mode, a layer trains until the tuner has settled. Then every n is screened,
and the best five and all choices run in new rounds, in turns. Some scenarios have a memory budget between the bytes of
the leanest plan and those of keeping everything. There every n x policy that fits is a candidate, and choices are
plans. Regret is the median over rounds of the choice's time over that of the best candidate, minus 1. The choices of
MPMoE's phases and MPipeMoE's eq. 10 from the same calibration are judged too. Baselines run in the same rounds: one
chunk, a fixed n, FasterMoE's split by destination and PipeMoE's pipeline (tuner_rounds.py). The predicted time of a
step includes the time of a tiny layer's step outside of its passes (autograd and Python), measured at calibration.
Every scenario is measured between two calibrations (tuner_rank.py). Errors are judged only where the two
calibrations agree within --steady.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import GEMM, QUIET_S, RANKS, SEED, STOLEN, Bench, Option, links, pairs

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/tuner.md"
OPTIONS = {
    "links": links("none", "4gbit", "1gbit", "0.2gbit"),
    "ranks": RANKS,
    "gemm": GEMM,
    "seed": SEED,
    "steps": Option(60, "steps that a mode trains at least"),
    "screen": Option(3, "rounds over every n"),
    "pairs": pairs(9),
    "calibrate": Option(6.0, "seconds"),
    "stolen": STOLEN,
    "quiet_timeout": QUIET_S,
    "steady": Option(0.05, "a scenario is measured again if calibrations before and after it differ by more"),
    "steady_seconds": Option(40.0, "of each scenario, for that"),
}
SMOKE = {"links": ["none"], "steps": 80, "pairs": 4, "calibrate": 0.3, "steady_seconds": 1.0}
FIXED = 4  # chunks of the baseline with a fixed n, as in tuner_rounds.py
# T, M, H, E, K; steps stay near or below 100 ms on one core.
SHAPES = {
    "square": (512, 256, 512, 4, 2),
    "wide": (256, 256, 1024, 4, 1),
    "long": (2048, 128, 256, 8, 2),
    "many": (512, 256, 256, 16, 4),
    "short": (96, 256, 512, 4, 2),
}
TINY = {"smoke": (64, 32, 64, 4, 2)}
SKEWS = (1.0, 1.6)
# (shape, share): share 0 is the bytes of the leanest plan, 1 the bytes of keeping everything with one chunk.
BUDGETS = (("square", 0.5), ("short", 0.2))
# The marks: "what", "name" and column of a row of the summary, and the maximum.
MARKS = (
    ("regret", "adaptive", "median", 0.02),
    ("regret", "adaptive", "most", 0.10),
    ("error", "all", "median", 0.05),
    ("error", "all", "p90", 0.12),
)
SMOKE_BUDGETS = (("smoke", 0.5),)


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The scenarios of one link: 10 without a budget and 2 with one."""
    shapes, skews = (TINY, (1.0,)) if options.smoke else (SHAPES, SKEWS)
    found = [(name, skew, None) for name in shapes for skew in skews]
    found += [(name, 1.0, share) for name, share in (SMOKE_BUDGETS if options.smoke else BUDGETS)]
    return [
        {
            "name": f"{name} x{skew:g}" + ("" if share is None else f" {share:g}"),
            **dict(zip("TMHEK", shapes[name], strict=True)),
            "skew": skew,
            "budget_share": share,
        }
        for name, skew, share in found
    ]


def regret(measured: dict[str, list[float]], chosen: int | str) -> float:
    """Median over rounds of the choice's time over that of the candidate with the smallest median, minus 1."""
    best = min(measured, key=lambda n: statistics.median(measured[n]))
    return statistics.median(a / b for a, b in zip(measured[str(chosen)], measured[best], strict=True)) - 1


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """Adds regrets and errors to a scenario's record."""
    measured = line["measured"]
    line["regret"] = {mode: regret(measured, key) for mode, key in line["modes"].items()}
    line["regret"] |= {name: regret(measured, n) for name, n in line["models"].items()}
    both = {n: line["predicted"][n]["schedule"] for n in measured if n in line["predicted"]}
    # A step also takes time outside of its passes, which was measured at calibration (tuner_rank.py).
    host_s = line["host_s"]
    line["error"] = {n: (seconds + host_s) / statistics.median(measured[n]) - 1 for n, seconds in both.items()}
    line["over_adaptive"] = {name: ratio(line, seconds) for name, seconds in sides_of(line).items()}
    return line


def sides_of(line: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of baselines by name, without their n."""
    found = {" ".join(word for word in name.split() if not word.isdigit()): s for name, s in line["baselines"].items()}
    if line["budget_share"] is None:
        found |= {"unsplit": line["measured"]["1"], "fixed n": line["measured"][str(FIXED)]}
    return found


def ratio(line: dict[str, Any], seconds: list[float]) -> float:
    """Median over rounds of a baseline's time over that of the adaptive tuner's choice."""
    chosen = line["measured"][line["modes"]["adaptive"]]
    return statistics.median(a / b for a, b in zip(seconds, chosen, strict=True))


def quantile(values: list[float], share: float) -> float:
    """The quantile by the nearest-rank method."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record: regrets of choices, times of baselines over adaptive's, and errors of predictions by link and in
    total. Errors are only of scenarios in which the machine was steady."""
    rows: list[dict[str, Any]] = []
    for what in ("regret", "over_adaptive"):
        for name in dict.fromkeys(name for line in lines for name in line[what]):
            values = [line[what][name] for line in lines if name in line[what]]
            ends = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            rows.append({"what": what, "name": name, "count": len(values), **ends})
    for link in ("all", *dict.fromkeys(line["link"] for line in lines)):
        among = [line for line in lines if line["is_steady"] and link in ("all", line["link"])]
        errors = [abs(error) for line in among for error in line["error"].values()]
        if errors:
            middle = {"median": statistics.median(errors), "p90": quantile(errors, 0.9)}
            rows.append({"what": "error", "name": link, "count": len(errors), **middle})
    return rows


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The missed marks."""
    found = {(row["what"], row["name"]): row for row in rows}
    short = []
    for what, name, key, most in MARKS:
        value = found.get((what, name), {}).get(key)
        if value is None:
            short.append(f"{what} {name} {key}: in no scenario")
        elif value > most:
            short.append(f"{what} {name} {key} {100 * value:.1f} %, must be at most {100 * most:.0f} %")
    return short


def run(bench: Bench) -> list[str]:
    options, lines = bench.options, []
    for link in options.links:
        plan = {
            "cases": cases(options),
            "calibrate_s": options.calibrate,
            "most_stolen": options.stolen,
            "quiet_timeout_s": options.quiet_timeout,
            "steady_s": options.steady_seconds,
            **bench.picked("gemm", "seed", "steps", "screen", "pairs", "steady"),
        }
        for found in bench.ask(HERE / "tuner_rank.py", plan, ranks=options.ranks, link=link, title=link):
            lines.append(judge({**found, "link": link}))
            bench.tell({name: lines[-1][name] for name in ("name", "link", "regret", "error", "is_steady")})
        bench.keep(summary(lines), lines)
    found = summary(lines)
    for each in found:
        bench.tell(each)
    return [] if options.smoke else missed(found)


CHOSEN_BY = {
    "adaptive": "`adaptive`, calibrated",
    "profile": "`profile`",
    "model": "`model`",
    "schedule": "the schedule's prediction alone",
    "mpmoe": "MPMoE's phases",
    "mpipemoe": "MPipeMoE's eq. 10",
}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Tables of regrets and baselines, and of errors of predictions."""
    told: dict[str, list[str]] = {"choices": [], "predictions": []}
    for run in runs:
        rows = records.rows_of(run)
        found = {(row["what"], row["name"]): row for row in rows}
        regrets = [
            [words, *(f"{100 * found['regret', name][key]:.1f} %" for key in ("median", "most"))]
            for name, words in CHOSEN_BY.items()
        ]
        others = [
            [row["name"], f"{row['median']:.2f}", f"{row['least']:.2f}, {row['most']:.2f}"]
            for row in rows
            if row["what"] == "over_adaptive"
        ]
        errors = [
            [row["name"], *(f"{100 * row[key]:.1f} %" for key in ("median", "p90"))]
            for row in rows
            if row["what"] == "error"
        ]
        told["choices"] += [
            f"{pages.said(run)}",
            pages.table(["chosen by", "median regret", "worst"], regrets),
            pages.table(["time over that of `adaptive`", "median", "least, most"], others),
        ]
        told["predictions"] += [
            "The same run, of scenarios before and after which both calibrations agreed.",
            pages.table(["error of a predicted step, by link", "median", "90th percentile"], errors),
        ]
    return {name: "\n\n".join(each) for name, each in told.items()}
