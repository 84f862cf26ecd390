"""The one place where benchmarks and the quickstart touch Sluice's Python interface."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from torch import nn


class Handle(Protocol):
    """What a swap returns."""

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
    """Swap all MoE layers inside `module` explicitly, as the ds_config key would."""
    return importlib.import_module("sluice.adapters.deepspeed").swap(module, options)


def moe_layers(module: nn.Module) -> list[nn.Module]:
    """Return the host's MOELayer modules, in order, swapped or not."""
    from deepspeed.moe.sharded_moe import MOELayer

    return [m for m in module.modules() if isinstance(m, MOELayer)]


def is_swapped(layer: nn.Module) -> bool:
    """Whether Sluice runs this layer: the swap replaces its class by one of Sluice's own."""
    return type(layer).__module__.split(".")[0] == "sluice"


def stats(layer: nn.Module) -> dict[str, int]:
    """Counters of a swapped layer: chunks, bytes_sent, comm_ns, compute_ns, comm_cpu_ns, peak_bytes, ..."""
    return dict(importlib.import_module("sluice").stats(layer))


def trace_start() -> None:
    """Let the executor record its operations."""
    importlib.import_module("sluice.trace").start()


def trace_stop() -> list[dict[str, Any]]:
    """Return the recorded operations: rank, lane, op, chunk, direction, layer, begin_ns, end_ns."""
    return list(importlib.import_module("sluice.trace").stop())
