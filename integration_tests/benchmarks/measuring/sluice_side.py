# SPDX-License-Identifier: Apache-2.0
"""The calls of Sluice's Python interface that the layer benchmark and the quickstart share."""

import importlib
import importlib.util
from typing import Any, Protocol

from torch import nn

STEPS_UNTIL_SLOTS_RETURN = 6  # SLUICE_SETTLED_PASSES (8) at two passes a step, and two steps more


class Handle(Protocol):
    """The result of a swap."""

    def unswap(self) -> None:
        """Give the layers back to DeepSpeed."""


def missing() -> str:
    """Empty if Sluice can be used, otherwise the reason in one sentence."""
    if importlib.util.find_spec("sluice") is None:
        return "The package sluice is not installed in this environment."
    try:
        importlib.import_module("sluice.adapters.deepspeed")
    except Exception as why:
        return f"The package sluice is installed but does not load: {type(why).__name__}: {why}"
    return ""


def swap(module: nn.Module, options: dict[str, object]) -> Handle:
    """Swap all MoE layers inside `module` explicitly, as the ds_config key with these options would."""
    _enabled, parsed = importlib.import_module("sluice.config").parse(options)
    return importlib.import_module("sluice.adapters.deepspeed").swap(module, parsed)


def moe_layers(module: nn.Module) -> list[nn.Module]:
    """Return the host's MOELayer modules, in order, swapped or not."""
    from deepspeed.moe.sharded_moe import MOELayer

    return [m for m in module.modules() if isinstance(m, MOELayer)]


def is_swapped(layer: nn.Module) -> bool:
    """Whether Sluice runs this layer: the swap replaces its class by one of Sluice's."""
    return type(layer).__module__.split(".")[0] == "sluice"


def stats(layer: nn.Module, reset_peak: bool = False) -> dict[str, Any]:
    """Counters of a swapped layer's context since its creation: bytes, nanoseconds per lane, memory."""
    return dict(importlib.import_module("sluice").stats(layer, reset_peak=reset_peak)["contexts"][0])


def trace_start() -> None:
    """Let the executor record its operations."""
    importlib.import_module("sluice.trace").start()


def trace_stop(rank: int) -> list[dict[str, Any]]:
    """Return the recorded operations in the form of stock_parts: `op` is S, C, R or M, `name` is Sluice's op.

    All ops of the compute lane are C, including the packing and summing of rows.
    """
    events = []
    for event in importlib.import_module("sluice.trace").stop():
        if event["op"] == "pass":  # the whole pass, not an operation
            continue
        letter = "C" if event["lane"] == "compute" else {"d": "S", "c": "R"}.get(event["op"][:1], "M")
        events.append({**event, "rank": rank, "name": event["op"], "op": letter})
    return events
