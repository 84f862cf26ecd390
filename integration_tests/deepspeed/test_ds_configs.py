# SPDX-License-Identifier: Apache-2.0
"""Tests that rare but valid configs and uses of an engine train like stock."""

from __future__ import annotations

from typing import Any

import pytest
from host_release import IS_OLD
from rank_harness import Ranks
from test_ds_parity import F32, _compare

FROZEN = ["all but the gates", "experts", "one expert", "what is before the experts"]


def _alike(answers: list[Any], relative: float = F32) -> None:
    for stock, swapped in answers:
        assert len(stock) > 0 and swapped == pytest.approx(stock, rel=relative)


@pytest.mark.parametrize("chunks", [2, None])
def test_FlopsProfiler_WhichHooksRankZeroAlone_TrainsAsStock(ranks2: Ranks, chunks: int | None) -> None:
    """The profiler hooks every module of rank 0 for one step. All ranks must continue in the same way."""
    config = {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}}
    layers = [{"k": 2}, {"k": 2, "expert": "tuple"}]
    answers = ranks2.run("cases_parity:parity", layers=layers, steps=5, config=config, sluice={"chunks": chunks})
    _compare(answers, F32)
    assert [swapped["stats"] for _, swapped in answers] == [["sluice", "host modules"]] * 2


@pytest.mark.parametrize("kind", ["relu", "gated"])
def test_FlopsProfiler_GemmsOfC_AreCountedAsThoseOfModules(ranks2: Ranks, kind: str) -> None:
    (fused, called), others = ranks2.run("cases_configs:profiled_macs", kind=kind)
    assert fused == called > 0 and others == []


@pytest.mark.skipif(IS_OLD, reason="0.15.4 has no torch_autocast")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_TorchAutocast_OfDsConfig_AsStock(fresh2: Ranks, stage: int) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": stage}}
    layers = [{"k": 2, "expert": "gated"}, {"k": 2, "expert": "tuple"}]
    answers = fresh2.run("cases_parity:parity", layers=layers, steps=5, config=config)
    _compare(answers, loss=0.02, weight=0.02, counts=False)


def test_Fp16_LossScaleOverflows_StepsAreSkippedAsInStock(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_configs:half_precision", steps=24)
    if answers[0] is None:
        pytest.skip("DeepSpeed trains in fp16 only on processors with AVX512-FP16")
    for (losses, skipped, scale), (own_losses, own_skipped, own_scale) in answers:
        assert own_skipped == skipped and own_scale == scale and 0 < skipped < 20, answers
        assert own_losses == pytest.approx(losses, rel=0.02) and losses[-1] != losses[0]


def test_ZeroTwo_WithTheOptimizerOffloaded_AsStock(ranks2: Ranks) -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.05,
    }
    layers = [{"k": 2}, {"ep_size": 1, "expert": "tuple"}]
    _compare(ranks2.run("cases_parity:parity", layers=layers, steps=6, config=config), F32)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("section", [{}, {"memory_budget": 12 << 20}, {"chunks": None}], ids=str)
def test_Evaluation_FirstOfAllAndBetweenMicroSteps_AsStock(ranks2: Ranks, mode: str, section: dict[str, Any]) -> None:
    answers = ranks2.run("cases_configs:evaluated_between", mode=mode, sluice_section=section)
    for stock, swapped in answers:
        _alike([*zip(stock, swapped)])


@pytest.mark.parametrize("what", FROZEN)
def test_Frozen_PartsOfTheModel_AsStock(ranks2: Ranks, what: str) -> None:
    _compare(ranks2.run("cases_configs:frozen", what=what), F32)


@pytest.mark.parametrize("section", [{}, {"memory_budget": 12 << 20, "max_outstanding": 2}], ids=str)
def test_Layer_CalledTwiceInAForward_AsStock(ranks2: Ranks, section: dict[str, Any]) -> None:
    _alike(ranks2.run("cases_configs:shared_layer", sluice_section=section))


def test_Swap_TakenBackAndDoneAgainInTheMiddle_AsStock(ranks2: Ranks) -> None:
    _alike(ranks2.run("cases_configs:swapped_again"))
