# SPDX-License-Identifier: Apache-2.0
"""Tests moves of AutoEP experts between ranks: bits and checkpoint files are those without moves."""

from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_autoep import AUTO_EP
from test_ds_deciding import _reports

pytestmark = pytest.mark.skipif(not AUTO_EP.exists(), reason="this DeepSpeed has no AutoEP (0.19.2 brought it)")

ZERO = {
    "f32": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 2": {"zero_optimization": {"stage": 2}},
    "bf16": {"bf16": {"enabled": True}},
    "zero 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}
DAILY = ("f32", "zero 1, bf16")
MODELS = ("stacked", "deepseek_v3")


def _differ(answers: list[Any]) -> list[str]:
    """Returns the differences in bits of two trainings."""
    return sorted(
        {name for still, moved in answers for name in ("losses", "counts", "weights") if still[name] != moved[name]}
    )


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.full) for n in ZERO])
def test_Move_EveryFewSteps_HasTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    answers = ranks2.run("cases_autoep_moves:moved_training", kind="stacked", steps=14, every=3, config=ZERO[name])
    assert _differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)


@pytest.mark.parametrize("name", ["f32", pytest.param("zero 2", marks=pytest.mark.full)])
def test_Move_TwoReplicas_HasTheBitsOfNone(ranks4: Ranks, name: str) -> None:
    answers = ranks4.run("cases_autoep_moves:moved_training", kind="looped", steps=9, every=2, config=ZERO[name])
    assert _differ(answers) == []


@pytest.mark.full
@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("kind", MODELS)
def test_Move_FiftyTimesInTwoHundredSteps_HasTheBitsOfNone(ranks2: Ranks, kind: str, name: str) -> None:
    answers = ranks2.run("cases_autoep_moves:moved_training", kind=kind, steps=201, every=4, config=ZERO[name])
    assert _differ(answers) == []


@pytest.mark.parametrize(
    ("name", "forget"), [("f32", " state exp_avg"), ("f32", " grad"), ("zero 1, bf16", " master"), ("zero 2", " state")]
)
def test_Move_ThatForgets_IsSeen(ranks2: Ranks, name: str, forget: str) -> None:
    answers = ranks2.run(
        "cases_autoep_moves:moved_training", kind="stacked", steps=10, every=2, config=ZERO[name], forget=forget
    )
    assert "losses" in _differ(answers)


def test_Move_WithAStaleSlotTable_IsSeen(ranks2: Ranks) -> None:
    case = {"kind": "stacked", "steps": 10, "every": 2, "stale": True}
    assert "losses" in _differ(ranks2.run("cases_autoep_moves:moved_training", **case))


@pytest.mark.parametrize("name", [n if n == "f32" else pytest.param(n, marks=pytest.mark.full) for n in ZERO])
def test_Adaptive_SkewedLoads_MoveWithTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    answers = ranks2.run("cases_autoep_moves:decided", kind="stacked", steps=14, config=ZERO[name])
    reports = _reports(answers)
    assert any(report["moved_experts"] >= 2 for report in reports), reports
    assert _differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("name", ["f32", "zero 1, bf16", pytest.param("zero 2", marks=pytest.mark.full)])
def test_Checkpoint_WhileExpertsAreAway_IsThatOfNone(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    for differ in ranks2.run("cases_autoep_moves:checkpoints", kind="looped", folder=str(tmp_path), config=ZERO[name]):
        assert differ == []
