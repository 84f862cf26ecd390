"""The first step of a model against a settled one, in new processes: what measuring and fresh memory cost.

Each run is a process with an empty cache folder, a second one that begins with what the first has kept, and one of
transformers' `grouped_mm`. Steps are forward and backward of some experts blocks, gradients set to None before each.
Settled: the median of the last steps. The mark is 1.5 settled steps; counts, not seconds, are held by `bazel test
//capi/test/layer:first_backward_test //capi/test/layer:first_backward_measured_test
//backend/gemm/auto/test:auto_race_test`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.stats import quartiles

PAGE = "benchmarks/experts.md"
OPTIONS = {
    "shapes": Option(["gptoss", "mixtral", "deepseek"]),
    "tokens": Option(1024),
    "layers": Option(2),
    "threads": Option(1),
    "dtype": Option("float32"),
    "steps": Option(24, "of each process"),
    "runs": Option(3),
}
SMOKE = {"shapes": ["smoke"], "tokens": 64, "steps": 6, "runs": 1}

MOST = 1.5
SETTLED = 5  # the last steps, which stand for settled ones
STOCK = "grouped_mm"


def faults() -> tuple[int, int]:
    """Of the calling thread, and of all."""
    return tuple(resource.getrusage(who).ru_minflt for who in (resource.RUSAGE_THREAD, resource.RUSAGE_SELF))


def run_steps(plan: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: seconds and faults of every step."""
    import torch

    from integration_tests.benchmarks.experts.experts_block import SHAPES, make_module, make_rows

    torch.set_num_threads(plan["threads"])
    dtype = getattr(torch, plan["dtype"])
    shape = SHAPES[plan["shape"]]
    blocks = [make_module(shape, dtype) for _ in range(plan["layers"])]
    for block in blocks:
        block.config._experts_implementation = plan.get("implementation", "sluice")
    rows = make_rows(shape, plan["tokens"], dtype)
    found: dict[str, list[Any]] = {"seconds": [], "own_faults": [], "all_faults": []}
    for _ in range(plan["steps"]):
        for block in blocks:
            block.zero_grad(set_to_none=True)
        tokens = rows.tokens.detach().requires_grad_()
        before, start = faults(), time.perf_counter()
        for block in blocks:
            tokens = tokens + block(tokens, rows.ids, rows.weights)
        tokens.backward(rows.grad)
        found["seconds"].append(time.perf_counter() - start)
        after = faults()
        found["own_faults"].append(after[0] - before[0])
        found["all_faults"].append(after[1] - before[1])
    return found


def ask(plan: dict[str, Any], cache: str) -> dict[str, Any]:
    """The same, of a new process whose findings are kept in `cache`."""
    environment = {**os.environ, "SLUICE_CACHE_DIR": cache, "OMP_NUM_THREADS": str(plan["threads"])}
    command = [sys.executable, "-m", "integration_tests.benchmarks.experts.first_step", json.dumps(plan)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1])


def first_and_settled(found: dict[str, Any]) -> list[float]:
    """Seconds of the first step, and of a settled one."""
    return [found["seconds"][0], quartiles(found["seconds"][-SETTLED:])["median"]]


def over_settled(found: dict[str, Any]) -> float:
    """The first step in settled ones."""
    first, settled = first_and_settled(found)
    return first / settled


def run_shape(plan: dict[str, Any], runs: int) -> dict[str, Any]:
    """All runs of one shape."""
    firsts, seconds_, stock = [], [], []
    of_stock = {**plan, "implementation": STOCK, "steps": min(plan["steps"], 1 + SETTLED)}  # it has nothing to settle
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            firsts.append(ask(plan, cache))
            seconds_.append(ask(plan, cache))
            stock.append(ask(of_stock, cache))
    line = {"plan": plan, "first": [over_settled(found) for found in firsts]}
    line["with_kept_choices"] = [over_settled(found) for found in seconds_]
    line["seconds"] = [first_and_settled(found) for found in firsts]
    line["stock_seconds"] = [first_and_settled(found) for found in stock]
    for name in ("own_faults", "all_faults"):
        line[name] = [firsts[0][name][0], firsts[0][name][-1]]  # of a first step, and of a settled one
    return line


def row(line: dict[str, Any]) -> dict[str, Any]:
    """Medians over the runs: steps in settled ones, and seconds of the first and of a settled step."""

    def medians(pairs: list[list[float]]) -> list[float]:
        return [quartiles(list(column))["median"] for column in zip(*pairs, strict=True)]

    return {
        "shape": line["plan"]["shape"],
        "first": quartiles(line["first"])["median"],
        "with_kept_choices": quartiles(line["with_kept_choices"])["median"],
        "seconds": medians(line["seconds"]),
        "stock_seconds": medians(line["stock_seconds"]),
    }


def cells(row: dict[str, Any]) -> list[str]:
    pairs = (", ".join(f"{value:.2f}" for value in row[name]) for name in ("seconds", "stock_seconds"))
    return [row["shape"], f"{row['first']:.2f}", f"{row['with_kept_choices']:.2f}", *pairs]


HEADS = ["shape", "first step, in settled ones", "with kept choices", "seconds, first and settled", "of `grouped_mm`"]


def run(bench: Bench) -> list[str]:
    options, lines = bench.options, []
    for shape in options.shapes:
        plan = {"shape": shape, **bench.picked("tokens", "layers", "threads", "dtype", "steps")}
        lines.append(run_shape(plan, options.runs))
        told = zip(HEADS, cells(row(lines[-1])), strict=True)
        own, every = lines[-1]["own_faults"], lines[-1]["all_faults"]
        bench.line("; ".join(f"{head} {cell}" for head, cell in told) + f"; page faults {own} own, {every} of all")
        bench.keep([row(line) for line in lines], lines)
    slow = [] if options.smoke else [each for each in map(row, lines) if each["first"] > MOST]
    return [f"{each['shape']}: the first step takes {each['first']:.2f} settled ones, at most {MOST}" for each in slow]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    return {"steps": pages.run_tables(runs, HEADS, cells)}


if __name__ == "__main__":
    print(json.dumps(run_steps(json.loads(sys.argv[1]))))
