# SPDX-License-Identifier: Apache-2.0
"""Tests moves of experts while Megatron trains: the bits are the same, and checkpoints show no move."""

from pathlib import Path
from typing import Any

import pytest
from mg_ranks import MegatronRanks
from test_mg_training import LOSS, NORM, WEIGHT

WHAT = ("losses", "parameters", "grads", "optimizer")
CASES: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"params_dtype": "bfloat16"},
    "fused into main_grad": {"gradient_accumulation_fusion": True, "params_dtype": "bfloat16"},
    "biases": {"add_bias_linear": True},
    "shared experts": {"moe_shared_expert_intermediate_size": 40},
}
DAILY = ("f32", "fused into main_grad")


def _check(answers: list[Any], moves: int) -> None:
    """Checks that two trainings on each rank have the same bits, and that experts moved in the second."""
    for still, moved in answers:
        assert [name for name in WHAT if still[name] != moved[name]] == []
        assert moved["moves"] >= moves and still["losses"][-1] != still["losses"][0]


@pytest.mark.parametrize("steps", [12, pytest.param(204, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", [c if c in DAILY else pytest.param(c, marks=pytest.mark.full) for c in CASES])
def test_Move_EveryFewSteps_HasTheBitsOfNone(ranks2: MegatronRanks, case: str, steps: int) -> None:
    _check(ranks2.run("mg_moves:moved", ep=2, steps=steps, every=3, **CASES[case]), moves=steps // 4)


def test_Move_TwoReplicas_HasTheBitsOfNone(ranks4: MegatronRanks) -> None:
    _check(ranks4.run("mg_moves:moved", ep=2, steps=8, every=2), moves=3)


def test_Move_GroupedExperts_HasTheBitsOfNone(oldest2: MegatronRanks) -> None:
    case = {"moe_grouped_gemm": True, "params_dtype": "bfloat16"}
    _check(oldest2.run("mg_moves:moved", ep=2, steps=8, every=2, **case), moves=3)
    for said in oldest2.run("mg_moves:grouped_stays_at_home_for_checkpoints"):
        assert "experts_at_home" in said


def test_Derived_AfterAMove_IsThatOfHome(ranks2: MegatronRanks) -> None:
    for home, away in ranks2.run("mg_moves:derived"):
        # Sums of squares over ranks differ by the order of their terms.
        assert away.pop("norm") == pytest.approx(home["norm"], rel=1e-6) and home.pop("norm") > 0.01
        assert away.pop("sums") == pytest.approx(home.pop("sums"), rel=1e-6)
        assert away == home and home["zeros"] >= 0, (away, home)


@pytest.mark.parametrize("loaded_by", ["stock", "decorated"])
def test_Checkpoint_SavedWhileExpertsAreAway_GoesOn(ranks2: MegatronRanks, tmp_path: Path, loaded_by: str) -> None:
    for each in ranks2.run("mg_moves:checkpoint", folder=str(tmp_path), loaded_by=loaded_by):
        assert each["resumed"]["losses"] == pytest.approx(each["whole"]["losses"], abs=LOSS), each
        assert each["resumed"]["norms"] == pytest.approx(each["whole"]["norms"], rel=NORM), each
        assert each["gap"] <= WEIGHT and len(each["refused"]) == 9, each
        for way, said in each["refused"].items():
            wanted = "another placement of experts" if way in ("model", "optimizer") else "experts_at_home"
            assert wanted in said, (way, said)


@pytest.mark.parametrize("metadata", [{}, {"singleton_local_shards": True}], ids=["stacked", "singletons"])
def test_Checkpoint_Keys_AreGlobalNumbersWhereverExpertsLive(ranks2: MegatronRanks, metadata: dict[str, Any]) -> None:
    answers = ranks2.run("mg_moves:keys_of_moved", **metadata)
    whole = [sorted(entry for answer in answers for entry in answer[when]["global"]) for when in (0, 1)]
    assert whole[0] == whole[1] and whole[0]
    assert any(still["global"] != moved["global"] for still, moved in answers)
    assert all(still["local"] == moved["local"] for still, moved in answers)


def test_Move_WhatCannot_IsRefusedOnAllRanks(ranks2: MegatronRanks) -> None:
    wanted = (
        "fixed number of experts",
        "cannot move under SGD",
        "requires_grad of",
        "outstanding",
        "use_distributed_optimizer",
        "not a layer that runs",
    )
    for said in ranks2.run("mg_moves:refusals"):
        assert len(said) == len(wanted) and all(text in one for text, one in zip(wanted, said)), said
