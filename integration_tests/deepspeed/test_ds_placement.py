# SPDX-License-Identifier: Apache-2.0
"""Tests moves of experts between ranks in DeepSpeed: bits and checkpoint files are those without moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_release import BF16_OPTIMIZER, LOADING, old_host_fails
from rank_harness import Ranks

LAYERS = [{"k": 2, "expert": "gelu"}, {"num_experts": 8, "expert": "gated", "drop_tokens": False}]

# Configurations by name: ds_config and the dtype of the data.
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
OF_BF16_OPTIMIZER = ("bf16", "zero 1, bf16, accumulated in f32")  # also in DeepSpeed 0.15.4


COMPARED = ("losses", "counts", "end", "random", "evaluations", "weights", "parameters", "optimizer")


def differ(answers: list[Any]) -> list[str]:
    """Returns the differences in bits of two trainings, which return most of these values."""
    names = [name for name in COMPARED if name in answers[0][0]]
    assert "losses" in names
    return sorted({name for still, moved in answers for name in names if still[name] != moved[name]})


REORDERED = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
# Trainings in which experts move every `every` updates.
MOVED: dict[str, dict[str, Any]] = {
    "zero 0": {"steps": 20},
    "accumulated": {"steps": 20, "config": {"gradient_accumulation_steps": 2}},
    **{
        name: {"steps": 14 * config.get("gradient_accumulation_steps", 1), "config": config, "dtype": dtype}
        for name, (config, dtype) in ZERO.items()
    },
    "two replicas": {"layers": [{"num_experts": 4, "expert": "tuple"}, {"num_experts": 8, "k": 2}], "steps": 9},
    # DeepSpeed's own mapping of parameters to flat buffers has the order of the user's groups.
    "ZeroReorders": {"layers": [{"num_experts": 4, "k": 2, "expert": "gelu"}], "steps": 7, "config": REORDERED},
    "WithClipping": {"steps": 9, "every": 2, "config": {"gradient_clipping": 0.02}},
    "frozen": {"steps": 12, "every": 5, "frozen": (3, 7)},
    "frozen, zero 1": {"steps": 12, "every": 5, "frozen": (3, 7), "config": ZERO["zero 1"][0]},
    "FusedAdam": {
        **{"steps": 9, "every": 2, "options": {"optimizer": True}},
        "config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
    },
}
LONG = ("zero 1", "zero 2", "zero 2, bf16", "bf16", "zero 1, bf16, accumulated in f32")


@pytest.mark.parametrize(
    ("name", "times"),
    [pytest.param(n, 0, id=n, marks=pytest.mark.full if n in LONG else ()) for n in MOVED]
    + [pytest.param(n, 50, id=f"{n}, fifty times", marks=pytest.mark.full) for n in ("zero 0", *ZERO)],
)
def test_Move_EveryFewSteps_HasTheBitsOfNone(ranks2: Ranks, ranks4: Ranks, name: str, times: int) -> None:
    old_host_fails(BF16_OPTIMIZER, name in OF_BF16_OPTIMIZER)
    case = {"layers": LAYERS, "every": 3, **MOVED[name]}
    micro_steps = case.get("config", {}).get("gradient_accumulation_steps", 1) if name != "accumulated" else 1
    if times:
        case |= {"steps": (4 * times + 1) * micro_steps, "every": 4}
    answers = (ranks4 if "layers" in MOVED[name] else ranks2).run("cases_placement:moved_training", **case)
    assert differ(answers) == []
    wanted = times or (case["steps"] // micro_steps - 1) // case["every"]
    assert all(moved["moves"] == wanted > 1 for _, moved in answers)


def test_Move_WithClippingByTheTrueNorm_TrainsAsWithout(ranks2: Ranks) -> None:
    job = {"layers": LAYERS, "options": {"clip_norm": "true"}, **MOVED["WithClipping"]}
    for still, moved in ranks2.run("cases_placement:moved_training", **job):
        assert moved["losses"] == pytest.approx(still["losses"], rel=1e-5)


# Configurations for tests of values that DeepSpeed derives from a rank's experts (docs/placement.md).
DERIVED = {"zero 0": ({}, "float32"), **ZERO}
SUMMED_BY_RANK = ("zero 1", "zero 2", "zero 1, bf16", "zero 2, bf16", "zero 1, bf16, accumulated in f32")


@pytest.mark.parametrize(
    "name", [n if n in ("zero 0", "bf16") else pytest.param(n, marks=pytest.mark.full) for n in DERIVED]
)
def test_Derived_AfterAMove_IsThatOfHome(ranks2: Ranks, name: str) -> None:
    old_host_fails(BF16_OPTIMIZER, name in OF_BF16_OPTIMIZER)
    config, dtype = DERIVED[name]
    arguments = {"config": {**config, "gradient_clipping": 0.01}, "dtype": dtype}
    for stock, home, away, true_home, true_away in ranks2.run("cases_placement:derived", **arguments):
        assert stock.pop("flops") > 0 and home["flops"] > 0  # stock counts padding, Sluice real rows
        if name in SUMMED_BY_RANK:  # a sum of squares over ranks: the order of its terms differs
            assert away.pop("norm") == pytest.approx(home["norm"], rel=1e-6)
            assert home.pop("norm") == pytest.approx(stock.pop("norm"), rel=1e-2 if "bf16" in name else 1e-6)
        elif name == "zero 0":
            assert home["norm"] == pytest.approx(stock.pop("norm"), rel=1e-6)
        assert away == home
        assert stock.items() <= home.items() if dtype == "float32" else True
        if name == "zero 0":
            assert true_home["norm"] == pytest.approx(true_away["norm"], rel=1e-6)
            assert true_home["norm"] > 1.01 * home["norm"]


# One configuration for each implementation of the overflow check. The step is skipped, and f16 halves the loss scale.
OVERFLOWING = {
    "zero 1, bf16": ZERO["zero 1, bf16"],
    "f16": ({"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}, "float16"),
    "zero 1, f16": (
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
        "float16",
    ),
}


@pytest.mark.parametrize("name", [n if n == "f16" else pytest.param(n, marks=pytest.mark.full) for n in OVERFLOWING])
def test_Overflow_InOneExpert_SkipsTheStepWhereverItIs(ranks2: Ranks, name: str) -> None:
    config, dtype = OVERFLOWING[name]
    if dtype == "float16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed trains in fp16 only on processors with AVX512-FP16")
    for answers in ranks2.run("cases_placement:derived", config=config, dtype=dtype, overflows=True):
        for found in answers:
            assert (found["skipped"], found["was_applied"]) == (1, False), found
        assert {found["loss_scale"] for found in answers} == {8.0 if dtype == "float16" else 1.0}


def test_TrueNorm_OfF32WithoutZero_IsThatOfZero(ranks2: Ranks) -> None:
    without, zero = (
        ranks2.run("cases_placement:derived", config={**config, "gradient_clipping": 0.01}, dtype="float32")
        for config in ({}, ZERO["zero 1"][0])
    )
    for (*_, true_home, true_away), (stock, *_) in zip(without, zero):
        assert true_home["norm"] == pytest.approx(stock["norm"], rel=1e-6)
        assert true_away["norm"] == pytest.approx(stock["norm"], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full)], ids="zero {}".format)
def test_Checkpoint_WhileExpertsAreAway_IsThatOfNone(ranks2: Ranks, tmp_path: Path, stage: int) -> None:
    old_host_fails(LOADING)
    config = {"zero_optimization": {"stage": stage}} if stage else {}
    layers = [{"k": 2}, {"num_experts": 8, "expert": "tuple"}]
    answers = ranks2.run("cases_placement:checkpoints", folder=str(tmp_path), layers=layers, config=config)
    check_files(answers, "expert_7", 1e-5)


def check_files(answers: list[Any], expert: str, most: float) -> None:
    """Checks answers of `checkpoint_files`. expert: in the name of a file; most: the relative difference to stock."""
    for files, others, losses in answers:
        assert any(expert in file for file in files) and any("optim_states" in file for file in files), files
        assert others == []
        assert losses["moved"] == losses["still"] == losses["back"]
        assert losses["stock"] == pytest.approx(losses["still"], rel=most)


def test_Move_WhatCannot_IsRefusedOnAllRanks(ranks2: Ranks) -> None:
    for said in ranks2.run("cases_placement:refusals"):
        wanted = (
            ("Unsupported", "fixed number of experts"),
            ("InvalidState", "outstanding"),
            ("InvalidState", "move them home first"),
            ("Unsupported", "expert 0 would go from slot 0 of rank 0 to slot 1 of rank 0, and requires_grad of"),
            ("InvalidState", "has gradients"),
        )
        assert len(said) == len(wanted), said
        assert all(one.startswith(kind) and text in one for (kind, text), one in zip(wanted, said)), said


@pytest.mark.parametrize(("placement", "times"), [(None, 2), ("adaptive", 1)], ids=["by hand", "adaptive"])
def test_Move_FusedAdamOf16BitsWithoutZero_IsRefusedByName(ranks2: Ranks, placement: str | None, times: int) -> None:
    old_host_fails(BF16_OPTIMIZER)
    for said in ranks2.run("cases_placement:refused_optimizer", placement=placement):
        assert len(said) == times
        assert all("under FP16_Optimizer" in one and '"torch_adam": true' in one for one in said), said


@pytest.mark.parametrize("name", ["zero 0", "zero 1", pytest.param("bf16", marks=pytest.mark.full)])
def test_StateDict_WhileExpertsAreAway_IsRightOrRefused(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    old_host_fails(BF16_OPTIMIZER, name in OF_BF16_OPTIMIZER)
    config, dtype = ZERO.get(name, ({}, "float32"))
    layers = [{"k": 2}, {"num_experts": 8, "expert": "tuple"}]
    arguments = {"folder": str(tmp_path), "layers": layers, "config": config, "dtype": dtype}
    for found in ranks2.run("cases_placement:state_dicts", **arguments):
        assert len(found) == 10
        for way, (away, at_home) in found.items():
            assert "sluice.experts_at_home(engine)" in away and at_home == "", (way, away, at_home)


# The steps of a move in order: the engine's check, copies, memory, transfer, filled tensors, the engine's placement.
STEPS = ["replace_experts:1", "content_of:2", "_rooms", "_begin", "_exchange", "fill:1", "fill:2", "replace_experts:2"]


@pytest.mark.parametrize("stage", [0, 1], ids="zero {}".format)
def test_Move_AStepFailsOnOneRank_AllLiesWhereItLay(ranks2: Ranks, stage: int) -> None:
    config = {"zero_optimization": {"stage": stage}} if stage else {}
    for said, as_before, same in ranks2.run("cases_placement:broken_moves", steps=[*STEPS, ""], config=config):
        assert as_before == [True] * len(STEPS) + [False] and said[-1] == ""
        for step, one in zip(STEPS, said):
            name = step.partition(":")[0]
            wanted = "expert_rank" if name == "replace_experts" else f"{name} has failed"
            assert wanted in one, (step, one)
        assert same == [True, True]


@pytest.mark.parametrize(("step", "is_torn"), [("content_of", False), ("_exchange", False), ("fill", True)])
def test_Move_ARankIsLost_AllLiesWhereItLay(ranks2: Ranks, step: str, is_torn: bool) -> None:
    said, as_before, torn = ranks2.try_run("cases_placement:lost_rank", dying=(1,), step=step)[0]["result"]
    ranks2.stop()
    assert "lost" in said and as_before and bool(torn) == is_torn, (said, torn)


@pytest.mark.parametrize("step", ["content_of", "_transfer", "still_of"])
def test_Move_ARankHangs_IsNamedWithinTheDeadline(ranks2: Ranks, step: str) -> None:
    """The rank goes on after the other has an error: nothing has moved, and training has the bits without moves."""
    for rank, (said, seconds, as_before, same) in enumerate(
        ranks2.run("cases_placement:hung_rank", step=step, wait_s=6.0)
    ):
        assert ("rank 1 did not answer within 6 s" if rank == 0 else "a rank was lost") in said, said
        assert seconds < 60 and as_before and same == [True, True], (rank, seconds)


def test_Move_CanGoNeitherOnNorBack_EveryLaterCallIsRefused(ranks2: Ranks) -> None:
    for said in ranks2.run("cases_placement:torn_move"):
        assert all("a move of its experts failed midway" in one for one in said), said
    ranks2.stop()
