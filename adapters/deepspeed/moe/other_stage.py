# SPDX-License-Identifier: Apache-2.0
"""Moves MoE layers that run on Sluice to another stage of a pipeline, between two batches.

Parameters, experts and optimizer states are moved as for any other layer, from each rank to the rank of the new stage
with the same index in the expert-parallel group. This file adds Sluice's own state of the layer: the placement of the
experts, the layer's part of the pipeline's plan, and the tuner's decisions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from sluice.adapters.common.migration import away
from sluice.adapters.common.migration.moving import has_moved, refuse_torn
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.migration.shipments import Content
from sluice.adapters.deepspeed.moe import kinds
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.errors import SluiceError
from sluice.planning.stages_chosen import MoeChoice
from torch import nn

from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups

_CARRIED = "sluice "  # prefix of the name of a MoE layer in a content
Layout = list[list[int]]


def layers_in(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the MoE layers in a layer of the pipeline, with their names relative to it."""
    for name, each in function.named_modules() if isinstance(function, nn.Module) else ():
        if isinstance(each, MOELayer):
            yield name, each


def why_not(handle: Any, layer: int, function: Any) -> str:
    """Returns why a layer of this stage cannot move with its MoE layers; "": it can."""
    for _, each in layers_in(function):
        if kinds.of_swapped(each) is None:
            return f"layer {layer} holds a MoE layer that does not run on Sluice"
        options = handle.options
        if options.memory_budget is not None or options.host_memory_budget is not None:
            return (
                f"layer {layer} holds a MoE layer, and a memory_budget is planned for the MoE layers that a stage has "
                "at the start: leave it out, and give these layers plans in the plan of the pipeline"
            )
        try:
            refuse_torn(each._sluice)
        except SluiceError as error:
            return error.message
    return ""


def group_names(function: Any) -> list[str]:
    """Returns DeepSpeed's names of the groups that MoE layers in a pipeline's layer use, such as "ep_size_2"."""
    return sorted({each.ep_group_name for _, each in layers_in(function)})


def layouts(module: Any, handle: Any) -> dict[str, Layout]:
    """Returns, by group name, the replicas of the pipeline in this rank's expert-parallel group and in the group of
    ranks with the same experts, for groups in which a MoE layer runs on Sluice or has run."""

    def replicas(ranks: Sequence[int]) -> list[int]:
        return [getattr(module._topo.get_coord(rank), "data", 0) for rank in ranks]

    contexts, found = {ranks for ranks, _ in handle.backends}, {}
    for name, group in groups._get_expert_parallel_group_dict().items():
        ranks = dist.get_process_group_ranks(group)
        if tuple(ranks) in contexts:
            same = dist.get_process_group_ranks(groups._get_expert_data_parallel_group(name))
            found[name] = [replicas(ranks), replicas(same)]
    return found


def why_other_groups(layer: int, stage: int, needed: dict[str, Layout], found: dict[str, Layout]) -> str:
    """Returns why the layer cannot run on a stage with the groups `found`; "": it can. needed: its present groups."""
    for name, layout in needed.items():
        if found.get(name) != layout:
            there = "other ones" if name in found else f"{', '.join(sorted(found)) or 'none'}"
            return (
                f"layer {layer} holds a MoE layer of the expert-parallel groups {name}, and stage {stage} has {there} "
                "in which MoE layers run on Sluice: give that stage a MoE layer of this ep_size from the start, or "
                "leave the layer"
            )
    return ""


def pack(function: Any) -> Content:
    """Returns Sluice's state of the MoE layers in a leaving layer, which is sent in addition to the tensors."""
    found = {}
    for name, each in layers_in(function):
        state = each._sluice
        found[_CARRIED + name] = json.dumps(
            {
                "finding": state.finding.compared(),
                "placement": state.placement,
                "choice": state.choice and state.choice._asdict(),
                "decisions": state.decisions(),
            }
        )
    return found


def adopt(engine: Any, layer: int, function: Any, content: Content) -> None:
    """Makes the MoE layers in an arrived layer run on Sluice, after its tensors are filled. Not collective: engine
    layers are made in their first forward."""
    handle, after_experts = engine.sluice, engine._config.use_data_before_expert_parallel_
    for each in function.modules() if isinstance(function, nn.Module) else ():
        # A layer that was built before the pipeline, and has been on this stage, still has its groups.
        if hasattr(each, "set_deepspeed_parallelism") and _group_of(each) is None:
            each.set_deepspeed_parallelism(after_experts)  # finds the existing groups
    for name, each in layers_in(function):
        carried = json.loads(content[_CARRIED + name])
        kind, full = kinds.of_host(each), f"{layer}.{name}" if name else str(layer)
        assert kind is not None
        number = 1 + max((found.layer_id for found in handle.findings), default=-1)
        finding = kind.probe(each, number, full)
        if finding.compared() != carried["finding"]:
            raise UnsupportedError(f"{full} is {finding.compared()} here, and {carried['finding']} where it comes from")
        where = (finding.ranks, finding.device)
        state = kind.state(finding, handle.backends[where], handle.options, handle.families.setdefault(where, []))
        each._sluice, each.__class__ = state, kind.swapped
        state.optimizer = handle.optimizer
        state.placement = Placement(*map(tuple, carried["placement"]))
        if has_moved(state) and handle.optimizer() is not None:
            away.guard_optimizer(handle.optimizer(), state)
        if carried["choice"]:
            state.use_plan(MoeChoice(**carried["choice"]))
        handle.findings.append(finding)


def _group_of(layer: nn.Module) -> Any:
    return getattr(getattr(layer, "deepspeed_moe", None), "ep_group", None)


def settle(arrived: Iterable[tuple[Any, Content]], gone: Iterable[Any]) -> None:
    """Finishes a move that has succeeded on all ranks: imports decisions, and releases the layers that have left."""
    for function, content in arrived:
        for name, each in layers_in(function):
            each._sluice.take_decisions(json.loads(content[_CARRIED + name])["decisions"])
    for function in gone:
        release(function)


def refresh(engine: Any) -> None:
    """Updates the lists of MoE layers in the handle and the engine to those of this stage."""
    handle, module = engine.sluice, engine.module
    handle.layers = [each for each in module.modules() if kinds.of_swapped(each) is not None]
    handle.findings = [each._sluice.finding for each in handle.layers]
    here = {id(each._sluice) for each in handle.layers}
    for family in handle.families.values():
        family[:] = [state for state in family if id(state) in here]
    if handle.decider is not None:
        handle.decider.watch(handle.layers)
    engine.num_experts = [each.num_experts for each in module.modules() if isinstance(each, MoE)]
    engine.moe_layers = [each for each in module.modules() if isinstance(each, MOELayer)]
    engine.gate_modules = [each for each in module.modules() if isinstance(each, TopKGate)]
    for each in (*engine.moe_layers, *engine.gate_modules) if engine.wall_clock_breakdown() else ():
        each.wall_clock_breakdown = True


def release(function: Any) -> None:
    """Returns the MoE layers in a layer that has left this stage to the host."""
    for _, each in layers_in(function):
        kind = kinds.of_swapped(each)
        if kind is not None:
            each.__dict__.pop("_sluice").close()
            each.__class__ = kind.host
