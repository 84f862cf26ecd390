# SPDX-License-Identifier: Apache-2.0
"""Rank-side: layers that move between pipeline stages during training, compared with a training without moves."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import cases_pipe
import torch
import torch.distributed as dist
from cases_pipe import Job, _bits, unclipped
from deepspeed.utils import groups
from ds_models import go_home, said
from shuffles import PROMISES_BITS
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module
from sluice.planning.layer_moves import LayerDecider
from sluice.planning.stages_chosen import MoeChoice

MOST_STEPS = 60  # at most, until the tuners have decided


def _drawn(job: Job, seed: int) -> list[int]:
    """Returns a partition without empty stages, the same on all ranks. Tied layers stay at the ends."""
    drawn, count = random.Random(seed), job.engine.module._num_layers
    last = count - 1 if job.kind == "tied" else count
    return [0, *sorted(drawn.sample(range(1, last), job.stages - 1)), count]


def trained(
    steps: int,
    every: int,
    draw: Callable[[Job, int], list[int]] = _drawn,
    pipeline: dict[str, Any] | None = None,
    live: bool = False,
    **job: Any,
) -> dict[str, Any]:
    """Trains. every: batches between two moves; 0: no moves. draw: the partition of a move, by its step."""
    wanted: dict[int, list[int]] = {}  # by the number of steps until then
    counts: list[int] = []
    held: list[Any] = []

    def objects(engine: Any) -> Any:
        return engine.optimizer, engine.optimizer.param_groups[0], engine.module

    def move(made: Job, step: int) -> None:
        held.append(objects(made.engine))
        if every and step % every == every - 1:
            parts = wanted[step + 1] = draw(made, step)
            moves = made.engine.sluice.move_layers(parts, live=live)
            counts.append(sum(made.engine.stage_id in (source, target) for _, source, target in moves))
            assert (list(made.engine.module.parts) == parts) != live

    def end(made: Job) -> dict[str, Any]:
        return {"same": held[0] == objects(made.engine), "moved": sum(counts)}

    found = cases_pipe.trained(steps, pipeline or {}, move, end, **job)
    assert all(found["been"][number] == parts for number, parts in wanted.items())
    del found["random"]  # DeepSpeed seeds each layer, so it depends on the stage's last layer
    return {**found, "live": found["stats"]["live"]}


def moved(steps: int, every: int, **job: Any) -> list[dict[str, Any]]:
    """Returns [unmoved, moved]."""
    return [trained(steps, each, **job) for each in (0, every)]


def with_experts(placement: dict[str, Any] | None = None, **job: Any) -> list[Any]:
    """Moves MoE layers, and their experts before and after that, by calls or by the option: [still, moved]."""
    found = []
    for moves in (False, True):
        section = {**PROMISES_BITS, "chunks": 2, "placement": placement}
        made = unclipped({}, section=section, **job)
        engine, losses, placed = made.engine, [], []
        by_hand = placement is None and job["kind"] != "experts alone"
        for step, parts in enumerate(([0, 2, 6], [0, 5, 6], [0, 1, 6], [0, 4, 6], [0, 3, 6])):
            losses += made.train(range(4 * step, 4 * step + 2))
            if moves:
                engine.sluice.move_layers(parts)
            losses += made.train(range(4 * step + 2, 4 * step + 4))
            for layer in engine.sluice.layers if step < 2 and by_hand else ():
                engine.sluice.move_experts(
                    layer, *(([1, 0, 0, 1], [0, 1, 0, 1]) if step else ([1, 1, 0, 0], [0, 1] * 2))
                )
            placed.append({each._sluice.finding.name: each._sluice.placement for each in engine.sluice.layers})
        names = [[state["layer"], state["computed_by"]] for state in engine.sluice.stats()["layers"]]
        guarded = not by_hand or said(engine.optimizer.state_dict).startswith("InvalidState")
        go_home(engine)
        state = {**made.state(), "layers": names, "experts": engine.num_experts, "guarded": guarded}
        found.append({"losses": losses, "evaluations": made.evaluate(100), "placed": placed, **state})
        made.end()
    return found


def decided(seconds: list[float], groups_named: str | None = None, **job: Any) -> list[Any]:
    """Moves MoE layers by "plan": "adaptive": [without it, with it]. seconds: the times of layers that it uses;
    groups_named: the name of stage 1's expert groups while ranks compare them."""
    found = []
    after_batch, without_groups = LayerDecider.after_batch, moving_layers.without_groups

    def compared(engine: Any, wait_s: float | None) -> frozenset[int]:
        with _renamed(groups_named if engine.module.stage_id == 1 else None):
            return without_groups(engine, wait_s)

    def of_seconds(self: Any, _: Any, *rest: Any) -> Any:
        return after_batch(self, seconds, *rest)

    with patch.object(LayerDecider, "after_batch", of_seconds), patch.object(moving_layers, "without_groups", compared):
        for plan in ({}, {"plan": "adaptive"}):
            section = {**PROMISES_BITS, "chunks": 2, **job.get("section", {})}
            made = unclipped({"in_flight": 2, **plan}, **{**job, "section": section})
            losses = made.train(range(6))
            names = [state["layer"] for state in made.engine.sluice.stats()["layers"]]
            stats, parts = made.engine.sluice.pipeline.stats(), list(made.engine.module.parts)
            more = {"parts": parts, "names": names, "layers": stats.get("layers", {}), "live": stats["live"]}
            more["sizes"] = made.engine.sluice.pipeline._watch._sizes if "plan" in plan else []
            if not made.engine.sluice.options.memory_budget:
                made.engine.sluice.move_layers([0, 3, 6])
            found.append({"losses": losses, "evaluations": made.evaluate(100), **made.state(), **more})
            made.end()
    return found


def carried(**job: Any) -> list[Any]:
    """Moves layer 2 with decisions and a plan. Returns [the tuner's answers before; after the move; its reasons after
    that; plans of MoE layers by name with layer 2 at home, away, and at home again]."""
    made = unclipped({}, section={"chunks": None, "tuner": {"mode": "profile"}}, **job)
    engine, name = made.engine, "2.moe.deepspeed_moe"
    context = engine.sluice.layers[0]._sluice.contexts()[0]
    for step in range(MOST_STEPS):
        made.train(range(step, step + 1))
        have_all = torch.tensor([int(bool(context.answers()))])
        dist.all_reduce(have_all, op=dist.ReduceOp.MIN)
        if have_all:
            break
    answers = context.answers()
    engine.sluice.move_layers([0, 2, 6])
    now = context.answers()
    made.train(range(2))
    whys = [[each["hidden_width"], each["why"]] for each in context.decisions()]
    engine.sluice.move_layers([0, 3, 6])
    for each in engine.sluice.layers:
        if each._sluice.finding.name == name:
            each._sluice.use_plan(MoeChoice(3, "redispatch", "recompute", "per_chunk", 512))
    plans = [_plans(engine)]
    for parts in ([0, 2, 6], [0, 3, 6]):
        engine.sluice.move_layers(parts)
        made.train(range(2))
        plans.append(_plans(engine))
    made.end()
    return [answers, now, whys, plans]


def _plans(engine: Any) -> dict[str, Any]:
    return {each["layer"]: each.get("plan") for each in engine.sluice.stats()["layers"]}


def gradients(**job: Any) -> list[Any]:
    """Returns the gradients that move with a layer, on each rank [before a move, after it, at home]."""
    made = unclipped({}, **job)
    made.train(range(2))
    module = made.engine.module
    home = stage_module.parts_of(module)
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, index + 100.0 * dist.get_rank() + 1)
    found = []
    for parts in (home, _drawn(made, 3), home):
        made.engine.sluice.move_layers(parts)
        found.append({name: float(p.grad.flatten()[0]) for name, p in module.named_parameters()})
    made.end()
    return found


def checkpoint(folder: str, parts: Sequence[int], **job: Any) -> list[Any]:
    """Saves a checkpoint after a move. Returns later losses and state of the run itself, and of stock with these parts
    that loads the checkpoint."""
    made = unclipped({}, **job)
    made.train(range(3))
    made.engine.sluice.move_layers(parts)
    made.engine.save_checkpoint(os.path.join(folder, "moved"), tag="x")
    losses = made.train(range(3, 6))
    state = made.state()
    made.end()
    dist.barrier()
    stock = unclipped(None, parts=parts, **job)
    assert list(stock.engine.module.parts) == list(parts)
    stock.engine.load_checkpoint(os.path.join(folder, "moved"), tag="x")
    found = [losses, stock.train(range(3, 6)), state, stock.state()]
    stock.end()
    return found


@contextlib.contextmanager
def _renamed(name: str | None) -> Iterator[None]:
    """Gives the only expert groups of this rank another name; None: does nothing."""
    with contextlib.ExitStack() as stack:
        for table in [groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP] if name else []:
            (group,) = table.values()
            stack.enter_context(patch.dict(table, {name: group}, clear=True))
        yield


def refused(
    parts: Sequence[int],
    own_parts: Sequence[int] | None = None,
    hook: bool = False,
    groups_named: str | None = None,
    other_step: bool = False,
    live: bool = False,
    twice: bool = False,
    buffers: str = "",
    pipeline: dict[str, Any] | None = None,
    **job: Any,
) -> list[Any]:
    """Returns [errors, whether anything has changed, later losses]. own_parts: a different request on rank 1.
    groups_named: the name of stage 1's expert groups during the request. (DeepSpeed itself cannot make other groups on
    one stage: it numbers them on each rank, and the numbers meet in one store.) other_step: rank 1's optimizer has
    counted another step. live: a move during a batch, after one batch. twice: after a move in flight. buffers: a layer
    has a buffer, which is "written", or "unknown" as there was no batch."""
    made = unclipped(pipeline or {}, **{"stages": dist.get_world_size(), **job})
    module = made.engine.module
    if buffers and made.engine.stage_id == 0:
        layer = stage_module.function_of(module, 2)
        layer.register_buffer("count", torch.zeros(1))
        if buffers == "written":
            inner = layer.forward
            layer.forward = lambda x: (layer.count.add_(1), inner(x))[1]
    if hook:
        list(module.children())[-1].register_forward_hook(lambda *_: None)
    if (live and buffers != "unknown") or other_step:
        made.train(range(1))
    if other_step and dist.get_rank() == 1:
        next(iter(made.engine.optimizer.optimizer.state.values()))["step"] += 1
    if twice:
        made.engine.sluice.move_layers(parts, live=True)
    before = _bits(dict(module.named_parameters())), list(module.parts)
    wanted = own_parts if own_parts and dist.get_rank() == 1 else parts
    with _renamed(groups_named if getattr(module, "stage_id", 0) == 1 else None):
        errors = [said(lambda: made.engine.sluice.move_layers(wanted, live=live))]
    if twice:
        errors.append(said(lambda: made.engine.sluice.move_layers([0, 3, 6])))
    changed = before != (_bits(dict(module.named_parameters())), list(module.parts))
    losses = made.train(range(2))
    made.end()
    return [" | ".join(errors), changed, losses]
