# SPDX-License-Identifier: Apache-2.0
"""Reads and replaces the layers of a `PipelineModule` on this rank, and their contents.

The module remains the user's object. After a change, names and orders are those of a module that was built with the new
partition.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from sluice.adapters.common.migration.shipments import Content
from sluice.adapters.torch.model_blocks import Recomputed
from sluice.adapters.torch.offloaded import Offloaded
from torch import nn

from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import LayerSpec, TiedLayerSpec

_SWITCHES = "_sluice_switches"  # attribute of a module: layers that a plan recomputes or offloads
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parts_of(module: Any) -> tuple[int, ...]:
    """Returns the first layer of each stage, and the number of layers."""
    return tuple(int(bound) for bound in module.parts)


def named(module: Any) -> str:
    """Returns a phrase with this rank's stage and its layers."""
    first, last = parts_of(module)[module.stage_id : module.stage_id + 2]
    return f"stage {module.stage_id} (layers {first} to {last - 1})"


def owners(parts: Sequence[int]) -> list[int]:
    """Returns the stage of each layer."""
    return [stage for stage, (first, last) in enumerate(zip(parts, parts[1:])) for _ in range(first, last)]


def why_no_partition(module: Any, parts: Sequence[int]) -> str:
    """Returns why `parts` is not a partition of this module's layers; "": it is one."""
    bounds, count = list(parts), module._num_layers
    if len(bounds) == module.num_stages + 1 and bounds[0] == 0 and bounds[-1] == count:
        if all(first < last for first, last in zip(bounds, bounds[1:])):
            return ""
    return (
        f"parts are {bounds}: for {count} layers on {module.num_stages} stages they are {module.num_stages + 1} "
        f"strictly ascending numbers from 0 to {count}"
    )


def why_pinned(module: Any, layer: int) -> str:
    """Returns why this layer of this stage cannot move; "": it can."""
    function, why = function_of(module, layer), why_stays(module, layer)
    if why or not isinstance(function, nn.Module):
        return why  # "" for a function: all ranks have it
    inner = list(function.modules())
    if any(getattr(each, name, None) for each in inner for name in _HOOKS):
        return f"layer {layer} has hooks, which belong to this process"
    own = {id(parameter) for parameter in function.parameters()}
    others = [function_of(module, other) for other in layers_of(module) if other != layer]
    if any(id(p) in own for other in others if isinstance(other, nn.Module) for p in other.parameters()):
        return f"layer {layer} shares parameters with another layer"
    return ""


def why_stays(module: Any, layer: int) -> str:
    """Returns why this layer's type forbids moving the layer, so that plans must leave it; "": it does not."""
    spec, function = module._layer_specs[layer], function_of(module, layer)
    if isinstance(spec, TiedLayerSpec):
        return f"layer {layer} is tied to others by '{spec.key}'"
    inner = list(function.modules()) if isinstance(function, nn.Module) else []
    if any(isinstance(each, nn.SyncBatchNorm) for each in inner):
        return f"layer {layer} communicates with those of the other replicas"
    return ""


def has_experts(module: Any, layer: int) -> bool:
    """Returns whether this layer of this stage holds a MoE layer."""
    function = function_of(module, layer)
    return isinstance(function, nn.Module) and any(isinstance(each, MOELayer) for each in function.modules())


def function_of(module: Any, layer: int) -> Any:
    """Returns the function that this stage calls for one of its layers."""
    return module.forward_funcs[layer - module._local_start]


def is_tied(module: Any, layer: int) -> bool:
    """Returns whether the layer shares its parameters with others by a TiedLayerSpec."""
    return isinstance(module._layer_specs[layer], TiedLayerSpec)


def layers_of(module: Any) -> range:
    """Returns the layers of this stage."""
    return range(module._local_start, module._local_stop)


def parameters_of(module: Any, layer: int) -> list[nn.Parameter]:
    """Returns the parameters of a layer of this stage, tied ones included."""
    spec = module._layer_specs[layer]
    owner = module.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else function_of(module, layer)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


def content_of(function: Any) -> Content:
    """Returns parameters, gradients, buffers and flags of a layer, without copies."""
    content: Content = {}
    if not isinstance(function, nn.Module):
        return content
    for name, parameter in function.named_parameters():
        content[f"{name} value"] = parameter.detach()
        content[f"{name} trained"] = parameter.requires_grad
        if parameter.grad is not None:
            content[f"{name} grad"] = parameter.grad.detach()
    for name, buffer in function.named_buffers():
        content[f"{name} buffer"] = buffer.detach()
    content["evaluated"] = " ".join(name or "." for name, each in function.named_modules() if not each.training)
    return content


def names_of(function: Any) -> list[str]:
    """Returns names of all tensors that `fill` sets, with the shapes of parameters."""
    if not isinstance(function, nn.Module):
        return []
    parameters = [f"{name} {list(parameter.shape)}" for name, parameter in function.named_parameters()]
    return parameters + [name for name, _ in function.named_buffers()]


def build(module: Any, layer: int) -> Any:
    """Builds an arriving layer from its spec, without changing the random streams of the training."""
    spec = module._layer_specs[layer]
    if not isinstance(spec, LayerSpec):
        return spec
    with _random_untouched():
        return spec.build()


def fill(function: Any, content: Content) -> None:
    """Gives a newly built layer the received content. Tensors are not copied."""
    if not isinstance(function, nn.Module):
        return
    evaluated = content["evaluated"].split()
    for name, each in function.named_modules():
        each.training = (name or ".") not in evaluated
        for key, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[key] = content[f"{name}.{key} buffer" if name else f"{key} buffer"]
    for name, parameter in function.named_parameters():
        parameter.data = content[f"{name} value"]
        parameter.requires_grad_(content[f"{name} trained"])
        parameter.grad = content.get(f"{name} grad")
        parameter.ds_pipe_replicated = False


def run_with(module: Any, first: int, functions: Sequence[Any]) -> None:
    """Makes forwards run these functions; `first` is the layer of the first one. The stage's modules do not change."""
    module.forward_funcs[:] = functions
    module._set_bounds(start=first, stop=first + len(functions))


def replace(module: Any, parts: Sequence[int], functions: Mapping[int, Any]) -> None:
    """Gives the stage its layers under `parts`. functions: by layer, at least the layers of this stage."""
    for layer in range(module._num_layers):
        module._modules.pop(str(layer), None)
    module.parts = list(parts)
    module._set_bounds(start=parts[module.stage_id], stop=parts[module.stage_id + 1])
    module.forward_funcs[:] = [functions[layer] for layer in layers_of(module)]
    module.fwd_map.clear()
    for place, layer in enumerate(layers_of(module)):
        function = functions[layer]
        if isinstance(function, nn.Module) and not isinstance(module._layer_specs[layer], TiedLayerSpec):
            module.fwd_map[str(layer)] = place
            module.add_module(str(layer), function)
    _refresh_switches(module)
    # The host lists, by position, which layers it may recompute, and skips a layer without an entry.
    module.is_checkpointable_results_interval = None
    module.is_checkpointable_results = []
    module._precompute_checkpointable_values()


@dataclass
class _Switches:
    """Layers of all stages that a plan switches, and what is switched on for the layers of this stage."""

    recomputed: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()
    tier: str = ""
    again: dict[int, tuple[nn.Module, Recomputed]] = field(default_factory=dict)  # by layer
    copies: Offloaded | None = None


def _switches(module: Any) -> _Switches:
    """Returns the switches of a module, which has none until the first one is set."""
    found: _Switches = vars(module).get(_SWITCHES) or _Switches()
    return found


def _set(module: Any, **switches: Any) -> None:
    vars(vars(module).setdefault(_SWITCHES, _Switches())).update(switches)
    _refresh_switches(module)


def set_recomputed(module: Any, layers: Iterable[int]) -> None:
    """Makes these layers recompute in the backward, on whichever stage they are.

    Each layer is switched separately. The host's checkpoint intervals would change the seeds of layers.
    """
    _set(module, recomputed=frozenset(layers))


def recomputed_of(module: Any) -> frozenset[int]:
    """Returns layers of all stages that are recomputed."""
    return _switches(module).recomputed


def set_offloaded(module: Any, layers: Iterable[int], tier: str) -> None:
    """Offloads the saved tensors of these layers to the tier until their backward, on whichever stage they are. If the
    tier's file cannot be created, External is raised and nothing is offloaded."""
    _set(module, offloaded=frozenset(layers), tier=tier)


def offloaded_of(module: Any) -> Offloaded | None:
    """Returns the offloaded layers of this stage; None: it has none."""
    return _switches(module).copies


def why_not_switched(module: Any, layer: int) -> str:
    """Returns why a layer cannot be recomputed or offloaded; "": it can. The layer's spec decides, which all ranks
    have."""
    spec = module._layer_specs[layer]
    if isinstance(spec, TiedLayerSpec):
        return f"layer {layer} is tied to others by '{spec.key}'"
    return "" if isinstance(spec, (LayerSpec, nn.Module)) else f"layer {layer} is a function"


def _refresh_switches(module: Any) -> None:
    """Applies both switches to the current layers. Offloading wraps recomputation: it is undone first and set last."""
    now, here = _switches(module), {layer: function_of(module, layer) for layer in layers_of(module)}
    if now.copies is not None:
        now.copies.undo()
        now.copies = None
    for layer, (function, switch) in list(now.again.items()):
        if layer not in now.recomputed or here.get(layer) is not function:
            switch.undo()
            del now.again[layer]
    for layer in now.recomputed & here.keys() - now.again.keys():
        now.again[layer] = here[layer], Recomputed([here[layer]])
    chosen = [f"layer {layer}" for layer in here if layer in now.offloaded]
    if chosen:
        own = {n: each for n, each in here.items() if isinstance(each, nn.Module) and not is_tied(module, n)}
        now.copies = Offloaded({f"layer {n}": each for n, each in own.items()}, chosen, now.tier)


@contextmanager
def _random_untouched() -> Iterator[None]:
    """Restores the random states of torch, Python and numpy afterwards."""
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state[0])
            if numpy is not None:
                numpy.random.set_state(state[1])
