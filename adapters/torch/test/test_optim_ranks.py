# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim` with a process group: data-parallel training with gradient sums inside the step."""

import pytest
import ranks
import torch

TWO = [
    ("trained", {"max_norm": 0.0}),
    ("trained", {"max_norm": 0.05}),
    ("overflowed", {"where": 0}),
    ("overflowed", {"where": 1}),
    ("scaled", {"kind": "sluice"}),
    ("scaled", {"kind": "torch"}),
    ("refused", {}),
    ("cut", {}),
]
FOUR = [("trained", {"max_norm": 0.05}), ("experts", {})]


@pytest.fixture(scope="module")
def two():
    """Returns the results of both ranks, by job of TWO."""
    return list(zip(*ranks.run(2, "optim_jobs:several", jobs=TWO)))


@pytest.fixture(scope="module")
def four():
    """Returns the results of all ranks, by job of FOUR."""
    return list(zip(*ranks.run(4, "optim_jobs:several", jobs=FOUR)))


@pytest.mark.parametrize("size, job", [("two", 0), ("two", 1), ("four", 0)], ids=["plain", "clipped", "four"])
def test_Step_OverRanks_HasTheBitsOfTheMeanAndTrainsAsTorchs(request, size, job):
    for is_same, copied in request.getfixturevalue(size)[job]:
        assert is_same and copied


def test_ParameterGroups_WithRanksOfTheirOwn_AreSummedOverThem(four):
    wanted = [[15, 3, 1], [15, 3, 2], [15, 12, 4], [15, 12, 8]]
    for got, sums in zip(four[1], wanted):
        assert got == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("where", [0, 1])
def test_GradientOfOneRank_ThatIsInfinite_ChangesNothingOnAny(two, where):
    for same, skipped, told, still_same in two[2 + where]:
        assert (same, skipped, told, still_same) == (True, 1, 1, False)


def test_GradScaler_WithAnOverflowOnOneRank_HasTorchsScalesOnAll(two):
    mine, stock = two[4], two[5]
    for (scales, count, params), (wanted, wanted_count, others) in zip(mine, stock):
        assert (scales, count) == (wanted, wanted_count)
        assert scales[1] > scales[2]  # the overflow's
        for a, b in zip(params, others):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, mine[0][2], mine[1][2]))


def test_WhatWouldDivergeOrWait_IsRefusedByName(two):
    first, second = two[6]
    for said in (first, second):
        assert "use sluice.optim.GradScaler" in said[0]
        assert "clip by its max_norm" in said[1]
        assert "number of elements" in said[2] or "counts, dtypes" in said[2]
    assert "not all among those of the optimizer" in first[3]
    assert "the optimizer has none" in first[4]


@pytest.mark.parametrize("form", ["whole", "cut", "summed"])
def test_GradientOfACutParameter_HoweverItIsLaid_TrainsAsTorchs(two, form):
    assert all(found[form] for found in two[7])


def test_InfiniteGradient_InOneRanksPartOfACutParameter_SkipsTheStepOnAll(two):
    assert all(found["skipped"] for found in two[7])


def test_MaxNorm_OfACutParameter_IsRefusedByName(two):
    assert all("use torch.nn.utils.clip_grad_norm_" in found["clipped"] for found in two[7])
