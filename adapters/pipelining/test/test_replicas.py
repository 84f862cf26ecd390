# SPDX-License-Identifier: Apache-2.0
"""Tests stages with FSDP or DDP replicas under Sluice's schedules: torch's bits, or an error with the reason."""

import os

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "replica_jobs")
SAME = [("fsdp", "sluice:1f1b"), ("fsdp", "sluice:gpipe"), ("ddp", "sluice"), ("ddp", "sluice:backward_first")]
REFUSED = {
    ("fsdp", "sluice"): "FSDPBlocks synchronizes its replicas within a pass, but policy adaptive does not",
    ("fsdp", "sluice:zero_bubble"): "FSDP is not supported with separate weight gradients",
    ("ddp", "sluice:zero_bubble"): "DistributedDataParallel reduces gradients in a whole backward",
}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def told():
    cases = [*SAME, *REFUSED]
    return [dict(zip(cases, each)) for each in ranks.run(4, f"{JOBS}:against_1f1b", cases=cases)]


@pytest.mark.parametrize("case", SAME, ids=" ".join)
def test_Schedule_OverReplicas_SameBitsAs1F1B(told, case):
    assert [each[case] for each in told] == ["same"] * 4


@pytest.mark.parametrize("case", REFUSED, ids=" ".join)
def test_Schedule_OverReplicasThatItCannotRun_IsRefusedOnAllRanks(told, case):
    for each in told:
        assert each[case].startswith("Unsupported") and REFUSED[case] in each[case], each[case]
