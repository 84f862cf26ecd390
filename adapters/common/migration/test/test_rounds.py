# SPDX-License-Identifier: Apache-2.0
"""Tests that rounds reach every placement, and that a rank sends and receives at most one expert in a round."""

import random

import pytest
from sluice.adapters.common.migration.placement import Placement, rounds


def _drawn(numbers: random.Random, ranks: int, slots: int) -> Placement:
    places = [(rank, slot) for rank in range(ranks) for slot in range(slots)]
    numbers.shuffle(places)
    return Placement(*(tuple(each) for each in zip(*places)))


def _check(old: Placement, new: Placement, ranks: int) -> None:
    gives, gets, turns = [0] * ranks, [0] * ranks, [0] * ranks
    for expert in range(len(old.expert_rank)):
        before, after = old.place(expert), new.place(expert)
        if before[0] != after[0]:
            gives[before[0]] += 1
            gets[after[0]] += 1
        elif before != after:
            turns[before[0]] += 1
    assert max(gives + gets) <= 1 and max(turns) <= 2
    assert all(not (given and turned) for given, turned in zip(gives, turns))


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_Rounds_AnyTwoPlacements_ReachesTheSecondWithinTheLimits(ranks: int, slots: int) -> None:
    for seed in range(60):
        numbers = random.Random(seed)
        now, target = _drawn(numbers, ranks, slots), _drawn(numbers, ranks, slots)
        for after in rounds(now, target):
            assert sorted(zip(*after)) == sorted(zip(*now)) and after != now
            _check(now, after, ranks)
            now = after
        assert now == target


def test_Rounds_SwapsOfDifferentRanks_ShareARound() -> None:
    old = Placement((0, 0, 1, 1, 2, 2, 3, 3), (0, 1) * 4)
    new = Placement((1, 0, 0, 1, 3, 2, 2, 3), (0, 1) * 4)
    assert rounds(old, new) == [new] and rounds(new, new) == []
