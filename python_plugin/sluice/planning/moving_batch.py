# SPDX-License-Identifier: Apache-2.0
"""Simulates, in virtual time, a batch of a pipeline in which layers move to another stage.

Stages run 1F1B, and a message takes no time. The rules of `sluice_layer_move_*` hold at each cut: the layers run on
their new stage from the first forward that the upper stage starts after it knows that the layers have arrived. If
layers move down, a gradient from the lower stage carries this information.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

_FORWARD = 1 / 3  # share of the forward in a layer's time; mostly affects when gradients arrive


class Batch(NamedTuple):
    """seconds: of the whole batch; triggers: by bound of the partition, the first micro-batch whose layers run on their
    new stage. -1: the layers move at the end of the batch, or nothing moves at this bound."""

    seconds: float
    triggers: tuple[int, ...]


def batch_of(
    seconds: Sequence[float], old: Sequence[int], new: Sequence[int], arrivals: Sequence[float], micro_batches: int
) -> Batch:
    """Simulates a batch that begins with the partition `old` and ends with `new`. seconds: of a micro-batch in each
    layer; arrivals: by bound, when the layers have arrived, in seconds. Pure."""
    run = _Run(seconds, old, new, arrivals, micro_batches)
    return Batch(max(run.run(), *arrivals), tuple(run.triggers))


class _Run:
    def __init__(
        self,
        seconds: Sequence[float],
        old: Sequence[int],
        new: Sequence[int],
        arrivals: Sequence[float],
        micro_batches: int,
    ) -> None:
        self._sums = [0.0, *accumulate(seconds)]
        self._old, self._new, self._arrivals = old, new, arrivals
        self.triggers = [-1] * len(old)
        stages = len(old) - 1
        self._orders = [_order(min(stages - stage, micro_batches), micro_batches) for stage in range(stages)]
        self._ends: dict[tuple[int, bool, int], float] = {}  # by stage, is_forward and micro-batch
        self._next = [0] * stages
        self._free = [0.0] * stages
        self._told = [float("inf")] * (stages + 1)  # by bound: when the upper stage knows of the arrival
        self._starts: list[tuple[float, int]] = []  # start and stage of ops that can run

    def run(self) -> float:
        """Runs ops in the order in which they start, since triggers depend on ops that have ended."""
        self._offer(0)
        while self._starts:
            start, stage = heapq.heappop(self._starts)
            is_forward, micro_batch = self._orders[stage][self._next[stage]]
            if is_forward:
                self._hear(stage + 1, start, micro_batch)
            took = self._sums[self._bound(stage + 1, micro_batch)] - self._sums[self._bound(stage, micro_batch)]
            end = start + took * (_FORWARD if is_forward else 1 - _FORWARD)
            self._ends[stage, is_forward, micro_batch] = self._free[stage] = end
            self._next[stage] += 1
            if not is_forward and end >= self._arrivals[stage]:  # this gradient goes to the stage above
                self._told[stage] = min(self._told[stage], end)
            self._offer(stage)
            neighbour = stage + 1 if is_forward else stage - 1
            if 0 <= neighbour < len(self._orders):
                self._offer(neighbour, (is_forward, micro_batch))
        return max(self._free)

    def _offer(self, stage: int, only: tuple[bool, int] | None = None) -> None:
        """Queues the next op of the stage, if the op can run. only: if it is this op."""
        if self._next[stage] == len(self._orders[stage]):
            return
        op = is_forward, micro_batch = self._orders[stage][self._next[stage]]
        if only is not None and op != only:
            return
        last = len(self._orders) - 1
        before = (stage - 1, True) if is_forward else (min(stage + 1, last), stage == last)
        given = 0.0 if is_forward and stage == 0 else self._ends.get((*before, micro_batch))
        if given is not None:
            heapq.heappush(self._starts, (max(self._free[stage], given), stage))

    def _hear(self, bound: int, start: float, micro_batch: int) -> None:
        """Sets the trigger of this bound if the upper stage has learned of the arrival. Called before each forward."""
        comes_up = self._new[bound] > self._old[bound]
        known = self._arrivals[bound] if comes_up else self._told[bound]
        if self._new[bound] != self._old[bound] and self.triggers[bound] < 0 and known <= start:
            self.triggers[bound] = micro_batch

    def _bound(self, bound: int, micro_batch: int) -> int:
        has_moved = 0 <= self.triggers[bound] <= micro_batch
        return self._new[bound] if has_moved else self._old[bound]


def _order(in_flight: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Returns the ops of a stage under 1F1B: (is_forward, micro-batch)."""
    order = [(True, i) for i in range(in_flight)]
    for i in range(micro_batches):
        order.append((False, i))
        if in_flight + i < micro_batches:
            order.append((True, in_flight + i))
    return order
