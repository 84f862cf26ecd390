# SPDX-License-Identifier: Apache-2.0
"""Times calls of an experts block without gradients for a few tokens, as in generation."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.experts.experts_block import SHAPES, Rows, Shape, make_module, make_rows, seconds
from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import Bench

MOST_OVERHEAD_US = 30  # time of a call without gradients beyond its GEMMs
ROUNDS = 16  # all kinds of calls run in each round, because the machine's speed changes over time
Action = Callable[[], list[float]]


def decode(shape: Shape, dtype: torch.dtype, calls: int) -> dict[int, dict[str, float]]:
    """Microseconds of calls without gradients at T = 1, 2, 4, 8, each the median of the fastest quarter.

    `call_us` and `narrow_us`: a call at full widths and at widths of 16. `gemms_us`: a loop of torch.mm over the
    experts that have tokens. `overhead_us`: the part of a narrow call, including transformers' part, that is not its
    two grouped GEMMs, whose time is from a trace. calls: per round.
    """
    narrow = Shape(16, 16, shape.experts, shape.top_k)
    found: dict[int, dict[str, float]] = {}
    with torch.no_grad():
        for tokens in (1, 2, 4, 8):
            module, rows = make_module(shape, dtype), make_rows(shape, tokens, dtype)
            gemms = functools.partial(_gemms, module, rows)
            wide = _in_turns({"call": _micro(_call(module, rows), calls), "gemms": _micro(gemms, calls)})
            call = _call(make_module(narrow, dtype), make_rows(narrow, tokens, dtype))
            traced = functools.partial(traced_gemms, call, 10 * calls)
            small = _in_turns({"call": _micro(call, 10 * calls), "gemms": traced})
            found[tokens] = {"call_us": wide["call"], "narrow_us": small["call"], "gemms_us": wide["gemms"]}
            found[tokens]["overhead_us"] = small["call"] - small["gemms"]
    return found


def _in_turns(kinds: dict[str, Action]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, action in kinds.items():
            times[name] += action()
    return {name: fastest_quarter(took) for name, took in times.items()}


def _call(module: Any, rows: Rows) -> Callable[[], Any]:
    return lambda: module(rows.tokens, rows.ids, rows.weights)


def traced_gemms(call: Callable[[], Any], calls: int) -> list[float]:
    """Microseconds of the GEMMs in each call, from the trace."""
    sluice.trace.start(16 * calls)
    for _ in range(calls):
        call()
    took: dict[str, list[float]] = {"gemm1": [], "gemm2": []}
    for event in sluice.trace.stop():
        if event["op"] in took:
            took[event["op"]].append((event["end_ns"] - event["begin_ns"]) / 1e3)
    found = {op: len(times) for op, times in took.items()}
    if found != {op: calls for op in took}:
        raise RuntimeError(f"the trace of {calls} calls has {found} GEMMs")
    return [one + two for one, two in zip(took["gemm1"], took["gemm2"], strict=True)]


def fastest_quarter(times: list[float]) -> float:
    """The median of the fastest quarter: the time of an undisturbed call."""
    return statistics.median(sorted(times)[: max(1, len(times) // 4)])


def _gemms(module: Any, rows: Rows) -> None:
    for expert in rows.ids.unique().tolist():
        x = rows.tokens[(rows.ids == expert).any(-1)]
        pre = torch.mm(x, module.gate_up_proj[expert].t())
        torch.mm(pre[:, : pre.shape[1] // 2], module.down_proj[expert].t())


def _micro(action: Callable[[], Any], calls: int) -> Action:
    """Microseconds of each call, after two calls that warm up caches."""

    def run() -> list[float]:
        for _ in range(2):
            action()
        return [seconds(action)[0] * 1e6 for _ in range(calls)]

    return run


def run(bench: Bench) -> list[str]:
    """Measures calls of each shape. A call may take 30 us more than its GEMMs, and than a loop of torch.mm."""
    options, rows = bench.options, []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.shapes:
            for dtype in options.dtypes:
                for tokens, cell in decode(SHAPES[name], getattr(torch, dtype), 3 * options.rounds).items():
                    rows.append({"shape": name, "dtype": dtype, "threads": threads, "tokens": tokens, **cell})
                    bench.tell(rows[-1])
                bench.keep(rows)
    missed = []
    for row in rows:
        at = f"{row['shape']} {row['dtype']} {row['threads']} threads, decode T {row['tokens']}"
        over = {"over its GEMMs at width 16": row["overhead_us"], "over torch.mm": row["call_us"] - row["gemms_us"]}
        missed += [f"{at}: {us:.0f} us {what}" for what, us in over.items() if us > MOST_OVERHEAD_US]
    return [] if options.smoke else missed


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["shape", "T", "call ÷ loop of `torch.mm`", "call at width 16, µs", "of it not GEMMs"]
    return pages.table(
        heads,
        (
            [
                r["shape"],
                r["tokens"],
                f"{r['call_us'] / r['gemms_us']:.2f}",
                f"{r['narrow_us']:.0f}",
                f"{r['overhead_us']:.0f}",
            ]
            for r in rows
        ),
    )
