# SPDX-License-Identifier: Apache-2.0
"""The machine of stock.py: rates of torch's own kernels, measured in turns that are about as short as an op.

Sizes differ from the layers' sizes, so that the model has to interpolate. Several weights are used in turn, as in a
layer, so that none stays in the cache.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sluice.planning.rates import FORMS
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = (24, 96, 384, 1536)  # per expert
CHAINS = (96, 384)  # rows per expert when whole experts run
BYTES = tuple(1 << power for power in (16, 18, 20, 22, 24, 26))
WEIGHT_BYTES, MOST_ROWS = 1 << 25, 3072  # for one round of GEMMs


class Calls(TorchDispatchMode):
    """Counts torch ops, including views."""

    count = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


Clock = Callable[[], float]
Samples = dict[tuple[Any, ...], list[float]]


def gemms(M: int, H: int, rows: int) -> dict[str, Callable[[], Any]]:
    """For each form a function that multiplies both matrices of some experts; and the flops of one turn."""
    count = _count(M, H, rows)
    up = [(torch.randn(H, M), torch.randn(H)) for _ in range(count)]
    down = [(torch.randn(M, H), torch.randn(M)) for _ in range(count)]
    x, h = (torch.randn(count, rows, width).unbind() for width in (M, H))
    each = range(count)
    return {
        "forward": lambda: [(functional.linear(x[e], *up[e]), functional.linear(h[e], *down[e])) for e in each],
        "input_grad": lambda: [(h[e] @ up[e][0], x[e] @ down[e][0]) for e in each],
        "weight_grad": lambda: [(h[e].t() @ x[e], x[e].t() @ h[e]) for e in each],
        "flops": lambda: count * 4.0 * rows * M * H,
    }


def chain_of_experts(M: int, H: int, rows: int, clock: Clock) -> tuple[float, float]:
    """Seconds of whole experts, forward and backward. Their rows do not stay in the cache from op to op."""
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M)) for _ in range(_count(M, H, rows))
    )
    inputs = [torch.randn(rows, M, requires_grad=True) for _ in experts]
    gradients = [torch.ones(rows, M) for _ in experts]
    for _ in range(2):
        experts.zero_grad(set_to_none=True)
        began = clock()
        outputs = [expert(x) for expert, x in zip(experts, inputs)]
        middle = clock()
        torch.autograd.backward(outputs, gradients)
        end = clock()
    return middle - began, end - middle


def _count(M: int, H: int, rows: int) -> int:
    return max(1, min(WEIGHT_BYTES // (8 * M * H), MOST_ROWS // rows))


def sample(M: int, H: int, clock: Clock, into: Samples) -> None:
    """Measures each rate once."""

    def timed(key: tuple[Any, ...], turn: Callable[[], Any], share: float) -> None:
        turn()
        began = clock()
        turn()
        into.setdefault(key, []).append((clock() - began) / share)

    for rows in ROWS:
        turns = gemms(M, H, rows)
        flops = turns.pop("flops")()
        for form, turn in turns.items():
            timed((form, rows), turn, flops)
    for size in BYTES:
        source = torch.randn(size // (4 * M), M)
        order, times = torch.randperm(len(source)), max(1, (1 << 22) // size)
        timed(("rows", size), lambda: [source.index_select(0, order) for _ in range(times)], times)  # noqa: B023
    for rows in CHAINS:
        for direction, seconds in zip(("forward", "backward"), chain_of_experts(M, H, rows, clock)):
            into.setdefault((direction + "_of_experts", rows, _count(M, H, rows), M, H), []).append(seconds)
    x, gradient = torch.randn(256, H, requires_grad=True), torch.ones(256, H)
    y = functional.gelu(x)
    timed(("activation_seconds",), lambda: functional.gelu(x), x.numel())
    backward = lambda: torch.autograd.grad(y, x, gradient, retain_graph=True)  # noqa: E731
    timed(("activation_grad_seconds",), backward, x.numel())
    if dist.get_world_size() > 1:
        for size in BYTES[:-1]:
            sent = torch.zeros(dist.get_world_size(), size // 4)
            dist.barrier()
            timed(("exchange", size), lambda: dist.all_to_all_single(torch.empty_like(sent), sent), 1)  # noqa: B023


def machine(samples: Samples) -> tuple[dict[str, Any], float]:
    """Returns the machine (format: docs/tuning.md) from medians, and the seconds of host code per torch call."""
    middle = {key: statistics.median(found) for key, found in samples.items()}
    curve = {
        name: sorted([key[1], middle[key]] for key in middle if key[0] == name) for name in (*FORMS, "rows", "exchange")
    }
    factors: dict[str, list[float]] = {"forward": [], "backward": []}
    for (name, *sizes), seconds in middle.items():
        if name.endswith("_of_experts"):
            direction, (rows, count, M, H) = name.partition("_")[0], sizes
            forms = FORMS[:1] if direction == "forward" else FORMS[1:]
            gelu = "activation_seconds" if direction == "forward" else "activation_grad_seconds"
            ops = sum(middle[form, rows] for form in forms) * 4.0 * rows * M * H + rows * H * middle[gelu,]
            factors[direction].append(seconds / (count * ops))
    found: dict[str, Any] = {
        "sluice_machine": 2,
        "name": "torch",
        "world_size": dist.get_world_size(),
        "gemm": {"f32": {form: curve[form] for form in FORMS}},
        "rows": {"points": curve["rows"]},
        "host_copy": {"points": curve["rows"]},
        "exchange": {"points": curve["exchange"]} if curve["exchange"] else {"bytes_per_second": 1e9},
        **{
            f"cache_miss_{direction}": {"points": [[size, statistics.mean(each)] for size in (1, 1e12)]}
            for direction, each in factors.items()
        },
        **{name: middle[name,] for name in ("activation_seconds", "activation_grad_seconds")},
    }
    return found, middle["op",]
