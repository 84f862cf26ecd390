# SPDX-License-Identifier: Apache-2.0
"""Tests the option "placement": with skewed loads experts move and bits stay the same; otherwise nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_placement import ZERO, _differ

LAYERS = [{"num_experts": 8, "k": 2, "drop_tokens": False}, {"num_experts": 8, "expert": "tuple", "drop_tokens": False}]


def _reports(answers: list[Any]) -> list[dict[str, Any]]:
    """Returns the reports of all layers, which must be the same on all ranks, except for sent bytes."""
    found = [[{k: v for k, v in report.items() if k != "travel"} for report in answer[2]] for answer in answers]
    assert all(reports == found[0] for reports in found)
    return found[0]


def _travels(answers: list[Any]) -> list[dict[str, Any]]:
    """Returns the "travel" report of each rank and layer."""
    return [report["travel"] for answer in answers for report in answer[2]]


def test_Adaptive_SkewedLoads_MoveWithTheBitsOfNone(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=14)
    for report in _reports(answers):
        assert report["moved_experts"] >= 2 and report["questions"] >= 1, report
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("rate", [None, 20_000_000])
def test_Adaptive_WhatTravels_IsOneExpertAtATimeDuringTheSteps(ranks2: Ranks, rate: int | None) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=14, rate=rate)
    assert _differ([answer[:2] for answer in answers]) == []
    state = 4 * 4 * (16 * 24 * 2 + 24 + 16)  # weights, gradients and two moments of the larger kind
    for travel in _travels(answers):
        assert 0 < travel["peak_staged_bytes"] < 1.5 * state, travel
        assert travel["sent_bytes"] > travel["hidden_bytes"] > 0.5 * travel["sent_bytes"], travel


@pytest.mark.parametrize("name", ["f32", "zero 1, bf16", pytest.param("zero 2", marks=pytest.mark.full)])
def test_Adaptive_WhileExpertsMove_TwoStatesAreHeldAndNoneAfterwards(ranks2: Ranks, name: str) -> None:
    config, dtype = ZERO.get(name, ({}, "float32"))
    more = 0.05 if name == "f32" else 0.25  # small tensors; gloo's threads free ZeRO's tensors a moment later
    for count in ranks2.run("cases_deciding:counted_training", config=config, dtype=dtype):
        assert count["moves"] >= 4 and count["state"] > 500_000, count
        assert count["most"] <= (2 + more) * count["state"], count
        assert abs(count["left"]) < 0.01 * count["state"] and count["left_staged"] == 0, count


def test_Adaptive_TwoReplicas_MakeTheSameMoves(ranks4: Ranks) -> None:
    answers = ranks4.run("cases_deciding:decided_training", layers=LAYERS, steps=14)
    assert all(report["moved_experts"] >= 2 for report in _reports(answers))
    assert _differ([answer[:2] for answer in answers]) == []


DAILY = ("zero 2", "zero 1, bf16", "bf16")


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.full) for n in ZERO])
def test_Partitioned_ShuffledEveryFewSteps_HasTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    config, dtype = ZERO[name]
    steps = 14 * config.get("gradient_accumulation_steps", 1)  # experts move after updates
    answers = ranks2.run(
        "cases_deciding:decided_training", layers=LAYERS, steps=steps, config=config, dtype=dtype, shuffle=True
    )
    assert all(report["moved_experts"] >= 4 for report in _reports(answers))
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("name", ["zero 2", "zero 1, bf16"])
def test_Partitioned_MastersCutOverReplicas_HaveTheBitsOfNone(ranks4: Ranks, name: str) -> None:
    config, dtype = ZERO[name]
    answers = ranks4.run(
        "cases_deciding:decided_training", layers=LAYERS, steps=16, config=config, dtype=dtype, shuffle=True
    )
    assert all(report["moved_experts"] >= 2 for report in _reports(answers))
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("forget", [" master", " state exp_avg"])
def test_Partitioned_ThatForgets_IsSeen(ranks2: Ranks, forget: str) -> None:
    config, dtype = ZERO["zero 1, bf16"]
    answers = ranks2.run(
        "cases_deciding:decided_training",
        layers=LAYERS,
        steps=11,
        config=config,
        dtype=dtype,
        shuffle=True,
        forget=forget,
    )
    assert "losses" in _differ([answer[:2] for answer in answers])


@pytest.mark.parametrize("forget", [" state exp_avg", " state step", " grad"])
def test_Adaptive_ThatForgets_IsSeen(ranks2: Ranks, forget: str) -> None:
    case = {"layers": LAYERS, "steps": 14, "forget": forget, "is_left_out": False, "shuffle": True}
    answers = ranks2.run("cases_deciding:decided_training", **case)
    assert "losses" in _differ([answer[:2] for answer in answers])


def test_Partitioned_ThatForgetsGradients_IsSeen(ranks2: Ranks) -> None:
    config, dtype = ZERO["zero 2"]
    case = {"layers": LAYERS, "steps": 14, "forget": " gradient", "shuffle": True}
    answers = ranks2.run("cases_deciding:decided_training", config=config, dtype=dtype, **case)
    assert "losses" in _differ([answer[:2] for answer in answers])


@pytest.mark.parametrize("case", [{"epoch_of_last": 1}, {"touch": 6}], ids=["another epoch", "somebody writes"])
def test_Adaptive_MoveThatCannotBeCommitted_IsGivenUpOnAllRanks(ranks2: Ranks, case: dict[str, int]) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS[:1], steps=9, **case)
    words = "epoch" if "epoch_of_last" in case else "weights of experts were changed"
    for still, moved, (report,) in answers:
        assert words in report["given_up"] and report["moved_experts"] == 0, report
        assert moved["losses"] == still["losses"]


def test_Adaptive_OtherParametersFrozenOnEachRank_NoneChangesItsRank(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS[:1], steps=9, frozen=True)
    for still, moved, (report,) in answers:
        assert "requires_grad of" in report["given_up"] and report["moved_experts"] == 0, report
        assert moved["losses"] == still["losses"] and moved["end"] == still["end"]


@pytest.mark.parametrize("name", ["_packed", "_landing", "_load"])
def test_Adaptive_AStepFailsOnOneRank_IsGivenUpOnAllRanks(ranks2: Ranks, name: str) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS[:1], steps=9, broken=name)
    for still, moved, (report,) in answers:
        assert report["given_up"] and report["moved_experts"] == 0, report
        assert moved["losses"] == still["losses"] and moved["end"] == still["end"]
    assert any(f"{name} has failed" in reports[0]["given_up"] for _, _, reports in answers)


def test_Adaptive_WhatHasArrivedCannotBePut_TheLayerIsRefusedByName(ranks2: Ranks) -> None:
    stepped, called = zip(*ranks2.run("cases_deciding:torn_training", layers=LAYERS[:1]))
    ranks2.stop()
    assert all("a move of its experts failed midway" in one for one in (*stepped, *called)), (stepped, called)


def test_Move_WithAStaleSlotTable_IsSeen(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=14, shuffle=True, stale=True)
    assert "losses" in _differ([answer[:2] for answer in answers])


def test_Adaptive_EvenLoads_SendNothing(ranks2: Ranks) -> None:
    for reports, sent in ranks2.run("cases_deciding:even_training", steps=10):
        assert sent == []
        assert [(r["moved_experts"], r["questions"], r["verdict"]) for r in reports] == [(0, 0, "even")], reports


def test_Adaptive_Unswapped_ExpertsAreHome(ranks2: Ranks) -> None:
    for moved, is_same in ranks2.run("cases_deciding:unswapped"):
        assert moved >= 2 and is_same


@pytest.mark.full
def test_Adaptive_TwoHundredSteps_HaveTheBitsOfNone(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=200)
    assert _differ([answer[:2] for answer in answers]) == []
