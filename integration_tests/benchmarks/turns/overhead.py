# SPDX-License-Identifier: Apache-2.0
"""The cost of tuning in a run of 10,000 steps, in wall and CPU time, for constant and for changing batches.

A tuned layer (mode adaptive, no machine) trains in blocks of steps, in turns with blocks of two sets of layers with a
configured n and weight-gradient mode: the tuned layer's latest choice for each size, so that the quality of the choice
does not matter. All sides run the same batches. The two configured sets differ only in the placement of their memory
and threads, which already makes a difference as large as the judged one. So the tuned side is compared with the mean of
both, in several runs, each in new processes. Judged are

  cost      the part of all time that tuning takes: for blocks in which candidates raced from their sums, for all
            others from the median over pairs of blocks, which depends little on changes of the machine's speed
  account   the tuner's own count: time of races beyond the best candidate, and first passes after switches

Pairs of blocks that lost more than --stolen of their time to other guests of the machine's host do not count. The cost
by each clock, and the account, may be at most 0.5 %.
"""

import statistics
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, RANKS, SEED, STOLEN, Bench, Option

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/overhead.md"
WORKLOADS = {"constant": (64,), "changing": (48, 64, 96, 128)}  # T of a step, drawn for every step
PROMISED = 0.005  # part of all time
CLOCKS = ("wall", "cpu")
OPTIONS = {
    "workloads": Option(list(WORKLOADS), choices=list(WORKLOADS)),
    "steps": Option(10000, "of each side"),
    "runs": Option(4, "of each workload"),
    "block": Option(50, "steps of one side before the other's turn"),
    "link": Option("none"),
    "ranks": RANKS,
    **{name: Option(value) for name, value in {"M": 32, "H": 64, "E": 4, "K": 2}.items()},
    "gemm": GEMM,
    "seed": SEED,
    "stolen": STOLEN,
}
SMOKE = {"steps": 60, "block": 20, "runs": 1, "workloads": ["changing"]}


def judge(found: dict[str, Any]) -> dict[str, float]:
    """Parts of all time: cost by clock, and the tuner's account."""
    kept = [share <= found["most_stolen"] for share in found["stolen"]]
    kept = kept if any(kept) else [True] * len(kept)  # use all pairs if none is quiet
    result = {}
    for clock in CLOCKS:
        sides = found[clock]
        both = [
            (tuned, (one + other) / 2, raced)
            for tuned, one, other, raced, counts in zip(
                sides["tuned"], sides["fixed"], sides["twin"], found["raced"], kept, strict=True
            )
            if counts
        ]
        total = sum(fixed for _, fixed, _ in both)
        races = sum(tuned - fixed for tuned, fixed, raced in both if raced) / total
        settled = [(tuned / fixed, fixed) for tuned, fixed, raced in both if not raced]
        share = sum(fixed for _, fixed in settled) / total
        result[clock] = races + share * (statistics.median([ratio for ratio, _ in settled] or [1.0]) - 1)
    stats = found["stats"]
    result["account"] = (stats["excess_seconds"] + stats["switch_seconds"]) / stats["total_seconds"]
    return result


def row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the runs; for the clocks also minimum and maximum."""
    judged = [judge(run) for run in runs]
    values = {what: [each[what] for each in judged] for what in (*CLOCKS, "account")}
    spans = {what: {"median": statistics.mean(v), "q1": min(v), "q3": max(v)} for what, v in values.items()}
    return {"workload": name, **{c: spans[c] for c in CLOCKS}, "account": spans["account"]["median"]}


def run(bench: Bench) -> list[str]:
    options, rows, raw = bench.options, [], {}
    if options.steps < options.block or min(options.block, options.runs) < 1:
        bench.refuse("--steps must be at least --block; --block and --runs at least 1")
    for name in options.workloads:
        plan = {"sizes": WORKLOADS[name], "shape": bench.picked(*"MHEK"), "most_stolen": options.stolen}
        plan |= bench.picked("steps", "block", "seed", "gemm")
        raw[name] = []
        for number in range(options.runs):
            raw[name].append(
                bench.ask(HERE / "overhead_rank.py", plan, ranks=options.ranks, link=options.link, title=name)
            )
            bench.line(f"run {number + 1} of {options.runs}, {name}: {judge(raw[name][-1])}")
        rows.append(row(name, raw[name]))
        bench.keep(rows, raw)
    return [] if options.smoke else [text for each in rows for text in missed(each)]


def missed(row: dict[str, Any]) -> list[str]:
    values = {"account": row["account"], **{clock: row[clock]["median"] for clock in CLOCKS}}
    return [f"{row['workload']}, {name}: {100 * v:.2f} %, at most 0.5 %" for name, v in values.items() if v > PROMISED]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def percent(value: float, sign: str = "+") -> str:
        return pages.bold(f"{100 * value:{sign}.2f} %", value > PROMISED)

    def cells(row: dict[str, Any]) -> list[str]:
        told = [
            f"{percent(row[clock]['median'])} [{100 * row[clock]['q1']:.2f}, {100 * row[clock]['q3']:.2f}]"
            for clock in CLOCKS
        ]
        return [row["workload"], *told, percent(row["account"], "")]

    return {"workloads": pages.run_tables(runs, ["batches", "wall", "CPU", "account"], cells)}
