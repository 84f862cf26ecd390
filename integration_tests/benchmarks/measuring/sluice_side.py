# SPDX-License-Identifier: Apache-2.0
"""The calls of Sluice's Python interface that the layer benchmark and the quickstart share."""

from typing import Any

import sluice
from sluice.adapters import deepspeed
from sluice.config import parse
from torch import nn

STEPS_UNTIL_SLOTS_RETURN = 6  # SLUICE_SETTLED_PASSES (8) at two passes a step, and two steps more


def swap(module: nn.Module, options: dict[str, object]) -> Any:
    """Swap all MoE layers inside `module` explicitly, as the ds_config key with these options would. The result's
    `unswap` gives the layers back to DeepSpeed."""
    _enabled, parsed = parse(options)
    return deepspeed.swap(module, parsed)


def is_swapped(layer: nn.Module) -> bool:
    """Whether Sluice runs this layer: the swap replaces its class by one of Sluice's."""
    return type(layer).__module__.split(".")[0] == "sluice"


def stats(layer: nn.Module, reset_peak: bool = False) -> dict[str, Any]:
    """Counters of a swapped layer's context since its creation: bytes, nanoseconds per lane, memory."""
    return dict(sluice.stats(layer, reset_peak=reset_peak)["contexts"][0])


def trace_stop(rank: int) -> list[dict[str, Any]]:
    """Return the operations since sluice.trace.start() in the form of stock_parts: `op` is S, C, R or M, `name` is
    Sluice's op.

    All ops of the compute lane are C, including the packing and summing of rows.
    """
    events = []
    for event in sluice.trace.stop():
        if event["op"] == "pass":  # the whole pass, not an operation
            continue
        letter = "C" if event["lane"] == "compute" else {"d": "S", "c": "R"}.get(event["op"][:1], "M")
        events.append({**event, "rank": rank, "name": event["op"], "op": letter})
    return events
