"""Sluice: the expert-parallel MoE engine that a training framework swaps in.

Importing this package imports neither torch nor a host framework: every process that imports torch loads it.
"""

from __future__ import annotations

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

# A process that imports Sluice needs no entry point: the names are in transformers' registries from here on.
autoload.load()


def __getattr__(name: str) -> Any:
    if name == "configure":  # its module is loaded by those who call it, not by every `import torch`
        from sluice.settings import configure

        return configure
    if name == "plan_model":
        from sluice.adapters.torch.model_plan import plan_model

        return plan_model
    if name == "keep_quantised":
        from sluice.adapters.transformers.quantizer import keep_quantised

        return keep_quantised
    if name in ("decisions", "export_decisions", "export_machine"):
        from sluice import decision_export

        return getattr(decision_export, name)
    if name in ("experts_at_home", "move_experts", "start_moving_experts"):
        from sluice import expert_placement

        return getattr(expert_placement, name)
    raise AttributeError(f"module 'sluice' has no attribute {name!r}")


def give_back() -> int:
    """Frees the memory of gradients that waits in this process for the next ones (`gradient_pool`); how many bytes.

    Any thread, at any time: gradients that are there stay.
    """
    import sys

    pool = sys.modules.get("sluice.adapters.torch.gradient_pool")
    return 0 if pool is None else int(pool.give_back())


def stats(given: Any, reset_peak: bool = False) -> Any:
    """Numbers of what Sluice runs: memory, bytes sent, lane times, what computes.

    Of a layer (a swapped one, the host module around it, an experts module of transformers) a dict; of a model, a
    DeepSpeed engine, or a list of any of these a list of dicts, one for each layer in it that has run. Each may be
    inside of DDP, FSDP or torch.compile. InvalidArgument, a ValueError, says why nothing of it is on Sluice;
    InvalidState that the layer has not run yet.

    Layers with the same ranks share one context, and with it these numbers. reset_peak: once all are read, the
    peak starts anew at what is allocated now.
    """
    from sluice import layer_lookup as resolve
    from sluice.errors import InvalidState

    layers = resolve.layers(given)
    found = [dict(layer.stats()) for layer in layers]
    if reset_peak:  # not while they are read: layers share the peak
        for layer in layers:
            layer.stats(True)
    if not resolve.is_one_layer(given):
        return found
    if not found:
        raise InvalidState(f"stats: {resolve.name_of(given)} has not run yet: call the model once first")
    return found[0]
