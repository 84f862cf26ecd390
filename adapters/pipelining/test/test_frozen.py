# SPDX-License-Identifier: Apache-2.0
"""Tests that separate weight gradients have torch's bits, also with frozen layers and parameters with several uses."""

import os

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "frozen_jobs")

# By label: name of the schedule, placement of stages, stages per rank, options.
SCHEDULES = {
    "zero_bubble": ("sluice:zero_bubble", "looped", 1, {}),
    "v": ("sluice:v", "v", 2, {}),
    "whole": ("sluice", "looped", 1, {}),
}

# Cases in which no linear layer has a weight gradient that can be deferred.
NOTHING_WAITS = ("weights", "all but biases", "uses outside, frozen before")


def test_EveryCaseUnderEverySchedule_GradientsHaveTheBitsOf1F1B():
    later = {}
    for rank, answers in enumerate(ranks.run(2, f"{JOBS}:against_1f1b", schedules=SCHEDULES)):
        assert len(answers) > 25 * len(SCHEDULES)
        for (case, label), (differing, there, weights_later) in answers.items():
            assert differing == [] and there > 4, (rank, case, label, differing)
            later[case, label] = later.get((case, label), 0) + weights_later
    for (case, label), count in later.items():
        assert (count > 0) == (label != "whole" and case not in NOTHING_WAITS), (case, label, count)


def test_AUseOutsideOfItsLayer_InALaterMicroBatch_IsRefusedByName():
    for told, is_kept in ranks.run(2, f"{JOBS}:changing"):
        assert "up.bias" in told and "separate_wgrad" in told and "zero_bubble" in told, told
        assert is_kept


@pytest.mark.parametrize("name", ["sluicesingle:1f1b", "sluicesingle:zero_bubble"])
def test_ScaleGrads_OverTwoSteps_HasTorchsBitsAndWarnsOnce(name):
    for rank, (is_same, (nothing, zeros, first, second)) in enumerate(ranks.run(2, f"{JOBS}:scaled_twice", name=name)):
        assert is_same, rank
        assert nothing == zeros == second == [], (rank, nothing, zeros, second)
        assert len(first) == 1 and f"stage {rank}: {2 * rank}.up.weight.grad" in first[0], first
