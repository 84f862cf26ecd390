# SPDX-License-Identifier: Apache-2.0
"""Rank-side: layers that change their stage while a batch runs, compared with a training without moves."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_moves import UNCLIPPED, _forgetting
from cases_pipe import Job, _bits
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

    LiveLayers._is_there, LiveLayers._takes_sum = is_there, takes  # type: ignore[method-assign]
    try:
        yield
    finally:
        LiveLayers._is_there, LiveLayers._takes_sum = original, takes_sum  # type: ignore[method-assign]


@contextlib.contextmanager
def _mutated(what: str) -> Iterator[None]:
    """Adds a fault to the host."""
    hold, fold, kept_of = Cut.hold, Cut.fold, moving_layers._kept_of

    def fold_backwards(self: Any) -> None:
        held = self._held
        self._held = {-micro_batch: gradients for micro_batch, gradients in held.items()}
        fold(self)

    if what == "holds nothing":
        Cut.hold = lambda self, micro_batch: None  # type: ignore[method-assign]
    if what == "folds backwards":
        Cut.fold = fold_backwards  # type: ignore[method-assign]
    if what in ("moments", "step"):
        moving_layers._kept_of = _forgetting(what)
    try:
        yield
    finally:
        Cut.hold, Cut.fold = hold, fold  # type: ignore[method-assign]
        moving_layers._kept_of = kept_of


@contextlib.contextmanager
def _counted() -> Iterator[set[int]]:
    """Notes how many layers this stage runs in the forwards of batches in which layers move."""
    original, counts = stage_module.run_with, set[int]()

    def run_with(module: Any, first: int, functions: Sequence[Any]) -> None:
        counts.add(len(functions))
        original(module, first, functions)

    stage_module.run_with = run_with
    try:
        yield counts
    finally:
        stage_module.run_with = original


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


def _trained(
    steps: int,
    every: int,
    look: int,
    mutant: str = "",
    rate: int | None = None,
    sums: int = 1,
    run: int = 1,
    through: list[list[int]] | None = None,
    **job: Any,
) -> Any:
    """Trains. every: batches between moves; 0: no moves. run: number of layers that cross a cut together. through: the
    partitions, in turns; None: drawn ones."""
    config = {**UNCLIPPED, **job.get("config", {})}
    made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": config})
    home, losses, moved = stage_module.parts_of(made.engine.module), [], 0
    held = made.engine.optimizer, made.engine.optimizer.param_groups[0], made.engine.module
    torch.manual_seed(5)
    with _seen_at(look, sums), _mutated(mutant), _counted() as counts:
        for step in range(steps):
            parts = None
            if every and step % every == every - 1:
                parts = through[step // every % len(through)] if through else _drawn(made, step, run)
                moves = made.engine.sluice.move_layers(parts, live=True, bytes_per_second=rate)
                moved += sum(made.engine.stage_id in (source, target) for _, source, target in moves)
                assert list(made.engine.module.parts) != parts
            losses += made.train(range(step, step + 1))
            assert parts is None or list(made.engine.module.parts) == parts
        away = made.evaluate(100)
        made.engine.sluice.move_layers(home)
    found = {"losses": losses, "away": away, "moved": moved, **made.state()}
    found["live"] = made.engine.sluice.pipeline.stats()["live"]
    found["kind"], found["counts"] = type(made.engine.optimizer).__name__, sorted(counts)
    found["same"] = held == (made.engine.optimizer, made.engine.optimizer.param_groups[0], made.engine.module)
    made.end()
    return found


def moved(steps: int, every: int, look: int, **job: Any) -> list[dict[str, Any]]:
    """Returns [unmoved, moved in batches]."""
    return [_trained(steps, 0, look, **{**job, "mutant": ""}), _trained(steps, every, look, **job)]


def stepped(steps: list[list[int]], **job: Any) -> list[Any]:
    """Runs an adaptive pipeline that decides on these steps. Returns [partitions after each batch, losses, number of
    moves, number of steps, losses without moves]."""

    def decided(self: Any, *_: Any) -> LayerLook:
        way = () if self.num_moves else tuple(map(tuple, steps))
        if way:
            self.parts, self.num_moves = way[-1], 1
        return LayerLook("pays" if way else "no_gain", 0.0, 0.0, self.parts, 0, steps=way)

    found: list[Any] = []
    original, LayerDecider.after_batch = LayerDecider.after_batch, decided  # type: ignore[method-assign]
    try:
        made = Job(pipeline={**TWO_IN_FLIGHT, "plan": "adaptive"}, **{**job, "config": UNCLIPPED})
        seen, losses = [], []
        for step in range(10):
            losses += made.train(range(step, step + 1))
            seen.append(list(made.engine.module.parts))
        report = made.engine.sluice.pipeline.stats()["layers"]
        found = [seen, losses, report["moves"], report["batches_moving"]]
        made.end()
    finally:
        LayerDecider.after_batch = original  # type: ignore[method-assign]
    still = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
    found.append(still.train(range(10)))
    still.end()
    return found


class _Failing:
    """Makes the loss on the last stage fail once, in micro-batch 2."""

    def __init__(self, job: Job) -> None:
        self._job, self._loss, self._calls = job, job.engine.module.loss_fn, 0

    def __enter__(self) -> None:
        def loss(*args: Any) -> Any:
            self._calls += 1
            if self._calls == 3:
                raise ValueError("a drawn failure")
            return self._loss(*args)

        self._job.engine.module.loss_fn = loss

    def __exit__(self, *_: object) -> None:
        self._job.engine.module.loss_fn = self._loss


def _said(action: Any) -> str:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def failed(parts: Sequence[int], **job: Any) -> list[Any]:
    """Returns [with a live move, without], each [error of a failed batch, parts then, parts later, losses]."""
    found = []
    for live in (True, False):
        made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
        made.train(range(2))
        with _seen_at(1):
            if live:
                made.engine.sluice.move_layers(parts, live=True)
            with _Failing(made):
                said = _said(lambda made=made: made.train(range(2, 3)))
            then = list(made.engine.module.parts)
            losses = made.train(range(2, 6))
        found.append([said, then, list(made.engine.module.parts), losses])
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


@contextlib.contextmanager
def _fault_in(engine: Any, name: str, rank: int, skipped: int, times: int) -> Iterator[None]:
    """Makes the function of a step raise on this rank at the end of the `times` calls that follow `skipped` calls."""
    owner, attribute = _faults(engine)[name]
    original, calls = getattr(owner, attribute), iter(range(1 << 30))

    def fails(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if dist.get_rank() == rank and skipped <= next(calls) < skipped + times:
            raise RuntimeError("a drawn fault")
        return result

    setattr(owner, attribute, fails)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


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
    made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": {**UNCLIPPED, **job.get("config", {})}})
    said, losses, home = [], made.train(range(2)), list(made.engine.module.parts)
    with _seen_at(look, sums):
        for step, (name, rank, skipped) in enumerate(faults, 2):
            before = made.state()
            with _fault_in(made.engine, name, rank, skipped, times):
                error = _said(lambda: made.engine.sluice.move_layers(parts, live=live))
                if live and not error:
                    error = _said(lambda step=step: made.train(range(step, step + 1)))
            changed = (made.state(), list(made.engine.module.parts)) != (before, home)
            again = _said(lambda step=step: losses.extend(made.train(range(step, step + 1))))
            said.append([error, changed, again])
        if times == 1:
            made.engine.sluice.move_layers(parts, live=live)
            losses += made.train(range(len(losses), len(losses) + 2))
    now = list(made.engine.module.parts)
    made.end()
    if times > 1:
        return [said]
    still = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": {**UNCLIPPED, **job.get("config", {})}})
    found = [said, losses, still.train(range(len(losses))), now]
    still.end()
    return found


def hung(silent: int, parts: Sequence[int], wait_s: float, **job: Any) -> list[Any]:
    """Makes a rank hang in a transfer until the others have an error. Returns [error, seconds until then, losses of
    later batches, losses without a move, the partition]."""
    made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
    losses, original, store = made.train(range(2)), shipments._transfer, _get_default_store()
    others = [f"hung {silent} {rank}" for rank in range(dist.get_world_size()) if rank != silent]

    def hangs(*args: Any) -> None:
        store.wait(others, timedelta(seconds=MOST_WAIT_S))
        original(*args)

    if dist.get_rank() == silent:
        shipments._transfer = hangs
    begun = time.monotonic()
    try:
        error = _said(lambda: made.engine.sluice.move_layers(parts, timeout=wait_s))
    finally:
        shipments._transfer = original
    seconds = time.monotonic() - begun
    store.set(f"hung {silent} {dist.get_rank()}", "")
    losses += made.train(range(2, 4))
    now = list(made.engine.module.parts)
    made.end()
    still = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
    found = [error, seconds, losses, still.train(range(4)), now]
    still.end()
    return found


def spoilt(parts: Sequence[int], **job: Any) -> list[Any]:
    """Writes into a layer in flight. Returns [error of the batch, parts, error of later training]."""
    made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
    made.train(range(2))
    made.engine.sluice.move_layers(parts, live=True)
    if made.engine.stage_id == 0:
        with torch.no_grad():
            next(stage_module.function_of(made.engine.module, 2).parameters()).add_(0.0)
    with _seen_at(1):
        said = _said(lambda: made.train(range(2, 3)))
    then = list(made.engine.module.parts)
    again = _said(lambda: made.train(range(2, 4)))
    made.end()
    return [said, then, again]


def loaded(folder: str, parts: Sequence[int], **job: Any) -> list[Any]:
    """Loads a checkpoint while layers are in flight. Returns [parts after the next batches, losses before and after the
    load, parts and losses after a later move]."""
    made = Job(pipeline=TWO_IN_FLIGHT, **{**job, "config": UNCLIPPED})
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


def refused(parts: Sequence[int], twice: bool = False, buffers: str = "", **job: Any) -> list[Any]:
    """Returns [errors, whether anything has changed]. twice: after a move in flight. buffers: a layer has a buffer."""
    made = Job(**{"stages": dist.get_world_size(), "pipeline": TWO_IN_FLIGHT, "config": UNCLIPPED, **job})
    module = made.engine.module
    if buffers and made.engine.stage_id == 0:
        layer = stage_module.function_of(module, 2)
        layer.register_buffer("count", torch.zeros(1))
        if buffers == "written":
            inner = layer.forward
            layer.forward = lambda x: (layer.count.add_(1), inner(x))[1]
    if buffers != "unknown":
        made.train(range(1))
    if twice:
        made.engine.sluice.move_layers(parts, live=True)
    before = _bits(dict(module.named_parameters())), list(module.parts)
    said = [_said(lambda: made.engine.sluice.move_layers(parts, live=True))]
    if twice:
        said.append(_said(lambda: made.engine.sluice.move_layers([0, 3, 6])))
    changed = before != (_bits(dict(module.named_parameters())), list(module.parts))
    made.train(range(1, 3))
    made.end()
    return [" | ".join(said), changed]


def benchmark(plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the results of the ranks of integration_tests/benchmarks/live/live.py."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from integration_tests.benchmarks.live import live_rank

    return {name: live_rank.CELLS[name](plan) for name, plan in plans.items()}
