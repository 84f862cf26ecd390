"""Placements that are reached in rounds, one between any two updates: in each a rank gives one expert at most, and gets
one, so that no more is held besides what trains than one expert's state that leaves, and one that is staged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sluice import trace
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.common.migration.moving import Belongings, MovingLayer
from sluice.adapters.common.migration.placement import Placement, rounds
from sluice.errors import InvalidArgument, InvalidState, Mismatch, PeerRefused


class ExpertMigration:
    """One layer's way to a placement, and what has come of it."""

    def __init__(
        self,
        layer: MovingLayer,
        belongings: Callable[[], Belongings],
        target: Placement,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """belongings: of this rank, asked for before each round. moved: called after each round."""
        self.layer, self.belongings, self._moved = layer, belongings, moved
        self.rounds = deque(rounds(layer.placement, target))
        self.num_moves = 0  # experts that have changed their rank
        self.left_bytes = self.hidden_bytes = 0  # from this rank; of these, out before the host came to the boundary
        self.peak_staged_bytes = 0
        self.commit_seconds = 0.0
        self.begin_ns = 0  # of the newest round
        self.why_not = ""  # it has ended early, on all ranks

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is left to be done."""
        return not self.rounds

    def note(self, num_moves: int, progress: dict[str, Any]) -> None:
        """A round is done."""
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
        """The rest of it is given up."""
        self.rounds.clear()
        self.why_not = why


class MigrationQueue:
    """All of one optimizer's layers, one round at a time. All ranks add the same ones in the same order."""

    def __init__(self, ranks: Sequence[int], bytes_per_second: int | None = None) -> None:
        self._ranks, self._rate = tuple(ranks), bytes_per_second
        self._background: BackgroundMove | None = None
        self._waiting: deque[ExpertMigration] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether all have ended."""
        return not self._waiting

    def add(self, migration: ExpertMigration) -> None:
        """Begins after the next update, or when those before it have ended."""
        if not migration.has_ended:
            self._waiting.append(migration)

    def before_update(self) -> None:
        """What is on its way arrives. Collective."""
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
        """The next round begins. Collective."""
        if not self._waiting:
            return
        if self._background is None:
            self._background = BackgroundMove(self._ranks, self._rate)
        migration = self._waiting[0]
        migration.begin_ns = time.monotonic_ns()
        self._background.begin(migration.layer, migration.belongings(), migration.rounds[0])

    def cancel(self, reason: str) -> None:
        """All stay where they are now. All ranks do so: not collective."""
        if self._background is not None:
            self._background.abort(reason)
        for migration in self._waiting:
            migration.end(reason)
        self._waiting.clear()

    def close(self) -> None:
        """May be called again."""
        self.cancel("closed")
        if self._background is not None:
            self._background.close()
            self._background = None
