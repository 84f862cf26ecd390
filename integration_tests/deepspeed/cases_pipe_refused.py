# SPDX-License-Identifier: Apache-2.0
"""Rank-side: pipelines that are refused, and batches that fail."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest.mock import patch

import deepspeed
import ds_models
import pipe_models as models
import torch
import torch.distributed as dist
from cases_pipe import MICRO_BATCHES, Job, unclipped
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn


class _OwnEngine(PipelineEngine):
    """A user's subclass that overrides how schedules run."""

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        super()._exec_schedule(pipe_schedule)


def refused(what: str, section: dict[str, Any]) -> str:
    """Returns the error of a model whose stages Sluice cannot run. With "warn" the host runs the batches."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    if what == "no pipeline":
        net: Any = nn.Sequential(*layers)
    elif what == "tensor parallelism":
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=dist.get_world_size(), num_dp=1)
        net = PipelineModule(layers, topology=topology, loss_fn=models.loss)
    elif what == "two directions":
        from deepspeed.pipe import DualPipeVModule

        net = DualPipeVModule(layers, num_stages=dist.get_world_size(), loss_fn=models.loss, partition_method="uniform")
    else:
        net = PipelineModule(layers, num_stages=dist.get_world_size(), loss_fn=models.loss)
    kind = _OwnEngine if what == "own engine" else PipelineEngine
    with patch.object(deepspeed, "PipelineEngine", kind):
        engine = Job("plain", 1, {}, section=section, net=net).engine
    assert engine.sluice.pipeline is None
    assert "_exec_schedule" not in vars(engine)
    return "stays"


def differ(section: list[dict[str, Any]]) -> str:
    """Returns the error when ranks have different "pipeline" sections."""
    Job("plain", dist.get_world_size(), section[dist.get_rank()])
    return "none"


def frozen(kind: str, later: bool = False, **job: Any) -> list[Any]:
    """Returns [error, losses, bytes sent] of a pipeline with frozen layers. later: layers freeze after the start."""
    made: list[Any] = [[], 0]

    def train() -> None:
        one = unclipped({}, kind="plain" if later else kind, stages=2, **{"is_filtered": False, **job})
        if later:
            for name, layer in one.engine.module.named_children():
                layer.requires_grad_(name not in kind.split())
        made[:] = one.train(range(3)), one.engine.sluice.pipeline.stats()["bytes_sent"]

    return [ds_models.said(train), *made]


def one_stage() -> list[float]:
    """Returns losses of a pipeline with one stage, which the host runs, because there is nothing to overlap."""
    made = Job("plain", 1, {})
    assert made.engine.sluice.pipeline is None
    return made.train(range(1))


# ---- batches that fail ----


class Failing(models.Block):
    """A block that fails on request."""

    at: tuple[str, int] | None = None  # direction, and index of the micro-batch in the batch
    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number, Failing.seen = Failing.seen, Failing.seen + 1
        self._fail("forward", number)
        out = super().forward(x)
        if torch.is_grad_enabled():
            out.register_hook(lambda _grad: self._fail("backward", number))
        return out

    def _fail(self, where: str, number: int) -> None:
        if Failing.at == (where, number):
            raise RuntimeError(f"the layer is out of order in {where}")


def _net(stage: int, stages: int) -> PipelineModule:
    """Returns a pipeline with two layers per stage. The first layer of `stage` can fail."""
    torch.manual_seed(0)
    layers = [Failing() if index == 2 * stage else models.Block() for index in range(2 * stages)]
    return PipelineModule(layers, num_stages=stages, loss_fn=models.loss, partition_method="uniform", seed_layers=True)


def _short(batches: Any, count: int) -> Any:
    for _, each in zip(range(count), batches):
        yield each


MESSAGE_DRIVEN = {"policy": "message_driven", "in_flight": 3}


def failing(
    stage: int,
    where: str,
    stages: int,
    config: dict[str, Any] | None = None,
    pipeline: dict[str, Any] = MESSAGE_DRIVEN,
    **job: Any,
) -> dict[str, Any]:
    """Fails two batches on one stage. Returns this rank's errors, and losses and state with and without the batches."""
    found: dict[str, Any] = {"errors": []}
    sides = []
    for section in (None, pipeline):
        made = Job("plain", stages, section, config=config, net=_net(stage, stages), **job)
        losses = made.train(range(2))
        if section is not None:
            for _ in range(2):
                data = made.data(9)
                if where == "load" and made.engine.stage_id == stage:
                    data = _short(data, 2)
                with patch.multiple(Failing, at=(where, 2), seen=0):
                    found["errors"].append(ds_models.said(lambda: made.engine.train_batch(data)))  # noqa: B023
            found["stats"] = made.engine.sluice.pipeline.stats()
        losses += made.train(range(2, 5))
        losses.append(float(made.engine.eval_batch(made.data(8))))
        sides.append({"losses": losses, **made.state()})
        made.end()
    return {**found, "stock": sides[0], "ours": sides[1]}


def killed(stage: int) -> str:
    """Kills one stage in its forward. Returns the errors of the other stages."""
    stages = dist.get_world_size()
    made = Job("plain", stages, {}, net=models.module("plain", stages))
    made.train(range(1))
    if made.engine.stage_id == stage:
        made.engine.module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return ds_models.said(lambda: made.train(range(1, 2)))


def unequal() -> list[str]:
    """Returns the error when one rank evaluates another number of micro-batches than the other ranks."""
    stages = dist.get_world_size()
    made = Job("plain", stages, {})
    made.train(range(1))
    count = MICRO_BATCHES + (dist.get_rank() == 0)
    told = ds_models.said(lambda: made.engine.eval_batch(made.data(1, count), num_micro_batches=count))
    dist.barrier()  # until all ranks were told
    return [told, str(made.train(range(1, 2))[0] > 0)]
