# SPDX-License-Identifier: Apache-2.0
"""Puts Sluice's MoE layers into Megatron's specs. No class of the host changes.

The host builds a model from specs. `with_sluice` takes the spec that the host would use, and returns it with another
class for its MoE layers. Attention, norms, order of layers and pipeline slices stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from sluice.adapters.megatron.layer import SluiceMoELayer
from sluice.errors import Unsupported
from sluice.planning import stages_chosen

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def with_sluice(spec: Any, *, plan: str | None = None, **options: Any) -> Any:
    """Returns a copy of a spec whose MoE layers run on Sluice. The spec itself stays as it is.

    spec     of a block or of a transformer layer, or a function that returns one; or the spec of MoELayer itself, as in
             `submodules.mlp` (a ModuleSpec, or a functools.partial from Megatron-Core 0.18 on)
    plan     a file that `sluice plan --stages --json` printed for the whole model: each MoE layer runs under its plan
             in the file, by its layer_number. Equal on all ranks
    options  keys of the "sluice" section (docs/megatron.md), for these layers; `sluice.configure` and SLUICE_OPTIONS
             have priority

    Unsupported: the spec has no MoE layer. BadInput: the file is no such plan. When the model is built, a plan of
    another number of MoE layers, ranks with different plans, and a memory_budget in addition are refused.
    """
    is_of_layer = isinstance(spec, functools.partial) and spec.func is MoELayer
    if callable(spec) and not is_of_layer and not isinstance(spec, ModuleSpec):
        return _called_later(spec, {**options, **({} if plan is None else {"plan": plan})})
    keywords: dict[str, Any] = {"sluice": options} if options else {}
    if plan is not None:
        keywords["sluice_plan"] = stages_chosen.read_moe(plan)
    swapped, count = swap_moe(spec, keywords)
    if count == 0:
        raise Unsupported(
            f"with_sluice: this {type(spec).__name__} has no MoE layer (megatron.core's MoELayer): give the spec of a "
            "model with num_moe_experts, such as get_gpt_decoder_block_spec makes"
        )
    return swapped


def _called_later(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # hosts look at its signature
    def spec(*args: Any, **kwargs: Any) -> Any:
        return with_sluice(function(*args, **kwargs), **options)

    return spec


def swap_moe(spec: Any, keywords: dict[str, Any]) -> tuple[Any, int]:
    """Returns (a copy with Sluice's class for MoELayer and these keywords to it, the number of MoE layers)."""
    if isinstance(spec, TransformerBlockSubmodules):
        # One spec is usually used for many layers: it is copied once.
        done = {id(layer): swap_moe(layer, keywords) for layer in spec.layer_specs}
        layers = [done[id(layer)][0] for layer in spec.layer_specs]
        return dataclasses.replace(spec, layer_specs=layers), sum(done[id(layer)][1] for layer in spec.layer_specs)
    if isinstance(spec, functools.partial):
        if spec.func is not MoELayer:
            return spec, 0
        return functools.partial(SluiceMoELayer, *spec.args, **{**spec.keywords, **keywords}), 1
    if not isinstance(spec, ModuleSpec):
        return spec, 0
    if spec.module is MoELayer:
        return dataclasses.replace(spec, module=SluiceMoELayer, params={**spec.params, **keywords}), 1
    inner = getattr(spec.submodules, "mlp", None)
    if inner is None:
        return spec, 0
    mlp, count = swap_moe(inner, keywords)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, mlp=mlp)), count
