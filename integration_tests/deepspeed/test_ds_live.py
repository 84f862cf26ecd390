# SPDX-License-Identifier: Apache-2.0
"""Layers that change their stage while a batch of DeepSpeed's pipeline runs: the bits of a training without moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from host_release import LOADING, old_host_fails
from rank_harness import Ranks
from test_ds_moves import CLIPPED, FUSED_ADAM, ZERO1, _differ

from integration_tests.benchmarks.live import live

PLAIN: dict[str, Any] = {"kind": "plain"}
NEVER = 1 << 30  # ops of the receiver until it sees what has come


def _check(answers: list[Any], late: bool, least: int) -> None:
    assert _differ(answers) == []
    for _, moved in answers:
        assert moved["same"] and moved["losses"][-1] != moved["losses"][0]
        live = moved["live"]
        assert (live["at_flush"] if late else live["in_batch"]) == moved["moved"], (live, moved["moved"])
        assert live["in_batch"] + live["at_flush"] == moved["moved"]
    assert sum(moved["moved"] for _, moved in answers) >= least


@pytest.mark.parametrize("look", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "dropout"])
def test_TwoStages_LayersMoveInBatches_SameBitsAsNone(pipe2: Ranks, kind: str, look: int) -> None:
    """The parameters are there at the first op of the receiver, or later: micro-batches go over at another place."""
    answers = pipe2.run("cases_live:moved", steps=24, every=2, look=look, stages=2, kind=kind)
    assert sum(moved["live"]["sums_early"] for _, moved in answers) > 0
    if look == 1:
        _check(answers, late=False, least=24)
    else:
        assert _differ(answers) == []
        assert sum(moved["live"]["in_batch"] for _, moved in answers) > 0


@pytest.mark.parametrize("sums", [3, NEVER])
def test_TwoStages_GradientsThatComeLate_SameBitsAsNone(pipe2: Ranks, sums: int) -> None:
    answers = pipe2.run("cases_live:moved", steps=12, every=2, look=1, sums=sums, stages=2, **PLAIN)
    _check(answers, late=False, least=12)
    assert (sum(moved["live"]["sums_early"] for _, moved in answers) > 0) == (sums < NEVER)


@pytest.mark.parametrize("config", [CLIPPED, FUSED_ADAM], ids=["clipped", "FusedAdam"])
def test_TwoStages_WhatDependsOnTheStage_SameBitsAsNone(pipe2: Ranks, config: dict[str, Any]) -> None:
    case = {**PLAIN, "config": config, "section": {"optimizer": config is FUSED_ADAM}}
    _check(pipe2.run("cases_live:moved", steps=12, every=2, look=1, stages=2, **case), late=False, least=12)


def test_TwoStages_ParametersThatComeLate_MoveAtTheFlush(pipe2: Ranks) -> None:
    answers = pipe2.run("cases_live:moved", steps=12, every=2, look=NEVER, stages=2, **PLAIN)
    _check(answers, late=True, least=12)


def test_TwoStagesOfTwoReplicas_SameBitsAsNone(pipe2x2: Ranks) -> None:
    answers = pipe2x2.run("cases_live:moved", steps=12, every=2, look=1, stages=2, kind="tied")
    _check(answers, late=False, least=24)


def test_FourStages_LayersAtSeveralCutsAtOnce_SameBitsAsNone(pipe4: Ranks) -> None:
    answers = pipe4.run("cases_live:moved", steps=16, every=2, look=1, stages=4, kind="deep")
    assert _differ(answers) == []
    assert sum(moved["live"]["in_batch"] for _, moved in answers) > 0


@pytest.mark.parametrize("mutant", ["holds nothing", "folds backwards", "moments", "step"])
def test_AHostThatErrs_IsSeen(pipe2: Ranks, mutant: str) -> None:
    answers = pipe2.run("cases_live:moved", steps=8, every=2, look=1, sums=NEVER, stages=2, mutant=mutant, **PLAIN)
    assert "losses" in _differ(answers)


def test_ABatchThatFails_TheLayerStays(pipe2: Ranks) -> None:
    for (said, then, parts, losses), (said_still, _, _, losses_still) in pipe2.run(
        "cases_live:failed", stages=2, **PLAIN
    ):
        assert "a drawn failure" in said and "a drawn failure" in said_still
        assert then == parts == [0, 3, 6]
        assert losses == losses_still


def test_ALayerThatSomebodyWritesInto_StaysAndFailsTheBatchOnAllRanks(pipe2: Ranks) -> None:
    for said, parts, again in pipe2.run("cases_live:spoilt", stages=2, **PLAIN):
        assert "somebody has written into layer 2" in said
        assert parts == [0, 3, 6] and again == ""


def test_ACheckpointThatIsLoaded_CancelsWhatIsOnItsWay(pipe2: Ranks, tmp_path: Path) -> None:
    old_host_fails(LOADING)
    for parts, first, again, then, losses in pipe2.run("cases_live:loaded", folder=str(tmp_path), stages=2, **PLAIN):
        assert parts == [0, 3, 6] and first == again
        assert then == [0, 2, 6] and len(losses) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two layers": ({"kind": "plain", "parts": [0, 1, 6]}, "2 layers would pass the cut after stage 0"),
    "tied": ({"kind": "ends tied", "parts": [0, 2, 6]}, "tied to others by 'ends'"),
    "under way": ({"kind": "plain", "parts": [0, 2, 6], "twice": True}, "layers are on their way"),
    "flat buffers": ({"kind": "plain", "parts": [0, 2, 6], "config": ZERO1}, "whose gradients lie in flat buffers"),
    "unknown buffers": ({"kind": "plain", "parts": [0, 2, 6], "buffers": "unknown"}, "no batch has shown"),
    "written buffers": ({"kind": "plain", "parts": [0, 2, 6], "buffers": "written"}, "a buffer that forwards write"),
    "host's checkpoints": (
        {"kind": "plain", "parts": [0, 2, 6], "module": {"activation_checkpoint_interval": 1}},
        "activation_checkpoint_interval is set",
    ),
    "split weights": (
        {"kind": "plain", "parts": [0, 2, 6], "pipeline": {"in_flight": 2, "separate_wgrad": True}},
        "weight gradients are ops of their own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_Move_WhatCannot_IsRefusedOnAllRanks(pipe2: Ranks, case: str) -> None:
    arguments, words = REFUSED[case]
    for said, changed in pipe2.run("cases_live:refused", **arguments):
        assert words in said and not changed, said
        assert said.count(words) == (2 if arguments.get("twice") else 1)


def test_Benchmark_TinyCells_FindAllThatIsJudged(pipe2: Ranks) -> None:
    plans = {name: {**cell, **live.TINY[name]} for name, cell in live.CELLS.items()}
    found, _ = pipe2.run("cases_live:benchmark", plans=plans)
    for name, cell in plans.items():
        assert all(line for line, _ in live.JUDGES[name](cell, found[name]))
    moved = found["stall"]["live"]
    assert moved["in_batch"] + moved["at_flush"] == plans["stall"]["pairs"] + 1
    assert all(len(each) == plans["stall"]["pairs"] for each in found["stall"]["seconds"].values())
    assert len(found["latencies"]["still"]) == plans["latencies"]["micro_batches"]
    assert found["decided"]["noise_batches"] == 2
