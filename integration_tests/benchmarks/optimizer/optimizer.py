# SPDX-License-Identifier: Apache-2.0
"""One step of AdamW in host memory: Sluice, DeepSpeed's CPUAdam and torch's fused AdamW, and a stream of bytes.

In f32 every side has parameters, gradients and moments of its own, of the same shapes and values. A round runs each
side once, each time in another order; ratios are of one round. Brackets hold the 95 % interval of the median.

sluice      told that gradients are finite (`check_finite=False`), which no other side looks at either
checked     as it is by default: gradients are read once more, and change nothing where one is not finite
stream      `a.add_(b)` over the same arrays until as many bytes were moved as a step has to: parameter, m and v read
            and written, the gradient read, 28 bytes a parameter
DeepSpeed   its C++ op, built by its own builder on this machine
mixed       a step of ZeRO-1 offload in bf16, of two engines (mixed.py)
marks       the lower end of the interval at least 0.97 of either host; at least 0.85 of the stream; mixed: mixed.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.launch import ROOT
from integration_tests.benchmarks.measuring.stats import median_of_pairs, quartiles
from integration_tests.benchmarks.optimizer import mixed

PAGE = "benchmarks/optimizer.md"
SIDES = ("sluice", "checked", "deepspeed", "torch_fused", "stream")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BYTES_PER_PARAMETER = 28
LEAST_OF_HOST, LEAST_OF_STREAM = 0.97, 0.85
TENSOR = mixed.TENSOR  # elements of one parameter
OPTIONS = {
    "parameters": Option(128, "millions"),
    "threads": Option([1, 2]),
    "rounds": Option(20),
    "clock": Option("wall", "cpu: for a machine with others on it, and one thread", choices=list(CLOCKS)),
    "steps": Option(["f32", "mixed"], choices=("f32", "mixed")),
}
SMOKE = {"parameters": 1, "threads": [1], "rounds": 2}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters_of(millions: int) -> list[Any]:
    """`millions` of parameters in tensors of a large layer, with gradients; the same values for every side."""
    import torch

    torch.manual_seed(1)
    count = (millions * 1_000_000 + TENSOR - 1) // TENSOR
    params = [torch.nn.Parameter(torch.randn(TENSOR)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(TENSOR) * 1e-2
    return params


def stream(millions: int) -> Callable[[], None]:
    """Moves the bytes of a step by additions in place: two numbers read and one written."""
    params = parameters_of(millions)
    pairs = [(param.data, param.grad) for param in params]
    additions = BYTES_PER_PARAMETER * sum(len(param) for param in params) / (12 * TENSOR)

    def run() -> None:
        for index in range(round(additions)):
            a, b = pairs[index % len(pairs)]
            a.add_(b, alpha=1e-9)

    return run


def side(name: str, millions: int) -> Callable[[], Any]:
    """A call that makes one step."""
    import torch

    if name == "stream":
        return stream(millions)
    params = parameters_of(millions)
    if name in ("sluice", "checked"):
        from sluice.optim import AdamW

        return AdamW(params, check_finite=name == "checked", **ADAM).step
    if name == "torch_fused":
        return torch.optim.AdamW(params, fused=True, **ADAM).step
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **ADAM).step


def measure(millions: int, threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side in each round, the first of which does not count."""
    import torch

    torch.set_num_threads(threads)
    steps = {name: side(name, millions) for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        first = number % len(SIDES)
        for name in SIDES[first:] + SIDES[:first]:
            begin = clock()
            steps[name]()
            if number > 0:
                seconds[name].append(clock() - begin)
        print(f"{threads} threads, round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def judged(seconds: dict[str, list[float]], parameters: int, threads: int) -> dict[str, Any]:
    """The row of f32: each side's time over Sluice's."""
    row: dict[str, Any] = {"step": "f32", "threads": threads}
    row["seconds"] = {name: quartiles(each)["median"] for name, each in seconds.items()}
    for name in SIDES[1:]:
        pairs = zip(seconds[name], seconds["sluice"], strict=True)
        row[f"over_{name}"] = median_of_pairs([other / mine for other, mine in pairs])
    return row | {"stream_gb_per_s": BYTES_PER_PARAMETER * parameters / row["seconds"]["stream"] / 1e9}


MARKS = (  # of f32: side, which end of the interval, at least
    ("over_deepspeed", "low", LEAST_OF_HOST),
    ("over_torch_fused", "low", LEAST_OF_HOST),
    ("over_stream", "median", LEAST_OF_STREAM),
)


def missed(row: dict[str, Any]) -> list[str]:
    """The marks that a row misses."""
    marks = MARKS if row["step"] == "f32" else (("stock_over_sluice", "low", mixed.WANTED),)
    at = f"{row['step']}, {row['threads']} threads"
    said = [
        f"{at}: {name} {row[name][end]:.3f}, wanted {least:.2f}" for name, end, least in marks if row[name][end] < least
    ]
    return said + ([f"{at}: masters differ by {row['apart']:.1e}"] if row.get("apart", 0.0) >= mixed.MOST_APART else [])


def run(bench: Bench) -> list[str]:
    """Each number of threads in a process of its own."""
    options, rows = bench.options, []
    if min(options.rounds, options.parameters, *options.threads) < 1:
        bench.refuse("--rounds, --parameters and --threads are at least 1")
    for step in options.steps:
        for threads in options.threads:
            own = [
                sys.executable,
                "-m",
                "integration_tests.benchmarks.optimizer.optimizer",
                step,
                str(options.parameters),
            ]
            own += [str(threads), str(options.rounds), options.clock]
            place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": str(threads)}
            environment = {**os.environ, **place, "DS_ACCELERATOR": "cpu"}
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
            count = (options.parameters * 1_000_000 + TENSOR - 1) // TENSOR * TENSOR
            row = judged(found, count, threads) if step == "f32" else mixed.judged(found, threads)
            bench.line("  ".join(f"{key} {value}" for key, value in row.items()))
            rows.append(row)
            bench.keep(rows)
    return [] if options.smoke else [text for row in rows for text in missed(row)]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def ratio(row: dict[str, Any], name: str, end: str = "low", least: float = 0.0) -> str:
        found = row[name]
        return pages.bold(f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]", found[end] < least)

    def ms(row: dict[str, Any], side: str) -> str:
        return f"{1e3 * row['seconds'][side]:.0f}"

    told: dict[str, list[str]] = {"f32": [], "mixed": []}
    for run in runs:
        rows = records.rows_of(run)
        plain = [
            [row["threads"], ms(row, "sluice"), *(ratio(row, *mark) for mark in MARKS), ratio(row, "over_checked")]
            for row in rows
            if row["step"] == "f32"
        ]
        both = [
            [row["threads"], ms(row, "stock"), ms(row, "sluice"), ratio(row, "stock_over_sluice", "low", mixed.WANTED)]
            for row in rows
            if row["step"] == "mixed"
        ]
        heads = ["threads", "Sluice, ms", "DeepSpeed ÷ Sluice", "torch ÷ Sluice", "stream ÷ Sluice", "looked at first"]
        told["f32"] += [pages.said(run), pages.table(heads, plain)] if plain else []
        heads = ["threads", "DeepSpeed, ms", "Sluice, ms", "DeepSpeed ÷ Sluice"]
        told["mixed"] += [pages.said(run), pages.table(heads, both)] if both else []
    return {name: "\n\n".join(each) for name, each in told.items()}


if __name__ == "__main__":
    which, millions, count, rounds, clock = sys.argv[1:]
    measured = (
        measure(int(millions), int(count), int(rounds), CLOCKS[clock])
        if which == "f32"
        else mixed.measure(int(millions), int(count), int(rounds))
    )
    print(json.dumps(measured))
