# SPDX-License-Identifier: Apache-2.0
"""Tests that all ranks report a deviation of one rank, with its number, and continue if possible."""

from typing import Any

import pytest
from mg_ranks import MegatronRanks

SOON = 60.0  # seconds: far below the timeout of the groups


@pytest.mark.parametrize("changes", [{}, {"moe_shared_expert_intermediate_size": 40}], ids=["plain", "shared experts"])
def test_BadInput_OfOneRank_BothAreToldAndGoOn(oldest2: MegatronRanks, changes: dict[str, Any]) -> None:
    """Shared experts are computed first; their failure is reported, too."""
    zero, one = oldest2.run("mg_failures:bad_input", **changes)
    assert "PeerRefused" in zero["said"] and "rank 1" in zero["said"] and "36" in zero["said"], zero
    assert "36" in one["said"] and zero["finite"] and one["finite"], one


def test_ExpertThatRaises_OnOneRank_TheNextCallTellsTheOther(oldest2: MegatronRanks) -> None:
    """Rows are in flight by then, and the exchanges of the pass continue."""
    zero, one = oldest2.run("mg_failures:expert_raises")
    assert zero["said"][0] == "" and "rank 1" in zero["said"][1], zero
    assert "the hook's own words" in one["said"][0] and "an earlier pass failed" in one["said"][1], one
    assert zero["finite"] and one["finite"]


def test_OtherLayer_OnOneRank_BothAreToldAndGoOn(oldest2: MegatronRanks) -> None:
    for found in oldest2.run("mg_failures:other_layer"):
        assert found["said"].startswith("Mismatch") and found["finite"], found
        assert "rank 0 is in call" in found["said"] or "rank 1 is in call" in found["said"], found


def test_RankSkipsAForward_IsNamedAtTheDeadline(fresh2: MegatronRanks) -> None:
    zero, one = fresh2.run("mg_failures:one_rank_skips")
    assert zero.startswith("TimedOut") and "rank 1" in zero and one == "", (zero, one)


def test_ModelsThatDiffer_AreAnErrorOnBothRanks(oldest2: MegatronRanks) -> None:
    for said in oldest2.run("mg_failures:models_differ"):
        assert said.startswith("DisagreementError") and '"hidden_width" is 48 on rank 0 and 56 on rank 1' in said, said


def test_OneRankCannot_BothRefuseOrBothLeaveItToTheHost(oldest2: MegatronRanks) -> None:
    for found in oldest2.run("mg_failures:one_rank_cannot", policy="error"):
        assert "experts are a _OtherExperts" in found["said"] and "(on rank 1)" in found["said"], found
    for found in oldest2.run("mg_failures:one_rank_cannot", policy="warn"):
        assert found == {"said": "", "kept": [True, True]}


def test_BadOptions_OfSpecAndEnvironment_AreNamed(oldest2: MegatronRanks) -> None:
    wanted = ("'chnks'", "auto", "SLUICE_OPTIONS", "/nowhere/options.json")
    for said in oldest2.run("mg_failures:bad_options"):
        assert len(said) == len(wanted) and all(word in text for word, text in zip(wanted, said)), said


def test_ExpertsSplitOverRanks_AreRefusedByNameOrLeft(ranks2: MegatronRanks) -> None:
    reason = "split over 2 tensor-parallel ranks: set expert_tensor_parallel_size to 1"
    for found in ranks2.run("mg_failures:split_experts", policy="error"):
        assert reason in found["said"] and found["kept"] == [], found
    for rank, found in enumerate(ranks2.run("mg_failures:split_experts", policy="warn")):
        assert found["said"] == "" and found["kept"] == [True, True]
        assert (reason in found["printed"]) == (rank == 0), found


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.full), "backward"])
def test_RankKilledInAStep_TheOthersLoopNamesItSoon(fresh2: MegatronRanks, where: str) -> None:
    survivor, dead = fresh2.try_run("mg_failures:dies_in_training", dying=(1,), where=where)
    assert dead == {"died": True}
    found = survivor["result"]
    assert "PeerLost" in found["said"] and "rank 0 lost rank 1" in found["said"] and found["s"] < SOON, found
