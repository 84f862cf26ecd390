# SPDX-License-Identifier: Apache-2.0
"""Moves experts to a placement in rounds, one round between two updates. In a round each rank sends at most one expert
and receives at most one, so that it needs extra memory only for the state of one leaving and one arriving expert."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sluice import trace
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.common.migration.moving import Belongings, MovingLayer
from sluice.adapters.common.migration.placement import Placement, rounds
from sluice.errors import InvalidArgument, InvalidState, Mismatch, PeerRefused


class ExpertMigration:
    """Has the remaining rounds of one layer, and the totals of its finished rounds."""

    def __init__(
        self,
        layer: MovingLayer,
        belongings: Callable[[], Belongings],
        target: Placement,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """belongings: returns the contents of this rank's experts, before each round. moved: called after each."""
        self.layer, self.belongings, self._moved = layer, belongings, moved
        self.rounds = deque(rounds(layer.placement, target))
        self.num_moves = 0  # experts that have changed their rank
        # Sent by this rank; of these, sent before the host reached the boundary between two steps.
        self.left_bytes = self.hidden_bytes = 0
        self.peak_staged_bytes = 0
        self.commit_seconds = 0.0
        self.begin_ns = 0  # of the newest round
        self.why_not = ""  # why the migration has ended early, on all ranks

    @property
    def has_ended(self) -> bool:
        """Returns whether no round remains."""
        return not self.rounds

    def note(self, num_moves: int, progress: dict[str, Any]) -> None:
        """Adds a finished round to the totals."""
        sizes = progress["leaving_bytes"], progress["hidden_bytes"], progress["commit_seconds"]
        trace.keep_move("experts", self.layer.moving_name, self.begin_ns, num_moves, *sizes)
        self.rounds.popleft()
        self.num_moves += num_moves
        self.left_bytes += progress["leaving_bytes"]
        self.hidden_bytes += progress["hidden_bytes"]
        self.peak_staged_bytes = max(self.peak_staged_bytes, progress["peak_staged_bytes"])
        self.commit_seconds += progress["commit_seconds"]
        self._moved()

    def end(self, why: str) -> None:
        """Drops the remaining rounds."""
        self.rounds.clear()
        self.why_not = why


class MigrationQueue:
    """Runs one optimizer's migrations, one round at a time. All ranks add the same migrations in the same order."""

    def __init__(self, ranks: Sequence[int], bytes_per_second: int | None = None) -> None:
        self._ranks, self._rate = tuple(ranks), bytes_per_second
        self._background: BackgroundMove | None = None
        self._waiting: deque[ExpertMigration] = deque()

    @property
    def is_empty(self) -> bool:
        """Returns whether all migrations have ended."""
        return not self._waiting

    def add(self, migration: ExpertMigration) -> None:
        """Adds a migration, which begins after the next update, or when the earlier ones have ended."""
        if not migration.has_ended:
            self._waiting.append(migration)

    def before_update(self) -> None:
        """Ends the current round: waits for its experts and commits it. Collective."""
        if self._background is None or not self._background.is_under_way:
            return
        migration = self._waiting[0]
        try:
            moves = self._background.commit()
        except (InvalidArgument, InvalidState, Mismatch, PeerRefused) as error:  # on all ranks
            migration.end(str(error))
        else:
            migration.note(moves, self._background.progress())
        if migration.has_ended:
            self._waiting.popleft()

    def after_update(self) -> None:
        """Begins the next round. Collective."""
        if not self._waiting:
            return
        if self._background is None:
            self._background = BackgroundMove(self._ranks, self._rate)
        migration = self._waiting[0]
        migration.begin_ns = time.monotonic_ns()
        self._background.begin(migration.layer, migration.belongings(), migration.rounds[0])

    def cancel(self, reason: str) -> None:
        """Ends all migrations; experts stay where they are now. All ranks call it; it is not collective."""
        if self._background is not None:
            self._background.abort(reason)
        for migration in self._waiting:
            migration.end(reason)
        self._waiting.clear()

    def close(self) -> None:
        """Cancels and releases everything. A second call has no effect."""
        self.cancel("closed")
        if self._background is not None:
            self._background.close()
            self._background = None


_known: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, ...], MigrationQueue]] = WeakKeyDictionary()


def migrations_of(
    optimizer: torch.optim.Optimizer, ranks: Sequence[int], bytes_per_second: int | None = None
) -> MigrationQueue:
    """Returns the queue of moves between these ranks that this optimizer runs. The first call sets bytes_per_second."""
    by_ranks = _known.setdefault(optimizer, {})
    if tuple(ranks) not in by_ranks:
        made = by_ranks[tuple(ranks)] = MigrationQueue(ranks, bytes_per_second)
        optimizer.register_step_pre_hook(lambda *_: made.before_update())
        optimizer.register_step_post_hook(lambda *_: made.after_update())
    return by_ranks[tuple(ranks)]


def cancel(optimizer: torch.optim.Optimizer | None, reason: str) -> None:
    """Cancels moves; experts stay where they are. All ranks call it."""
    for migrations in _known.get(optimizer, {}).values() if optimizer is not None else ():
        migrations.cancel(reason)
