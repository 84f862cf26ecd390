# SPDX-License-Identifier: Apache-2.0
"""Tests the numbered traps of a DeepSpeed adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_release import CAPACITY, FLOAT_MASK, LOADING, old_host_fails
from rank_harness import Ranks


@pytest.mark.parametrize("expert", ["relu", "gated", "tuple"])
def test_Trap01_IdleExperts_GetZeroGradients(ranks2: Ranks, expert: str) -> None:
    zero = ranks2.run("cases_traps:idle_experts_get_zero_gradients", expert=expert)
    assert zero == [[False, True], [True, True]]


@pytest.mark.parametrize("stage", [1, 2])
def test_Trap01_ExpertIdleOnOneRankAndBusyOnItsPeerUnderZero_AsStock(ranks4: Ranks, stage: int) -> None:
    old_host_fails(CAPACITY)
    answers = ranks4.run("cases_parity:idle_here_busy_there", stage=stage)
    for rank, (stock, swapped) in enumerate(answers):
        for counts in stock["counts"] + swapped["counts"]:
            used = [number for number, rows in enumerate(counts[0]) if rows]
            assert used == [0 if rank < 2 else 1], (rank, counts)
        assert swapped["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        for name, norm in stock["weights"].items():
            assert swapped["weights"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), (rank, name)


def test_Trap02_ParametersMoved_AddressesAreReadAfresh(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:pointers_are_read_afresh")


@pytest.mark.parametrize("layers", [[{}, {"expert": "tuple"}], [{"use_residual": True}, {"ep_size": 1}]])
def test_Trap03_SwapAndUnswap_AddAndReplaceNothing(ranks2: Ranks, layers: list[Any]) -> None:
    ranks2.run("cases_traps:nothing_is_added_or_replaced", layers=layers)


def test_Trap04_DeterministicGate_NothingIsDrawn(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:no_random_number_of_its_own")


def test_Trap05_HookAfterSwap_ExpertIsCalled(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:hook_after_swap_fires")


def test_Trap05_HookOnOneRank_ErrorExplainsIt(ranks2: Ranks) -> None:
    first, second = ranks2.run("cases_traps:hook_on_one_rank")
    assert first.startswith("Mismatch") and "hooked or changed after the swap" in first
    assert second.startswith("Mismatch") and "rank 0" in second


def test_Trap05_HookOnTheContainerAfterSwap_FallsUnderOnUnsupported(ranks2: Ranks) -> None:
    first, second = ranks2.run("cases_traps:container_hooked_after_the_swap", policy="error")
    assert first.startswith("PeerRefused") and "the container of its experts" in first
    assert second.startswith("UnsupportedError") and "put the hooks on the layer or the experts" in second
    quiet, warned = ranks2.run("cases_traps:container_hooked_after_the_swap", policy="warn")
    assert quiet == "" and warned.startswith("sluice: ") and "the container of its experts" in warned


def test_Trap05_HookedExpert_SeesItsRowsInOneCall(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:hooked_expert_runs_whole")


def test_Trap06_LayerAttributes_AsStock(ranks2: Ranks) -> None:
    old_host_fails(FLOAT_MASK)
    ranks2.run("cases_traps:attributes_as_stock")


@pytest.mark.parametrize("how", ["engine", "torch"])
def test_Trap09_CompiledModel_LossesAsStockAndLayersRunInSluice(ranks2: Ranks, how: str) -> None:
    for stock, losses, graphs, passes in ranks2.run("cases_traps:compiled", how=how):
        assert losses == pytest.approx(stock, rel=1e-5)
        assert graphs and all(nodes > 0 for nodes in graphs), "nothing was compiled"
        assert passes == 4 * 2 * 2  # steps, layers that share the context, forward and backward


def test_Trap10_EpSizeOne_NeverCommunicates(ranks2: Ranks) -> None:
    assert ranks2.run("cases_traps:alone_never_communicates") == [0, 0]


def test_Trap10_HostsMessagesInBetween_StaySeparate(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:host_collectives_in_between")


def test_Trap11_RankSkipsTheLayer_ErrorNamesIt(fresh2: Ranks) -> None:
    first, second = fresh2.try_run("cases_traps:one_rank_skips", drop=False, how="skip")
    assert "error" not in second
    assert first["error"]["type"] == "TimedOut"
    assert "rank 1" in first["error"]["message"]


def test_Trap11_RanksCallDifferentLayers_ErrorNamesThem(fresh2: Ranks) -> None:
    answers = fresh2.try_run("cases_traps:one_rank_skips", drop=True, how="other layer")
    for answer in answers:
        assert answer["error"]["type"] == "Mismatch", answer
        assert "rank 0" in answer["error"]["message"] and "rank 1" in answer["error"]["message"]


@pytest.mark.parametrize("config", [{}, {"wall_clock_breakdown": True}], ids=str)
def test_Trap11_RankRefusesItsInput_OthersLearnAndGoOn(ranks2: Ranks, config: dict[str, bool]) -> None:
    """Tests the host's timers, too: a timer that was not stopped would make every later forward fail."""
    first, second = ranks2.run("cases_traps:one_rank_refuses", **config)
    assert first.startswith("PeerRefused") and "rank 1" in first and "width 20" in first
    assert second.startswith("ValueError") and "width 20, the layer 16" in second


@pytest.mark.parametrize("after_steps", [0, 2])
def test_Trap11_ExpertsOfOneRankBecomeUnsupported_OthersLearnAndGoOn(ranks2: Ranks, after_steps: int) -> None:
    first, second = ranks2.run("cases_traps:one_rank_doubles_its_experts", after_steps=after_steps)
    assert first.startswith("PeerRefused") and "rank 1" in first and "float64" in first
    assert second.startswith("UnsupportedError") and "torch.float64" in second


def test_Trap13_Autocast_NoCopyOfAParameterOutlivesTheCall(ranks2: Ranks) -> None:
    assert ranks2.run("cases_traps:autocast_keeps_no_copy") == [["torch.float32"]] * 2


def test_Trap14_NoGrad_SavesNothing(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:no_grad_saves_nothing")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_Trap08And14_SameTokensDroppedAndEvalHasItsOwnCapacityAndDrawsAsStock(ranks2: Ranks, k: int) -> None:
    for in_training, in_eval, draws in ranks2.run("cases_traps:evaluates_as_stock", k=k):
        assert in_eval > in_training
        assert draws == (k < 3)  # k = 1 draws for dropped tokens (RTS), k = 2 for the second expert


def test_Trap15_Banner_OnceOnRankZero(fresh2: Ranks, tmp_path: Path) -> None:
    fresh2.run("cases_traps:trace_and_stats", folder=str(tmp_path))
    banners = [fresh2.output(rank).count("MoE layers run on Sluice") for rank in range(2)]
    assert banners == [1, 0]
    assert "1 of 1 MoE layers run on Sluice: 1 fused in C" in fresh2.output(0)


# ---- beyond the list ----


CHECKPOINTS = {
    "zero 0": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 2": {"zero_optimization": {"stage": 2}},
    "bf16": {"bf16": {"enabled": True}},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_Checkpoint_WrittenByOne_LoadsInTheOther(ranks2: Ranks, tmp_path: Path, kind: str) -> None:
    old_host_fails(LOADING)
    layers = [{"k": 2}, {"ep_size": 1, "expert": "tuple"}]
    contents = {}
    for writer in ("stock", "sluice"):
        answers = ranks2.run(
            "cases_traps:checkpoint",
            folder=str(tmp_path / writer),
            writer=writer,
            layers=layers,
            config=CHECKPOINTS[kind],
        )
        for losses, _ in answers:
            assert losses["sluice"] == pytest.approx(losses["stock"], rel=0.02 if kind == "bf16" else 1e-5)
        contents[writer] = answers[0][1]
    assert contents["stock"] == contents["sluice"]  # both write the same files, keys, shapes and dtypes
    assert any("expert_3" in file for file in contents["stock"])
    states = [keys for file, keys in contents["stock"].items() if "optim_states" in file]
    assert states and all(any("exp_avg" in key for key in keys) for keys in states), contents["stock"].keys()


def test_Copies_OfASwappedLayer_AreTheHosts(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:copies_are_stock")


@pytest.mark.parametrize("section", [None, {"enabled": True, "prof_all": True}], ids=["by a call", "by ds_config"])
def test_CommsLogger_On_GetsRecords(ranks2: Ranks, section: dict[str, Any] | None) -> None:
    for records in ranks2.run("cases_traps:comms_records", section=section):
        assert records["sluice_forward"] == 1 and records["sluice_backward"] == 1


def test_Trace_TwoRanks_OpensInPerfetto(ranks2: Ranks, tmp_path: Path) -> None:
    for lanes in ranks2.run("cases_traps:trace_and_stats", folder=str(tmp_path)):
        assert lanes == ["comm", "compute"]
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert any(event["ph"] == "X" and event["dur"] >= 0 for event in events)


def test_Stats_OfAnEngineWithoutSluice_SaysWhatItIsAndWhy(ranks2: Ranks) -> None:
    wanted = [
        'DeepSpeedEngine does not run on Sluice: it holds 1 MoE layer of DeepSpeed\'s; its "sluice" section was off',
        "DeepSpeedEngine does not run on Sluice: it holds 1 MoE layer of DeepSpeed's; its ds_config has no section",
        "DeepSpeedEngine does not run on Sluice: it holds 2 MoE layers of DeepSpeed's; engine.sluice.unswap() has",
        "DeepSpeedEngine does not run on Sluice: it holds 1 MoE layer of DeepSpeed's; MoE layer 'moes.0': a reason",
        "Model does not run on Sluice: it holds 1 MoE layer of DeepSpeed's; Sluice takes over layers in deepspeed.init",
        "Linear does not run on Sluice: it holds no MoE layer that Sluice knows",
    ]
    for said in ranks2.run("cases_traps:asked_without_sluice"):
        assert [found[: len(begin)] for found, begin in zip(said, wanted)] == wanted


def test_Engines_SeveralOnTheSameRanks_LiveAndEndAlone(ranks2: Ranks) -> None:
    ranks2.run("cases_traps:second_engine_on_the_same_ranks")


@pytest.mark.parametrize("expert, before", [("relu", False), ("gated", True)])
def test_Trap05_AdaptersOnExperts_EachState_AsTheModules(ranks2: Ranks, expert: str, before: bool) -> None:
    ranks2.run("cases_traps:adapters_on_experts", expert=expert, before=before)
