# SPDX-License-Identifier: Apache-2.0
"""Defines A and B of low-rank adapters (LoRA) on one weight of a layer's experts, stacked over experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Factors(NamedTuple):
    """Describes an adapter, which adds `scale * b[e] @ a[e]` to the weight of expert e."""

    a: torch.Tensor  # [E, r, in]
    b: torch.Tensor  # [E, out, r]
    scale: float


def joined(adapters: Sequence[Factors], dtype: torch.dtype) -> Factors:
    """Joins adapters into one, in a dtype that a layer of `dtype` takes: float32 or `dtype`. Their ranks are
    concatenated. If there is more than one, B contains the scales."""
    if len(adapters) == 1:
        a, b, scale = adapters[0]
    else:
        a = torch.cat([each.a for each in adapters], 1)
        b = torch.cat([each.b * each.scale for each in adapters], 2)
        scale = 1.0
    if a.dtype != b.dtype or a.dtype not in (torch.float32, dtype):
        a, b = a.to(dtype), b.to(dtype)
    return Factors(a, b, scale)
