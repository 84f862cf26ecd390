# SPDX-License-Identifier: Apache-2.0
"""Makes steps of a move succeed on all ranks or fail on all: each rank reports its result to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from sluice.errors import InvalidState, PeerLost, SluiceError

T = TypeVar("T")


class Vote:
    """Takes votes of the ranks that move a layer's experts together. Every call is collective over all of them.

    name        of the layer, for errors
    group       of torch, over the layer's ranks; None: this rank alone
    everywhere  takes whether this group can continue, and returns whether all groups with the same experts can; None:
                there is one group
    """

    def __init__(self, name: str, group: Any, ranks: Sequence[int], everywhere: Callable[[bool], bool] | None) -> None:
        self.name, self._group, self._ranks, self._everywhere = name, group, ranks, everywhere
        self.is_lost = False  # a rank did not answer, and its state is unknown

    def tell(self, value: Any) -> list[Any]:
        """Returns the value of each rank of the group, in its order. PeerLost if a rank does not answer."""
        said = [value]
        if self._group is not None:
            said = [None] * len(self._ranks)
            with self._answered():
                dist.all_gather_object(said, value, group=self._group)
        return said

    def ask(self, why_not: str, error: Exception | None = None) -> None:
        """Returns if no rank has a reason against it; else every rank raises. error: this rank's reason."""
        said = self.tell(why_not)
        why = next((f"{self.name}, rank {rank}: {one}" for rank, one in zip(self._ranks, said) if one), "")
        if self._everywhere is not None:
            with self._answered():
                all_can = self._everywhere(not why)
            why = why or ("" if all_can else f"{self.name}: another group of ranks with the same experts cannot move")
        if why:
            raise error if isinstance(error, SluiceError) else InvalidState(why) from error

    def take(self, step: Callable[[], T]) -> T:
        """Returns the step's result, if the step has succeeded on every rank; else every rank raises."""
        result, error = None, None
        try:
            result = step()
        except Exception as failure:
            error = failure
        self.ask("" if error is None else f"{type(error).__name__}: {error}", error)
        return result  # type: ignore[return-value]

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Turns the error of a collective of torch into PeerLost."""
        try:
            yield
        except Exception as error:
            self.is_lost = True
            raise PeerLost(f"{self.name}: a rank was lost during the move: {error}") from error
