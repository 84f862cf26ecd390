# SPDX-License-Identifier: Apache-2.0
"""Tests Megatron's --optimizer-cpu-offload with with_sluice(spec, optimizer=True), on every release."""

import pytest
from mg_ranks import MegatronRanks
from test_mg_training import LOSS, NORM, WEIGHT


@pytest.mark.parametrize("fraction", [1.0, pytest.param(0.5, marks=pytest.mark.full)])
def test_OffloadedOptimizer_ByTheSpec_TrainsAsTorchsAdamW(ranks2: MegatronRanks, fraction: float) -> None:
    for found in ranks2.run("mg_offload:trained", fraction=fraction):
        assert found["kinds"] == ["OffloadedAdamW"]
        assert 0 < found["offloaded"] <= found["of"]
        assert (found["offloaded"] == found["of"]) == (fraction == 1.0)
        assert found["named"] == ["torch.optim.adamw"]
        assert found["sluice"]["losses"] == pytest.approx(found["stock"]["losses"], abs=LOSS)
        assert found["sluice"]["norms"] == pytest.approx(found["stock"]["norms"], rel=NORM)
        assert found["gap"] <= WEIGHT < found["moved"] / 10
