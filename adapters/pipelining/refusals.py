# SPDX-License-Identifier: Apache-2.0
"""Finds the placement of a rank's stages, and refuses stages that cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# Policies with a fixed order (docs/pipeline.md): replicas of a stage run the same ops without messages between them.
PLANNED = ("1f1b", "gpipe", "zero_bubble", "looped", "v")
# Policies that always run weight gradients as separate ops.
SPLIT = ("zero_bubble", "v")


class Way(NamedTuple):
    """Describes how the stages of all ranks run. policy: by name; split: weight gradients are separate ops."""

    policy: str
    placement: str
    split: bool


def way_of(stages: Sequence[Any], policy: str | None, split: bool | None) -> Way:
    """Fills in defaults, and finds the placement of the stages. placement "": unknown order."""
    policy = policy or "adaptive"
    return Way(policy, _placement(stages, policy), policy in SPLIT if split is None else split)


def _placement(stages: Sequence[Any], policy: str) -> str:
    rank, ranks = stages[0].group_rank, stages[0].group_size
    found = [stage.stage_index for stage in stages]
    looped = [rank + ranks * k for k in range(len(stages))]
    v_shaped = [ranks * k + (ranks - 1 - rank if k % 2 else rank) for k in range(len(stages))]
    known = {tuple(v_shaped): "v"} if policy == "v" else {tuple(v_shaped): "v", tuple(looped): "looped"}
    return known.get(tuple(found), "")


def reason_against(stages: Sequence[Any], way: Way) -> str:
    """Returns why these stages of this rank cannot run; "": they can."""
    first = stages[0]
    wanted = first.num_stages / first.group_size
    indices = ", ".join(str(stage.stage_index) for stage in stages)
    if len(stages) != wanted:
        return (
            f"it holds {len(stages)} of {first.num_stages} stages on {first.group_size} ranks: each rank holds "
            f"equally many, here {wanted:g}"
        )
    if not way.placement:
        return (
            f"place {first.group_rank} of {first.group_size} holds stages {indices}: they must be looped (stage c on "
            "rank c mod p), or a V with two on each rank (down the ranks and up again; policy v needs it), in "
            "ascending order"
        )
    for stage in stages:
        reason = _reason_against_one(stage, way)
        if reason:
            return f"stage {stage.stage_index}: {reason}"
    return ""


def _reason_against_one(stage: Any, way: Way) -> str:
    if torch.device(stage.device).type != "cpu":
        return f"it is on {stage.device}, but stages exchange tensors in host memory only"
    if way.split and isinstance(stage.submod, DistributedDataParallel):
        return "DistributedDataParallel reduces gradients in a whole backward: remove separate_wgrad or DDP"
    if way.split and any(isinstance(each, torch._dynamo.OptimizedModule) for each in stage.submod.modules()):
        return "a compiled module runs its backward as a whole: remove separate_wgrad or torch.compile"
    if way.split and any(isinstance(each, FSDPModule) for each in stage.submod.modules()):
        return "FSDP is not supported with separate weight gradients: remove separate_wgrad or FSDP"
    if way.policy in PLANNED:
        return ""
    for each in stage.submod.modules():
        if isinstance(each, (FSDPModule, torch.nn.SyncBatchNorm)):
            others = [name for name in PLANNED if not (isinstance(each, FSDPModule) and name in SPLIT)]
            return (
                f"{type(each).__name__} synchronizes its replicas within a pass, but policy {way.policy} does not "
                f"fix the order of passes: use one of {', '.join(others)}"
            )
    return ""
