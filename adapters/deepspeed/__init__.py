# SPDX-License-Identifier: Apache-2.0
"""Sluice in DeepSpeed: `deepspeed.moe.layer.MoE` runs its dispatch, experts and combine in C.

Nobody imports this package by hand for the usual way: `"sluice": {"enabled": true}` in ds_config does it (`hook.py`).
`swap(module, options)` is the same step for whoever builds layers without a DeepSpeed engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.adapters.deepspeed.swapper import Handle, swap
    from sluice.adapters.deepspeed.unsupported import UnsupportedError

__all__ = ["Handle", "UnsupportedError", "swap"]

_HOMES = {"Handle": "swapper", "swap": "swapper", "UnsupportedError": "unsupported"}


def __getattr__(name: str) -> Any:
    # Lazily: the hook lives in this package and must stay light while DeepSpeed itself is being imported.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
