# SPDX-License-Identifier: Apache-2.0
"""Rank-side: a pipeline's configured partition and recomputation, compared with stock with the same partition."""

from __future__ import annotations

import resource
from typing import Any
from unittest.mock import patch

import torch
from cases_pipe import Job, unclipped
from ds_models import said
from pipe_models import Switched
from replaced_collectives import noted_collectives
from sluice.adapters.deepspeed.pipeline import stage_module, stage_watch
from sluice.adapters.deepspeed.pipeline.stage_watch import StageWatch
from sluice.adapters.torch import offloaded as model_offloaded
from sluice.planning import stages_chosen


def _trained(steps: int, plan: dict[str, Any] | None, **job: Any) -> dict[str, Any]:
    """Trains one side. plan: the "pipeline" section; None: stock."""
    made = unclipped(plan, **job)
    found: dict[str, Any] = {"parts": [int(bound) for bound in made.engine.module.parts]}
    torch.manual_seed(5)
    counts = _count_forwards(made.engine.module)
    found["losses"] = made.train(range(steps))
    found["forwards"] = {name: count[0] for name, count in counts.items()}
    found["evaluations"] = made.evaluate(100)
    found.update(made.state())
    made.end()
    return found


def _count_forwards(module: Any) -> dict[str, list[int]]:
    """Counts the runs of each layer of this stage. A recomputed layer runs twice."""
    counts: dict[str, list[int]] = {}
    for name, child in module.named_children():
        if name.isdigit():
            counts[name] = count = [0]
            inner = next(child.children())  # hooks of the layer itself do not fire in a recomputation
            inner.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
    return counts


def by_key(steps: int, pipeline: dict[str, Any], parts: Any, **job: Any) -> list[dict[str, Any]]:
    """Returns [stock, built with these parts; through Sluice, with a plan that has these parts]."""
    return [_trained(steps, None, parts=parts, **job), _trained(steps, pipeline, **job)]


def _by_themselves(
    steps: int, plan: dict[str, Any] | None, hooked: bool, off: dict[str, list[int]] | None = None, **job: Any
) -> dict[str, Any]:
    """Trains one side. plan: the "pipeline" section; None: stock. off: by step, the layers that are
    switched off from that step on. At the end layers move home, for the comparison."""
    made = unclipped(plan, **job)
    home = [int(bound) for bound in made.engine.module.parts]
    if hooked:
        for layer in made.engine.module.children():
            layer.register_forward_hook(lambda *_: None)
    found: dict[str, Any] = {"losses": [], "been": [home]}
    for step in range(steps):
        Switched.off = set((off or {}).get(str(step), Switched.off if step else ()))
        found["losses"] += made.train(range(step, step + 1))
        found["been"].append([int(bound) for bound in made.engine.module.parts])
    if plan is not None:
        found["layers"] = made.engine.sluice.pipeline.stats()["layers"]
        found["recomputed"] = sorted(stage_module.recomputed_of(made.engine.module))
        if not hooked:
            made.engine.sluice.move_layers(home)
    found.update(made.state())
    made.end()
    return found


def adaptive(steps: int, hooked: bool, budget: int | None = None, **job: Any) -> list[dict[str, Any]]:
    """Returns [stock; through Sluice, with "plan": "adaptive"]."""
    plans = (None, {"plan": "adaptive", **({"memory_budget": budget, "in_flight": 2} if budget else {})})
    return [_by_themselves(steps, plan, hooked, **job) for plan in plans]


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
    with patch.object(model_offloaded, "LEAST_BYTES", 1):
        stock = _trained(steps, None, parts=parts, **job)
        made = unclipped(pipeline, **job)
        torch.manual_seed(5)
        losses, error = made.train(range(1)), ""
        if full is not None:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if full == torch.distributed.get_rank():
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
            error = said(lambda: made.train(range(50, 51)))
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        losses += made.train(range(1, steps))
        ours = {"losses": losses, "parts": [int(bound) for bound in made.engine.module.parts]}
        ours["evaluations"] = made.evaluate(100)
        ours.update(made.state())
        copies = made.engine.sluice.pipeline.stats().get("offload", {})
        made.end()
        return [stock, ours, copies, error]
