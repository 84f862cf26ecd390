"""The option "placement": experts change ranks where loads differ, with the same bits; elsewhere nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_placement import _differ

LAYERS = [{"num_experts": 8, "k": 2, "drop_tokens": False}, {"num_experts": 8, "expert": "tuple", "drop_tokens": False}]


def _reports(answers: list[Any]) -> list[dict[str, Any]]:
    """Of each layer, alike on all ranks."""
    assert all(reports == answers[0][2] for _, _, reports in answers)
    return list(answers[0][2])


def test_Adaptive_SkewedLoads_MoveWithTheBitsOfNone(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=14)
    for report in _reports(answers):
        assert report["moved_experts"] >= 2 and report["questions"] >= 1, report
    assert _differ([answer[:2] for answer in answers]) == []


def test_Adaptive_TwoReplicas_MoveAlike(ranks4: Ranks) -> None:
    answers = ranks4.run("cases_deciding:decided_training", layers=LAYERS, steps=8)
    assert all(report["moved_experts"] >= 2 for report in _reports(answers))
    assert _differ([answer[:2] for answer in answers]) == []


ZERO = {
    "zero 1": ({"zero_optimization": {"stage": 1}}, "float32"),
    "zero 2": ({"zero_optimization": {"stage": 2}}, "float32"),
    "zero 1, bf16": ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, "bfloat16"),
    "zero 2, bf16": ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "bfloat16"),
    "bf16": ({"bf16": {"enabled": True}}, "bfloat16"),
    "zero 1, bf16, accumulated in f32": (
        {
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_accumulation_steps": 2,
        },
        "bfloat16",
    ),
}


DAILY = ("zero 2", "zero 1, bf16", "bf16")


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.full) for n in ZERO])
def test_Partitioned_ShuffledEveryFewSteps_HasTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    config, dtype = ZERO[name]
    steps = 14 * config.get("gradient_accumulation_steps", 1)  # experts move behind updates
    answers = ranks2.run(
        "cases_deciding:decided_training", layers=LAYERS, steps=steps, config=config, dtype=dtype, shuffle=True
    )
    assert all(report["moved_experts"] >= 4 for report in _reports(answers))
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("name", ["zero 2", "zero 1, bf16"])
def test_Partitioned_MastersCutOverReplicas_HaveTheBitsOfNone(ranks4: Ranks, name: str) -> None:
    config, dtype = ZERO[name]
    answers = ranks4.run(
        "cases_deciding:decided_training", layers=LAYERS, steps=10, config=config, dtype=dtype, shuffle=True
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


def test_Move_WithAStaleSlotTable_IsSeen(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=8, shuffle=True, stale=True)
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
