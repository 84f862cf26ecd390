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


def decode(shape: Shape, dtype: torch.dtype, names: list[str], calls: int) -> dict[str, Any]:
    """Microseconds of calls without gradients at T = 1, 2, 4, 8, each the median of the fastest quarter.

    `call_us` and `narrow_us`: a call with each implementation, at full widths and at widths of 16. `gemms_us`: a loop
    of torch.mm over the experts that have tokens. `narrow_gemms_us`: Sluice's two grouped GEMMs in narrow calls, from
    its trace. `overhead_us`: the rest of a narrow call without a trace, including transformers' part. calls: per round.
    """
    narrow = Shape(16, 16, shape.experts, shape.top_k)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for tokens in (1, 2, 4, 8):
            module, rows = make_module(shape, dtype), make_rows(shape, tokens, dtype)
            wide = {name: _micro(_call(module, name, rows), calls) for name in names}
            wide["gemms"] = _micro(functools.partial(_gemms, module, rows), calls)
            call_us = _in_turns(wide)
            module, rows = make_module(narrow, dtype), make_rows(narrow, tokens, dtype)
            small = {name: _micro(_call(module, name, rows), 10 * calls) for name in names}
            small["gemms"] = functools.partial(traced_gemms, _call(module, "sluice", rows), 10 * calls)
            narrow_us = _in_turns(small)
            cell: dict[str, Any] = {name: {"call_us": call_us[name], "narrow_us": narrow_us[name]} for name in names}
            cell["gemms_us"] = call_us["gemms"]
            cell["sluice"]["narrow_gemms_us"] = narrow_us["gemms"]
            cell["sluice"]["overhead_us"] = narrow_us["sluice"] - narrow_us["gemms"]
            found[str(tokens)] = cell
    return found


def _in_turns(kinds: dict[str, Action]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, action in kinds.items():
            times[name] += action()
    return {name: fastest_quarter(took) for name, took in times.items()}


def _call(module: Any, name: str, rows: Rows) -> Callable[[], Any]:
    def call() -> None:
        module.config._experts_implementation = name
        module(rows.tokens, rows.ids, rows.weights)

    return call


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
                found = decode(SHAPES[name], getattr(torch, dtype), ["sluice", "grouped_mm"], 3 * options.rounds)
                for tokens, cell in found.items():
                    fields = {"shape": name, "dtype": dtype, "threads": threads, "tokens": int(tokens)}
                    ours = {key: cell["sluice"][key] for key in ("call_us", "narrow_us", "overhead_us")}
                    rows.append({**fields, **ours, "gemms_us": cell["gemms_us"]})
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
