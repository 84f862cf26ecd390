# SPDX-License-Identifier: Apache-2.0
"""Tests the numbered traps of a DeepSpeed adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_release import CAPACITY, FLOAT_MASK, LOADING, old_host_fails
from rank_harness import Ranks
from test_ds_parity import F32, compare

# Functions of cases_traps that assert on the ranks.
ASSERTING = [
    *("pointers_are_read_afresh", "hooked_expert_runs_whole", "host_collectives_in_between", "no_grad_saves_nothing"),
    *("copies_are_stock", "second_engine_on_the_same_ranks"),
]


@pytest.mark.parametrize("trap", ASSERTING)
def test_Trap_ByName_RanksAssert(ranks2: Ranks, trap: str) -> None:
    ranks2.run(f"cases_traps:{trap}")


@pytest.mark.parametrize("stage", [1, 2])
def test_Trap01_ExpertIdleOnOneRankAndBusyOnItsPeerUnderZero_AsStock(ranks4: Ranks, stage: int) -> None:
    old_host_fails(CAPACITY)
    answers = ranks4.run("cases_parity:idle_here_busy_there", stage=stage)
    for rank, (stock, swapped) in enumerate(answers):
        for counts in stock["counts"] + swapped["counts"]:
            used = [number for number, rows in enumerate(counts[0]) if rows]
            assert used == [0 if rank < 2 else 1], (rank, counts)
    compare(answers, F32)


@pytest.mark.parametrize("layers", [[{}, {"expert": "tuple"}], [{"use_residual": True}, {"ep_size": 1}]])
def test_Trap03_SwapAndUnswap_AddAndReplaceNothing(ranks2: Ranks, layers: list[Any]) -> None:
    ranks2.run("cases_traps:nothing_is_added_or_replaced", layers=layers)


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


F64 = [["PeerRefused", "rank 1", "float64"], ["UnsupportedError", "torch.float64"]]
WIDTH = [["PeerRefused", "rank 1", "width 20"], ["ValueError", "width 20, the layer 16"]]
NO_S2 = "policy S2 is not possible"
CONTAINER = "the container of its experts"
# What a rank does wrong, and the words that each rank is told. With "warn" there are no errors.
ERRS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "hook on one rank": (
        {"how": "hook on an expert", "bad": 0, "options": {"k": 2}},
        [["Mismatch", "hooked or changed after the swap"], ["Mismatch", "rank 0"]],
    ),
    "hook under a policy": (
        {"how": "hook on an expert", "section": {"policy": "S2"}},
        [["PeerRefused", NO_S2], ["UnsupportedError", NO_S2]],
    ),
    "hook on the container": (
        {"how": "hook on the container"},
        [["PeerRefused", CONTAINER], ["UnsupportedError", "put the hooks on the layer or the experts"]],
    ),
    "hook on the container, warn": (
        {"how": "hook on the container", "section": {"on_unsupported": "warn"}},
        [[], ["sluice: ", CONTAINER]],
    ),
    "other width": ({"how": "other width"}, WIDTH),
    # A timer that was not stopped would make every later forward fail.
    "other width under timers": ({"how": "other width", "wall_clock_breakdown": True}, WIDTH),
    "other width in the second group": (
        {"how": "other width", "bad": 3},
        [[], [], ["PeerRefused", "rank 1", "the group of global ranks 2, 3"], ["ValueError", "'moes.0.deepspeed_moe'"]],
    ),
    "experts in f64": ({"how": "experts in f64"}, F64),
    "experts in f64 at first": ({"how": "experts in f64", "first_call": True}, F64),
}


def check_told(told: list[str], words: list[list[str]]) -> None:
    """Checks what the ranks were told: it begins with the first word, and has the others. No words: nothing."""
    for text, wanted in zip(told, words, strict=True):
        assert text.startswith(wanted[0]) and all(word in text for word in wanted) if wanted else text == "", told


@pytest.mark.parametrize("case", ERRS)
def test_Trap11_RankErrs_OthersLearnAndGoOn(ranks2: Ranks, ranks4: Ranks, case: str) -> None:
    job, words = ERRS[case]
    check_told((ranks4 if len(words) == 4 else ranks2).run("cases_traps:rank_errs", **job), words)


def test_Trap13_Autocast_NoCopyOfAParameterOutlivesTheCall(ranks2: Ranks) -> None:
    assert ranks2.run("cases_traps:autocast_keeps_no_copy") == [["torch.float32"]] * 2


def test_Trap15_Banner_OnceOnRankZero_AndTheTraceOpensInPerfetto(fresh2: Ranks, tmp_path: Path) -> None:
    assert fresh2.run("cases_traps:trace_and_stats", folder=str(tmp_path)) == [["comm", "compute"]] * 2
    banners = [fresh2.output(rank).count("MoE layers run on Sluice") for rank in range(2)]
    assert banners == [1, 0]
    assert "1 of 1 MoE layers run on Sluice: 1 fused in C" in fresh2.output(0)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert any(event["ph"] == "X" and event["dur"] >= 0 for event in events)


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
    job = {"layers": [{"k": 2}, {"ep_size": 1, "expert": "tuple"}], "config": CHECKPOINTS[kind]}
    contents = cross_loaded(ranks2, "cases_traps:checkpoint", tmp_path, kind == "bf16", **job)
    assert any("expert_3" in file for file in contents)
    states = [keys for file, keys in contents.items() if "optim_states" in file]
    assert states and all(any("exp_avg" in key for key in keys) for keys in states), contents.keys()


def cross_loaded(ranks: Ranks, target: str, folder: Path, is_rounded: bool, **job: Any) -> dict[str, list[str]]:
    """Makes stock load a checkpoint of Sluice and the reverse. Returns the contents of the files, by file."""
    contents = {}
    for writer in ("stock", "sluice"):
        answers = ranks.run(target, folder=str(folder / writer), writer=writer, **job)
        for losses, _ in answers:
            assert losses["sluice"] == pytest.approx(losses["stock"], rel=0.02 if is_rounded else 1e-5)
        contents[writer] = answers[0][1]
    assert contents["stock"] == contents["sluice"]  # both write the same files, keys, shapes and dtypes
    return contents["stock"]


@pytest.mark.parametrize("section", [None, {"enabled": True, "prof_all": True}], ids=["by a call", "by ds_config"])
def test_CommsLogger_On_GetsRecords(ranks2: Ranks, section: dict[str, Any] | None) -> None:
    for records in ranks2.run("cases_traps:comms_records", section=section):
        assert records["sluice_forward"] == 1 and records["sluice_backward"] == 1


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


@pytest.mark.parametrize("expert, before", [("relu", False), ("gated", True)])
def test_Trap05_AdaptersOnExperts_EachState_AsTheModules(ranks2: Ranks, expert: str, before: bool) -> None:
    ranks2.run("cases_traps:adapters_on_experts", expert=expert, before=before)
