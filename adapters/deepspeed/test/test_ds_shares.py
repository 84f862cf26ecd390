"""One budget over several contexts: each has its least first, and the rest goes by the rows of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sluice.adapters.deepspeed import shares
from sluice.errors import InvalidArgument, OverBudget

CPU = torch.device("cpu")
ALONE, BOTH = ((0,), CPU), ((0, 1), CPU)


class FakeBackend:
    """A backend, and the state of its only layer."""

    def __init__(self, least: int, error: Exception | None = None) -> None:
        self.backend, self.least, self.error = self, least, error
        self.share: tuple[int, int] | None = None

    def prepare(self, dtype: torch.dtype) -> None:
        if self.error is not None:
            raise self.error

    def smallest_budget(self, tokens: int) -> int:
        return self.least * tokens

    def set_share(self, share: int, whole: int) -> None:
        self.share = share, whole


def sharing(total: int, alone: FakeBackend, both: FakeBackend, other: list[dict[str, Any]]) -> shares.Sharing:
    """Of rank 0, whose peer of BOTH says `other`, round by round."""
    said = iter(other)

    def exchange(ranks: tuple[int, ...], own: Any) -> dict[int, Any]:
        return {0: own} if len(ranks) == 1 else {0: own, 1: {**own, **next(said)}}

    made = shares.Sharing(total, {ALONE: 1, BOTH: 9}, exchange)
    made.add(ALONE, alone, [alone])
    made.add(BOTH, both, [both])
    return made


def test_Sharing_LeastFirst_AndTheRestByRows() -> None:
    """By rows alone the first would get 100 of 1,000, less than it needs."""
    alone, both = FakeBackend(50), FakeBackend(20)
    made = sharing(1000, alone, both, [{}, {}])
    made.settle(10, torch.float32)
    assert alone.share == (500 + 30, 1000) and both.share == (200 + 270, 1000)
    made.settle(10, torch.float32)  # once
    assert shares.split(1000, {ALONE: 1, BOTH: 9}, ALONE) == 100


def test_Sharing_Peers_TheNeediestAndTheSmallestShareCount() -> None:
    alone, both = FakeBackend(50), FakeBackend(20)
    sharing(1000, alone, both, [{"least": 300}, {}]).settle(10, torch.float32)
    assert alone.share == (500 + 20, 1000) and both.share == (300 + 180, 1000)
    alone, both = FakeBackend(50), FakeBackend(20)
    sharing(1000, alone, both, [{}, {"share": 222}]).settle(10, torch.float32)
    assert both.share == (222, 1000)


def test_Sharing_TooLittle_NamesBothAndTheirSum() -> None:
    alone, both = FakeBackend(50), FakeBackend(60)
    words = (
        r"memory_budget of 1000 bytes is shared by 2 expert-parallel groups, which need at least 500 for the layers of "
        r"ranks \[0\] and 600 for the layers of ranks \[0, 1\], together 1100, for 10 tokens at a time: raise"
    )
    with pytest.raises(OverBudget, match=words):
        sharing(1000, alone, both, [{}, {}]).settle(10, torch.float32)
    assert alone.share is None and both.share is None
    made = sharing(1100, alone, both, [{}, {}])
    made.settle(10, torch.float32)
    assert alone.share == (500, 1100) and both.share == (600, 1100)


def test_Sharing_OneRankFails_AllHearWhy() -> None:
    """Both rounds are held in any case: peers of another context wait for this rank there."""
    rounds: list[Any] = []

    def exchange(ranks: tuple[int, ...], own: Any) -> dict[int, Any]:
        rounds.append((ranks, own["why"]))
        return {0: own}

    failing, other = FakeBackend(1, InvalidArgument("no such layer")), FakeBackend(1)
    made = shares.Sharing(100, {ALONE: 1, BOTH: 1}, exchange)
    made.add(ALONE, other, [other])
    made.add(BOTH, failing, [failing])
    with pytest.raises(OverBudget, match="no such layer"):
        made.settle(1, torch.float32)
    assert rounds == [(ranks, "no such layer") for ranks in ((0,), (0, 1)) * 2]
    made.fail("again")  # said already
    assert len(rounds) == 4
    made = shares.Sharing(100, {ALONE: 1}, exchange)
    made.add(ALONE, other, [other])
    made.fail("bad rows")  # before its first forward
    assert rounds[4:] == [((0,), "bad rows")] * 2
