# SPDX-License-Identifier: Apache-2.0
"""Tests single layers of Megatron on Sluice: specs, errors, hooks, checkpoints. All ranks report a deviation of one
rank, with its number, and continue if possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mg_ranks import MegatronRanks
from test_mg_training import LOSS, NORM, WEIGHT, check_as_stock

SOON = 60.0  # seconds: far below the timeout of the groups


def test_NamedSpec_SomeLayersWithExperts_OptionsFromTheEnvironment(ranks2: MegatronRanks, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"gemm": "host", "chunks": 2}))
    path.chmod(0o600)
    for text in (str(path), path.read_text()):
        found = ranks2.run("mg_cases:train_named", text=text)
        check_as_stock(found)
        assert all(each["kinds"] == ["SluiceMoELayer", "MLP", "SluiceMoELayer"] for each in found)
        assert all(each["chunks"] == [2, 2] for each in found)


def test_WithSluice_EachFormOfSpec_HasItsLayersAndLeavesTheSpec(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:forms_of_specs"):
        assert "has no MoE layer" in found.pop("dense")
        assert found == {"block": 2, "layer": 1, "mlp": 1, "function": 2, "before": 0}


MOE = {"num_chunks": 2, "restore_input": "redispatch", "restore_pre_activation": "recompute", "wgrad": "per_chunk"}
KEPT = {"num_chunks": 1, "restore_input": "keep", "restore_pre_activation": "keep", "wgrad": "deferred"}


def written(path: Path, *moes: dict[str, object] | None, **changes: object) -> str:
    """Writes the part of `sluice plan --stages --json` for such layers that Megatron reads."""
    layers = [{"kind": "keep" if moe is None else "mixed", "moe": moe and {**moe, "tokens": 32}} for moe in moes]
    path.write_text(json.dumps({"form": 1, "fits": True, "layers": layers, **changes}))
    return str(path)


def test_WithSluice_PlanOfTheModel_GivesEachMoeLayerItsOwn(ranks2: MegatronRanks, tmp_path: Path) -> None:
    path = written(tmp_path / "plan.json", None, MOE, None, None, KEPT)  # attention and experts apart
    found = ranks2.run("mg_cases:under_a_plan", path=path)
    check_as_stock(found)
    for each in found:
        assert each["plans"] == ["n 2, S4, weight gradients per chunk", "n 1, none, weight gradients deferred"]
        assert each["chunks"] in (1, 2)


def test_WithSluice_PlanThatDoesNotFit_IsRefusedOnAllRanks(ranks2: MegatronRanks, tmp_path: Path) -> None:
    good = written(tmp_path / "good.json", MOE, None, KEPT)
    other = written(tmp_path / "other.json", KEPT, None, KEPT)
    short = written(tmp_path / "short.json", MOE, None)
    again = written(tmp_path / "again.json", MOE, None, KEPT)
    data = json.loads(Path(again).read_text())
    data["layers"][1]["kind"] = "recompute"
    Path(again).write_text(json.dumps(data))
    for said in ranks2.run("mg_cases:refused_plan", paths=[good, other]):
        assert 'Sluice\'s options differ: "plan" is' in said, said
    for said in ranks2.run("mg_cases:refused_plan", paths=[short]):
        assert "the plan has 1 MoE layers, and the model 2: plan this model" in said, said
    for said in ranks2.run("mg_cases:refused_plan", paths=[again]):
        assert "layers[1].kind is 'recompute': a layer without a moe is kept here" in said, said
    for said in ranks2.run("mg_cases:refused_plan", paths=[good], memory_budget="1GiB"):
        assert "plan and memory_budget are both given" in said, said


def test_SwitchedOff_DecoratedSpec_IsStockToTheBit(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:switched_off"):
        assert found["kept"] == [True, True] and found["found"] == found["stock"]


def test_HookOnAnExpert_RunsAndChangesNothing(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:hooked_expert"):
        assert found["rows"] > 0 and found["gap"] < 1e-6 and found["computed_by"] == "host modules", found


def test_LinearsReplacedByAdapters_AfterTheModelIsBuilt_RunAsModulesAndSaySo(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:replaced_linears"):
        assert found["computed_by"] == "host modules" and found["changed"] > 1e-3 and found["gradients"], found
        assert len(found["said"]) == 1 and "linear_fc1 is a _Adapted, not ColumnParallelLinear" in found["said"][0]


def test_FrozenParameters_OfALayer_TheOthersHaveTheirGradientsWithTokensOrWithout(ranks2: MegatronRanks) -> None:
    assert ranks2.run("mg_cases:frozen_parameters") == [[], []]


def test_Checkpoint_OfStock_LoadedBySluice_GoesOn(ranks2: MegatronRanks, tmp_path: Path) -> None:
    """The other direction, with experts that have moved: test_mg_moves.py."""
    found = ranks2.run("mg_cases:checkpoint", folder=str(tmp_path))
    for each in found:
        assert each["resumed"]["losses"] == pytest.approx(each["whole"]["losses"], abs=LOSS), each
        assert each["resumed"]["norms"] == pytest.approx(each["whole"]["norms"], rel=NORM), each
        assert each["gap"] <= WEIGHT, each


def test_Checkpoint_OfTheDistributedOptimizer_IsThatOfStock(ranks2: MegatronRanks, tmp_path: Path) -> None:
    """The result of loading is that of stock, also where stock fails."""
    for found in ranks2.run("mg_cases:distributed_checkpoints", folder=str(tmp_path)):
        assert found["different"] == [] and found["gap"] <= WEIGHT, found
        assert any("exp_avg_sq" in name and "linear_fc1" in name for name in found["names"]), found
        assert found["said"][0] == found["said"][1], found


def test_OneRankSwitchedOff_IsNamedAtTheDeadline(fresh2: MegatronRanks) -> None:
    zero, one = fresh2.run("mg_cases:one_switched_off")
    assert "rank 1 did not enable Sluice" in zero and one == ""


def test_Checkpoint_OtherSizeOfExpertParallelism_LoadsAsStock(oldest4: MegatronRanks, tmp_path: Path) -> None:
    for losses in oldest4.run("mg_cases:resharded", folder=str(tmp_path)):
        assert len(losses) == 4 and max(losses.values()) - min(losses.values()) <= LOSS, losses


# ---- one rank deviates ----


@pytest.mark.parametrize("changes", [{}, {"moe_shared_expert_intermediate_size": 40}], ids=["plain", "shared experts"])
def test_BadInput_OfOneRank_BothAreToldAndGoOn(ranks2: MegatronRanks, changes: dict[str, int]) -> None:
    """Shared experts are computed first; their failure is reported, too."""
    zero, one = ranks2.run("mg_cases:bad_input", **changes)
    assert "PeerRefused" in zero["said"] and "rank 1" in zero["said"] and "36" in zero["said"], zero
    assert "36" in one["said"] and zero["finite"] and one["finite"], one


def test_ExpertThatRaises_OnOneRank_TheNextCallTellsTheOther(oldest2: MegatronRanks) -> None:
    """Rows are in flight by then, and the exchanges of the pass continue."""
    zero, one = oldest2.run("mg_cases:expert_raises")
    assert zero["said"][0] == "" and "rank 1" in zero["said"][1], zero
    assert "the hook's own words" in one["said"][0] and "an earlier pass failed" in one["said"][1], one
    assert zero["finite"] and one["finite"]


def test_ModelsThatDiffer_AreAnErrorOnBothRanks(oldest2: MegatronRanks) -> None:
    for said in oldest2.run("mg_cases:models_differ"):
        assert said.startswith("DisagreementError") and '"hidden_width" is 48 on rank 0 and 56 on rank 1' in said, said


UNSUPPORTED = {
    "mg_cases:other_experts": "experts are a _OtherExperts",  # on rank 1 alone
    "mg_cases:split_experts": "split over 2 tensor-parallel ranks: set expert_tensor_parallel_size to 1",
}


@pytest.mark.parametrize("job", UNSUPPORTED)
def test_UnsupportedExperts_AllRanksRefuseThemByNameOrLeaveThemToTheHost(ranks2: MegatronRanks, job: str) -> None:
    reason, is_of_one = UNSUPPORTED[job], "other" in job
    for found in ranks2.run(job, policy="error"):
        assert reason in found["said"] and '"on_unsupported": "warn"' in found["said"] and found["kept"] == [], found
        assert ("(on rank 1)" in found["said"]) == is_of_one, found
    for rank, found in enumerate(ranks2.run(job, policy="warn")):
        assert found["said"] == "" and found["kept"] == [True, True]
        assert (reason in found["printed"]) == (rank == 0), found


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.full), "backward"])
def test_RankKilledInAStep_TheOthersLoopNamesItSoon(fresh2: MegatronRanks, where: str) -> None:
    survivor, dead = fresh2.try_run("mg_cases:dies_in_training", dying=(1,), where=where)
    assert dead == {"died": True}
    found = survivor["result"]
    assert "PeerLost" in found["said"] and "rank 0 lost rank 1" in found["said"] and found["s"] < SOON, found
