# SPDX-License-Identifier: Apache-2.0
"""Runs dispatch, experts and combine of DeepSpeed's `deepspeed.moe.layer.MoE` in C.

Users need not import this package: `"sluice": {"enabled": true}` in ds_config swaps the layers (`hook.py`).
`swap(module, options)` swaps layers that are built without a DeepSpeed engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.adapters.deepspeed.swapper import Handle, swap
    from sluice.adapters.deepspeed.unsupported import UnsupportedError

__all__ = ["Handle", "UnsupportedError", "swap"]

_HOMES = {"Handle": "swapper", "swap": "swapper", "UnsupportedError": "unsupported"}


def __getattr__(name: str) -> Any:
    # Imports are lazy: DeepSpeed's own import loads the hook of this package, so it must be light.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
