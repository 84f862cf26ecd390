# SPDX-License-Identifier: Apache-2.0
"""The part of the possible overlap that Sluice reaches if communication takes about as long as computation.

Two layers run in turns: one with one chunk, whose ops give the separate times of communication and computation, and one
whose n Sluice chooses during training. From both, per pass,

    ideal = sum over forward and backward of max(communication, computation + CPU seconds of the communication lane)

since one core both computes and moves the bytes. Communication is that of the rank that waited least for the others. In
backward it is twice the gradients' dispatch, because the combine overlaps the weight gradients even with one chunk.
Computation is that of the slowest rank. `reached` is the ideal over the time of the passes with the chosen n.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.torch import MoeLayer
from sluice.config import TunerOptions

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, SEED, Bench, Option
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stats import misses, pair_ratios, quartiles
from integration_tests.benchmarks.tuner.tuner_scenario import OPEN, Choice, Scenario

PAGE = "benchmarks/tuner.md"
# T, M, H, E, K, link, and the share of the ideal that must be reached. Over these links communication takes about as
# long as computation on one core of 60 to 120 GFLOP/s.
CASES: dict[str, tuple[int, int, int, int, int, str, float]] = {
    "one-expert": (8192, 512, 2048, 2, 1, "0.25gbit", 0.92),
    "eight": (2048, 1024, 4096, 8, 1, "0.125gbit", 0.82),
    "smoke": (64, 32, 64, 4, 1, "none", 0.0),
}
OPTIONS = {
    "cases": Option(["one-expert", "eight"], choices=list(CASES)),
    "gemm": GEMM,
    "rounds": Option(8),
    "settle": Option(120, "steps in which Sluice may choose n, at most"),
    "seed": SEED,
}
SMOKE = {"cases": ["smoke"], "rounds": 3}


def run(bench: Bench) -> list[str]:
    options, found = bench.options, []
    for name in options.cases:
        *sizes, link, must = CASES[name]
        case = {**dict(zip("TMHEK", sizes, strict=True)), "skew": 1.0}
        plan = {"case": case, **bench.picked("rounds", "settle", "seed", "gemm")}
        one = bench.ask(Path(__file__), plan, ranks=2, link=link, title=name)
        one["ideal_s"] = sum(max(p["comm_s"], p["compute_s"] + p["comm_cpu_s"]) for p in one["parts"].values())
        one["reached"] = quartiles([one["ideal_s"] / seconds for seconds in one["chosen_s"]])["median"]
        one["one_chunk_over_chosen"] = pair_ratios(one["one_chunk_s"], one["chosen_s"])["median"]
        sizes_text = ", ".join(f"{letter} {case[letter]}" for letter in "TMHE")
        found.append({"case": sizes_text, "link": link, "must": must, **one})
        bench.tell({**row(found[-1]), "parts": one["parts"]})
        bench.keep([row(each) for each in found], found)
    return [line for x in found for line in misses(x["case"], [("of the ideal", x["reached"], ">=", x["must"])])]


def row(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("case", "link", "ideal_s", "reached", "must", "n", "one_chunk_over_chosen")}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        reached = pages.bold(f"{100 * row['reached']:.0f} %", row["reached"] < row["must"])
        gain = f"{row['one_chunk_over_chosen']:.2f}"
        return [
            row["case"],
            row["link"],
            f"{row['ideal_s']:.3f} s",
            reached,
            f"{100 * row['must']:.0f} %",
            row["n"],
            gain,
        ]

    heads = ["case", "link", "ideal", "reached", "wanted", "n", "one chunk ÷ chosen"]
    return {"cases": pages.run_tables(runs, heads, cells)}


# ---- on the ranks ----

DIRECTIONS = ("forward", "backward")
EVENTS = 1 << 14  # upper bound of the ops of one step
EXCHANGES = ("dispatch", "combine", "dispatch_grad", "combine_grad")


def traced(scenario: Scenario, layer: MoeLayer) -> list[dict[str, Any]]:
    """The ops of one step, including passes."""
    layer.context.trace_start(EVENTS)
    scenario.step(layer)
    events = [dict(event) for event in layer.context.trace_take()]
    layer.context.trace_start(0)
    return events


def seconds_of(events: list[dict[str, Any]]) -> float:
    """Seconds of both passes."""
    return sum(e["end_ns"] - e["begin_ns"] for e in events if e["op"] == "pass") / 1e9


def lanes_of(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For a step with one chunk, by direction: seconds of each exchange and of the compute lane."""
    found = {}
    for one in (e for e in events if e["op"] == "pass"):
        inside = [e for e in events if e["op"] != "pass" and one["begin_ns"] <= e["begin_ns"] <= one["end_ns"]]
        parts = {name: 0.0 for name in ("compute", *EXCHANGES)}
        for e in inside:
            name = "compute" if e["lane"] == "compute" else e["op"]
            if name in parts:
                parts[name] += (e["end_ns"] - e["begin_ns"]) / 1e9
        found[one["direction"]] = parts
    return found


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Reduces values elementwise over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def parts_of(rounds: list[dict[str, dict[str, float]]], comm_cpu_s: float) -> dict[str, dict[str, float]]:
    """By direction: medians of communication, computation, and the communication lane's CPU time."""

    def median(direction: str, name: str) -> float:
        return statistics.median(parts[direction][name] for parts in rounds)

    exchanges = {"forward": ("dispatch", "combine"), "backward": ("dispatch_grad", "dispatch_grad")}
    comm = over_ranks([sum(median(d, name) for name in exchanges[d]) for d in DIRECTIONS], dist.ReduceOp.MIN)
    # Forward and backward move the same rows, so each has half of the lane's CPU time. Half of the backward's part runs
    # during the weight gradients, and their seconds already include it.
    cpu = over_ranks([comm_cpu_s / 2], dist.ReduceOp.MAX)[0]
    busy = [median("forward", "compute"), max(0.0, median("backward", "compute") - cpu / 2)]
    compute = over_ranks(busy, dist.ReduceOp.MAX)
    return {
        direction: {"comm_s": comm[i], "compute_s": compute[i], "comm_cpu_s": cpu}
        for i, direction in enumerate(DIRECTIONS)
    }


def main() -> None:
    rank = Rank()
    plan = rank.plan
    scenario = Scenario(plan, plan["case"])
    alone = rank.context(gemm=plan["gemm"])
    choosing = rank.context(gemm=plan["gemm"], tuner=TunerOptions(mode="adaptive"))
    one = scenario.layer(alone, Choice(1))
    chosen = scenario.layer(choosing, OPEN)
    for _ in range(plan["settle"]):
        scenario.step(chosen)
        if choosing.stats()["last_is_settled"]:
            break
    for _ in range(2):
        scenario.step(one)
    lanes, walls = [], {"one": [], "chosen": []}
    cpu_ns = 0
    for count in range(plan["rounds"]):
        for side in ("one", "chosen") if count % 2 == 0 else ("chosen", "one"):
            layer = one if side == "one" else chosen
            scenario.step(layer)  # a measured step follows a step of the same kind
            before = alone.stats()["comm_cpu_ns"]
            events = traced(scenario, layer)
            cpu_ns += alone.stats()["comm_cpu_ns"] - before
            walls[side].append(seconds_of(events))
            if side == "one":
                lanes.append(lanes_of(events))
        rank.report(done=count + 1, of=plan["rounds"])
    found = {
        "parts": parts_of(lanes, cpu_ns / 1e9 / plan["rounds"]),
        "one_chunk_s": over_ranks(walls["one"], dist.ReduceOp.MAX),
        "chosen_s": over_ranks(walls["chosen"], dist.ReduceOp.MAX),
        "n": choosing.stats()["last_num_chunks"],
    }
    rank.leave(found)


if __name__ == "__main__":
    main()
