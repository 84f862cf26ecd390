# SPDX-License-Identifier: Apache-2.0
"""Tests the claims of Megatron's own tests of dispatcher, router and expert checkpoints on whole layers on gloo.

Those tests call parts that a layer on Sluice has and does not use, or need eight GPUs (test_mg_upstream.py). Each
claim holds for stock, too.
"""

from pathlib import Path
from typing import Any

import pytest
from mg_ranks import MegatronRanks

HOWS = ("stock", "decorated")
CAPACITY = {"moe_expert_capacity_factor": 0.5}
PADDED = {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True}
CASES: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {  # with the smallest and largest kept share
    "dropless": ({}, (1.0, 1.0)),
    "capacity": (CAPACITY, (0.1, 0.5)),
    "capacity by position": ({**CAPACITY, "moe_token_drop_policy": "position"}, (0.1, 0.5)),
    "padded": (PADDED, (0.1, 0.7)),
}


def _check_round_trip(found: list[dict[str, Any]], how: str, bounds: tuple[float, float]) -> None:
    for each in found:
        assert max(each["output"], each["gradient"]) <= 1e-6, each
        assert bounds[0] <= each["kept"] <= bounds[1], each
        assert (each["ran"] > 0) == (how == "decorated"), each


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_TwoRanks_ExpertsThatGiveBackTheirRows_RoundTripIsExact(ranks2: MegatronRanks, case: str, how: str) -> None:
    changes, bounds = CASES[case]
    _check_round_trip(ranks2.run("mg_dispatch:round_trip", ep=2, how=how, **changes), how, bounds)


@pytest.mark.parametrize("ep", [1, 4])
def test_FourRanks_OneAndFourExpertParallel_RoundTripIsExact(oldest4: MegatronRanks, ep: int) -> None:
    for changes, bounds in CASES.values():
        found = oldest4.run("mg_dispatch:round_trip", ep=ep, how="decorated", **changes)
        _check_round_trip(found, "decorated", bounds)


@pytest.mark.parametrize("how", HOWS)
def test_Padded_AgainstNotPadded_SameOutputsAndGradients(ranks2: MegatronRanks, how: str) -> None:
    for found in ranks2.run("mg_dispatch:padded_beside_plain", ep=2, how=how):
        assert found["output"] <= 1e-6 * found["size"] and found["gradient"] <= 1e-6, found
        plain, padded = found["counts"]
        assert len(padded) == 1 and padded[0] == max(plain), found


@pytest.mark.parametrize("how", HOWS)
def test_Router_OutputsCountForNothing_ItsOwnLossesStillReachIt(ranks2: MegatronRanks, how: str) -> None:
    for none, aux, z in ranks2.run("mg_dispatch:router_losses", ep=2, how=how):
        assert none == 0 and aux > 0 and z > 0


def test_Router_ItsOwnLosses_ReachItToTheBit(ranks2: MegatronRanks) -> None:
    """Losses are scaled as by a schedule. The backward of the probabilities adds zeros to the losses' gradients."""
    for stock, mine in zip(*(ranks2.run("mg_dispatch:router_losses", ep=2, how=how, scale=0.25) for how in HOWS)):
        assert stock == mine


@pytest.mark.parametrize("how", HOWS)
def test_Router_ItsOwnDtype_OutputsHaveTheLayers(ranks2: MegatronRanks, how: str) -> None:
    wanted = [["bfloat16", "bfloat16"], ["float32", "bfloat16"], ["float64", "bfloat16"]]
    assert ranks2.run("mg_dispatch:router_dtypes", ep=2, how=how) == [wanted] * 2


@pytest.mark.parametrize("gated", [True, False])
def test_Checkpoint_FourTwoFourRanks_HoldsTheSameTensors(oldest4: MegatronRanks, tmp_path: Path, gated: bool) -> None:
    for found in oldest4.run("mg_dispatch:resharded_in_turn", folder=str(tmp_path), gated=gated):
        assert found["same"] == [True, True] and found["largest"] > 0, found
        assert any("linear_fc1" in name for name in found["experts"]), found
