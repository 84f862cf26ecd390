"""Calls of an experts block without gradients, for a few tokens, as generation makes them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.experts_block import Rows, Shape, make_module, make_rows, seconds


def decode(shape: Shape, dtype: torch.dtype, names: list[str], calls: int) -> dict[str, Any]:
    """Microseconds of calls without gradients at T = 1, 2, 4, 8, each the fastest quarter's median of `calls` calls.

    Of each name: `call_us`, beside `products_us`, a loop of torch.mm over the hit experts; and `narrow_us`, the call at
    widths of 16. Of sluice, its two grouped products in those narrow calls by its own trace, `narrow_products_us`, and
    what is left of the call without a trace, transformers' own part too: `overhead_us`.
    """
    narrow = Shape(16, 16, shape.experts, shape.top_k)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for tokens in (1, 2, 4, 8):
            cell: dict[str, Any] = {name: {} for name in names}
            for key, size in (("call_us", shape), ("narrow_us", narrow)):
                module, rows = make_module(size, dtype), make_rows(size, tokens, dtype)
                for name in names:
                    module.config._experts_implementation = name
                    call = functools.partial(module, rows.tokens, rows.ids, rows.weights)
                    cell[name][key] = _micro(call, calls)
                    if name == "sluice" and key == "narrow_us":
                        cell[name]["narrow_products_us"] = traced_products(call, calls)
                        cell[name]["overhead_us"] = cell[name][key] - cell[name]["narrow_products_us"]
                if key == "call_us":
                    cell["products_us"] = _micro(functools.partial(_products, module, rows), calls)
            found[str(tokens)] = cell
    return found


def traced_products(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call's products, as its trace has them."""
    sluice.trace.start()
    for _ in range(calls):
        call()
    took: dict[str, list[float]] = {"gemm1": [], "gemm2": []}
    for event in sluice.trace.stop():
        if event["op"] in took:
            took[event["op"]].append((event["end_ns"] - event["begin_ns"]) / 1e3)
    found = {op: len(times) for op, times in took.items()}
    if found != {op: calls for op in took}:
        raise RuntimeError(f"the trace of {calls} calls has {found} products")
    return sum(fastest_quarter(times) for times in took.values())


def fastest_quarter(times: list[float]) -> float:
    """Its median: what a call takes when nobody interrupts it."""
    return statistics.median(sorted(times)[: max(1, len(times) // 4)])


def _products(module: Any, rows: Rows) -> None:
    for expert in rows.ids.unique().tolist():
        x = rows.tokens[(rows.ids == expert).any(-1)]
        pre = torch.mm(x, module.gate_up_proj[expert].t())
        torch.mm(pre[:, : pre.shape[1] // 2], module.down_proj[expert].t())


def _micro(action: Callable[[], Any], calls: int) -> float:
    for _ in range(5):
        action()
    return fastest_quarter([seconds(action)[0] for _ in range(calls)]) * 1e6
