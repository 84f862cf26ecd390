# SPDX-License-Identifier: Apache-2.0
"""Computes the updates that Megatron's `HybridDeviceOptimizer` makes in host memory (--optimizer-cpu-offload).

HybridDeviceOptimizer makes an optimizer of a given class, torch's AdamW, for each parameter in host memory. While it
makes them, that class is Sluice's. Its attributes and checkpoints name torch's class.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sluice.adapters.torch.optim import AdamW
from sluice.errors import Unsupported

METHOD = "_init_sub_optimizers"


class OffloadedAdamW(AdamW):
    """Updates like AdamW, but does not check gradients: the host checks them if it is configured to."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, check_finite=False, **options)


def install() -> None:
    """Changes the class of optimizers that are made from now on. Unsupported if this release has no such method."""
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
    """Undoes `install`. Existing optimizers keep their class."""
    original = getattr(getattr(_hybrid(), METHOD, None), "_sluice_original", None)
    if original is not None:
        setattr(_hybrid(), METHOD, original)


def _hybrid() -> Any:
    try:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    except ImportError as error:
        raise Unsupported("optimizer: this Megatron-Core has no HybridDeviceOptimizer: leave the key out") from error
    return HybridDeviceOptimizer
