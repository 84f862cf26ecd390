# SPDX-License-Identifier: Apache-2.0
"""Finds the activation of an experts module by calls of `_apply_gate`, or of `act_fn` without a gate."""

from __future__ import annotations

from typing import Any

import torch
from sluice.adapters.common import activations


def find(module: Any) -> activations.Unit | None:
    """Returns the library's unit for the activation; None: the library has none."""

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not module.has_gate:
            return module.act_fn(gate)
        return module._apply_gate(
            torch.cat((gate, up), -1) if module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
        )

    alphas = _numbers(module, "alpha", "swiglu_alpha")
    return activations.find(activation, module.has_gate, alphas, _numbers(module, "limit", "swiglu_limit"))


def _numbers(module: Any, *names: str) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [float(value) for value in found if isinstance(value, (int, float))]
