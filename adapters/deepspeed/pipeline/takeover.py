# SPDX-License-Identifier: Apache-2.0
"""Runs the batches of DeepSpeed's pipeline engine by the library: "sluice": {"pipeline": {...}}.

DeepSpeed's `TrainSchedule` and `InferenceSchedule` fix the order of each stage, which waits for every message. Here a
stage runs ops whose inputs have arrived (docs/pipeline.md), while messages are sent. The host runs other schedules.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from datetime import timedelta
from typing import Any

import torch
from sluice import version
from sluice.adapters.common import agree
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module, stage_plan
from sluice.adapters.deepspeed.pipeline.engine_stage import EngineStage, SplitBackwardStage
from sluice.adapters.deepspeed.pipeline.live_layers import LiveLayers
from sluice.adapters.deepspeed.pipeline.stage_watch import StageWatch
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch import EpGroup, Pipeline, PipelineConfig
from sluice.config import ADAPTIVE_PLAN, Options, PipelineOptions
from sluice.errors import InvalidState

from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

# Instructions that a batch calls, and instructions that it replaces.
_CALLED = (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass)
_REPLACED = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)


def take_over(engine: Any, options: Options) -> Takeover | None:
    """Makes the library run this engine's batches. None: the host runs them (one stage, or "warn" and a reason).

    Called before the engine has its pipeline attributes. Collective over all ranks; all of them raise UnsupportedError
    or agree.DisagreementError together.
    """
    reason = _reason_against(engine)
    if not reason and engine.module._topo.get_dim("pipe") == 1:
        if not options.pipeline or options.pipeline.plan is None:
            return None
        reason = "the pipeline has one stage, so a plan has nothing to partition"
    chosen = dataclasses.asdict(options.pipeline or PipelineOptions())
    own = {
        "refused": reason,
        "pipeline": {name: value for name, value in chosen.items() if value is not None},
        "layers": _partition(engine.module),
        "version": version.__version__,
    }
    ranks = range(torch.distributed.get_world_size())
    answers = agree.exchange(ranks, torch.distributed.get_rank(), own, options.timeout)
    refusals = {rank: answer.pop("refused") for rank, answer in answers.items()}
    agree.require_equal('"sluice": "pipeline"', answers)
    rank, reason = next(((rank, why) for rank, why in refusals.items() if why), (0, ""))
    if reason:
        _refuse(f"{reason} (on rank {rank})" if len(ranks) > 1 else reason, options)
        return None
    return Takeover(engine, options)


def _reason_against(engine: Any) -> str:
    """Returns why the host must run this engine's batches; "": the library can."""
    if not getattr(engine, "pipeline_parallelism", False):
        return "the model is not a deepspeed.pipe.PipelineModule, so there are no stages to run"
    kind = type(engine)
    own = [
        instruction.__name__
        for instruction in (*_CALLED, *_REPLACED)
        if kind._INSTRUCTION_MAP.get(instruction) is not PipelineEngine._INSTRUCTION_MAP[instruction]
    ]
    if own:
        return f"{kind.__name__} overrides {', '.join(own)}"
    if kind._exec_schedule is not PipelineEngine._exec_schedule:
        return f"{kind.__name__} overrides _exec_schedule"
    width = max(engine.module._topo.get_dim("model"), 1)
    if width > 1:
        return f"the topology has tensor parallelism (model = {width})"
    if engine.device.type != "cpu":
        return f"the engine is on {engine.device}, but stages exchange tensors in host memory only"
    return _reason_of_frozen(engine)


def _reason_of_frozen(engine: Any) -> str:
    """Returns why a stage cannot be without trained parameters; "": it has some, or the host supports it."""
    trains = engine.client_optimizer is not None or engine.optimizer_name() is not None
    if not trains or any(parameter.requires_grad for parameter in engine.module.parameters()):
        return ""
    if engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
        why = "DeepSpeed's optimizer for ZeRO, bf16 and fp16 needs one on each stage"
    elif engine.gradient_clipping() > 0:
        why = '"gradient_clipping" needs a gradient on each stage'
    else:
        return ""
    named = stage_module.named(engine.module)
    return f"{named} has no trainable parameter, and {why}: partition the model so that it gets a layer with some"


def _refuse(reason: str, options: Options) -> None:
    if options.on_unsupported == "error":
        raise UnsupportedError(
            f'"sluice": "pipeline": {reason}. Write "on_unsupported": "warn" in the "sluice" section to leave its '
            "batches to DeepSpeed, or remove the key"
        )
    _say(f"[sluice] WARNING: batches stay with DeepSpeed: {reason}")


class Takeover:
    """Runs the engine's batches until `close`."""

    def __init__(self, engine: Any, options: Options) -> None:
        self.batches = 0  # batches that the library ran
        module = engine.module
        grid, topology, wanted = module._grid, module._topo, options.pipeline
        assert wanted is not None
        timeout = None if options.timeout is None else timedelta(seconds=options.timeout)
        ranks = range(torch.distributed.get_world_size())
        self._engine = weakref.ref(engine)
        self._options = options
        self._stage = SplitBackwardStage(engine) if wanted.is_apart else EngineStage(engine)
        self.live = LiveLayers(options)
        watches = wanted.plan == ADAPTIVE_PLAN
        self._watch = StageWatch(options.timeout, self.live, wanted.memory_budget) if watches else None
        group = EpGroup.unshared(ranks, timeout, options.transport)
        try:
            self.pipeline = Pipeline(
                PipelineConfig(
                    policy=wanted.policy,
                    partition=_partition(module),
                    stage=grid.get_stage_id(),
                    replica=grid.get_data_parallel_id(),
                    num_replicas=max(topology.get_dim("data"), 1),
                    has_experts=_meets_its_replicas(module),
                    in_flight=wanted.in_flight,
                    separate_wgrad=wanted.is_apart,
                ),
                group,
            )
        except BaseException:
            group.close()
            raise
        self._release = weakref.finalize(self, group.close)  # also closes the pipeline
        self._release.atexit = False  # the group has its own exit handler
        engine._exec_schedule = self._exec_schedule
        if torch.distributed.get_rank() == 0:
            limit = "chosen" if wanted.in_flight is None else wanted.in_flight
            _say(
                f"[sluice {version.__version__}] pipeline of {topology.get_dim('pipe')} stages runs on Sluice: "
                f"policy {wanted.policy}{', separate weight gradients' if wanted.is_apart else ''} | in flight "
                f"{limit} | {topology.get_dim('data')} replicas | pid {os.getpid()}"
            )

    def start_plan(self, engine: Any) -> None:
        """Moves layers as the plan says. Called before the first batch, after the optimizer was made."""
        wanted = self._options.pipeline
        if wanted is not None and wanted.plan not in (None, ADAPTIVE_PLAN):
            stage_plan.start(engine, self._options)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        """Replaces the engine's method."""
        kind = type(pipe_schedule)
        if kind not in (schedule.TrainSchedule, schedule.InferenceSchedule):
            PipelineEngine._exec_schedule(self._engine(), pipe_schedule)
            return
        forward_only = kind is schedule.InferenceSchedule
        if self._watch is None or forward_only:
            self._run(pipe_schedule.num_micro_batches, forward_only)
            return
        self._watch.before_batch(self._engine(), self.pipeline, pipe_schedule.num_micro_batches)
        try:
            with self._watch.measured(self._engine(), self.pipeline) as self._stage.watch:
                self._run(pipe_schedule.num_micro_batches, forward_only)
        finally:
            self._stage.watch = None

    def _run(self, micro_batches: int, forward_only: bool) -> None:
        engine = self._engine()
        if moving_layers.why_torn(engine):
            raise InvalidState(moving_layers.why_torn(engine))
        live, stage = None, self._stage
        try:
            live = None if forward_only else self.live.batch(engine.module)
            self._stage.begin(forward_only, live)
        except Exception as error:  # the other ranks learn this in the batch
            stage = _Failed(error)
        try:
            try:
                self.pipeline.run(stage, micro_batches, forward_only)
            finally:
                if live is not None:
                    live.end()
            if not forward_only:
                self.live.commit(engine)
        except BaseException:
            self._stage.abandon()
            self.live.cancel("a batch failed after some of its gradients may have been sent")
            raise
        self.batches += 1
        self._stage.end()

    def stats(self) -> dict[str, Any]:
        """Returns numbers of the batches that the library ran. Not to be called during a batch."""
        layers = {} if self._watch is None else {"layers": self._watch.report()}
        later = {"weights_later": self._stage.num_weights_later} if isinstance(self._stage, SplitBackwardStage) else {}
        engine = self._engine()
        offloaded = stage_module.offloaded_of(engine.module) if engine is not None else None
        copies = {} if offloaded is None else {"offload": offloaded.stats()}
        return {
            "batches": self.batches,
            **later,
            **layers,
            **copies,
            "live": self.live.report(),
            **self.pipeline.stats(),
        }

    def close(self) -> None:
        """Returns the engine's batches to the host. Not collective, but all ranks must call it. May be called again."""
        engine = self._engine()
        if engine is not None:
            vars(engine).pop("_exec_schedule", None)
        self.live.close()
        self._release()


class _Failed:
    """Replaces a stage whose batch could not begin: every step raises the error."""

    def __init__(self, error: Exception) -> None:
        self.load = self.forward = self.backward = self.weight_grad = self._fail
        self._error = error

    def _fail(self, *_: Any) -> Any:
        raise self._error


def _partition(module: Any) -> str:
    """Returns the bounds of stages, such as "0,4,8"; "": the module has none."""
    return ",".join(str(int(bound)) for bound in getattr(module, "parts", ()))


def _meets_its_replicas(module: Any) -> bool:
    """Returns whether layers of this stage communicate with other replicas in a forward or a backward."""
    return any(
        isinstance(each, torch.nn.SyncBatchNorm) or (isinstance(each, MOELayer) and each.ep_size > 1)
        for each in module.modules()
    )


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
