# SPDX-License-Identifier: Apache-2.0
"""What to say of models of Megatron in which no layer runs on Sluice. Needs no Sluice engine."""

from __future__ import annotations

import sys
from typing import Any


def waits(module: Any) -> bool:
    """A layer is taken over when it is built, and has numbers from then on."""
    return False


def need_not_have_run(given: Any) -> bool:
    """A stage of a pipeline may hold no MoE layer at all."""
    return False


def why(given: Any) -> str:
    """Why no layer of it is on Sluice; "": it has none of Megatron's."""
    kind = getattr(sys.modules.get("megatron.core.transformer.moe.moe_layer"), "MoELayer", None)
    layers = [] if kind is None else [child for child in given.modules() if isinstance(child, kind)]
    if not layers:
        return ""
    many = f"it holds {len(layers)} MoE layer{'s' if len(layers) > 1 else ''} of Megatron's"
    if any(hasattr(layer, "_sluice") for layer in layers):
        return f"{many}, which were left to it: the line that they printed when they were built says why"
    return (
        f"{many}: build it with --spec sluice.megatron moe_block_spec, or with sluice.megatron.with_sluice around its "
        "spec"
    )
