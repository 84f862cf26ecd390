# SPDX-License-Identifier: Apache-2.0
"""Decides between steps whether experts should change ranks, and moves them during the next steps.

Each rank knows the loads from the headers of forwards, so that nothing is sent while they are even. If they are not,
one exchange among the layer's ranks sums the rows of each expert, and every rank plans the same placement from the same
sums. Groups of ranks that hold replicas of the experts make the same moves, so they exchange at every look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.migration.rounds import ExpertMigration, MigrationQueue
from sluice.adapters.deepspeed.moe import moving
from sluice.config import PlacementOptions
from sluice.planning.placement import PlacementPlan, move_verdict, plan_placement

MOST_PAUSE = 16  # looks between two decisions, for a layer whose plans do not pay


class Look(NamedTuple):
    """The result of one look at a layer; the newest is in `sluice.stats`."""

    verdict: str  # "even", or of planning.placement.VERDICTS
    imbalance: float  # rows of the most loaded rank divided by the mean
    planned: float  # the imbalance after the plan
    bound: float  # lower bound of the imbalance for every placement
    num_moves: int


class _Sums(NamedTuple):
    """Totals of all ranks since the last look."""

    loads: list[int]
    pass_ns: int  # inside passes of the layer's context, on the slowest rank
    sent: int  # bytes, on the rank with the most
    comm_ns: int
    expert_bytes: int  # bytes that move with one expert


class Watch:
    """Watches the loads of one layer."""

    def __init__(self, layer: Any, options: PlacementOptions) -> None:
        self.layer = layer
        self.options = options
        self.num_questions = 0  # exchanges among ranks
        self.newest: Look | None = None
        self.migrations: list[ExpertMigration] = []
        self.cancel: Callable[[str], None] = lambda reason: None  # cancels the moves of all layers
        self._seen: tuple[int, list[int], list[int], tuple[int, int, int]] | None = None
        self._pause = self._waits = 0
        self._replicas = moving.replicas_of(layer)

    def forget(self) -> None:
        """Drops the loads seen so far, because they belong to another placement."""
        self._seen = None

    def look(self, step: int, num_layers: int, optimizer: Any) -> Placement | None:
        """Returns the placement that experts should get after `step` steps; None: experts stay. Collective over all
        ranks that have the layer, replicas included."""
        state = self.layer._sluice
        now = step, *state.loads(), state.spent()
        before, self._seen = self._seen, now
        if before is None:
            return None
        expert_rows, rank_rows = ([a - b for a, b in zip(new, old)] for new, old in zip(now[1:3], before[1:3]))
        fullest, mean = max(rank_rows), sum(rank_rows) / len(rank_rows)
        is_even = fullest <= self.options.target * mean
        if is_even and self._replicas is None:
            self.newest = Look("even", fullest / mean if mean else 1.0, 1.0, 1.0, 0)
            return None
        if self._waits > 0:
            self._waits -= 1
            return None
        spent = [a - b for a, b in zip(now[3], before[3])]
        size = moving.bytes_of_expert(self.layer, optimizer)
        return self._decide(self._ask(expert_rows, [*spent, size]), step - before[0], num_layers)

    def _ask(self, expert_rows: Sequence[int], numbers: Sequence[int]) -> _Sums:
        self.num_questions += 1
        # Rows are summed over ranks and replicas; of times the maximum is taken.
        device = next(self.layer.experts.parameters()).device
        rows = torch.tensor(list(expert_rows), dtype=torch.int64, device=device)
        most = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        for group in (self.layer.ep_group, self._replicas):
            if group is not None:
                dist.all_reduce(rows, group=group)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return _Sums(rows.tolist(), *(int(number) for number in most.tolist()))

    def _decide(self, sums: _Sums, steps: int, num_layers: int) -> Placement | None:
        state = self.layer._sluice
        placement, ranks = state.placement, len(state.finding.ranks)
        sizes = [sums.expert_bytes] * len(sums.loads)
        plan = plan_placement(sums.loads, *placement, ranks, sizes, self.options.target)
        step_seconds = sums.pass_ns / 1e9 / max(1, steps) / num_layers
        verdict = move_verdict(
            step_seconds,
            step_seconds * plan.load / max(1, plan.load_before),
            _most_moved(plan, placement.expert_rank, sums.expert_bytes) * sums.comm_ns / 1e9 / max(1, sums.sent),
            self.options.horizon,
            self.options.least_gain,
        )
        self._pause = 0 if verdict == "pays" else min(MOST_PAUSE, max(1, 2 * self._pause))
        self._waits = self._pause
        mean = max(plan.mean_load, 1e-9)
        self.newest = Look(verdict, plan.load_before / mean, plan.load / mean, plan.bound_load / mean, plan.num_moves)
        return Placement(plan.expert_rank, plan.expert_slot) if verdict == "pays" else None

    def ranks(self) -> tuple[int, ...]:
        """Returns all ranks that must make the same moves, ascending. Collective."""
        mine = [dist.get_rank()] if self._replicas is None else dist.get_process_group_ranks(self._replicas)
        said: list[Any] = [None] * len(self.layer._sluice.finding.ranks)
        dist.all_gather_object(said, mine, group=self.layer.ep_group)
        return tuple(sorted({rank for each in said for rank in each}))

    def report(self) -> dict[str, Any]:
        """Returns the layer's numbers for `sluice.stats`."""
        newest = {} if self.newest is None else self.newest._asdict()
        given_up = [migration.why_not for migration in self.migrations if migration.why_not]
        return {
            "moved_experts": sum(migration.num_moves for migration in self.migrations),
            "questions": self.num_questions,
            "given_up": given_up[-1] if given_up else "",
            **newest,
            "travel": {  # of this rank
                "sent_bytes": sum(migration.left_bytes for migration in self.migrations),
                "hidden_bytes": sum(migration.hidden_bytes for migration in self.migrations),
                "peak_staged_bytes": max((migration.peak_staged_bytes for migration in self.migrations), default=0),
                "commit_seconds": sum(migration.commit_seconds for migration in self.migrations),
            },
        }


class Decider:
    """Decides for the layers of one engine."""

    def __init__(self, layers: Sequence[Any], options: PlacementOptions, optimizer: Callable[[], Any]) -> None:
        self.options = options
        self.watches: list[Watch] = []
        self._optimizer = optimizer
        self._steps = 0
        self._travels: dict[tuple[int, ...], MigrationQueue] = {}  # by the ranks that must make the same moves
        self.watch(layers)

    def watch(self, layers: Sequence[Any]) -> None:
        """Replaces the layers to decide for. Not to be called during a move of experts."""
        known = {id(watch.layer): watch for watch in self.watches}
        several = [layer for layer in layers if len(layer._sluice.finding.ranks) > 1]
        self.watches = [known.get(id(layer)) or Watch(layer, self.options) for layer in several]
        for watch in self.watches:
            watch.layer._sluice.watch = watch
            watch.cancel = self.cancel

    def start(self) -> None:
        """Called when the optimizer exists, before the first step. UnsupportedError if its states cannot be moved."""
        for watch in self.watches:
            moving.bytes_of_expert(watch.layer, self._optimizer())

    def before_step(self) -> None:
        """Called when gradients are final, before the update. Collective, like the update."""
        for migrations in self._travels.values():
            migrations.before_update()

    def after_step(self) -> None:
        """Called after the update, when gradients are gone. Collective, like the update."""
        self._steps += 1
        if self._steps % self.options.interval == 0 and all(each.is_empty for each in self._travels.values()):
            self._look()
        for migrations in self._travels.values():
            migrations.after_update()

    def cancel(self, reason: str) -> None:
        """Cancels moves; experts stay where they are. All ranks call it."""
        for migrations in self._travels.values():
            migrations.cancel(reason)

    def close(self) -> None:
        """Ends all migrations. A second call has no effect."""
        for migrations in self._travels.values():
            migrations.close()
        self._travels = {}

    def _look(self) -> None:
        by_context: dict[int, int] = {}
        for watch in self.watches:
            key = id(watch.layer._sluice.backend)
            by_context[key] = by_context.get(key, 0) + 1
        for watch in self.watches:
            num_layers = by_context[id(watch.layer._sluice.backend)]
            target = watch.look(self._steps, num_layers, self._optimizer())
            if target is not None:
                self._move(watch, target)

    def _move(self, watch: Watch, target: Placement) -> None:
        layer, optimizer = watch.layer, self._optimizer
        migration = ExpertMigration(layer._sluice, lambda: moving.belongings_of(layer, optimizer()), target)
        watch.migrations.append(migration)
        watch.forget()
        ranks = watch.ranks()
        if ranks not in self._travels:
            self._travels[ranks] = MigrationQueue(ranks, self.options.bytes_per_second)
        self._travels[ranks].add(migration)


def _most_moved(plan: PlacementPlan, expert_rank: Sequence[int], size: int) -> int:
    """Returns the largest number of bytes that leave or reach one rank."""
    out, back = [0] * (max(expert_rank) + 1), [0] * (max(expert_rank) + 1)
    for old, new in zip(expert_rank, plan.expert_rank):
        if old != new:
            out[old] += size
            back[new] += size
    return max(out + back)
