# SPDX-License-Identifier: Apache-2.0
"""Makes steps of a move succeed on all ranks or fail on all: each rank reports its result to the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from sluice.adapters.common.agree import DEFAULT_WAIT_S
from sluice.errors import InvalidState, PeerLost, PeerRefused, SluiceError, TimedOut
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")
_OF_OTHERS = (PeerLost, PeerRefused, TimedOut)  # errors of a rank that only met the failure of another
_rounds: dict[tuple[int, ...], itertools.count[int]] = {}


class Vote:
    """Takes votes of the ranks that move a layer's experts together. Every call is collective over all of them.

    name      of the layer, for errors
    group     of torch, over the layer's ranks; None: this rank alone
    replicas  a group of torch, over the ranks that hold the same experts as this one; None: this rank alone
    wait_s    seconds to wait for a rank; None: DEFAULT_WAIT_S
    """

    def __init__(
        self, name: str, group: Any, ranks: Sequence[int], replicas: Any = None, wait_s: float | None = None
    ) -> None:
        self.name, self._group, self._ranks, self._replicas = name, group, ranks, replicas
        self.wait_s = DEFAULT_WAIT_S if wait_s is None else wait_s
        self.is_lost = False  # a rank did not answer, and its state is unknown

    def tell(self, value: Any) -> list[Any]:
        """Returns the value of each rank of the group, in its order. PeerLost if a rank does not answer."""
        said = [value]
        if self._group is not None:
            said = [None] * len(self._ranks)
            with self._answered():
                _meet(self._group, self.wait_s)
                dist.all_gather_object(said, value, group=self._group)
        return said

    def ask(self, why_not: str, error: Exception | None = None) -> None:
        """Returns if no rank has a reason against it; else every rank raises. error: this rank's reason."""
        at, why = first_reason(self.tell(why_not))
        reason = f"{self.name}, rank {self._ranks[at]}: {why}" if why else ""
        if self._replicas is not None:
            with self._answered():
                all_can = self._all_replicas(not why)
            if not reason and not all_can:
                reason = f"{self.name}: another group of ranks with the same experts cannot move"
        if not reason:
            return
        is_own = isinstance(error, SluiceError) and (not isinstance(error, _OF_OTHERS) or _is_of_others(why))
        raise error if is_own and error is not None else InvalidState(reason) from error

    def take(self, step: Callable[[], T]) -> T:
        """Returns the step's result, if the step has succeeded on every rank; else every rank raises."""
        result, error = None, None
        try:
            result = step()
        except Exception as failure:
            error = failure
        self.ask("" if error is None else f"{type(error).__name__}: {error}", error)
        return result  # type: ignore[return-value]

    def _all_replicas(self, can: bool) -> bool:
        _meet(self._replicas, self.wait_s)
        said: list[Any] = [None] * dist.get_world_size(self._replicas)
        dist.all_gather_object(said, can, group=self._replicas)
        return all(said)

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Turns the error of a collective of torch into PeerLost."""
        try:
            yield
        except Exception as error:
            self.is_lost = True
            raise PeerLost(f"{self.name}: a rank was lost during the move: {error}") from error


def first_reason(said: Sequence[str]) -> tuple[int, str]:
    """Returns the place of a rank with a reason against a step, and the reason; (0, ""): no rank has one. A rank that
    only lost another one is not chosen if a rank reports the cause."""
    found = [(_is_of_others(why), at, why) for at, why in enumerate(said) if why]
    return min(found)[1:] if found else (0, "")


def _is_of_others(why: str) -> bool:
    return why.startswith(tuple(each.__name__ for each in _OF_OTHERS))


def _meet(group: Any, wait_s: float) -> None:
    """Waits until all ranks of the group are here. torch would wait for its own timeout, and would not say for whom.

    Each rank writes to the store that it is here, and then enters a barrier. The barrier fails soon if a rank has
    ended; a rank that hangs has not written. A rank that comes too late ends the barrier, and learns that the others
    have given up, so the group remains usable.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    number = next(_rounds.setdefault(ranks, itertools.count()))
    base, store = f"sluice/vote/{'.'.join(map(str, ranks))}", c10d._get_default_store()
    prefix = f"{base}/{number}"
    store.set(f"{prefix}/{dist.get_rank()}", "")
    barrier, pause, deadline = dist.barrier(group, async_op=True), 1e-5, time.monotonic() + wait_s
    while not barrier.is_completed() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    if not barrier.is_completed():
        missing = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        named = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        text = f"{named} did not answer within {wait_s:.0f} s"
        store.set(f"{prefix}/given up", text)
        raise TimedOut(text, peer=missing[0] if missing else -1)
    barrier.wait()
    if number > 0:  # all ranks have left the round before
        store.delete_key(f"{base}/{number - 1}/{dist.get_rank()}")
    if store.check([f"{prefix}/given up"]):
        raise TimedOut(f"the other ranks have given up: {store.get(f'{prefix}/given up').decode()}")
