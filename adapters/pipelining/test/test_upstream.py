# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of torch's multi-process tests of schedules over gloo with Sluice's schedules: the results must be the
same as with torch's.

Torch's test_schedule_multiproc.py and test_stage.py themselves need two GPUs.
"""

import os

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "upstream_jobs")
LOOPED, V = [[0, 2], [1, 3]], [[0, 3], [1, 2]]
# By name of torch's test: job, schedule, options.
CASES = {
    "test_forward_only": ("forward_only", "forward only", {}),
    "test_grad_with_tracer, 1f1b": ("traced", "1f1b", {}),
    "test_grad_with_tracer, gpipe": ("traced", "gpipe", {}),
    "test_kwargs_with_tracer, 1f1b": ("traced_keywords", "1f1b", {}),
    "test_grad_with_manual, 1f1b, shapes inferred": ("by_hand", "1f1b", {"infers_shapes": True}),
    "test_grad_with_manual, 1f1b, shapes given": ("by_hand", "1f1b", {"infers_shapes": False}),
    "test_grad_with_manual, gpipe": ("by_hand", "gpipe", {"infers_shapes": True}),
    "test_grad_with_manual_interleaved, 1f1b": ("several", "interleaved", {"indices": LOOPED}),
    "test_grad_with_manual_interleaved, looped bfs": ("several", "looped bfs", {"indices": LOOPED}),
    "test_schedule_with_native_zero_bubble": ("several", "zero bubble", {"indices": LOOPED}),
    "test_non_symmetric_stage_ids": ("several", "v", {"indices": V}),
    "test_schedule_with_weight_update_mlp_e2e": ("put_off", "zero bubble", {"indices": LOOPED}),
    "test_custom_dw_with_fb_schedule": ("put_off", "gpipe", {"indices": [[0], [1]]}),
}
BATCHES = {"forward_only": 5}


@pytest.fixture(scope="module")
def outcomes():
    return ranks.run(2, f"{JOBS}:cases", which=CASES)


@pytest.mark.parametrize("case", CASES)
def test_Case_OfTorchsTests_EndsAsWithTorchsOwnClass(outcomes, case):
    for rank, told in enumerate(outcomes):
        stock, own = told[case]
        assert stock == 0, (rank, stock)
        assert own == BATCHES.get(CASES[case][0], 2), (rank, own)


def test_Inputs_OfAnotherShapeOrDtype_FailOnAllRanksAndTheNextStepIsRight():
    first, second = ranks.run(2, f"{JOBS}:mismatched")
    for told in zip(first, second):  # found by torch's check, or by the loss on the last rank
        (culprit,) = (rank for rank in (0, 1) if not told[rank].startswith("PeerRefused"))
        assert "Error" in told[culprit], told
        assert f"rank {culprit}" in told[1 - culprit], told
