# SPDX-License-Identifier: Apache-2.0
"""Runs cases of torch's multi-process tests of schedules over gloo with Sluice's schedules.

Torch's test_schedule_multiproc.py and test_stage.py themselves need two GPUs. Its cases with plain stages are rows of
integration_tests/pairs, which have the bits of torch's own schedules.
"""

import os

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "upstream_jobs")
# By name of torch's test: job and options.
CASES = {
    "test_forward_only": ("forward_only", {}),
    "test_kwargs_with_tracer, 1f1b": ("traced", {"name": "SluiceSingle"}),
    "test_kwargs_with_tracer, gpipe": ("traced", {"name": "SluiceSingle:gpipe"}),
    "test_schedule_with_weight_update_mlp_e2e": (
        "put_off",
        {"name": "sluice", "separate_wgrad": True, "indices": [[0, 2], [1, 3]]},
    ),
    "test_custom_dw_with_fb_schedule": ("put_off", {"name": "SluiceSingle:gpipe", "indices": [[0], [1]]}),
}


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(2, f"{JOBS}:cases", which=CASES)


@pytest.mark.parametrize("case", CASES)
def test_Case_OfTorchsTests_TrainsAsOneProcess(outcomes, case):
    assert [told[case] for told in outcomes] == [5 if case == "test_forward_only" else 2] * 2


def test_Inputs_OfAnotherShapeOrDtype_FailOnAllRanksAndTheNextStepIsRight():
    first, second = ranks.run(2, f"{JOBS}:mismatched")
    for told in zip(first, second):  # found by torch's check, or by the loss on the last rank
        (culprit,) = (rank for rank in (0, 1) if not told[rank].startswith("PeerRefused"))
        assert "Error" in told[culprit], told
        assert f"rank {culprit}" in told[1 - culprit], told
