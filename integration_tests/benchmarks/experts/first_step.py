"""The first step of a model beside a settled one, in new processes: what measuring and fresh memory cost.

    .venv/bin/python -m integration_tests.benchmarks.first_step [--shapes gptoss mixtral deepseek] [--tokens 1024]
        [--layers 2] [--threads 1] [--runs 3] [--check] [--smoke]

Each run is a process with an empty cache folder, a second one that begins with what the first has kept, and one of
transformers' `grouped_mm`. Steps are forward and backward of some experts blocks, gradients set to None before each.
Settled: the median of the last steps. Also page faults, of the calling thread and of all. --check: exit code 1 where
the median first step takes more than 1.5 settled ones; counts, not seconds, are held by `bazel test
//capi/test/layer:first_backward_test //capi/test/layer:first_backward_measured_test
//backend/gemm/auto/test:auto_race_test`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import records
from integration_tests.benchmarks.measuring.stats import quartiles

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
    command = [sys.executable, "-m", "integration_tests.benchmarks.first_step", "--plan", json.dumps(plan)]
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


def of_columns(pairs: list[list[float]]) -> str:
    """Medians of first and settled seconds in words."""
    first, settled = (quartiles(list(column))["median"] for column in zip(*pairs, strict=True))
    return f"{first:.2f} s, {settled:.2f} settled"


def show(line: dict[str, Any]) -> str:
    """A line of the table."""
    first, kept = (quartiles(line[name])["median"] for name in ("first", "with_kept_choices"))
    own, every = line["own_faults"], line["all_faults"]
    return (
        f"{line['plan']['shape']:>9} T {line['plan']['tokens']}, {line['plan']['threads']} threads: first step "
        f"{first:.2f} settled ones ({of_columns(line['seconds'])}; {STOCK}: {of_columns(line['stock_seconds'])}), "
        f"with kept choices {kept:.2f}; page faults of the calling thread {own[0]} and "
        f"{own[1]} settled, of all threads {every[0]} and {every[1]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["gptoss", "mixtral", "deepseek"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=24, help="of each process (%(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--check", action="store_true", help=f"exit code 1 where a first step takes more than {MOST}")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to see that everything runs")
    parser.add_argument("--record", type=Path, default=records.FOLDER / "first_step.json")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        print(json.dumps(run_steps(json.loads(options.plan))))
        return 0
    if options.smoke:
        options.shapes, options.tokens, options.steps, options.runs = ["smoke"], 64, 6, 1
    lines = []
    for shape in options.shapes:
        plan = {"shape": shape, **{name: getattr(options, name) for name in ("tokens", "layers", "threads", "dtype")}}
        lines.append(run_shape({**plan, "steps": options.steps}, options.runs))
        print(show(lines[-1]), flush=True)
        records.write(options.record, {"lines": lines})
    missed = [line["plan"]["shape"] for line in lines if quartiles(line["first"])["median"] > MOST]
    if missed:
        print(f"more than {MOST} settled steps: {', '.join(missed)}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
