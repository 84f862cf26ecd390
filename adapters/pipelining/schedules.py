# SPDX-License-Identifier: Apache-2.0
"""Defines schedules for torch.distributed.pipelining. The library orders ops and sends messages (docs/pipeline.md)."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice import config, version
from sluice.adapters.common import agree
from sluice.adapters.pipelining.stage import Batch, TorchStage
from sluice.adapters.torch import EpGroup, Pipeline, PipelineConfig
from sluice.adapters.torch.split_backward import SplitBackward
from sluice.errors import Unsupported
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
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


POLICIES = ("adaptive", "1f1b_hint", "backward_first", "message_driven", *PLANNED)


class _Arriving:
    """Implements the common part of both kinds of schedule.

    policy          which of the ready ops a rank runs next; None: adaptive, chosen by measurements of the first batch
    separate_wgrad  weight gradients are separate ops; None: as the policy needs
    in_flight       L: forwards of a stage whose backward has not run; None: chosen by measurements of the first batch

    All three are also attributes of the class, and must be equal on all ranks. The first step opens connections.
    """

    policy: str | None = None
    separate_wgrad: bool | None = None
    in_flight: int | None = None
    sluice: Pipeline | None = None  # set by the first step; its stats() describe the batches
    _later: Sequence[SplitBackward] = ()  # by stage
    _has_warned_of_scaling = False

    def __init__(
        self,
        *arguments: Any,
        policy: str | None = None,
        separate_wgrad: bool | None = None,
        in_flight: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.policy = self.policy if policy is None else policy
        self.separate_wgrad = self.separate_wgrad if separate_wgrad is None else separate_wgrad
        self.in_flight = self.in_flight if in_flight is None else in_flight

    def _step_microbatches(
        self: Any,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Runs a batch. If it fails on a rank, it fails on all."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        stages = self._own_stages()
        way = way_of(stages, self.policy, self.separate_wgrad)
        if self.sluice is None or not self.sluice.alive:
            self._open(stages, way)
        self._initialize(arg_mbs[0], kwarg_mbs[0], None if target_mbs is None else target_mbs[0], loss_kwargs)
        batch = Batch(
            *(arg_mbs, kwarg_mbs, target_mbs, loss_kwargs, return_outputs),
            is_apart=way.split,
            forward_only=not self._has_backward,
        )
        self._later = self._later or [SplitBackward() for _ in stages]
        run = [TorchStage(self, stage, batch, later) for stage, later in zip(stages, self._later)]
        self._warn_of_scaling(stages)
        try:
            for each in run:
                each.prepare()
            self.sluice.run(run, self._n_microbatches, batch.forward_only)
        except BaseException:
            self._internal_losses.clear()
            for each in run:
                each.abandon()
            raise
        for each in run:
            each.end()
        self._update_losses(stages, losses)
        for stage in () if batch.forward_only else stages:
            stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    @property
    def weights_later(self) -> int:
        """Returns the number of weight gradients of this rank so far that were separate ops."""
        return sum(each.num_left for each in self._later)

    def _warn_of_scaling(self: Any, stages: Sequence[Any]) -> None:
        """Warns once that torch scales the whole `.grad` at the end of a step, gradients of earlier steps included."""
        if self._has_warned_of_scaling or not self._has_backward or not self.scale_grads or self._n_microbatches == 1:
            return
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                if parameter.grad is not None and parameter.grad.any():
                    self._has_warned_of_scaling = True
                    warnings.warn(
                        f"stage {stage.stage_index}: {name}.grad exists at the start of a step, and scale_grads=True "
                        f"divides all of it by {self._n_microbatches} once more at the end, as torch's schedules do. "
                        "Clear gradients before each step, or use scale_grads=False and divide gradients yourself "
                        "before the update (logged once)",
                        stacklevel=5,
                    )
                    return

    def _open(self: Any, stages: Sequence[Any], way: Way) -> None:
        """Opens the pipeline. Collective over the ranks of the stages' group: if one refuses, all raise an error."""
        first = stages[0]
        ranks = sorted(dist.get_process_group_ranks(dist.group.WORLD if first.group is None else first.group))
        own = {
            "refused": reason_against(stages, way),
            "stages": first.num_stages,
            "micro-batches": self._n_microbatches,
            "policy": way.policy,
            "version": version.__version__,
        }
        answers = agree.exchange(ranks, dist.get_rank(), own, None)
        refusals = {rank: answer.pop("refused") for rank, answer in answers.items()}
        for rank, reason in refusals.items():
            if reason:
                raise Unsupported(f"torch.distributed.pipelining: rank {rank}: {reason}")
        agree.require_equal("torch.distributed.pipelining", answers)
        if way.placement == "v":  # torch exchanges metadata by this map
            for stage in stages:
                stage.stage_index_to_group_rank = generate_stage_to_rank_mapping(
                    first.group_size, first.num_stages, style="v"
                )
        group = EpGroup.unshared(ranks)
        try:
            self.sluice = Pipeline(
                PipelineConfig(
                    policy=way.policy,
                    partition=f"{first.num_stages} stages",
                    stage=first.group_rank,
                    in_flight=self.in_flight,
                    num_virtual=len(stages),
                    placement=way.placement,
                    separate_wgrad=way.split,
                ),
                group,
            )
        except BaseException:
            group.close()
            raise
        weakref.finalize(self, group.close).atexit = False  # the group has its own exit handler
        if first.group_rank == 0:
            print(
                f"[sluice {version.__version__}] pipeline of {first.num_stages} stages on {len(ranks)} ranks runs on "
                f"Sluice: policy {way.policy} | in flight {self.in_flight or 'chosen'} | weight gradients "
                f"{'separate' if way.split else 'with the backward'} | pid {os.getpid()}",
                flush=True,
            )


class ScheduleSluice(_Arriving, torch_schedules.PipelineScheduleMulti):
    """Runs any number of stages on each rank, looped or in V: a list of stages, or a single stage."""

    def __init__(self, stages: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(list(stages) if isinstance(stages, Sequence) else [stages], *arguments, **keywords)

    def _own_stages(self) -> list[Any]:
        return self._stages

    def _initialize(self, *first: Any) -> None:
        self._initialize_stages(*first)


class ScheduleSluiceSingle(_Arriving, torch_schedules.PipelineScheduleSingle):
    """Runs one stage on each rank, for code that requires torch's PipelineScheduleSingle."""

    def _own_stages(self) -> list[Any]:
        return [self._stage]

    def _initialize(self, *first: Any) -> None:
        self._initialize_stage(*first)


def named(name: str) -> type:
    """Returns the class for "sluice" or "SluiceSingle"; ":POLICY" may follow."""
    if config.switch() == "0":
        raise ValueError(f"schedule {name!r}: SLUICE=0 switches Sluice off; name one of torch's own schedules")
    if not hasattr(torch_schedules.PipelineScheduleMulti, "_initialize_pp_stages"):
        raise Unsupported(f"schedule {name!r} needs the stages of torch 2.13; this is {torch.__version__}")
    kind, _, policy = name.lower().partition(":")
    if policy and policy not in POLICIES:
        raise ValueError(f"schedule {name!r}: policy {policy!r} is not known; give one of {', '.join(POLICIES)}")
    return _class(ScheduleSluiceSingle if kind == "sluicesingle" else ScheduleSluice, policy or None)


@functools.cache
def _class(base: type, policy: str | None) -> type:
    return base if policy is None else type(f"{base.__name__}_{policy}", (base,), {"policy": policy})
