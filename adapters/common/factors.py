# SPDX-License-Identifier: Apache-2.0
"""A and B of low-rank adapters (LoRA) on one weight of a layer's experts, stacked over experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """What is added to the weights: `scale * b[e] @ a[e]`."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]
    scale: float


def joined(adapters: Sequence[Factors], dtype: torch.dtype) -> Factors:
    """Several adapters as one, as a layer of this dtype takes them: float32, or its own. Their ranks lie one after the
    other. If there is more than one, B contains the scales."""
    if len(adapters) == 1:
        a, b, scale = adapters[0]
    else:
        a = torch.cat([each.a for each in adapters], 1)
        b = torch.cat([each.b * each.scale for each in adapters], 2)
        scale = 1.0
    if a.dtype != b.dtype or a.dtype not in (torch.float32, dtype):
        a, b = a.to(dtype), b.to(dtype)
    return Factors(a, b, scale)
