# SPDX-License-Identifier: Apache-2.0
"""Sluice: the expert-parallel MoE engine that a training framework swaps in.

Importing this package imports neither torch nor a host framework, because every process that imports torch loads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sluice import autoload, trace
from sluice.version import __version__

if TYPE_CHECKING:
    from sluice.adapters.torch.model_plan import plan_model
    from sluice.adapters.transformers.quantizer import keep_quantised
    from sluice.decision_export import decisions, export_decisions, export_machine
    from sluice.expert_placement import experts_at_home, move_experts, start_moving_experts
    from sluice.settings import configure

__all__ = [
    "__version__",
    "configure",
    "decisions",
    "experts_at_home",
    "export_decisions",
    "export_machine",
    "give_back",
    "keep_quantised",
    "move_experts",
    "plan_model",
    "start_moving_experts",
    "stats",
    "trace",
]

# A process that imports Sluice needs no entry point: this call installs the import hooks.
autoload.load()


# Modules that are loaded on first use, not by every `import torch`.
_LAZY = {
    "configure": "settings",
    "plan_model": "adapters.torch.model_plan",
    "keep_quantised": "adapters.transformers.quantizer",
    **dict.fromkeys(("decisions", "export_decisions", "export_machine"), "decision_export"),
    **dict.fromkeys(("experts_at_home", "move_experts", "start_moving_experts"), "expert_placement"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sluice.{_LAZY[name]}"), name)


def give_back() -> int:
    """Frees the memory that `gradient_pool` keeps in this process for later gradients, and returns its bytes.

    Any thread may call it at any time: gradients in use are kept.
    """
    import sys

    pool = sys.modules.get("sluice.adapters.torch.gradient_pool")
    return 0 if pool is None else int(pool.give_back())


def stats(given: Any, reset_peak: bool = False) -> dict[str, Any]:
    """Returns numbers of the layers that Sluice runs, as {"layers": [...], "contexts": [...], "process": {...}}.

    given      a layer (a swapped one, the host module around it, an experts module of transformers), a model, a
               DeepSpeed engine, or a list of any of these, each also inside of DDP, FSDP or torch.compile
    layers     for each layer that has run, in the order of the model: what computes it, and `contexts`, the places of
               its contexts in the second list
    contexts   layers with the same ranks share one context; each context is listed once, so that its totals (bytes,
               passes, nanoseconds) can be added up
    process    what all contexts of this process share

    docs/tools.md has a table of the numbers and their units. With reset_peak the peaks restart at the bytes that are
    allocated now. InvalidArgument, a ValueError, says why no layer of `given` runs on Sluice. InvalidState: the layer
    has not run yet.
    """
    from sluice import layer_lookup as resolve
    from sluice.errors import InvalidState

    layers = resolve.layers(given)
    if not layers and resolve.is_one_layer(given):
        raise InvalidState(f"stats: {resolve.name_of(given)} has not run yet: call the model once first")
    return resolve.numbers_of(layers, reset_peak)
