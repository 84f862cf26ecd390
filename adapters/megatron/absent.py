# SPDX-License-Identifier: Apache-2.0
"""Explains why no layer of a Megatron model runs on Sluice. Needs no Sluice engine."""

from __future__ import annotations

import sys
from typing import Any


def waits(module: Any) -> bool:
    """Returns False: a layer is taken over when it is built, and has statistics from then on."""
    return False


def need_not_have_run(given: Any) -> bool:
    """Returns False: no layer waits for its first call."""
    return False


def why(given: Any) -> str:
    """Returns why no layer of the model runs on Sluice; "": it has no MoE layers of Megatron."""
    kind = getattr(sys.modules.get("megatron.core.transformer.moe.moe_layer"), "MoELayer", None)
    layers = [] if kind is None else [child for child in given.modules() if isinstance(child, kind)]
    if not layers:
        return ""
    many = f"it holds {len(layers)} MoE layer{'s' if len(layers) > 1 else ''} of Megatron's"
    if any(hasattr(layer, "_sluice") for layer in layers):
        return f"{many}, which stay with it: the line that they printed when they were built says why"
    return (
        f"{many}: build it with --spec sluice.megatron moe_block_spec, or with sluice.megatron.with_sluice around its "
        "spec"
    )
