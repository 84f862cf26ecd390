"""Sluice: the expert-parallel MoE engine that a training framework swaps in.

Importing this package imports neither torch nor a host framework: every process that imports torch loads it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sluice import autoload, trace

if TYPE_CHECKING:
    from sluice.decided import decisions, export_decisions, export_machine
    from sluice.settings import configure

try:
    from sluice._version import __version__
except ImportError:  # the source tree itself: only the packaging knows the version
    __version__ = "0+source"

__all__ = ["__version__", "configure", "decisions", "export_decisions", "export_machine", "stats", "trace"]

# A process that imports Sluice needs no entry point: the names are in transformers' registries from here on.
autoload.load()


def __getattr__(name: str) -> Any:
    if name == "configure":  # its module is loaded by those who call it, not by every `import torch`
        from sluice.settings import configure

        return configure
    if name in ("decisions", "export_decisions", "export_machine"):
        from sluice import decided

        return getattr(decided, name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def stats(layer: Any, reset_peak: bool = False) -> dict[str, Any]:
    """Numbers of a swapped layer, of a host module around it, or of a transformers experts module that Sluice has run:
    memory, bytes sent, lane times, what computes.

    Layers with the same ranks share one context, and with it these numbers. reset_peak: once they are read, the
    peak starts anew at what is allocated now.
    """
    inner = getattr(layer, "deepspeed_moe", layer)
    state = getattr(inner, "_sluice", None)
    experts = sys.modules.get("sluice.adapters.transformers.experts")
    if state is None and experts is not None:
        found = experts.stats(layer, reset_peak)
        if found is not None:
            return dict(found)
    if state is None:
        inner = None if experts is None else experts.first_run_in(layer)
        if inner is not None:
            raise ValueError(
                f"{type(layer).__name__} is more than an experts block: ask one of its experts modules, such as {inner}"
            )
        raise ValueError(f"{type(layer).__name__} does not run on Sluice: no banner, no Sluice")
    return dict(state.stats(reset_peak))
