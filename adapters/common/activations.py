# SPDX-License-Identifier: Apache-2.0
"""Finds which of the library's activations a host applies between two GEMMs.

`find` calls the host's function on a grid of values, and compares values and gradients with each formula of the
library. So functions are recognised by their results and not by their names, and a different function never matches.
`of_module` and `of_function` call nothing: they recognise torch's own modules and functions in code that is only read,
as other functions may have side effects.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from sluice.adapters.torch import Swiglu
from torch import nn
from torch.nn import functional as F

# (gate, up), of one shape, to the same shape; without a gate `up` is ignored.
Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Unit:
    """Describes the activation between an expert's two GEMMs, by the names of sluice.adapters.torch.MoeLayer."""

    activation: str
    swiglu: Swiglu | None = None


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}
_COLUMNS = 64
# Some gates compute in f32 for inputs of any dtype. The formulas differ by more than 1e-4 somewhere on the grid.
_TOLERANCE = 2e-6


def of_module(module: nn.Module) -> str | None:
    """Returns the library's name of a module of exactly one of torch's types, or None."""
    kind = type(module)
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return "silu" if kind is nn.SiLU else None


def of_function(function: Any) -> str | None:
    """Returns the library's name of one of torch's functions, called with its input alone, or None."""
    return "relu" if function is torch.relu else next((n for n, known in _PLAIN.items() if known is function), None)


def find(
    activation: Activation,
    gated: bool,
    alphas: Sequence[float] = (),
    limits: Sequence[float] = (),
    offsets: Sequence[float] = (),
) -> Unit | None:
    """Returns the unit; None: it is not one of the library's. Raises what the function raises.

    alphas, limits, offsets  numbers of SwiGLU that the host names, in addition to those that models use

    The function is called on a separate thread.
    """
    return call_on_thread(lambda: _find(activation, gated, alphas, limits, offsets), "sluice-asks-a-gate")


def _find(
    activation: Activation, gated: bool, alphas: Sequence[float], limits: Sequence[float], offsets: Sequence[float]
) -> Unit | None:
    limits = [limit for limit in limits if limit > 0]
    gate, up = _grid(limits)
    found = activation(gate, up)
    if found.shape != gate.shape or not found.requires_grad:
        return None
    # Rounding in f32 is relative to the terms of the equation, not to a difference of them.
    size = (1 + gate.detach().abs()) * (1 + up.detach().abs())
    grads = _gradients(found, gate, up)
    for unit in _candidates(gated, [alpha for alpha in alphas if alpha > 0], limits, offsets):
        wanted = _apply(unit, gated, gate, up)
        pairs = [(found, wanted), *zip(grads, _gradients(wanted, gate, up))]
        if all(_close(one, other, size) for one, other in pairs):
            return unit
    return None


def _candidates(
    gated: bool, alphas: Sequence[float], limits: Sequence[float], offsets: Sequence[float]
) -> Iterator[Unit]:
    """Yields the library's formulas with the numbers that the host names; clamped SiLU is SwiGLU with alpha 1."""
    yield from (Unit(name) for name in _PLAIN)
    if not gated:
        return
    for alpha in (*alphas, 1.0, 1.702):  # 1.702: the sigmoid form of GELU
        for limit in (*limits, math.inf):
            for offset in (*offsets, 0.0, 1.0):
                yield Unit("swiglu", Swiglu(alpha, limit, offset))


def _apply(unit: Unit, gated: bool, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes the library's equations (sluice/moe.h)."""
    if unit.swiglu is None:
        out = _PLAIN[unit.activation](gate)
        return out * up if gated else out
    alpha, limit, offset = unit.swiglu.alpha, unit.swiglu.limit, unit.swiglu.offset
    held = gate.clamp(max=limit)
    return held * torch.sigmoid(alpha * held) * (up.clamp(-limit, limit) + offset)


def _grid(limits: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns every pair of two ranges: fine around zero and the limits, coarse beyond the clamps of all models."""
    fine = torch.linspace(-12, 12, _COLUMNS // 2)
    coarse = torch.logspace(-3, 3, _COLUMNS // 4)
    near = torch.tensor([sign * limit * factor for limit in limits for sign in (-1, 1) for factor in (0.99, 1.01)])
    line = torch.cat((fine, coarse, -coarse, near)).double()
    gate, up = line.repeat(len(line), 1), line.flip(0).unsqueeze(1).repeat(1, len(line))
    return gate.requires_grad_(), up.requires_grad_()


def _gradients(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(out.double().sum(), (gate, up), allow_unused=True)
    return [torch.zeros_like(gate) if grad is None else grad for grad in grads]


def _close(found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> bool:
    gap = float(((found - wanted).abs() / size).detach().max())
    return math.isfinite(gap) and gap <= _TOLERANCE


T = TypeVar("T")


def call_on_thread(ask: Callable[[], T], name: str) -> T:
    """Calls `ask` on a thread of that name; returns its result and raises its exception. Autocast, grad mode, inference
    mode, dispatch modes and saved-tensor hooks (of a checkpoint, say) belong to the host's thread, so that they do not
    apply to the call."""
    found: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return found[0]
