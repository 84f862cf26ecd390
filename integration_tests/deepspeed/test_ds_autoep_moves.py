# SPDX-License-Identifier: Apache-2.0
"""Tests moves of AutoEP experts between ranks: bits and checkpoint files are those without moves."""

from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_autoep import AUTO_EP
from test_ds_deciding import SIZES, _reports
from test_ds_placement import check_files, differ

pytestmark = pytest.mark.skipif(not AUTO_EP.exists(), reason="this DeepSpeed has no AutoEP (0.19.2 brought it)")

ZERO = {
    "f32": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 2": {"zero_optimization": {"stage": 2}},
    "bf16": {"bf16": {"enabled": True}},
    "zero 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}


def _trainings() -> list[Any]:
    """Returns parameters: the ranks, the model, the configuration, the number of steps and of steps between moves."""
    every = [(2, "stacked", name, 14, 3) for name in ZERO] + [(4, "looped", name, 9, 2) for name in ("f32", "zero 2")]
    often = [(2, kind, name, 201, 4) for kind in ("stacked", "deepseek_v3") for name in ZERO]
    daily = (every[0], every[4], every[5])
    return [pytest.param(*each, marks=() if each in daily else pytest.mark.full) for each in every + often]


@pytest.mark.parametrize(("world", "kind", "name", "steps", "every"), _trainings())
def test_Move_EveryFewSteps_HasTheBitsOfNone(
    request: pytest.FixtureRequest, world: int, kind: str, name: str, steps: int, every: int
) -> None:
    case = {"kind": kind, "steps": steps, "every": every, "config": ZERO[name]}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_autoep_moves:moved_training", **case)
    assert differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)


@pytest.mark.parametrize(("world", "chosen", "stage"), SIZES)
def test_Move_OfEachSize_HasTheBitsOfNone(request: pytest.FixtureRequest, world: int, chosen: int, stage: int) -> None:
    case = {"shape": {"experts": max(8, 2 * world), "chosen": chosen}, "size": world, "kind": "stacked"}
    case |= {"steps": 8, "every": 2, "config": {"zero_optimization": {"stage": stage}}}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_autoep_moves:moved_training", **case)
    assert differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)


@pytest.mark.parametrize("name", [n if n == "f32" else pytest.param(n, marks=pytest.mark.full) for n in ZERO])
def test_Adaptive_SkewedLoads_MoveWithTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    answers = ranks2.run("cases_autoep_moves:decided", kind="stacked", steps=14, config=ZERO[name])
    reports = _reports(answers)
    assert any(report["moved_experts"] >= 2 for report in reports), reports
    assert differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("name", ["f32", "zero 1, bf16", pytest.param("zero 2", marks=pytest.mark.full)])
def test_Checkpoint_WhileExpertsAreAway_IsThatOfNone(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    answers = ranks2.run("cases_autoep_moves:checkpoints", kind="looped", folder=str(tmp_path), config=ZERO[name])
    check_files(answers, "expert", 0.02 if "bf16" in name else 1e-5)
