# SPDX-License-Identifier: Apache-2.0
"""Rank-side: layers that move between pipeline stages during training, compared with a training without moves."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases_pipe import Job, _bits
from deepspeed.utils import groups
from shuffles import PROMISES_BITS
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module
from sluice.errors import SluiceError
from sluice.planning.layer_moves import LayerDecider
from sluice.planning.stages_chosen import MoeChoice

UNCLIPPED = {"gradient_clipping": 0.0}
MOST_STEPS = 60  # at most, until the tuners have decided


def _drawn(job: Job, seed: int) -> list[int]:
    """Returns a partition without empty stages, the same on all ranks. Tied layers stay at the ends."""
    drawn, count = random.Random(seed), job.engine.module._num_layers
    last = count - 1 if job.kind == "tied" else count
    return [0, *sorted(drawn.sample(range(1, last), job.stages - 1)), count]


def _forgetting(what: str) -> Any:
    """Makes the host faulty, so that it does not install this state of an arrived layer."""
    fill = moving_layers._kept_of

    def forgetful(function: Any, content: dict[str, Any]) -> Any:
        found = fill(function, content)
        for _, state in found.values():
            for key, value in state.items():
                if (what == "step") == (key == "step") and what and isinstance(value, torch.Tensor):
                    value.zero_()
        return found

    return forgetful


def _trained(steps: int, every: int, forget: str = "", **job: Any) -> dict[str, Any]:
    """Trains. every: batches between two moves; 0: no moves."""
    made = Job(pipeline={}, **{**job, "config": {**UNCLIPPED, **job.get("config", {})}})
    home, losses, moved = stage_module.parts_of(made.engine.module), [], 0
    torch.manual_seed(5)
    kept_of, moving_layers._kept_of = moving_layers._kept_of, _forgetting(forget)
    held = made.engine.optimizer, made.engine.optimizer.param_groups[0], made.engine.module
    try:
        for step in range(steps):
            if every and step % every == every - 1:
                parts = _drawn(made, step)
                moved += len(made.engine.sluice.move_layers(parts))
                assert list(made.engine.module.parts) == parts
            losses += made.train(range(step, step + 1))
        away = made.evaluate(100)
        made.engine.sluice.move_layers(home)
    finally:
        moving_layers._kept_of = kept_of
    same = held == (made.engine.optimizer, made.engine.optimizer.param_groups[0], made.engine.module)
    found = {"losses": losses, "away": away, "moved": moved, "same": same, **made.state()}
    found["kind"] = type(made.engine.optimizer).__name__
    made.end()
    return found


def moved(steps: int, every: int, forget: str = "", **job: Any) -> list[dict[str, Any]]:
    """Returns [unmoved, moved]."""
    return [_trained(steps, 0, **job), _trained(steps, every, forget, **job)]


def with_experts(placement: dict[str, Any] | None = None, **job: Any) -> list[Any]:
    """Moves MoE layers, and their experts before and after that, by calls or by the option: [still, moved]."""
    found = []
    for moves in (False, True):
        config = {**UNCLIPPED, **job.get("config", {})}
        section = {**PROMISES_BITS, "chunks": 2, "placement": placement}
        made = Job(pipeline={}, section=section, **{**job, "config": config})
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
        guarded = not by_hand or bool(_refusal(engine.optimizer.state_dict))
        with engine.sluice.at_home(False):
            pass
        state = {**made.state(), "layers": names, "experts": engine.num_experts, "guarded": guarded}
        found.append({"losses": losses, "away": made.evaluate(100), "placed": placed, **state})
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

    LayerDecider.after_batch = lambda self, _, *rest: after_batch(self, seconds, *rest)  # type: ignore[method-assign]
    moving_layers.without_groups = compared
    try:
        for plan in ({}, {"plan": "adaptive"}):
            section = {**PROMISES_BITS, "chunks": 2, **job.get("section", {})}
            config = {**UNCLIPPED, **job.get("config", {})}
            made = Job(pipeline={"in_flight": 2, **plan}, **{**job, "section": section, "config": config})
            losses = made.train(range(6))
            names = [state["layer"] for state in made.engine.sluice.stats()["layers"]]
            stats, parts = made.engine.sluice.pipeline.stats(), list(made.engine.module.parts)
            more = {"parts": parts, "names": names, "layers": stats.get("layers", {}), "live": stats["live"]}
            more["sizes"] = made.engine.sluice.pipeline._watch._sizes if "plan" in plan else []
            if not made.engine.sluice.options.memory_budget:
                made.engine.sluice.move_layers([0, 3, 6])
            found.append({"losses": losses, "away": made.evaluate(100), **made.state(), **more})
            made.end()
    finally:
        LayerDecider.after_batch = after_batch  # type: ignore[method-assign]
        moving_layers.without_groups = without_groups
    return found


def _refusal(action: Any) -> str:
    try:
        action()
    except SluiceError as error:
        return error.message
    return ""


def carried(**job: Any) -> list[Any]:
    """Moves layer 2 with decisions and a plan. Returns [the tuner's answers before; after the move; its reasons after
    that; plans of MoE layers by name with layer 2 at home, away, and at home again]."""
    made = Job(pipeline={}, section={"chunks": None, "tuner": {"mode": "profile"}}, **{**job, "config": UNCLIPPED})
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
    made = Job(pipeline={}, **{**job, "config": UNCLIPPED})
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
    job = {**job, "config": {**UNCLIPPED, **job.get("config", {})}}
    made = Job(pipeline={}, **job)
    made.train(range(3))
    made.engine.sluice.move_layers(parts)
    made.engine.save_checkpoint(os.path.join(folder, "moved"), tag="x")
    losses = made.train(range(3, 6))
    state = made.state()
    made.end()
    dist.barrier()
    stock = Job(pipeline=None, parts=parts, **job)
    assert list(stock.engine.module.parts) == list(parts)
    stock.engine.load_checkpoint(os.path.join(folder, "moved"), tag="x")
    found = [losses, stock.train(range(3, 6)), state, stock.state()]
    stock.end()
    return found


@contextlib.contextmanager
def _renamed(name: str | None) -> Iterator[None]:
    """Gives the only expert groups of this rank another name; None: does nothing."""
    tables = [groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP] if name else []
    before = [dict(table) for table in tables]
    for table, ((old, group),) in zip(tables, [list(each.items()) for each in before]):
        del table[old]
        table[name] = group
    try:
        yield
    finally:
        for table, groups_before in zip(tables, before):
            table.clear()
            table.update(groups_before)


def refused(
    parts: Sequence[int],
    own_parts: Sequence[int] | None = None,
    hook: bool = False,
    groups_named: str | None = None,
    **job: Any,
) -> list[Any]:
    """Returns [error, whether anything has changed, later losses]. own_parts: a different request on rank 1.
    groups_named: the name of stage 1's expert groups during the request. (DeepSpeed itself cannot make other groups on
    one stage: it numbers them on each rank, and the numbers meet in one store.)"""
    config = {**UNCLIPPED, **job.pop("config", {})}
    made = Job(pipeline={}, config=config, **{"stages": dist.get_world_size(), **job})
    module = made.engine.module
    before = _bits(dict(module.named_parameters())), list(module.parts)
    if hook:
        list(module.children())[-1].register_forward_hook(lambda *_: None)
    wanted = own_parts if own_parts and dist.get_rank() == 1 else parts
    with _renamed(groups_named if getattr(module, "stage_id", 0) == 1 else None):
        said = _refusal(lambda: made.engine.sluice.move_layers(wanted))
    changed = before != (_bits(dict(module.named_parameters())), list(module.parts))
    losses = made.train(range(2))
    made.end()
    return [said, changed, losses]
