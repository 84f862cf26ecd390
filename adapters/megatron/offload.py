# SPDX-License-Identifier: Apache-2.0
"""Megatron's --optimizer-cpu-offload: what `HybridDeviceOptimizer` updates in host memory, computed by the library.

It makes one optimizer of a class that it is given, torch's AdamW, for each parameter in host memory. While it makes
them that class is ours. What it keeps and writes into checkpoints names torch's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sluice.adapters.torch.optim import AdamW
from sluice.errors import Unsupported

METHOD = "_init_sub_optimizers"


class OffloadedAdamW(AdamW):
    """Gradients are not looked at: the host does that where it is told to."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, check_finite=False, **options)


def install() -> None:
    """Of optimizers that are made from now on, in this process; once. Unsupported: this release has no such method."""
    cls = _hybrid()
    original = getattr(cls, METHOD, None)
    if original is None:
        raise Unsupported(f"optimizer: this Megatron-Core has no HybridDeviceOptimizer.{METHOD}: leave the key out")
    if hasattr(original, "_sluice_original"):
        return

    @functools.wraps(original)
    def _init_sub_optimizers(self: Any) -> None:
        stock = self.cpu_optimizer_cls
        if stock is torch.optim.AdamW:
            self.cpu_optimizer_cls = OffloadedAdamW
        try:
            original(self)
        finally:
            self.cpu_optimizer_cls = stock

    _init_sub_optimizers._sluice_original = original  # type: ignore[attr-defined]
    setattr(cls, METHOD, _init_sub_optimizers)


def uninstall() -> None:
    """Optimizers that exist keep what they have."""
    original = getattr(getattr(_hybrid(), METHOD, None), "_sluice_original", None)
    if original is not None:
        setattr(_hybrid(), METHOD, original)


def _hybrid() -> Any:
    try:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    except ImportError as error:
        raise Unsupported("optimizer: this Megatron-Core has no HybridDeviceOptimizer: leave the key out") from error
    return HybridDeviceOptimizer
