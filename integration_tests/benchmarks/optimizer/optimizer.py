# SPDX-License-Identifier: Apache-2.0
"""One step of AdamW in host memory: Sluice, torch's fused AdamW, DeepSpeed's CPUAdam, and a stream of bytes.

docs/benchmarks/optimizer.md describes the sides and what is wanted. Every side has parameters, gradients and moments of
its own, of the same shapes and values. A round runs each side once, each time in another order.
"""

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
SIDES = {"f32": ("sluice", "torch_fused", "exact", "deepspeed", "stream"), "norm": ("sluice", "torch_fused")}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BYTES_PER_PARAMETER = 28
LEAST, LEAST_IN_L2, LEAST_WITH_NORM = 0.85, 1 / 1.1, 1.15
IN_L2 = 0.05  # millions: at most 16 bytes each are in use at once
LEAST_PER_ROUND = 2_000_000  # elements: steps of fewer are repeated within one time
OPTIONS = {
    "parameters": Option([0.04, 16.0, 128.0], "millions"),
    "tensors": Option([1, 32, 60], "of sizes from a third to five thirds of their mean; below 0.05 millions one"),
    "threads": Option([1, 2]),
    "rounds": Option(20),
    "clock": Option("wall", "cpu: for a machine with others on it, and one thread", choices=list(CLOCKS)),
    "steps": Option(["f32", "norm", "mixed"], choices=("f32", "norm", "mixed")),
}
SMOKE = {"parameters": [0.04, 1.0], "tensors": [3], "threads": [1], "rounds": 2}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def sizes_of(millions: float, tensors: int) -> list[int]:
    """Elements of each tensor: from a third to five thirds of their mean, in equal steps."""
    mean, last = millions * 1e6 / tensors, max(tensors - 1, 1)
    shares = [1.0] if tensors == 1 else [(1 + 4 * index / last) / 3 for index in range(tensors)]
    return [round(mean * share) for share in shares]


def parameters_of(sizes: list[int]) -> list[Any]:
    """Parameters with gradients; the same values for every side."""
    import torch

    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for param in params:
        param.grad = torch.randn(len(param)) * 1e-2
    return params


def stream(sizes: list[int]) -> Callable[[], None]:
    """Moves the bytes of a step by additions in place: two numbers read and one written."""
    pairs = [(param.data, param.grad) for param in parameters_of(sizes)]
    whole, part = divmod(BYTES_PER_PARAMETER, 12)
    rest = [(a[: len(a) * part // 12], b[: len(a) * part // 12]) for a, b in pairs]

    def run() -> None:
        for a, b in pairs * whole + rest:
            a.add_(b, alpha=1e-9)

    return run


def side(name: str, step: str, sizes: list[int]) -> Callable[[], Any]:
    """A call that makes one step."""
    import torch

    if name == "stream":
        return stream(sizes)
    params = parameters_of(sizes)
    if name in ("sluice", "exact"):
        from sluice.optim import AdamW

        return AdamW(params, exact=name == "exact", max_norm=1.0 if step == "norm" else 0.0, **ADAM).step
    if name == "torch_fused":
        fused = torch.optim.AdamW(params, fused=True, **ADAM)

        def clipped() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            fused.step()

        return clipped if step == "norm" else fused.step
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **ADAM).step


def measure(
    step: str, millions: float, tensors: int, threads: int, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each side in each round, the first of which does not count."""
    import torch

    torch.set_num_threads(threads)
    sizes, sides = sizes_of(millions, tensors), SIDES[step]
    repeats = max(1, round(LEAST_PER_ROUND / sum(sizes)))
    steps = {name: side(name, step, sizes) for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        first = number % len(sides)
        for name in sides[first:] + sides[:first]:
            call = steps[name]
            begin = clock()
            for _ in range(repeats):
                call()
            if number > 0:
                seconds[name].append((clock() - begin) / repeats)
    return seconds


def judged(step: str, seconds: dict[str, list[float]], millions: float, tensors: int, threads: int) -> dict[str, Any]:
    """The row of a step in f32: each side's time over Sluice's."""
    row: dict[str, Any] = {"step": step, "millions": millions, "tensors": tensors, "threads": threads}
    row["seconds"] = {name: quartiles(each)["median"] for name, each in seconds.items()}
    for name in SIDES[step][1:]:
        pairs = zip(seconds[name], seconds["sluice"], strict=True)
        row[f"over_{name}"] = median_of_pairs([other / mine for other, mine in pairs])
    return row


def wanted(row: dict[str, Any]) -> tuple[str, str, float]:
    """The mark of a row: its ratio, which end of the interval, at least."""
    if row["step"] == "mixed":
        return "stock_over_sluice", "low", mixed.WANTED
    if row["step"] == "norm":
        return "over_torch_fused", "median", LEAST_WITH_NORM
    return "over_torch_fused", "median", LEAST_IN_L2 if row["millions"] < IN_L2 else LEAST


def missed(row: dict[str, Any]) -> list[str]:
    """The marks that a row misses."""
    name, end, least = wanted(row)
    at = ", ".join(f"{row[key]} {key}" for key in ("millions", "tensors", "threads") if key in row)
    said = [f"{row['step']}, {at}: {name} {row[name][end]:.3f}, wanted {least:.2f}"] if row[name][end] < least else []
    return said + (
        [f"{row['step']}, {at}: masters differ by {row['apart']:.1e}"]
        if row.get("apart", 0.0) >= mixed.MOST_APART
        else []
    )


def cells(options: Any) -> list[tuple[str, float, int, int]]:
    """The step, millions of parameters, tensors and threads of each row."""
    found = []
    for step in options.steps:
        for millions in [max(options.parameters)] if step == "mixed" else options.parameters:
            if step == "norm" and millions < IN_L2:
                continue
            several = options.tensors if step != "mixed" and millions >= IN_L2 else [1]
            found += [(step, millions, tensors, threads) for tensors in several for threads in options.threads]
    return found


def run(bench: Bench) -> list[str]:
    """Each cell in a process of its own."""
    options, rows = bench.options, []
    if min(options.rounds, *options.tensors, *options.threads) < 1 or min(options.parameters) <= 0:
        bench.refuse("--rounds, --tensors and --threads are at least 1, and --parameters positive")
    for cell in cells(options):
        step, millions, tensors, threads = cell
        own = [sys.executable, "-m", "integration_tests.benchmarks.optimizer.optimizer", *map(str, cell)]
        own += [str(options.rounds), options.clock]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": str(threads)}
        environment = {**os.environ, **place, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        row = mixed.judged(found, threads) if step == "mixed" else judged(step, found, millions, tensors, threads)
        bench.tell(row)
        rows.append(row)
        bench.keep(rows)
    return [] if options.smoke else [text for row in rows for text in missed(row)]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def ratio(row: dict[str, Any], name: str) -> str:
        found, (mark, end, least) = row[name], wanted(row)
        text = f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
        return pages.bold(text, name == mark and found[end] < least)

    def ms(row: dict[str, Any], side: str) -> str:
        return f"{1e3 * row['seconds'][side]:.3g}"

    columns: dict[str, list[tuple[str, Callable[[dict[str, Any]], Any]]]] = {
        "f32": [
            ("Sluice, ms", lambda row: ms(row, "sluice")),
            ("torch ÷ Sluice", lambda row: ratio(row, "over_torch_fused")),
            ("exact ÷ default", lambda row: ratio(row, "over_exact")),
            ("DeepSpeed ÷ Sluice", lambda row: ratio(row, "over_deepspeed")),
            ("stream ÷ Sluice", lambda row: ratio(row, "over_stream")),
        ],
        "norm": [
            ("Sluice, ms", lambda row: ms(row, "sluice")),
            ("torch ÷ Sluice", lambda row: ratio(row, "over_torch_fused")),
        ],
        "mixed": [
            ("DeepSpeed, ms", lambda row: ms(row, "stock")),
            ("Sluice, ms", lambda row: ms(row, "sluice")),
            ("DeepSpeed ÷ Sluice", lambda row: ratio(row, "stock_over_sluice")),
        ],
    }
    told: dict[str, list[str]] = {step: [] for step in columns}
    for run in runs:
        for step, own in columns.items():
            rows = [row for row in records.rows_of(run) if row["step"] == step]
            keys = [key for key in ("millions", "tensors", "threads") if rows and key in rows[0]]
            names = {"millions": "million parameters"}
            heads = [names.get(key, key) for key in keys] + [head for head, _ in own]
            lines = [[f"{row[key]:g}" for key in keys] + [cell(row) for _, cell in own] for row in rows]
            told[step] += [pages.said(run), pages.table(heads, lines)] if rows else []
    return {name: "\n\n".join(each) for name, each in told.items()}


if __name__ == "__main__":
    which, millions, tensors, count, rounds, clock = sys.argv[1:]
    measured = (
        mixed.measure(round(float(millions)), int(count), int(rounds))
        if which == "mixed"
        else measure(which, float(millions), int(tensors), int(count), int(rounds), CLOCKS[clock])
    )
    print(json.dumps(measured))
