# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim` with a process group: parameters with groups of their own, DTensors, and what it refuses.

integration_tests/pairs trains data-parallel models with gradient sums inside the step.
"""

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)


@pytest.fixture(scope="module")
def found():
    """Returns the results of both ranks, by job."""
    return list(zip(*ranks.run(2, "optim_jobs:everything")))


def test_GradientOfACutParameter_HoweverItIsLaid_TrainsAsTorchs(found):
    assert all(each[form] for each in found[0] for form in ("whole", "cut", "summed"))


def test_InfiniteGradient_InOneRanksPartOfACutParameter_SkipsTheStepOnAll(found):
    assert all(each["skipped"] for each in found[0])


def test_ParameterGroups_WithRanksOfTheirOwn_AreSummedOverThem(found):
    for got, sums in zip(found[1], [[3, 1], [3, 2]]):
        assert got == pytest.approx(sums, rel=1e-5)


def test_WhatWouldDivergeOrWait_IsRefusedByName(found):
    first, second = found[2]
    for said in (first, second):
        assert "use sluice.optim.GradScaler" in said[0]
        assert "clip by its max_norm" in said[1]
        assert "number of elements" in said[2] or "counts, dtypes" in said[2]
    assert "not all among those of the optimizer" in first[3]
    assert "the optimizer has none" in first[4]
    assert all("use torch.nn.utils.clip_grad_norm_" in each["clipped"] for each in found[0])
