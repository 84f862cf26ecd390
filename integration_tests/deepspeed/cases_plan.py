# SPDX-License-Identifier: Apache-2.0
"""Rank-side: a pipeline's configured partition and recomputation, compared with stock with the same partition."""

from __future__ import annotations

import resource
from typing import Any
from unittest.mock import patch

import torch
from cases_pipe import Job, trained, unclipped
from ds_models import said
from pipe_models import Switched
from replaced_collectives import noted_collectives
from sluice.adapters.deepspeed.pipeline import stage_module, stage_watch
from sluice.adapters.deepspeed.pipeline.stage_watch import StageWatch
from sluice.adapters.torch import offloaded as model_offloaded
from sluice.planning import stages_chosen


def _count_forwards(module: Any) -> dict[str, list[int]]:
    """Counts the runs of each layer of this stage in training. A recomputed layer runs twice."""
    counts: dict[str, list[int]] = {}
    for name, child in module.named_children():
        if name.isdigit():
            counts[name] = count = [0]
            part = next(child.children())  # hooks of the layer itself do not fire in a recomputation
            part.register_forward_pre_hook(lambda part, _, count=count: count.__setitem__(0, count[0] + part.training))
    return counts


def by_key(steps: int, pipeline: dict[str, Any], parts: Any, **job: Any) -> list[dict[str, Any]]:
    """Returns [stock, built with these parts; through Sluice, with a plan that has these parts], each with the runs of
    each layer in the training."""
    counts: dict[str, list[int]] = {}

    def count(made: Job, step: int) -> None:
        if step == 0:
            counts.update(_count_forwards(made.engine.module))

    def counted(made: Job) -> dict[str, Any]:
        found = {"forwards": {name: number[0] for name, number in counts.items()}}
        counts.clear()
        return found

    sides = (None, {"parts": parts}), (pipeline, {})
    return [trained(steps, plan, count, counted, **more, **job) for plan, more in sides]


def adaptive(
    steps: int, hooked: bool, budget: int | None = None, off: dict[str, list[int]] | None = None, **job: Any
) -> list[dict[str, Any]]:
    """Returns [stock; through Sluice, with "plan": "adaptive"]. off: by step, the layers that are switched off from
    that step on."""

    def switch(made: Job, step: int) -> None:
        for layer in made.engine.module.children() if hooked and step == 0 else ():
            layer.register_forward_hook(lambda *_: None)
        Switched.off = set((off or {}).get(str(step), Switched.off if step else ()))

    def end(made: Job) -> dict[str, Any]:
        return {"recomputed": sorted(stage_module.recomputed_of(made.engine.module))}

    plans = (None, {"plan": "adaptive", **({"memory_budget": budget, "in_flight": 2} if budget else {})})
    found = [trained(steps, plan, switch, end, **job) for plan in plans]
    found[1]["layers"] = found[1]["stats"]["layers"]
    return found


def watched(steps: int, **job: Any) -> tuple[list[str], int, dict[str, Any]]:
    """Watches batches in which nothing moves: collectives that watching called, number of batches with complete
    measurements, and the newest verdict."""
    stage_watch._FIRST_LINK = 1e-9  # no move pays
    made = unclipped({"plan": "adaptive"}, **job)
    sent: list[str] = []
    before_batch = StageWatch.before_batch

    def counted(*args: Any) -> None:
        with noted_collectives(sent):
            before_batch(*args)

    with patch.object(StageWatch, "before_batch", counted):
        made.train(range(steps))
    notes = made.engine.sluice.pipeline.pipeline.notes()
    stage_watch._FIRST_LINK = 1e8
    head, each = stage_watch._HEAD, stage_watch._OF_LAYER
    always = (stage_watch._FORWARD, stage_watch._BACKWARD, stage_watch._OUTPUT, stage_watch._SIZE, stage_watch._GROUPS)
    known = sum(all(value > 0 for at, value in enumerate(note[head:]) if at % each in always) for note in notes)
    report = made.engine.sluice.pipeline.stats()["layers"]
    made.end()
    return sent, known, report


def refused(pipelines: Any, **job: Any) -> str:
    """Returns the error if rank r has pipelines[r]. "{rank}" in the path of a plan: each rank reads its own file, as
    if all had one path on machines of their own."""
    rank, read = torch.distributed.get_rank(), stages_chosen.read
    made: list[Job] = []
    with patch.object(stages_chosen, "read", lambda path, *args: read(path.format(rank=rank), *args)):
        error = said(lambda: made.append(Job(stages=len(pipelines), pipeline=pipelines[rank], **job)))
    for each in made:
        each.end()
    return error


def offloaded(steps: int, pipeline: dict[str, Any], parts: Any, full: int | None = None, **job: Any) -> Any:
    """Returns [stock; through Sluice, with a plan that offloads layers; the bytes that this rank copied; the error of a
    batch for which the disk of rank `full` is full]."""
    errors: list[str] = []

    def fill(made: Job, step: int) -> None:
        if full is None or step != 1:
            return
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if full == torch.distributed.get_rank():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
        errors.append(said(lambda: made.train(range(50, 51))))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    with patch.object(model_offloaded, "LEAST_BYTES", 1):
        stock = trained(steps, None, parts=parts, **job)
        ours = trained(steps, pipeline, fill, **job)
    return [stock, ours, ours["stats"].get("offload", {}), "".join(errors)]
