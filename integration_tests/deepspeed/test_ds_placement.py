"""Experts that move between ranks while DeepSpeed trains: the same bits, and files in which nothing has moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_release import LOADING, old_host_fails
from rank_harness import Ranks

LAYERS = [{"k": 2, "expert": "gelu"}, {"num_experts": 8, "expert": "gated", "drop_tokens": False}]


def _differ(answers: list[Any]) -> list[str]:
    """What of two trainings is not equal to the bit."""
    names = ("losses", "counts", "weights", "random")
    return sorted({name for still, moved in answers for name in names if still[name] != moved[name]})


@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}], ids=["each step", "accumulated"])
def test_Move_EveryFewSteps_HasTheBitsOfNone(ranks2: Ranks, config: dict[str, Any]) -> None:
    answers = ranks2.run("cases_placement:moved_training", layers=LAYERS, steps=20, every=3, config=config)
    assert _differ(answers) == []


def test_Move_ModulesAndTwoReplicas_HasTheBitsOfNone(ranks4: Ranks) -> None:
    layers = [{"num_experts": 4, "expert": "tuple"}, {"num_experts": 8, "k": 2}]
    assert _differ(ranks4.run("cases_placement:moved_training", layers=layers, steps=9, every=2)) == []


@pytest.mark.full
def test_Move_FiftyTimesInTwoHundredSteps_HasTheBitsOfNone(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_placement:moved_training", layers=LAYERS, steps=201, every=4)
    assert _differ(answers) == []


@pytest.mark.parametrize("forget", [" state ", " grad"])
def test_Move_ThatForgets_IsSeen(ranks2: Ranks, forget: str) -> None:
    answers = ranks2.run("cases_placement:moved_training", layers=LAYERS, steps=8, every=2, forget=forget)
    assert "losses" in _differ(answers)


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 1}}], ids=["zero 0", "zero 1"])
def test_Checkpoint_WhileExpertsAreAway_IsThatOfNone(ranks2: Ranks, tmp_path: Path, config: dict[str, Any]) -> None:
    old_host_fails(LOADING)
    layers = [{"k": 2}, {"num_experts": 8, "expert": "tuple"}]
    answers = ranks2.run("cases_placement:checkpoints", folder=str(tmp_path), layers=layers, config=config)
    for files, differ, losses in answers:
        assert any("expert_7" in file for file in files) and any("optim_states" in file for file in files), files
        assert differ == []
        assert losses["moved"] == losses["still"] == losses["back"]
        assert losses["stock"] == pytest.approx(losses["still"], rel=1e-5)


def test_Move_WhatCannot_IsRefusedOnAllRanks(ranks2: Ranks) -> None:
    for said in ranks2.run("cases_placement:refusals"):
        wanted = ("fixed number of experts", "outstanding", "move them home first", "has gradients")
        assert all(text in one for text, one in zip(wanted, said)) and len(said) == len(wanted), said
