# SPDX-License-Identifier: Apache-2.0
"""Tests moves of a split model's experts between ranks in a training: the bits are the same, and files show no move."""

from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks
from test_tf_parallel import LAYOUTS

WHAT = ("losses", "parameters", "grads", "optimizer")


def _check(answers: list[Any], moves: int, computed_by: str = "sluice") -> None:
    """Checks that two trainings on each rank have the same bits, and that experts moved in the second."""
    for still, moved in answers:
        assert [name for name in WHAT if still[name] != moved[name]] == []
        assert moved["moves"] >= moves and moved["computed_by"] == [computed_by], moved
        assert still["losses"][-1] != still["losses"][0] and len(still["optimizer"]) > 0


@pytest.mark.parametrize("steps", [12, pytest.param(204, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_Move_EveryFewSteps_HasTheBitsOfNone(ranks: Ranks, saved: Any, kind: str, layout: str, steps: int) -> None:
    answers = ranks.run("tf_ep_moves:moved", path=saved(kind), layout=LAYOUTS[layout], steps=steps, every=3)
    _check(answers, moves=steps // 4)


@pytest.mark.full
@pytest.mark.parametrize("k", [1, 4])
def test_Move_FourRanks_HasTheBitsOfNone(four_ranks: Ranks, saved: Any, k: int) -> None:
    case = {"path": saved("qwen3_moe", num_experts_per_tok=k), "layout": {"fsdp_size": 4}}
    _check(four_ranks.run("tf_ep_moves:moved", steps=12, every=3, **case), moves=3)


def test_Move_ExpertsThatAreCalled_HaveTheBitsOfNone(ranks: Ranks, saved: Any) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS["fsdp2"], "experts": "grouped_mm"}
    answers = ranks.run("tf_ep_moves:moved", steps=8, every=2, **case)
    _check(answers, moves=3, computed_by="the module's own functions")


@pytest.mark.parametrize("layout, lora", [("tp", False), ("fsdp2", False), ("fsdp2", True)])
def test_Move_DuringTheSteps_HasTheBitsOfNone(ranks: Ranks, saved: Any, layout: str, lora: bool) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout], "during_steps": True, "lora": lora}
    answers = ranks.run("tf_ep_moves:moved", steps=32, every=10, **case)
    _check(answers, moves=3)
    assert all(moved["hidden"] > 0 for _, moved in answers)


def test_Move_AdaptersOnExperts_HaveTheBitsOfNone(ranks: Ranks, saved: Any) -> None:
    """A, B and their optimizer state move with their experts."""
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS["fsdp2"], "lora": True}
    _check(ranks.run("tf_ep_moves:moved", steps=12, every=3, **case), moves=3)


def test_Move_DuringTheSteps_TwoStatesAreHeldAndNoneAfterwards(ranks: Ranks, saved: Any) -> None:
    path = saved("qwen3_moe", moe_intermediate_size=1024)
    for count in ranks.run("tf_ep_moves:counted_moves", path=path, layout=LAYOUTS["fsdp2"]):
        assert count["moves"] >= 4 and count["state"] > 500_000, count
        assert count["most"] <= 2.05 * count["state"], count  # 0.05: control messages and descriptions
        assert abs(count["left"]) < 0.01 * count["state"] and count["left_staged"] == 0, count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_Save_WhileExpertsAreAway_IsRefusedAndDoneAtHome(ranks: Ranks, saved: Any, tmp_path: Path, layout: str) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout], "folder": str(tmp_path)}
    for found in ranks.run("tf_ep_moves:saved", **case):
        assert all("experts_at_home" in said for said in found["said"].values()), found["said"]
        assert len(found["said"]) == 7 and set(found["at_home"].values()) == {""}, found["at_home"]
        assert found["away"] and found["same"], found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_Derived_AfterAMove_IsThatOfHome(ranks: Ranks, saved: Any, layout: str) -> None:
    for home, away in ranks.run("tf_ep_moves:derived", path=saved("qwen3_moe"), layout=LAYOUTS[layout]):
        assert away.pop("norms") == pytest.approx(home.pop("norms"), rel=1e-6)  # the sum of squares has another order
        assert away == home


def test_Move_WhatCannot_IsRefusedOnAllRanks(ranks: Ranks, saved: Any) -> None:
    wanted = (
        "fixed number of experts",
        "does not have them as parameters",
        "requires_grad of",
        "outstanding",
        "not a layer that runs on Sluice",
        "not shared out",
    )
    for said in ranks.run("tf_ep_moves:refusals", path=saved("qwen3_moe")):
        assert len(said) == len(wanted) and all(text in one for text, one in zip(wanted, said)), said
