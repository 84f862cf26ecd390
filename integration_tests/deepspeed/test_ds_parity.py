# SPDX-License-Identifier: Apache-2.0
"""Tests that losses are those of stock DeepSpeed, with all options of its MoE.

Options of Sluice, dtypes, ZeRO stages and activation checkpointing are in integration_tests/pairs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from host_release import BF16_OPTIMIZER, IS_OLD, K3_NO_DROP, old_host_fails
from rank_harness import Ranks

F32 = 1e-5  # relative, over the first 10 steps


def compare(answers: list[Any], loss: float, weight: float | None = None, counts: bool = True) -> None:
    """Compares the results of `ds_models.train`: [stock, through Sluice] by rank."""
    for rank, (stock, swapped) in enumerate(answers):
        gaps = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(stock["losses"], swapped["losses"])]
        assert max(gaps) <= loss, f"rank {rank}: {gaps}"
        gaps = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(stock["evaluations"], swapped["evaluations"])]
        assert not gaps or max(gaps) <= loss, f"rank {rank}: evaluations {gaps}"
        for name, norm in stock["weights"].items():
            assert swapped["weights"][name] == pytest.approx(norm, rel=weight or 10 * loss, abs=1e-6), (rank, name)
        assert stock["random"] == swapped["random"], "the draws differ"
        if counts:
            assert stock["counts"] == swapped["counts"], rank
            assert swapped["l_aux"] == pytest.approx(stock["l_aux"], rel=1e-4)


def least_budget(answers: list[Any], words: str = " needs ") -> int:
    """Returns the least budget, in bytes, that the errors of all ranks name after these words."""
    (least,) = {int(re.search(rf"{words}(\d+)\b", answer["error"]["message"])[1]) for answer in answers}
    return least


EXPERTS = {
    "relu": "sluice",
    "gelu": "sluice",
    "silu": "sluice",
    "class": "sluice",
    "gated": "sluice",
    "plain_linears": "sluice",
    "single": "host modules",
    "tuple": "host modules",
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("k", [1, 2])
def test_Experts_EachKind_LossesAsStock(ranks2: Ranks, kind: str, k: int) -> None:
    answers = ranks2.run("cases_parity:parity", layers=[{"expert": kind, "k": k}], steps=6)
    assert answers[0][1]["stats"] == [EXPERTS[kind]]
    compare(answers, F32)


GATES = {
    "drop": {},
    "drop hard": {"capacity_factor": 0.5, "min_capacity": 1},
    "no drop": {"drop_tokens": False},
    "min_capacity above": {"capacity_factor": 0.25, "min_capacity": 8},
    "Jitter": {"noisy_gate_policy": "Jitter"},
    "RSample": {"noisy_gate_policy": "RSample"},
    "RSample, no drop": {"noisy_gate_policy": "RSample", "drop_tokens": False},
    "policy None": {"noisy_gate_policy": "None"},
    "eval drops more": {"capacity_factor": 1.1, "eval_capacity_factor": 0.35, "min_capacity": 1},
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("gate", GATES)
def test_Gate_EachPolicyAndK_LossesCountsAndDrawsAsStock(ranks2: Ranks, gate: str, k: int) -> None:
    old_host_fails(K3_NO_DROP, k > 2 and GATES[gate].get("drop_tokens") is False)
    layer = {"k": k, **GATES[gate]}
    # The last of eight steps is followed by an evaluation, whose draws are compared, too.
    compare(ranks2.run("cases_parity:parity", layers=[layer], steps=8, evaluate=True), F32)


CALLED = {"expert": "tuple"}
OFFLOADED = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    **{"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.05},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one expert on a rank": {"layers": [{"num_experts": 2}, {"num_experts": 2, **CALLED}]},
    "eight experts on a rank": {"layers": [{"num_experts": 16, "k": 4}, {"num_experts": 16, "k": 4, **CALLED}]},
    # Without RTS the host sorts a 0/1 mask, and torch breaks the ties on both sides.
    "no RTS": {"layers": [{"k": 1, "use_rts": False, "capacity_factor": 0.6, "min_capacity": 1}]},
    "RTS": {"layers": [{"k": 1, "capacity_factor": 0.6, "min_capacity": 1}]},
    "no sampling": {"layers": [{"k": 2, "top2_2nd_expert_sampling": False}], "evaluate": True},
    # Without an mpu the host has no ranks to split experts over. With an mpu the layer is refused (test_ds_switch).
    "tensor parallelism without an mpu": {"layers": [{"k": 1, "enable_expert_tensor_parallelism": True}]},
    "used tokens": {"layers": [{"k": 1}], "used": True},
    "used tokens, no drop": {"layers": [{"k": 1, "drop_tokens": False}], "used": True},
    "residual": {"layers": [{"use_residual": True}]},
    "residual, called": {"layers": [{"use_residual": True, "expert": "single"}]},
    "two ep sizes": {"layers": [{"ep_size": 1}, {"ep_size": 2, "k": 2}, {"ep_size": 1, "k": 2, **CALLED}]},
    "chunks adaptive": {"layers": [{"k": 2}], "sluice": {"chunks": "adaptive"}},
    "policy adaptive": {"layers": [{"k": 2, "expert": "gated"}, CALLED], "sluice": {"policy": "adaptive"}},
    "policy offload": {"layers": [{"k": 2, "expert": "gated"}], "sluice": {"policy": {"input": "offload"}}},
    "optimizer offloaded by the host": {"layers": [{"k": 2}, {"ep_size": 1, "expert": "tuple"}], "config": OFFLOADED},
}


@pytest.mark.parametrize("what", OPTIONS)
def test_Options_EachOne_AsStock(ranks2: Ranks, what: str) -> None:
    compare(ranks2.run("cases_parity:parity", **OPTIONS[what]), F32)


@pytest.mark.parametrize("sizes", [[2, 4], [2, 1]])
def test_EpSizes_OnFourRanks_AsStock(ranks4: Ranks, sizes: list[int]) -> None:
    layers = [{"ep_size": size, "k": k} for k, size in enumerate(sizes, 1)]
    compare(ranks4.run("cases_parity:parity", layers=layers, steps=6), F32)


# What integration_tests/pairs does not freeze.
FROZEN: dict[str, list[str]] = {
    "second weights and a bias": ["experts.*2.weight", "experts.*0.bias"],
    "biases": ["bias"],
    "one expert": ["rank 0: .*experts.1"],
    "all but experts": ["first", "last", "wg"],
    "all but an expert of each rank": ["first", "last", "wg", "experts.1"],
    "all before": ["first", "wg"],
    "all but the gates": ["first", "last", "experts"],
}
# The cases that leave a trainable parameter in each ZeRO group.
ZERO = ("second weights and a bias", "biases", "one expert", "all before")
FROZEN_CASES = [(what, stage) for what in FROZEN for stage in (0, 2) if not stage or what in ZERO]


@pytest.mark.parametrize("kind", ["relu", "tuple"])
@pytest.mark.parametrize("what, stage", FROZEN_CASES)
def test_Frozen_GatesAndExperts_AsStock(ranks2: Ranks, what: str, stage: int, kind: str) -> None:
    job = {"frozen": FROZEN[what], "layers": [{"expert": kind, "k": 1}], "steps": 4}
    answers = ranks2.run("cases_parity:parity_frozen", config={"zero_optimization": {"stage": stage}}, **job)
    compare(answers, F32)


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "frozen, how, words",
    [
        ("experts", 1, "the group of experts ep_size_2 has"),
        ("experts", 2, "the group of experts ep_size_2 has"),
        ("rank 1: .*experts", 2, "the group of experts ep_size_2 has"),
        ("first|last|wg", 2, "the group of all parameters except experts has"),
        ("rank 0: .*experts", BF16, "no expert of rank 0 has a trainable parameter"),
    ],
)
def test_Frozen_WhatCannotTrain_IsRefusedByNameOnAllRanks(fresh2: Ranks, frozen: str, how: Any, words: str) -> None:
    job = {"config": BF16, "dtype": "bfloat16"} if how is BF16 else {"config": {"zero_optimization": {"stage": how}}}
    for said in fresh2.run("cases_parity:refused_frozen", layers=[{"k": 1}], frozen=[frozen], **job):
        assert said.startswith("UnsupportedError") and words in said, said


def test_Bf16Optimizer_GradAccumulationInF32_AsStock(ranks2: Ranks) -> None:
    """In bf16 the two sides differ by rounding, because stock sums padded rows in another order. One bf16 step is 2^-8.
    Rounding can change a route and so the counts. So only losses are compared, and the run is short."""
    old_host_fails(BF16_OPTIMIZER)
    config = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    answers = ranks2.run("cases_parity:parity", layers=[{"k": 2}], steps=5, config=config, dtype="bfloat16")
    compare(answers, loss=0.02, weight=0.02, counts=False)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_GradientAccumulation_TwoSteps_AsStock(ranks2: Ranks, stage: int) -> None:
    """ZeRO's hooks consume every gradient. Without them the second micro-step adds to the gradients of the first."""
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    answers = ranks2.run("cases_parity:parity", layers=[{}, {"k": 2, "expert": "tuple"}], config=config)
    compare(answers, F32)
    unseen = stage == 0 or (IS_OLD and stage == 1)  # 0.15.4's stage 1 has no such hooks
    assert [swapped["passes_in_place"] for _, swapped in answers] == [5 if unseen else 0] * 2


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop", [True, False])
def test_DenseMasks_OfOlderReleases_AsStock(ranks2: Ranks, k: int, drop: bool) -> None:
    old_host_fails(K3_NO_DROP, k > 2 and not drop)
    layers = [{"k": k, "drop_tokens": drop, "capacity_factor": 0.6, "min_capacity": 1, "noisy_gate_policy": "RSample"}]
    compare(ranks2.run("cases_parity:parity_through_masks", layers=layers, used=k == 1), F32)


AGAIN = ["S3", "S4", {"input": "keep", "pre_activation": "recompute"}]


@pytest.mark.parametrize(
    "how",
    [{}, {"autocast": "bfloat16"}, {"checkpointing": "reentrant"}, {"checkpointing": "nonreentrant"}],
    ids=["plain", "autocast", "reentrant", "nonreentrant"],
)
def test_HostModules_RunAgainInBackward_HaveTheBitsOfKeeping(ranks2: Ranks, how: dict[str, Any]) -> None:
    layers = [{"k": 2, "expert": "tuple"}, {"expert": "single", "ep_size": 1}]
    policies = ["none", *AGAIN]
    for kept, *others in ranks2.run("cases_parity:same_with_every_policy", layers=layers, policies=policies, **how):
        assert kept["stats"] == ["host modules"] * 2
        for other in others:
            assert other["losses"] == kept["losses"] and other["weights"] == kept["weights"]


def test_Budget_FourLayersWithTheLeastThatTheErrorNames_HoldAndTrainAsStock(ranks2: Ranks) -> None:
    """The bytes that the error names are enough for the whole model, whose peak then stays within them."""
    layers = [{"k": 2, "drop_tokens": False}] * 4
    small = {"memory_budget": 64 << 10, "gemm": "ref"}
    budget = least_budget(ranks2.try_run("cases_parity:parity", layers=layers, sluice=small))
    answers = ranks2.run("cases_parity:parity", layers=layers, sluice={"memory_budget": budget, "gemm": "ref"})
    compare(answers, F32)
    for answer in answers:
        assert budget / 2 < answer[1]["peak_bytes"] <= budget


def test_Budget_OfAModelWithTwoEpSizes_BoundsTheSumOfItsContexts(ranks2: Ranks) -> None:
    """The error names the minimum of each context and their sum. The sum is enough, and one byte less is not."""
    layers = [{"ep_size": 1, "k": 2}, {"ep_size": 2, "k": 2}, {"ep_size": 2, "expert": "tuple"}]
    pattern = r"need at least (\d+) for the layers of ranks .* and (\d+) for the layers of .*together (\d+), for"

    def refused(budget: int) -> set[tuple[int, ...]]:
        answers = ranks2.try_run("cases_parity:parity", layers=layers, sluice={"memory_budget": budget, "gemm": "ref"})
        return {tuple(map(int, re.search(pattern, answer["error"]["message"]).groups())) for answer in answers}

    found = refused(64 << 10)
    assert len(found) == 1, found
    alone, together, budget = found.pop()
    assert alone + together == budget and refused(budget - 1) == {(alone, together, budget)}
    answers = ranks2.run("cases_parity:parity", layers=layers, sluice={"memory_budget": budget, "gemm": "ref"})
    compare(answers, F32)
    for _, swapped in answers:
        assert len(swapped["peaks"]) == 2
        assert budget / 2 < sum(swapped["peaks"].values()) <= budget


def test_Budget_OfTwoEpSizes_LaterBatchesAreLarger_FitWhileTheWholeWouldDo(ranks2: Ranks) -> None:
    """Shares are set at the first forward. With a budget for four times its tokens, a batch with this many fits."""
    layers = [{"ep_size": 1, "k": 2}, {"ep_size": 2, "k": 2}, {"ep_size": 2, "expert": "tuple"}]

    def how(lengths: list[int], budget: int) -> dict[str, Any]:
        return {"layers": layers, "lengths": lengths, "sluice": {"memory_budget": budget, "gemm": "ref"}}

    budget = least_budget(ranks2.try_run("cases_parity:parity_of_lengths", **how([48], 64 << 10)), "together ")
    answers = ranks2.run("cases_parity:parity_of_lengths", **how([12, 48, 12, 48], budget))
    compare(answers, F32)
    assert all(sum(swapped["peaks"].values()) <= budget for _, swapped in answers)
    for answer in ranks2.try_run("cases_parity:parity_of_lengths", **how([12, 12, 96], budget)):
        assert "share of the memory budget" in answer["error"]["message"]
        assert "run the largest batch first, so that the division allows for it" in answer["error"]["message"]


@pytest.mark.parametrize("chunks", [2, None])
def test_FlopsProfiler_WhichHooksRankZeroAlone_TrainsAsStock(ranks2: Ranks, chunks: int | None) -> None:
    """The profiler hooks every module of rank 0 for one step. All ranks must continue in the same way."""
    config = {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}}
    layers = [{"k": 2}, {"k": 2, "expert": "tuple"}]
    answers = ranks2.run("cases_parity:parity", layers=layers, steps=5, config=config, sluice={"chunks": chunks})
    compare(answers, F32)
    assert [swapped["stats"] for _, swapped in answers] == [["sluice", "host modules"]] * 2


@pytest.mark.parametrize("kind", ["relu", "gated"])
def test_FlopsProfiler_GemmsOfC_AreCountedAsThoseOfModules(ranks2: Ranks, kind: str) -> None:
    (fused, called), others = ranks2.run("cases_parity:profiled_macs", kind=kind)
    assert fused == called > 0 and others == []


@pytest.mark.skipif(IS_OLD, reason="0.15.4 has no torch_autocast")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_TorchAutocast_OfDsConfig_AsStock(fresh2: Ranks, stage: int) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": stage}}
    layers = [{"k": 2, "expert": "gated"}, {"k": 2, "expert": "tuple"}]
    answers = fresh2.run("cases_parity:parity", layers=layers, steps=5, config=config)
    compare(answers, loss=0.02, weight=0.02, counts=False)


def test_Fp16_LossScaleOverflows_StepsAreSkippedAsInStock(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_parity:half_precision", steps=24)
    if answers[0] is None:
        pytest.skip("DeepSpeed trains in fp16 only on processors with AVX512-FP16")
    for stock, swapped in answers:
        assert swapped["end"] == stock["end"] and 0 < stock["end"][0] < 20, answers
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=0.02)
        assert stock["losses"][-1] != stock["losses"][0]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("section", [{}, {"memory_budget": 12 << 20}, {"chunks": None}], ids=str)
def test_Evaluation_FirstOfAllAndBetweenMicroSteps_AsStock(ranks2: Ranks, mode: str, section: dict[str, Any]) -> None:
    answers = ranks2.run("cases_parity:evaluated_between", mode=mode, sluice_section=section)
    compare(answers, F32)
    for stock, swapped in answers:
        assert len(stock["end"]) == 7 and swapped["end"] == pytest.approx(stock["end"], rel=F32)


@pytest.mark.parametrize("section", [{}, {"memory_budget": 12 << 20, "max_outstanding": 2}], ids=str)
def test_Layer_CalledTwiceInAForward_AsStock(ranks2: Ranks, section: dict[str, Any]) -> None:
    compare(ranks2.run("cases_parity:shared_layer", sluice_section=section), F32)


def test_Swap_TakenBackAndDoneAgainInTheMiddle_AsStock(ranks2: Ranks) -> None:
    compare(ranks2.run("cases_parity:swapped_again"), F32)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.full)])
def test_Long_ManySteps_WithinStocksOwnGap(ranks2: Ranks, steps: int) -> None:
    """The gap is at most 0.02, and at most twice the largest gap of two stock runs that differ in summation order."""
    for answer in ranks2.run("cases_parity:long_run", deadline=800, steps=steps):
        pairs = itertools.combinations(answer["stock"], 2)
        own = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
        gap = max(abs(a - b) for a, b in zip(answer["stock"][0], answer["sluice"], strict=True))
        print(f"{steps} steps: Sluice at most {gap:.2e} from stock, stock from stock {own:.2e}")
        assert own > 0, "the stock runs are the same: there is no gap to compare with"
        assert gap <= 0.02 and gap <= 2 * own, (gap, own)
