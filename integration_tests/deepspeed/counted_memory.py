# SPDX-License-Identifier: Apache-2.0
"""Rank-side, for all hosts: counts host memory of expert moves, from torch's allocations and the library's staging."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from replaced_collectives import replaced_collectives
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.torch import Migration

BEGINS, WAITS, COMMITS, EXCHANGES, INSTALLS, ENDED = range(6)
_MARK = "counted "


def _late(_: str, original: Any) -> Any:
    """Makes a collective return a moment later, after gloo's thread has released its tensors. The recording only sees
    this thread, so it would miss a release by gloo's thread."""

    def late(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        time.sleep(0.02)
        return result

    return late


class Counted:
    """Bytes. state: the state that moves with one expert. most: the most that a move held at once, in torch's memory
    and staged. left: torch's memory that all moves together did not free; left_staged: staging that a move kept."""

    def __init__(self) -> None:
        self.state = self.most = self.left = self.left_staged = self.moves = 0
        self._marks: list[list[int]] = []  # [the phase that follows, the most bytes staged during it]

    def _mark(self, what: int, staged: int = 0) -> None:
        with torch.profiler.record_function(f"{_MARK}{len(self._marks)}"):
            self._marks.append([what, staged])

    def begin(self, inner: Any, background: BackgroundMove, *given: Any) -> None:
        """Replaces BackgroundMove.begin."""
        self._mark(BEGINS)
        inner(background, *given)
        self._marks[-1][1] = background.progress()["staged_bytes"]
        self._mark(WAITS)

    def commit(self, inner: Any, background: BackgroundMove) -> int:
        """Replaces BackgroundMove.commit."""
        self._mark(COMMITS)
        with replaced_collectives(_late):
            moved: int = inner(background)
        self._mark(ENDED)
        progress = background.progress()
        self.state = max(self.state, progress["leaving_bytes"])  # one expert leaves in each round
        self.left_staged = max(self.left_staged, progress["staged_bytes"])
        self.moves += moved
        return moved

    def exchange(self, inner: Any, migration: Migration, *given: Any) -> None:
        """Replaces Migration.commit."""
        self._marks[-1][1] = migration.progress()["staged_bytes"]
        self._mark(EXCHANGES)
        inner(migration, *given)
        self._marks[-1][1] = migration.progress()["peak_staged_bytes"]
        self._mark(INSTALLS)

    def add_up(self, events: list[Any]) -> None:
        """Adds up a recording of the whole training, which contains all allocations and frees."""
        changes = [(e.start_ns(), -1, e.nbytes()) for e in events if e.name() == "[memory]"]
        marks = [(e.start_ns(), int(e.name()[len(_MARK) :]), 0) for e in events if e.name().startswith(_MARK)]
        held, now = 0, (ENDED, 0)  # held: bytes allocated since the begin of a move
        for _, mark, change in sorted(changes + marks):
            if mark >= 0:
                now = (self._marks[mark][0], self._marks[mark][1])
                held = 0 if now[0] == BEGINS else held
                self.left += held if now[0] == ENDED else 0
            elif now[0] not in (WAITS, ENDED):  # between calls of a move the host allocates memory
                held += change
            self.most = max(self.most, held + now[1])


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Counts all background moves of a training that runs within the block."""
    count, begin, commit, exchange = Counted(), BackgroundMove.begin, BackgroundMove.commit, Migration.commit
    BackgroundMove.begin = lambda *given: count.begin(begin, *given)  # type: ignore[method-assign]
    BackgroundMove.commit = lambda *given: count.commit(commit, *given)  # type: ignore[method-assign]
    Migration.commit = lambda *given: count.exchange(exchange, *given)  # type: ignore[method-assign]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield count
    finally:
        BackgroundMove.begin, BackgroundMove.commit, Migration.commit = begin, commit, exchange  # type: ignore[method-assign]
    count.add_up(profile.profiler.kineto_results.events())
