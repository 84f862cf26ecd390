"""Calls of an experts block without gradients, for a few tokens, as generation makes them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from integration_tests.benchmarks.experts_block import Rows, Shape, make_module, make_rows, seconds


def decode(shape: Shape, dtype: torch.dtype, names: list[str], rounds: int) -> dict[str, Any]:
    """Microseconds per call without gradients, beside a loop of torch.mm over the hit experts.

    `overhead_us`: the call at widths of 16, where products take next to nothing.
    """
    small = Shape(16, 16, shape.experts, shape.top_k)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for tokens in (1, 2, 4, 8):
            cell: dict[str, Any] = {}
            for key, size in (("call_us", shape), ("overhead_us", small)):
                module, rows = make_module(size, dtype), make_rows(size, tokens, dtype)
                for name in names:
                    module.config._experts_implementation = name
                    call = functools.partial(module, rows.tokens, rows.ids, rows.weights)
                    cell.setdefault(name, {})[key] = _micro(call, rounds)
                if key == "call_us":
                    cell["products_us"] = _micro(functools.partial(_products, module, rows), rounds)
            found[str(tokens)] = cell
    return found


def _products(module: Any, rows: Rows) -> None:
    for expert in rows.ids.unique().tolist():
        x = rows.tokens[(rows.ids == expert).any(-1)]
        pre = torch.mm(x, module.gate_up_proj[expert].t())
        torch.mm(pre[:, : pre.shape[1] // 2], module.down_proj[expert].t())


def _micro(action: Callable[[], Any], rounds: int) -> float:
    """The median of the fastest quarter: what a call takes when nobody interrupts it."""
    for _ in range(5):
        action()
    times = sorted(seconds(action)[0] for _ in range(40 * rounds))
    return statistics.median(times[: max(1, len(times) // 4)]) * 1e6
