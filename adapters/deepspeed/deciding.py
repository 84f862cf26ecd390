"""Decides between steps whether experts should change ranks, and has them moved.

What a rank must know to see that loads are even, it knows from the headers of forwards: while they are, nothing is
sent. Where they are not, one exchange among the layer's ranks sums the rows of each expert, and every rank plans the
same placement from the same sums. Groups of ranks that hold replicas of the experts move alike, so they ask each other
at every look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.adapters.deepspeed import moving
from sluice.config import PlacementOptions
from sluice.errors import InvalidState, PeerRefused
from sluice.planning.placement import PlacementPlan, move_verdict, plan_placement

from deepspeed.utils import groups

MOST_PAUSE = 16  # looks between two decisions, of a layer whose plans do not pay


class Look(NamedTuple):
    """What one look at a layer came to; the newest is in `sluice.stats`."""

    verdict: str  # "even", or of planning.placement.VERDICTS, or "busy": a forward waited for its backward
    imbalance: float  # rows of the fullest rank over the mean
    planned: float  # the same after the plan
    bound: float  # below which no placement comes
    num_moves: int


class _Sums(NamedTuple):
    """Of all ranks, since the last look."""

    loads: list[int]
    pass_ns: int  # inside passes of the layer's context, on the slowest rank
    sent: int  # bytes, on the rank with the most
    comm_ns: int
    expert_bytes: int  # of all that moves with an expert


class Watch:
    """One layer."""

    def __init__(self, layer: Any, options: PlacementOptions) -> None:
        self.layer = layer
        self.options = options
        self.num_moves = 0
        self.num_questions = 0  # exchanges among ranks
        self.newest: Look | None = None
        self._seen: tuple[list[int], list[int], tuple[int, int, int]] | None = None
        self._pause = self._waits = 0
        self._replicas = _replicas(layer)

    def look(self, steps: int, num_layers: int, optimizer: Any) -> None:
        """After `steps` steps. Collective over all ranks that have the layer, replicas too."""
        state = self.layer._sluice
        expert_rows, rank_rows = state.loads()
        now = expert_rows, rank_rows, state.spent()
        before, self._seen = self._seen, now
        if before is None:
            return
        expert_rows, rank_rows = ([a - b for a, b in zip(new, old)] for new, old in zip(now[:2], before[:2]))
        fullest, mean = max(rank_rows), sum(rank_rows) / len(rank_rows)
        is_even = fullest <= self.options.target * mean
        if is_even and self._replicas is None:
            self.newest = Look("even", fullest / mean if mean else 1.0, 1.0, 1.0, 0)
            return
        if self._waits > 0:
            self._waits -= 1
            return
        spent = [a - b for a, b in zip(now[2], before[2])]
        size = moving.bytes_of_expert(self.layer, optimizer)
        self._decide(self._ask(expert_rows, [*spent, size]), steps, num_layers, optimizer)

    def _ask(self, expert_rows: Sequence[int], numbers: Sequence[int]) -> _Sums:
        self.num_questions += 1
        # Rows add up over replicas as over ranks; of times the slowest counts.
        device = next(self.layer.experts.parameters()).device
        rows = torch.tensor(list(expert_rows), dtype=torch.int64, device=device)
        most = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        for group in (self.layer.ep_group, self._replicas):
            if group is not None:
                dist.all_reduce(rows, group=group)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return _Sums(rows.tolist(), *(int(number) for number in most.tolist()))

    def _decide(self, sums: _Sums, steps: int, num_layers: int, optimizer: Any) -> None:
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
        if verdict == "pays":
            verdict = self._move(plan, optimizer)
        self._pause = 0 if verdict == "pays" else min(MOST_PAUSE, max(1, 2 * self._pause))
        self._waits = self._pause
        mean = max(plan.mean_load, 1e-9)
        self.newest = Look(verdict, plan.load_before / mean, plan.load / mean, plan.bound_load / mean, plan.num_moves)

    def _move(self, plan: PlacementPlan, optimizer: Any) -> str:
        try:
            moving.move(self.layer, plan.expert_rank, plan.expert_slot, optimizer, self._everywhere)
        except (InvalidState, PeerRefused):  # on all ranks alike, and nothing has moved
            return "busy"
        self.num_moves += plan.num_moves
        return "pays"

    def report(self) -> dict[str, Any]:
        """For `sluice.stats`."""
        newest = {} if self.newest is None else self.newest._asdict()
        return {"moved_experts": self.num_moves, "questions": self.num_questions, **newest}

    def _everywhere(self, is_ready: bool) -> bool:
        """Whether all groups that hold replicas can move."""
        if self._replicas is None:
            return is_ready
        device = next(self.layer.experts.parameters()).device
        ready = torch.tensor([int(is_ready)], device=device)
        dist.all_reduce(ready, op=dist.ReduceOp.MIN, group=self._replicas)
        return bool(ready.item())


class Decider:
    """The layers of one engine."""

    def __init__(self, layers: Sequence[Any], options: PlacementOptions, optimizer: Callable[[], Any]) -> None:
        self.options = options
        self.watches = [Watch(layer, options) for layer in layers if len(layer._sluice.finding.ranks) > 1]
        self._optimizer = optimizer
        self._steps = 0
        for watch in self.watches:
            watch.layer._sluice.watch = watch

    def after_step(self) -> None:
        """The engine has updated its parameters, and gradients are gone. Collective, like the update."""
        if self._steps == 0:
            for watch in self.watches:  # refuses an optimizer from which nothing can be moved
                moving.bytes_of_expert(watch.layer, self._optimizer())
        self._steps += 1
        if self._steps % self.options.interval != 0:
            return
        by_context: dict[int, int] = {}
        for watch in self.watches:
            key = id(watch.layer._sluice.backend)
            by_context[key] = by_context.get(key, 0) + 1
        for watch in self.watches:
            num_layers = by_context[id(watch.layer._sluice.backend)]
            watch.look(self.options.interval, num_layers, self._optimizer())


def _replicas(layer: Any) -> Any:
    """The group of ranks that have the same experts; None: this rank alone."""
    group = groups._get_expert_data_parallel_group(layer.ep_group_name)
    return group if dist.get_world_size(group) > 1 else None


def _most_moved(plan: PlacementPlan, expert_rank: Sequence[int], size: int) -> int:
    """Bytes that leave or reach the rank with the most of them."""
    out, back = [0] * (max(expert_rank) + 1), [0] * (max(expert_rank) + 1)
    for old, new in zip(expert_rank, plan.expert_rank):
        if old != new:
            out[old] += size
            back[new] += size
    return max(out + back)
