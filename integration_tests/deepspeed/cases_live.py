# SPDX-License-Identifier: Apache-2.0
"""Rank-side: layers that change their stage while a batch runs, compared with a training without moves."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases_moves import trained
from cases_pipe import Job, unclipped
from ds_models import said
from sluice.adapters.common.migration import shipments
from sluice.adapters.deepspeed.moe import other_stage
from sluice.adapters.deepspeed.optimizer import gradient_sums, optimizer_parts
from sluice.adapters.deepspeed.pipeline import live_layers, moving_layers, stage_module
from sluice.adapters.deepspeed.pipeline.live_batch import Cut
from sluice.adapters.deepspeed.pipeline.live_layers import LiveLayers, why_no_live_parts
from sluice.planning.layer_moves import LayerDecider, LayerLook
from torch.distributed.distributed_c10d import _get_default_store

MOST_WAIT_S = 60.0
# With two micro-batches in flight, the upper stage receives the first gradient before its third forward.
TWO_IN_FLIGHT = {"policy": "1f1b_hint", "in_flight": 2}


@contextlib.contextmanager
def _seen_at(look: int | list[int], sums: int = 1) -> Iterator[None]:
    """Makes parameters arrive exactly at the look'th op of the receiver; a list has one for each rank. sums: the sum of
    the gradients arrives at the earliest this many ops later."""
    original, looks = LiveLayers._is_there, dict[int, int]()
    look = look[dist.get_rank()] if isinstance(look, list) else look
    takes_sum, sum_looks = LiveLayers._takes_sum, dict[int, int]()

    def takes(self: Any, trip: Any) -> bool:
        sum_looks[id(trip)] = sum_looks.get(id(trip), 0) + 1
        return sum_looks[id(trip)] >= sums and takes_sum(self, trip)

    def is_there(self: Any, trip: Any) -> bool:
        key = id(trip)
        looks[key] = looks.get(key, 0) + 1
        if looks[key] < look:
            return False
        deadline = time.monotonic() + MOST_WAIT_S
        while not original(self, trip):
            assert time.monotonic() < deadline, "parameters do not come"
            time.sleep(1e-4)
        return True

    with patch.multiple(LiveLayers, _is_there=is_there, _takes_sum=takes):
        yield


def _mutated(what: str) -> contextlib.AbstractContextManager[Any]:
    """Adds a fault to the host."""
    fold = Cut.fold

    def fold_backwards(self: Any) -> None:
        held = self._held
        self._held = {-micro_batch: gradients for micro_batch, gradients in held.items()}
        fold(self)

    faults = {"holds nothing": {"hold": lambda self, micro_batch: None}, "folds backwards": {"fold": fold_backwards}}
    return patch.multiple(Cut, **faults[what]) if what else contextlib.nullcontext()


@contextlib.contextmanager
def _counted() -> Iterator[set[int]]:
    """Notes how many layers this stage runs in the forwards of batches in which layers move."""
    original, counts = stage_module.run_with, set[int]()

    def run_with(module: Any, first: int, functions: Sequence[Any]) -> None:
        counts.add(len(functions))
        original(module, first, functions)

    with patch.object(stage_module, "run_with", run_with):
        yield counts


def _drawn(job: Job, seed: int, run: int) -> list[int]:
    """Another partition that one batch can reach, the same on all ranks. Up to `run` layers cross a cut, and exactly
    `run` cross a cut if this is possible. Tied layers stay at the ends."""
    drawn, module = random.Random(seed), job.engine.module
    now, count = list(stage_module.parts_of(module)), module._num_layers
    first, last = (1, count - 1) if job.kind == "tied" else (0, count)
    found: list[int] = []
    for _ in range(1000):
        parts = [0, *(bound + drawn.randint(-run, run) for bound in now[1:-1]), count]
        inside = all(first <= bound <= last for bound in parts[1:-1])
        if parts != now and inside and not stage_module.why_no_partition(module, parts):
            if not why_no_live_parts(module, parts):
                found = parts
                if max(abs(old - new) for old, new in zip(now, parts)) == run:
                    break
    assert found, f"no partition other than {now}"
    return found


def moved(
    steps: int,
    every: int,
    look: int | list[int],
    mutant: str = "",
    sums: int = 1,
    run: int = 1,
    through: list[list[int]] | None = None,
    **job: Any,
) -> list[dict[str, Any]]:
    """Returns [unmoved, moved in batches]. every: batches between moves. run: number of layers that cross a cut
    together. through: the partitions, in turns; None: drawn ones."""

    def draw(made: Job, step: int) -> list[int]:
        return through[step // every % len(through)] if through else _drawn(made, step, run)

    still = trained(steps, 0, pipeline=TWO_IN_FLIGHT, **job)
    with _seen_at(look, sums), _mutated(mutant), _counted() as counts:
        live = trained(steps, every, draw, TWO_IN_FLIGHT, live=True, **job)
    return [still, {**live, "counts": sorted(counts)}]


def _still(job: dict[str, Any], steps: int) -> list[float]:
    """Returns the losses of a training without moves."""
    losses: list[float] = trained(steps, 0, pipeline=TWO_IN_FLIGHT, **job)["losses"]
    return losses


def stepped(steps: list[list[int]], **job: Any) -> list[Any]:
    """Runs an adaptive pipeline that decides on these steps. Returns [partitions after each batch, losses, number of
    moves, number of steps, losses without moves]."""

    def decided(self: Any, *_: Any) -> LayerLook:
        way = () if self.num_moves else tuple(map(tuple, steps))
        if way:
            self.parts, self.num_moves = way[-1], 1
        return LayerLook("pays" if way else "no_gain", 0.0, 0.0, self.parts, 0, steps=way)

    with patch.object(LayerDecider, "after_batch", decided):
        made = unclipped({**TWO_IN_FLIGHT, "plan": "adaptive"}, **job)
        seen, losses = [], []
        for step in range(10):
            losses += made.train(range(step, step + 1))
            seen.append(list(made.engine.module.parts))
        report = made.engine.sluice.pipeline.stats()["layers"]
        made.end()
    return [seen, losses, report["moves"], report["batches_moving"], _still(job, 10)]


def _failing(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Makes the loss on the last stage fail once, in micro-batch 2."""
    loss, calls = job.engine.module.loss_fn, iter(range(1 << 30))

    def fails(*args: Any) -> Any:
        if next(calls) == 2:
            raise ValueError("a drawn failure")
        return loss(*args)

    return patch.object(job.engine.module, "loss_fn", fails)


def failed(parts: Sequence[int], **job: Any) -> list[Any]:
    """Returns [with a live move, without], each [error of a failed batch, parts then, parts later, losses]."""
    found = []
    for live in (True, False):
        made = unclipped(TWO_IN_FLIGHT, **job)
        made.train(range(2))
        with _seen_at(1):
            if live:
                made.engine.sluice.move_layers(parts, live=True)
            with _failing(made):
                error = said(lambda made=made: made.train(range(2, 3)))
            then = list(made.engine.module.parts)
            losses = made.train(range(2, 6))
        found.append([error, then, list(made.engine.module.parts), losses])
        made.engine.sluice.move_layers([0, 3, 6])
        made.end()
    return found


def _faults(engine: Any) -> dict[str, tuple[Any, str]]:
    """Returns the function that implements each step of a move."""
    optimizer = type(optimizer_parts.of_engine(engine))
    return {
        "reading the optimizer": (optimizer, "settings"),
        "building": (stage_module, "build"),
        "taking states": (optimizer, "take"),
        "packing": (moving_layers, "content_of"),
        "describing": (shipments, "describe"),
        "making room": (shipments, "places"),
        "beginning the batch": (live_layers, "LiveBatch"),
        "packing gradients": (live_layers, "load_gradients"),
        "loading gradients": (live_layers, "take_gradients"),
        "sending": (shipments, "_begin"),
        "loading": (stage_module, "fill"),
        "adopting": (other_stage, "adopt"),
        "replacing": (stage_module, "replace"),
        "putting states": (optimizer, "put"),
        "putting sums": (type(gradient_sums.of_optimizer(engine.optimizer)), "put"),
    }


def _fault_in(engine: Any, name: str, rank: int, skipped: int, times: int) -> contextlib.AbstractContextManager[Any]:
    """Makes the function of a step raise on this rank at the end of the `times` calls that follow `skipped` calls."""
    owner, attribute = _faults(engine)[name]
    original, calls = getattr(owner, attribute), iter(range(1 << 30))

    def fails(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if dist.get_rank() == rank and skipped <= next(calls) < skipped + times:
            raise RuntimeError("a drawn fault")
        return result

    return patch.object(owner, attribute, fails)


def broken(
    faults: list[tuple[str, int, int]],
    parts: Sequence[int],
    live: bool,
    look: int = 1,
    sums: int = 1,
    times: int = 1,
    **job: Any,
) -> list[Any]:
    """Makes a move with each of these faults: (step, rank, calls before the fault). Then, if `times` is 1, one without.

    Returns [[error, whether anything has changed, error of the next batch] for each fault; all losses; losses of a run
    without moves; the partition at the end].
    """
    made = unclipped(TWO_IN_FLIGHT, **job)
    errors, losses, home = [], made.train(range(2)), list(made.engine.module.parts)
    with _seen_at(look, sums):
        for step, (name, rank, skipped) in enumerate(faults, 2):
            before = made.state()
            with _fault_in(made.engine, name, rank, skipped, times):
                error = said(lambda: made.engine.sluice.move_layers(parts, live=live))
                if live and not error:
                    error = said(lambda step=step: made.train(range(step, step + 1)))
            changed = (made.state(), list(made.engine.module.parts)) != (before, home)
            again = said(lambda step=step: losses.extend(made.train(range(step, step + 1))))
            errors.append([error, changed, again])
        if times == 1:
            made.engine.sluice.move_layers(parts, live=live)
            losses += made.train(range(len(losses), len(losses) + 2))
    now = list(made.engine.module.parts)
    made.end()
    if times > 1:
        return [errors]
    return [errors, losses, _still(job, len(losses)), now]


def hung(silent: int, parts: Sequence[int], wait_s: float, **job: Any) -> list[Any]:
    """Makes a rank hang in a transfer until the others have an error. Returns [error, seconds until then, losses of
    later batches, losses without a move, the partition]."""
    made = unclipped(TWO_IN_FLIGHT, **job)
    losses, original, store = made.train(range(2)), shipments._transfer, _get_default_store()
    others = [f"hung {silent} {rank}" for rank in range(dist.get_world_size()) if rank != silent]

    def hangs(*args: Any) -> None:
        store.wait(others, timedelta(seconds=MOST_WAIT_S))
        original(*args)

    begun = time.monotonic()
    with patch.object(shipments, "_transfer", hangs if dist.get_rank() == silent else original):
        error = said(lambda: made.engine.sluice.move_layers(parts, timeout=wait_s))
    seconds = time.monotonic() - begun
    store.set(f"hung {silent} {dist.get_rank()}", "")
    losses += made.train(range(2, 4))
    now = list(made.engine.module.parts)
    made.end()
    return [error, seconds, losses, _still(job, 4), now]


def spoilt(parts: Sequence[int], **job: Any) -> list[Any]:
    """Writes into a layer in flight. Returns [error of the batch, parts, error of later training]."""
    made = unclipped(TWO_IN_FLIGHT, **job)
    made.train(range(2))
    made.engine.sluice.move_layers(parts, live=True)
    if made.engine.stage_id == 0:
        with torch.no_grad():
            next(stage_module.function_of(made.engine.module, 2).parameters()).add_(0.0)
    with _seen_at(1):
        error = said(lambda: made.train(range(2, 3)))
    then = list(made.engine.module.parts)
    again = said(lambda: made.train(range(2, 4)))
    made.end()
    return [error, then, again]


def loaded(folder: str, parts: Sequence[int], **job: Any) -> list[Any]:
    """Loads a checkpoint while layers are in flight. Returns [parts after the next batches, losses before and after the
    load, parts and losses after a later move]."""
    made = unclipped(TWO_IN_FLIGHT, **job)
    made.train(range(2))
    made.engine.save_checkpoint(folder, tag="x")
    first = made.train(range(2, 4))
    made.engine.sluice.move_layers(parts, live=True)
    made.engine.load_checkpoint(folder, tag="x")
    again = made.train(range(2, 4))
    then = list(made.engine.module.parts)
    made.engine.sluice.move_layers(parts, live=True)
    losses = made.train(range(4, 6))
    found = [then, first, again, list(made.engine.module.parts), losses]
    made.end()
    return found
