# SPDX-License-Identifier: Apache-2.0
"""Moves experts between the steps of a torch optimizer, by its step hooks."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from sluice.adapters.common.migration.rounds import MigrationQueue

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
