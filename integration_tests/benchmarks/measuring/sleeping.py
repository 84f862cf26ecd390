# SPDX-License-Identifier: Apache-2.0
"""A layer's work as sleep, so that ranks that share cores do not slow each other down."""

import time
from collections.abc import Callable
from typing import Any

import torch

SPUN_S = 2e-4  # the end of the time is spent in a loop, because a sleep may end late by about this much


def _until(end: float) -> None:
    time.sleep(max(0.0, end - SPUN_S - time.perf_counter()))
    while time.perf_counter() < end:
        pass


class Sleep(torch.autograd.Function):
    """Multiplies by the first weight. seconds: of "forward" and "backward", which include the arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: Callable[[str], float]) -> torch.Tensor:
        end = time.perf_counter() + seconds("forward")
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        out = x * weight[0]
        _until(end)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        end = time.perf_counter() + ctx.seconds("backward")
        (weight,) = ctx.saved_tensors
        own = torch.zeros_like(weight)
        own[0] = grad.mean()
        out = grad * weight[0]
        _until(end)
        return out, own, None
