# SPDX-License-Identifier: Apache-2.0
"""Finds the layers that run on Sluice in the argument of `sluice.stats`, `decisions`, `export_*` and `trace.stop`.

The argument is a layer, a model, a DeepSpeed engine, each also inside of DDP, FSDP or torch.compile, or a list of
these. A layer here is the adapter's object for it, with `layer_id`, `stats()` and `contexts()`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sluice import autoload
from sluice.errors import InvalidArgument

# Classes of torch that wrap one module, and the attribute that holds it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
# Each adapter's module about layers that have no numbers; loaded only if its host is.
_ABSENT = {
    "deepspeed": "sluice.adapters.deepspeed.absent",
    "megatron.core": "sluice.adapters.megatron.absent",
    "transformers": "sluice.adapters.transformers.absent",
}


def layers(given: Any) -> list[Any]:
    """Returns the layers that have numbers, in the order of the model, each once.

    The list is empty for experts of transformers before their first call, for a pipeline stage without MoE layers and
    for an empty list. Otherwise InvalidArgument says what was given, and why no layer of it runs on Sluice.
    """
    if isinstance(given, (list, tuple)):
        found = [layer for one in given for layer in layers(one)]
    else:
        found = _of_module(given)
    return list({id(layer): layer for layer in found}.values())


def is_one_layer(given: Any) -> bool:
    """Returns whether the argument (as for `layers`) is a layer itself, and not a model around one."""
    if isinstance(given, (list, tuple)):
        return False
    module = _unwrapped(given)
    module = module._modules.get("deepspeed_moe", module)  # DeepSpeed's MoE is the layer in the user's model
    return _layer(module) is not None or any(absent.waits(module) for absent in _hosts())


def contexts(given: Any) -> list[Any]:
    """Returns the open contexts of these layers, each once."""
    found = [context for layer in layers(given) for context in layer.contexts() if context.alive]
    return list({id(context): context for context in found}.values())


def numbers_of(layers: list[Any], reset_peak: bool = False) -> dict[str, Any]:
    """Returns the result of `sluice.stats` for these layers."""
    contexts = list({id(context): context for layer in layers for context in layer.contexts()}.values())
    places = {id(context): place for place, context in enumerate(contexts)}
    pool = sys.modules.get("sluice.adapters.torch.gradient_pool")
    return {
        "layers": [{**layer.stats(), "contexts": [places[id(one)] for one in layer.contexts()]} for layer in layers],
        "contexts": [{"ranks": list(one.ep_group.ranks), **one.stats(reset_peak)} for one in contexts],
        "process": {} if pool is None else pool.numbers(),
    }


def name_of(given: Any) -> str:
    """Returns the name of the class, and for a wrapper also the class of the wrapped module."""
    inner = _unwrapped(given)
    own = type(given).__name__
    return own if inner is given else f"{own} around {type(inner).__name__}"


def _of_module(given: Any) -> list[Any]:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(given, torch.nn.Module):
        raise InvalidArgument(
            f"{type(given).__name__} is not a layer, model or engine (torch.nn.Module), nor a list of these"
        )
    found = [layer for layer in map(_layer, given.modules()) if layer is not None]
    if found:
        return found
    inner = _unwrapped(given)
    for absent in _hosts():
        if absent.need_not_have_run(inner):
            return []
    reasons = [reason for absent in _hosts() if (reason := absent.why(inner))]
    reasons = reasons or [
        "it holds no MoE layer that Sluice knows (DeepSpeed's MoE, Megatron's MoELayer, transformers' experts)"
    ]
    raise InvalidArgument(f"{name_of(given)} does not run on Sluice: {'; '.join([*reasons, *autoload.problems])}")


def kept_of(module: Any) -> Any:
    """Returns the adapter's object for a layer, even before its first run; None if no adapter runs the layer."""
    if not hasattr(module, "named_modules"):
        return None
    kept = vars(module).get("_sluice")
    experts = sys.modules.get("sluice.adapters.transformers.experts")
    return experts.kept_of(module) if kept is None and experts is not None else kept


def _layer(module: Any) -> Any:
    """Returns the adapter's object for a layer that has numbers."""
    kept = kept_of(module)
    return kept if getattr(kept, "has_run", True) else None


def _hosts() -> list[Any]:
    return [importlib.import_module(name) for host, name in _ABSENT.items() if host in sys.modules]


def _unwrapped(given: Any) -> Any:
    while type(given).__module__.startswith("torch.") and type(given).__name__ in _WRAPPERS:
        given = getattr(given, _WRAPPERS[type(given).__name__])
    return given
