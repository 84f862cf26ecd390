"""Which of the library's activations an experts module applies, found by asking it.

A module's `_apply_gate` (or `act_fn`, without a gate) is called on a grid of values and compared with each formula that
the library has, in values and in gradients. So a class that nobody has seen is recognised by what it does and not by
its name, and one that does something else never passes for one that does not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "identity": lambda x: x,
}
_COLUMNS = 64
# Some gates compute in f32 whatever they are given. The formulas differ by more than 1e-4 somewhere on the grid.
_TOLERANCE = 2e-6


def find(module: Any) -> str | None:
    """The name of the activation (see sluice.adapters.torch.layer.ACTIVATIONS), or None: not one of the library's.

    Asked on a thread of its own: autocast, grad mode, inference mode and saved-tensor hooks (of a checkpoint, say) that
    are on around the first call belong to the host's thread.
    """
    found: list[str | None] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            found.append(_find(module))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask, name="sluice-asks-a-gate")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return found[0]


def _find(module: Any) -> str | None:
    gated = module.has_gate
    gate, up = _grid()
    if gated:
        rows = torch.cat((gate, up), -1) if module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
        found = module._apply_gate(rows)
    else:
        found = module.act_fn(gate)
    if found.shape != gate.shape or not found.requires_grad:
        return None
    # Rounding in f32 is relative to the terms of the equation, not to a difference of them.
    size = (1 + gate.detach().abs()) * (1 + up.detach().abs())
    grads = _gradients(found, gate, up)
    for name, formula in _formulas(gated):
        wanted = formula(gate, up)
        pairs = [(found, wanted), *zip(grads, _gradients(wanted, gate, up))]
        if all(_close(one, other, size) for one, other in pairs):
            return name
    return None


def _formulas(gated: bool) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    for name, function in _PLAIN.items():
        if gated:
            yield name, lambda gate, up, function=function: function(gate) * up
        else:
            yield name, lambda gate, up, function=function: function(gate)


def _grid() -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of two ranges: fine around zero, coarse to where no clamp of any model lies."""
    fine = torch.linspace(-12, 12, _COLUMNS // 2)
    coarse = torch.logspace(-3, 3, _COLUMNS // 4)
    line = torch.cat((fine, coarse, -coarse)).double()
    gate, up = line.repeat(len(line), 1), line.flip(0).unsqueeze(1).repeat(1, len(line))
    return gate.requires_grad_(), up.requires_grad_()


def _gradients(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    grads = torch.autograd.grad(out.double().sum(), (gate, up), allow_unused=True)
    return [torch.zeros_like(gate) if grad is None else grad for grad in grads]


def _close(found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> bool:
    gap = float(((found - wanted).abs() / size).detach().max())
    return math.isfinite(gap) and gap <= _TOLERANCE
