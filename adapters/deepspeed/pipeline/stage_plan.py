# SPDX-License-Identifier: Apache-2.0
"""Applies the file that the option "plan" of a pipeline names: the stage of each layer, which layers are recomputed or
offloaded, and the plans of MoE layers. The plan takes effect before the first batch.
"""

from __future__ import annotations

from typing import Any

from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch.swap import HOST, Swap
from sluice.config import Options
from sluice.errors import InvalidArgument, SluiceError
from sluice.planning import stages, stages_chosen
from sluice.planning.stages_chosen import Chosen
from torch import nn


def start(engine: Any, options: Options) -> None:
    """Applies the plan file that the engine's options name. Collective. An unusable file is an error on all ranks;
    ranks that found the error raise it with its own class."""
    module, wanted = engine.module, options.pipeline
    assert wanted is not None and wanted.plan is not None
    failure: SluiceError | None = None
    chosen = Chosen(stage_module.parts_of(module), ())
    try:
        chosen = stages_chosen.read(wanted.plan, module._num_layers, module.num_stages, wanted.memory_budget)
    except SluiceError as error:
        failure = error
    if failure is None and stages.OFFLOAD in chosen.kinds and wanted.is_apart:
        failure = InvalidArgument(
            "the plan has offloaded layers, whose weight gradients are computed in their backward: remove "
            '"separate_wgrad" and zero_bubble'
        )
    try:
        follow(engine, chosen, options.timeout, failure.message if failure else "", wanted.offload)
    except UnsupportedError:
        if failure is not None:
            raise failure from None
        raise


def follow(engine: Any, chosen: Chosen, wait_s: float | None, refused: str = "", offload: str | None = None) -> None:
    """Applies a plan to the engine, between batches. Collective over all ranks of the pipeline. offload: the tier of
    offloaded layers."""
    recomputed = [layer for layer, kind in enumerate(chosen.kinds) if kind == stages.RECOMPUTE]
    offloaded = [layer for layer, kind in enumerate(chosen.kinds) if kind == stages.OFFLOAD]
    tier = offload or HOST
    why = refused or _why_not(engine, chosen) or (_why_no_tier(tier) if offloaded else "")
    compared = {"kinds": list(chosen.kinds), "plans of MoE layers": [each and [*each] for each in chosen.moe]}
    moving_layers.move(engine, chosen.parts, wait_s, refused=why, compared=compared)
    moving_layers.settle(engine)
    stage_module.set_recomputed(engine.module, recomputed)
    stage_module.set_offloaded(engine.module, offloaded, tier)
    for layer in stage_module.layers_of(engine.module):
        choice = chosen.moe[layer] if chosen.moe else None
        if choice is not None:
            _moe_layers(engine.module, layer)[0]._sluice.use_plan(choice)


def _why_not(engine: Any, chosen: Chosen) -> str:
    """Returns why this engine cannot run the plan; "": it can."""
    has_plan = [choice is not None for choice in chosen.moe] or [False] * len(chosen.kinds)
    plain = [kind for kind, has in zip(chosen.kinds, has_plan) if not has]
    other = next((kind for kind in plain if kind not in (stages.KEEP, stages.RECOMPUTE, stages.OFFLOAD)), None)
    if other is not None:
        return f"the plan has a layer of kind '{other}': layers of a pipeline are kept, recomputed or offloaded"
    for layer in stage_module.layers_of(engine.module):
        why = _why_no_moe_plan(engine.module, layer) if has_plan[layer] else ""
        if why:
            return why
    if {stages.RECOMPUTE, stages.OFFLOAD} & set(chosen.kinds) and host_recomputes(engine):
        return (
            "the plan says which layers are recomputed or offloaded, but activation_checkpoint_interval is set: "
            'remove that from the model and from the "pipeline" section'
        )
    for layer, kind in enumerate(chosen.kinds):
        is_offloaded = kind == stages.OFFLOAD and not has_plan[layer]
        why = stage_module.why_not_switched(engine.module, layer) if is_offloaded or kind == stages.RECOMPUTE else ""
        if why:
            return f"the plan {'offloads' if is_offloaded else 'recomputes'} it, but {why}"
    return ""


def _moe_layers(module: Any, layer: int) -> list[Any]:
    """Returns the MoE layers in this layer of the pipeline that run on Sluice."""
    function = stage_module.function_of(module, layer)
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return [each for each in modules if hasattr(getattr(each, "_sluice", None), "why_no_plan")]


def _why_no_moe_plan(module: Any, layer: int) -> str:
    found = _moe_layers(module, layer)
    if len(found) != 1:
        return f"the plan has a MoE layer in layer {layer}, which has {len(found)} that run on Sluice"
    return found[0]._sluice.why_no_plan()


def _why_no_tier(tier: str) -> str:
    """Returns why this rank cannot use the tier; "": it can. Tries a write, since permissions may mislead."""
    try:
        Swap([False], tier).close()
    except SluiceError as error:
        return f"the plan has offloaded layers, but {error.message}"
    return ""


def host_recomputes(engine: Any) -> bool:
    """Returns whether DeepSpeed's own checkpoint intervals are on."""
    section = engine._config.pipeline.get("activation_checkpoint_interval", 0)
    return bool(section > 0 or engine.module.activation_checkpoint_interval > 0)
