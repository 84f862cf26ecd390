# SPDX-License-Identifier: Apache-2.0
"""Tests the option "placement": with skewed loads experts move and bits stay the same; otherwise nothing is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from host_release import BF16_OPTIMIZER, K3_NO_DROP, old_host_fails
from rank_harness import Ranks
from test_ds_placement import OF_BF16_OPTIMIZER, ZERO, differ

LAYERS = [{"num_experts": 8, "k": 2, "drop_tokens": False}, {"num_experts": 8, "expert": "tuple", "drop_tokens": False}]


def _reports(answers: list[Any]) -> list[dict[str, Any]]:
    """Returns the reports of all layers, which must be the same on all ranks, except for sent bytes."""
    found = [[{k: v for k, v in report.items() if k != "travel"} for report in answer[2]] for answer in answers]
    assert all(reports == found[0] for reports in found)
    return found[0]


def _travels(answers: list[Any]) -> list[dict[str, Any]]:
    """Returns the "travel" report of each rank and layer."""
    return [report["travel"] for answer in answers for report in answer[2]]


@pytest.mark.parametrize("rate", [None, 20_000_000])
def test_Adaptive_WhatTravels_IsOneExpertAtATimeDuringTheSteps(ranks2: Ranks, rate: int | None) -> None:
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS, steps=14, rate=rate)
    assert differ([answer[:2] for answer in answers]) == []
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


def _of_zero(name: str, **more: Any) -> dict[str, Any]:
    """Returns a job under this configuration, whose experts move to random places. They move after updates."""
    config, dtype = ZERO[name]
    steps = 14 * config.get("gradient_accumulation_steps", 1)
    return {"steps": steps, "config": config, "dtype": dtype, "shuffle": True, **more}


# The least number of moved experts of each layer, and the job.
MOVED: dict[str, tuple[int, dict[str, Any]]] = {
    "skewed": (2, {}),
    "skewed, 200 steps": (2, {"steps": 200}),
    **{name: (4, _of_zero(name)) for name in ZERO},
    "two replicas": (2, {}),
    "two replicas, zero 2": (2, _of_zero("zero 2", steps=16)),  # masters are cut over replicas
    "two replicas, zero 1, bf16": (2, _of_zero("zero 1, bf16", steps=16)),
}
DAILY = ("skewed", "zero 2", "bf16", "two replicas", "two replicas, zero 1, bf16")


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.full) for n in MOVED])
def test_Adaptive_ExpertsMove_WithTheBitsOfNone(ranks2: Ranks, ranks4: Ranks, name: str) -> None:
    old_host_fails(BF16_OPTIMIZER, name in OF_BF16_OPTIMIZER)
    least, job = MOVED[name]
    ranks = ranks4 if "replicas" in name else ranks2
    answers = ranks.run("cases_deciding:decided_training", **{"layers": LAYERS, "steps": 14, **job})
    for report in _reports(answers):
        assert report["moved_experts"] >= least and report["questions"] >= 1, report
    assert differ([answer[:2] for answer in answers]) == []


# The size of the expert-parallel group, experts per token, and the stage of ZeRO.
SIZES = [
    pytest.param(*case, id="EP {}, k {}, ZeRO {}".format(*case), marks=() if case == (4, 4, 1) else pytest.mark.full)
    for case in itertools.product((2, 4, 8), (1, 2, 4), (0, 1, 2))
]


@pytest.mark.parametrize(("world", "chosen", "stage"), SIZES)
def test_Move_OfEachSize_HasTheBitsOfNone(request: pytest.FixtureRequest, world: int, chosen: int, stage: int) -> None:
    old_host_fails(K3_NO_DROP, chosen > 2)
    layer = {"num_experts": max(8, 2 * world), "ep_size": world, "k": chosen, "drop_tokens": False, "expert": "gelu"}
    case = {"layers": [layer], "steps": 12, "config": {"zero_optimization": {"stage": stage}}, "shuffle": True}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_deciding:decided_training", **case)
    (report,) = _reports(answers)
    assert report["moved_experts"] >= 4, report
    assert differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize(
    "job",
    [
        _of_zero("zero 1, bf16", steps=11, forget=" master"),
        _of_zero("zero 1, bf16", steps=11, forget=" state exp_avg"),
        _of_zero("zero 2", forget=" gradient"),
        *(
            {"shuffle": True, "forget": each, "is_left_out": False}
            for each in (" state exp_avg", " state step", " grad")
        ),
        {"shuffle": True, "stale": True},
    ],
    ids=["master", "partitioned moments", "partitioned gradients", "moments", "step", "gradients", "slot table"],
)
def test_Adaptive_ThatForgets_IsSeen(ranks2: Ranks, job: dict[str, Any]) -> None:
    answers = ranks2.run("cases_deciding:decided_training", **{"layers": LAYERS, "steps": 14, **job})
    assert "losses" in differ([answer[:2] for answer in answers])


# What prevents a move, and the words of its report, which for a broken step only the rank has on which it fails.
GIVEN_UP: dict[str, tuple[dict[str, Any], str]] = {
    "another epoch": ({"epoch_of_last": 1}, "epoch"),
    "somebody writes": ({"touch": 6}, "weights of experts were changed"),
    "other parameters are frozen on each rank": ({"frozen": True}, "requires_grad of"),
    **{f"{name} fails": ({"broken": name}, f"{name} has failed") for name in ("_packed", "_landing", "_load")},
}


@pytest.mark.parametrize("what", GIVEN_UP)
def test_Adaptive_MoveThatCannotBeCommitted_IsGivenUpOnAllRanks(ranks2: Ranks, what: str) -> None:
    how, words = GIVEN_UP[what]
    answers = ranks2.run("cases_deciding:decided_training", layers=LAYERS[:1], steps=9, **how)
    for still, moved, (report,) in answers:
        assert report["given_up"] and report["moved_experts"] == 0, report
        assert moved["losses"] == still["losses"] and moved["end"] == still["end"]
    assert (any if "broken" in how else all)(words in reports[0]["given_up"] for *_, reports in answers), answers


def test_Adaptive_WhatHasArrivedCannotBePut_TheLayerIsRefusedByName(ranks2: Ranks) -> None:
    stepped, called = zip(*ranks2.run("cases_deciding:torn_training", layers=LAYERS[:1]))
    ranks2.stop()
    assert all("a move of its experts failed midway" in one for one in (*stepped, *called)), (stepped, called)


def test_Adaptive_EvenLoads_SendNothing(ranks2: Ranks) -> None:
    for reports, sent in ranks2.run("cases_deciding:even_training", steps=10):
        assert sent == []
        assert [(r["moved_experts"], r["questions"], r["verdict"]) for r in reports] == [(0, 0, "even")], reports


def test_Adaptive_Unswapped_ExpertsAreHome(ranks2: Ranks) -> None:
    for moved, is_same in ranks2.run("cases_deciding:unswapped"):
        assert moved >= 2 and is_same
