"""What the optimizer's benchmarks call kept, on times that were made up."""

import pytest

from integration_tests.benchmarks.optimizer import optimizer_mixed, optimizer_overlap


@pytest.mark.parametrize("ratio, apart, kept", [(1.35, 0.0, True), (1.25, 0.0, False), (1.35, 1e-3, False)])
def test_MixedStep_KeptByItsRatioAndByLikeMasters(ratio, apart, kept):
    assert pytest.approx(1.3) == optimizer_mixed.WANTED
    found = optimizer_mixed.judge({"seconds": {"stock": [ratio] * 20, "sluice": [1.0] * 20}, "apart": apart})
    assert found["kept"] is kept
    assert found["stock_over_sluice"]["median"] == ratio


@pytest.mark.parametrize(
    "serial, beside, kept",
    [(2.0, 1.15, True), (2.0, 1.2, False), (1.5, 1.1, False)],  # at most 1.10 and a tenth of the sum for one chunk
    ids=["kept", "too long", "too little gained"],
)
def test_Overlap_KeptByTheLongerAndByTheSerialPair(serial, beside, kept):
    seconds = {"update": [1.0] * 20, "sum": [0.9] * 20, "serial": [serial] * 20, "beside": [beside] * 20}
    found = optimizer_overlap.judge({"seconds": seconds, "k": 2, "buckets": 20})
    assert found["at_most"] == pytest.approx(1.1 + 0.09)
    assert found["kept"] is kept
