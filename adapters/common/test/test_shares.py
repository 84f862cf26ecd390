# SPDX-License-Identifier: Apache-2.0
"""Tests one budget over several contexts: the values that ranks exchange, and the share of each context."""

from __future__ import annotations

import math
import re
import types
from typing import Any

import pytest
import torch
from sluice.adapters.common import shares
from sluice.config import Options
from sluice.errors import InvalidArgument, OverBudget

CPU = torch.device("cpu")
ALONE, BOTH = ((0,), CPU), ((0, 1), CPU)


class FakeContext:
    """A context, and its only layer."""

    def __init__(self, least: int, error: Exception | None = None, most: int = 10**9) -> None:
        self.least, self.error, self.most = least, error, most
        self.share: tuple[int, int] | None = None

    def prepare(self, dtype: torch.dtype) -> None:
        if self.error is not None:
            raise self.error

    def engine_layers(self) -> list[Any]:
        return [self]

    def smallest_budgets(self, layers: list[Any], tokens: int, most: int) -> list[int]:
        assert layers == [self]
        sizes = [math.ceil(tokens * size) for size in (1, 1.25, 1.5, 2, 3, 4, 6, 8)]
        needs = [self.least * size for size in sizes if size <= self.most]
        return needs[: 1 + sum(need <= most for need in needs)]

    def set_share(self, share: int, whole: int) -> None:
        self.share = share, whole


def sharing(total: int, alone: FakeContext, both: FakeContext, other: list[dict[str, Any]]) -> shares.Sharing:
    """Returns the Sharing of rank 0, whose peer in BOTH answers `other`, round by round."""
    said = iter(other)

    def exchange(ranks: tuple[int, ...], own: Any) -> dict[int, Any]:
        return {0: own} if len(ranks) == 1 else {0: own, 1: {**own, **next(said)}}

    made = shares.Sharing(total, {ALONE: 1, BOTH: 9}, exchange)
    made.add(ALONE, alone, [alone])
    made.add(BOTH, both, [both])
    return made


def test_Sharing_LeastFirst_AndTheRestByRows() -> None:
    """By rows alone the first would get 1,000 of 10,000, less than what 80 tokens need, eight times those of the first
    forward."""
    alone, both = FakeContext(50), FakeContext(20)
    made = sharing(10000, alone, both, [{}, {}])
    made.settle(10, torch.float32)
    assert alone.share == (80 * 50 + 440, 10000) and both.share == (80 * 20 + 3960, 10000)
    made.settle(11, torch.float32)  # once
    assert alone.share == (80 * 50 + 440, 10000)
    assert shares.split(10000, {ALONE: 1, BOTH: 9}, ALONE) == 1000


def test_OutstandingOf_OnePassAfterTheOther_CountsTheMostOfTheseLayers() -> None:
    """The reference goes through the layers, once for each forward, from each layer on."""
    for order in ([0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 0, 0], [0]):
        for of_model in range(1, 3 * len(order) + 1):
            for context in set(order):
                most = max(
                    sum(order[(first + i) % len(order)] == context for i in range(of_model))
                    for first in range(len(order))
                )
                assert most <= shares.outstanding_of(of_model, order.count(context), len(order)) <= of_model


def test_Options_OfTwoContexts_SplitTheBudgetAndTheOutstandingForwards() -> None:
    """Another rank's numbers count if it plans with less memory, or with more forwards."""
    findings: Any = [
        types.SimpleNamespace(ranks=ranks, device=CPU, row_bytes=lambda: 640)
        for ranks in ((0,), (0, 1), (0, 1), (0, 1))
    ]
    options = Options(memory_budget=600, max_outstanding=8)

    def of(place: shares.Place, peer: dict[str, int] | None = None) -> Options:
        def least(own: dict[str, int]) -> dict[str, int]:
            return {name: min(value, (peer or own)[name]) for name, value in own.items()}

        return shares.options_of(options, findings, place, least)

    alone, both = of(ALONE), of(BOTH)
    assert (alone.memory_budget, alone.max_outstanding, alone.shared_memory_budget) == (200, 2, 600)
    assert (both.memory_budget, both.max_outstanding, both.shared_memory_budget) == (400, 6, 600)
    other = of(BOTH, {"memory_budget": 300, "max_outstanding": -7})
    assert (other.memory_budget, other.max_outstanding) == (300, 7)
    options = Options(memory_budget=600, host_memory_budget=400)
    assert of(BOTH).max_outstanding is None
    assert (of(ALONE).host_memory_budget, of(BOTH).host_memory_budget) == (100, 300)  # rows alone: a pool has no slots
    options = Options(max_outstanding=8)
    assert of(BOTH) is options


def test_Sharing_NoPlanForMoreTokens_IsNoErrorBefore() -> None:
    alone, both = FakeContext(50, most=20), FakeContext(20)
    sharing(2000, alone, both, [{}, {}]).settle(10, torch.float32)
    assert alone.share == (20 * 50 + 60, 2000) and both.share == (20 * 20 + 540, 2000)


def test_Sharing_ForwardOfMoreTokensRefused_SaysWhenSharesAreMade() -> None:
    alone, both = FakeContext(50), FakeContext(20)
    made = sharing(1000, alone, both, [{}, {}])
    error = OverBudget("no plan fits", peer=1)
    assert made.explain(error, 10) is error
    made.settle(10, torch.float32)
    assert made.explain(error, 10) is error  # no more tokens than the first had
    explained = made.explain(error, 11)
    words = (
        r"no plan fits. The memory_budget was divided at the first forward, which had 10 tokens .* \(this one has "
        r"11\): run the largest batch first, so that the division allows for it"
    )
    assert explained.peer == 1 and re.match(words, explained.message)


def test_Sharing_Peers_TheNeediestAndTheSmallestShareCount() -> None:
    alone, both = FakeContext(50), FakeContext(20)
    sharing(1000, alone, both, [{"needs": [300, 390, 450, 600, 900, 1200]}, {}]).settle(10, torch.float32)
    assert alone.share == (500 + 125, 1000) and both.share == (300 + 75, 1000)  # 150 and 90 more for a quarter more
    alone, both = FakeContext(50), FakeContext(20)
    sharing(1000, alone, both, [{}, {"share": 222}]).settle(10, torch.float32)
    assert both.share == (222, 1000)


def test_Sharing_TooLittle_NamesBothAndTheirSum() -> None:
    alone, both = FakeContext(50), FakeContext(60)
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

    failing, other = FakeContext(1, InvalidArgument("no such layer")), FakeContext(1)
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
