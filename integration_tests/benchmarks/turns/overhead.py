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

import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sluice.adapters.torch import Context, MoeLayer

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, RANKS, SEED, STOLEN, Bench, Option
from integration_tests.benchmarks.measuring.parts import slowest
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stats import misses
from integration_tests.benchmarks.measuring.stolen import Stolen
from integration_tests.benchmarks.tuner.tuner_scenario import Choice, Scenario

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
            raw[name].append(bench.ask(Path(__file__), plan, ranks=options.ranks, link=options.link, title=name))
            bench.line(f"run {number + 1} of {options.runs}, {name}: {judge(raw[name][-1])}")
        rows.append(row(name, raw[name]))
        bench.keep(rows, raw)
    return [] if options.smoke else [text for each in rows for text in missed(each)]


def missed(row: dict[str, Any]) -> list[str]:
    values = {"account": row["account"], **{clock: row[clock]["median"] for clock in CLOCKS}}
    return misses(row["workload"], ((f"of all time by {name}", v, "<=", PROMISED) for name, v in values.items()))


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


# ---- on the ranks ----

MODES = ("deferred", "per_chunk")
SIDES = ("tuned", "fixed", "twin")
Choices = dict[int, tuple[int, str]]  # by T: n and mode of weight gradients


class Run:
    """Batches and layers of one workload. Batches of all sizes train the same experts."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.plan = rank, rank.plan
        case = {**self.plan["shape"], "skew": 1.0}
        self.batches = {T: Scenario(self.plan, {**case, "T": T}) for T in self.plan["sizes"]}
        self.one = self.batches[self.plan["sizes"][0]]
        for each in self.batches.values():
            each.experts = self.one.experts

    def context(self) -> Context:
        return self.rank.context(gemm=self.plan["gemm"])

    def layer(self, context: Context, chunks: int = 0, wgrad: str = "adaptive") -> MoeLayer:
        return self.one.layer(context, Choice(chunks, wgrad=wgrad))

    def step(self, layer: MoeLayer, T: int) -> None:
        self.batches[T].run(layer)

    def chosen(self, context: Context, before: Choices) -> Choices:
        """The last decision for each size; the previous one if there was none."""
        found = dict(before)
        for decision in context.decisions():
            rows = {T: abs(T * self.plan["shape"]["K"] - decision["rows"]) for T in self.batches}
            found[min(rows, key=rows.__getitem__)] = (decision["num_chunks"], MODES[decision["wgrad_mode"]])
        return found


class Fixed:
    """Layers with the tuned layer's latest choices. Each is warmed up before its steps count."""

    def __init__(self, run: Run) -> None:
        self.run, self.context = run, run.context()
        self.layers: dict[tuple[int, str], MoeLayer] = {}
        self.warm: set[tuple[int, tuple[int, str]]] = set()
        self.choices: Choices = {}

    def follow(self, choices: Choices) -> None:
        self.choices = choices
        for T, choice in choices.items():
            if choice not in self.layers:
                self.layers[choice] = self.run.layer(self.context, *choice)
            if (T, choice) not in self.warm:
                self.warm.add((T, choice))
                self.step(T)

    def step(self, T: int) -> None:
        self.run.step(self.layers[self.choices[T]], T)


def main() -> None:
    rank = Rank()
    plan, run = rank.plan, Run(rank)
    tuned_context, fixed = run.context(), {"fixed": Fixed(run), "twin": Fixed(run)}
    tuned = run.layer(tuned_context)
    choices: Choices = dict.fromkeys(run.batches, (1, "deferred"))
    gc.disable()
    draw, stolen = random.Random(plan["seed"]), Stolen(1.0, 0.0)
    clocks: dict[str, dict[str, list[float]]] = {c: {side: [] for side in SIDES} for c in ("wall", "cpu")}
    raced: list[bool] = []
    done, races = 0, 0
    while done < plan["steps"]:
        sizes = [draw.choice(plan["sizes"]) for _ in range(min(plan["block"], plan["steps"] - done))]
        choices = run.chosen(tuned_context, choices)  # the same on all ranks
        for each in fixed.values():
            each.follow(choices)
        stolen.begin()
        for side in draw.sample(SIDES, len(SIDES)):
            gc.collect()  # outside of the timed blocks
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for T in sizes:
                if side == "tuned":
                    run.step(tuned, T)
                else:
                    fixed[side].step(T)
            clocks["cpu"][side].append(time.process_time() - cpu)
            clocks["wall"][side].append(time.perf_counter() - wall)
        stolen.spoiled()  # always False here: it only records the lost share
        before, races = races, tuned_context.tuner_stats()["race_passes"]
        raced.append(races > before)
        done += len(sizes)
        rank.report(done=done, of=plan["steps"], name="steps")
    found: dict[str, Any] = {
        c: {side: slowest(values) for side, values in sides.items()} for c, sides in clocks.items()
    }
    found["stolen"], found["most_stolen"] = stolen.shares, plan["most_stolen"]
    found["stats"], found["raced"] = tuned_context.tuner_stats(), raced
    found["chosen"] = run.chosen(tuned_context, choices)
    rank.leave(found)


if __name__ == "__main__":
    main()
