# SPDX-License-Identifier: Apache-2.0
"""Tests that layers which move between stages of DeepSpeed's pipeline keep the bits of a training without moves."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from host_release import BF16_OPTIMIZER, LOADING, old_host_fails
from rank_harness import Ranks
from test_ds_placement import differ

ZERO1 = {"zero_optimization": {"stage": 1}}
CLIPPED = {"gradient_clipping": 0.1}
F16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
FUSED_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
NO_FP16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    reason="DeepSpeed trains in fp16 only on processors with AVX512-FP16",
)
BF16 = {"dtype": "bfloat16"}
FUSED = {"config": FUSED_ADAM, "section": {"optimizer": True}}
TWO: dict[str, dict[str, Any]] = {
    "f32": {"kind": "plain"},
    "clipped": {"kind": "plain", "config": CLIPPED},
    "FusedAdam": {"kind": "plain", **FUSED},
    "dropout": {"kind": "dropout"},
    "bf16": {"kind": "plain", **BF16},
    "zero 1": {"kind": "plain", "config": ZERO1},
    "bf16 zero 1": {"kind": "dropout", **BF16, "config": ZERO1},
    "f16 zero 1": {"kind": "plain", "dtype": "float16", "config": {**ZERO1, **F16}},
}
MOVED: dict[str, dict[str, Any]] = {
    **TWO,
    "replicas, f32": {"kind": "tied"},
    "replicas, clipped": {"kind": "tied", "config": CLIPPED},
    "replicas, bf16": {"kind": "tied", **BF16},
    "replicas, zero 1": {"kind": "dropout", "config": ZERO1},
    "replicas, bf16 zero 1": {"kind": "tied", **BF16, "config": ZERO1},
    "four stages, f32": {"kind": "plain", "stages": 4},
    "four stages, clipped": {"kind": "dropout", "config": CLIPPED, "stages": 4},
    "four stages, bf16": {"kind": "dropout", **BF16, "stages": 4},
    "four stages, zero 1": {"kind": "tied", "config": ZERO1, "stages": 4},
}


DAILY = ("clipped", "FusedAdam", "bf16 zero 1", "f16 zero 1")
DAILY += ("replicas, clipped", "replicas, bf16 zero 1", "four stages, clipped", "four stages, zero 1")


def names(table: dict[str, dict[str, Any]], daily: Iterable[str]) -> list[Any]:
    """Returns the names of a table's cases. Cases in fp16 are skipped where DeepSpeed cannot run them. daily: cases
    that run without --full."""
    return [
        pytest.param(
            name,
            marks=[*([NO_FP16] if "float16" in job.values() else []), *([] if name in daily else [pytest.mark.full])],
        )
        for name, job in table.items()
    ]


@pytest.mark.parametrize(("steps", "every"), [(20, 3), pytest.param(200, 5, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", names(MOVED, DAILY))
def test_Layers_MoveEveryFewSteps_SameBitsAsNone(
    pipe2: Ranks, pipe2x2: Ranks, pipe4: Ranks, case: str, steps: int, every: int
) -> None:
    ranks = pipe4 if "four" in case else pipe2x2 if "replicas" in case else pipe2
    answers = ranks.run("cases_moves:moved", steps=steps, every=every, **{"stages": 2, **MOVED[case]})
    assert differ(answers) == []
    for still, moved in answers:
        assert still["moved"] == 0 and moved["same"] and still["losses"][-1] != still["losses"][0]
    assert sum(moved["moved"] for _, moved in answers) >= 2 * (steps // every), answers


EXPERTS: dict[str, dict[str, Any]] = {
    "f32": {"kind": "experts"},
    "f32 alone": {"kind": "experts alone"},
    "f32 as modules": {"kind": "experts as modules"},
    "clipped": {"kind": "experts", "config": CLIPPED},
    "bf16": {"kind": "experts", "dtype": "bfloat16"},
    "zero 1": {"kind": "experts", "config": ZERO1},
    "zero 1 alone": {"kind": "experts alone", "config": ZERO1},
    "bf16 zero 1": {"kind": "experts", "dtype": "bfloat16", "config": ZERO1},
    "decided": {"kind": "experts", "placement": {"interval": 1, "target": 1.0, "least_gain": 0.0, "horizon": 10**6}},
}


@pytest.mark.parametrize("case", EXPERTS)
def test_MoeLayers_MoveWithTheirExperts_SameBitsAsNone(pipe2x2: Ranks, case: str) -> None:
    old_host_fails(BF16_OPTIMIZER, case == "bf16")
    answers = pipe2x2.run("cases_moves:with_experts", stages=2, **EXPERTS[case])
    assert differ(answers) == []
    for rank, (still, moved) in enumerate(answers):
        assert still["losses"][-1] != still["losses"][0] and moved["layers"] == still["layers"]
        assert still["guarded"] and moved["guarded"]
        assert {by for _, by in moved["layers"]} == {"sluice"} and moved["experts"] == still["experts"]
        found = [sorted(int(name.split(".")[0]) for name in each) for each in moved["placed"]]
        assert (
            found == [[0], [0, 2, 3], [0], [0, 2, 3], [0, 2]] if rank < 2 else [[2, 3, 5], [5], [2, 3, 5], [5], [3, 5]]
        )
        last = [list(each[0]) for each in moved["placed"][4].values()]
        if case == "decided":
            assert any(list(each[0]) != [0, 0, 1, 1] for placed in moved["placed"] for each in placed.values())
        elif EXPERTS[case]["kind"] == "experts":  # on every stage, experts keep their placement
            assert all(each == [1, 0, 0, 1] for each in last)


def test_MoeLayer_WhoseGroupsAStageHasNot_IsRefusedOnAllRanks(pipe2x2: Ranks) -> None:
    job = {"parts": [0, 2, 6], "stages": 2, "kind": "experts", "groups_named": "ep_size_1"}
    for said, changed, _ in pipe2x2.run("cases_moves:refused", **job):
        words = "layer 2 holds a MoE layer of the expert-parallel groups ep_size_2, and stage 1 has ep_size_1"
        assert words in said and not changed, said


@pytest.mark.parametrize("case", ["f32", "bf16", "zero 1", "bf16 zero 1"])
def test_MoeLayers_UnderAnAdaptivePlan_MoveBetweenBatchesWithTheBitsOfNone(pipe2x2: Ranks, case: str) -> None:
    """The first layer is as slow as the others together. Layer 2 is a MoE layer."""
    old_host_fails(BF16_OPTIMIZER, case == "bf16")
    answers = pipe2x2.run("cases_moves:decided", seconds=[5.0, *[1.0] * 5], stages=2, **EXPERTS[case])
    assert differ(answers) == []
    for still, moved in answers:
        assert still["parts"] == [0, 3, 6] and moved["parts"] == [0, 1, 6], moved["layers"]
        assert moved["layers"]["moves"] == 1 and moved["layers"]["batches_moving"] == 0
        assert moved["live"]["in_batch"] == moved["live"]["at_flush"] == 0
        assert "no steps lead there" in moved["layers"]["why_drained"]
        assert moved["sizes"][2] > 1.3 * moved["sizes"][1]  # the price counts the experts, not the router alone


@pytest.mark.parametrize(
    "job", [{"groups_named": "ep_size_1"}, {"section": {"chunks": None, "memory_budget": 32 << 20}}],
    ids=["other groups", "memory_budget"],
)  # fmt: skip
def test_MoeLayers_ThatCannotMove_StayUnderAnAdaptivePlan(pipe2x2: Ranks, job: dict[str, Any]) -> None:
    """MoE layer 1 stays, and only layer 2, which has no experts, leaves the slow stage."""
    case = {"seconds": [5.0, *[1.0] * 5], "stages": 2, "kind": "between experts"}
    for _, moved in pipe2x2.run("cases_moves:decided", **case, **job):
        assert moved["parts"] == [0, 2, 6] and moved["layers"]["moves"] == 1
        assert "refused" not in moved["layers"] and moved["layers"]["verdict"] == "no_gain", moved["layers"]


def test_MoeLayers_ThatMove_BringPlanAndDecisions(pipe2x2: Ranks) -> None:
    answers = pipe2x2.run("cases_moves:carried", stages=2, kind="experts of two widths")
    plan = {"num_chunks": 3, "restore_input": "redispatch", "restore_pre_activation": "recompute"}
    plan |= {"wgrad": "per_chunk", "tokens": 512}
    name = "2.moe.deepspeed_moe"
    for rank, (_, now, whys, plans) in enumerate(answers):
        assert [each.get(name) for each in plans] == ([plan, None, plan] if rank < 2 else [None, plan, None])
        assert [name in each for each in plans] == ([True, False, True] if rank < 2 else [False, True, False])
        if rank >= 2:
            came = answers[rank - 2][0]
            assert came and all(each in now for each in came)
            assert [32, "imported"] in whys, whys


def test_Move_GradientsThatAreThere_GoWithTheirLayer(pipe2: Ranks) -> None:
    (first, first_away, first_home), (second, second_away, second_home) = pipe2.run(
        "cases_moves:gradients", kind="plain", stages=2
    )
    assert (first_home, second_home) == (first, second) and first_away != first
    assert {**first_away, **second_away} == {**first, **second}


@pytest.mark.parametrize("case", ["f32", "zero 1", "bf16 zero 1"])
def test_Checkpoint_SavedAfterAMove_LoadsIntoStockAtThesePlaces(pipe2: Ranks, tmp_path: Path, case: str) -> None:
    old_host_fails(LOADING)
    for losses, again, state, stock in pipe2.run(
        "cases_moves:checkpoint", folder=str(tmp_path), parts=[0, 5, 6], stages=2, **{**TWO[case], "kind": "plain"}
    ):
        assert losses == again and state == stock


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "numbers": ({"kind": "plain", "parts": [0, 6, 6]}, "strictly ascending numbers from 0 to 6 (on rank 0)"),
    "other numbers": ({"kind": "plain", "parts": [0, 2, 6], "own_parts": [0, 4, 6]}, "[0, 4, 6] on rank 1"),
    "tied": ({"kind": "ends tied", "parts": [0, 1, 6]}, "tied to others by 'ends'"),
    "nothing of its own": (
        {"kind": "tied", "parts": [0, 5, 6], "dtype": "bfloat16"},
        "stage 1 would have no trainable parameter of its own in group 0",
    ),
    "nothing trains": (
        {"kind": "frozen 0 1", "parts": [0, 2, 6]},
        "stage 0 would have no trainable parameter of its own in layers 0 to 1: leave it a layer with some, as layer 2",
    ),
    "nothing trains, zero 1": (
        {"kind": "frozen 4 5", "parts": [0, 4, 6], "config": ZERO1},
        "stage 1 would have no trainable parameter of its own in group 0 of the optimizer, which DeepSpeed's optimizer "
        "needs in layers 4 to 5: leave it a layer with some, as layer 0",
    ),
    "nothing trains, bf16": (
        {"kind": "frozen 0 1", "parts": [0, 2, 6], "dtype": "bfloat16"},
        "stage 0 would have no trainable parameter of its own in group 0",
    ),
    "a budget": (
        {"kind": "experts", "parts": [0, 2, 6], "stages": 2, "section": {"memory_budget": 64 << 20}},
        "a memory_budget is planned for the MoE layers that a stage has at the start",
    ),
    # A flat group has one step count, so stages with different step counts cannot exchange layers.
    "other steps": (
        {"kind": "plain", "parts": [0, 2, 6], "dtype": "bfloat16", "other_step": True},
        'the optimizers of stages differ: "group 0: step" is ',
    ),
    "hooks": ({"kind": "plain", "parts": [0, 2, 6], "hook": True}, "has hooks, which belong to this process"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_Move_WhatCannot_IsRefusedOnAllRanks(pipe2: Ranks, pipe2x2: Ranks, case: str) -> None:
    arguments, words = REFUSED[case]
    ranks = pipe2x2 if "stages" in arguments else pipe2
    answers = ranks.run("cases_moves:refused", **arguments)
    for said, changed, _ in answers:
        assert words in said and not changed, said
    assert answers[0][2] == answers[1][2]  # the training continues
