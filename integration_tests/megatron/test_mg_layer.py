# SPDX-License-Identifier: Apache-2.0
"""Tests single layers of Megatron on Sluice: specs, errors, hooks, failures, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mg_ranks import MegatronRanks
from test_mg_training import LOSS, NORM, WEIGHT, check_as_stock


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


def test_ExpertsOfAnotherClass_AreRefusedByNameOrLeft(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:refused_experts", policy="error"):
        assert "experts are a _OtherExperts" in found["error"] and '"on_unsupported": "warn"' in found["error"], found
    for rank, found in enumerate(ranks2.run("mg_cases:refused_experts", policy="warn")):
        assert found["kept"] == [True, True]
        assert ("stays with Megatron: its experts are a _OtherExperts" in found["said"]) == (rank == 0)


def test_OneRankFails_BothAreToldAndGoOn(ranks2: MegatronRanks) -> None:
    zero, one = ranks2.run("mg_cases:one_rank_fails")
    assert "PeerRefused" in zero["told"] and one["told"], (zero, one)
    assert zero["finite"] and one["finite"]


def test_HookOnAnExpert_RunsAndChangesNothing(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:hooked_expert"):
        assert found["rows"] > 0 and found["gap"] < 1e-6 and found["computed_by"] == "host modules", found


def test_LinearsReplacedByAdapters_AfterTheModelIsBuilt_RunAsModulesAndSaySo(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:replaced_linears"):
        assert found["computed_by"] == "host modules" and found["changed"] > 1e-3 and found["gradients"], found
        assert len(found["said"]) == 1 and "linear_fc1 is a _Adapted, not ColumnParallelLinear" in found["said"][0]


def test_TokensOfDifferentNumber_ExpertsWithoutAnyHaveGradients(ranks2: MegatronRanks) -> None:
    zero, one = ranks2.run("mg_cases:few_tokens")
    assert zero["shape"] == [6, 1, 32] and one["shape"] == [1, 1, 32]
    assert len(zero["grads"]) == len(one["grads"]) == 4 and max(zero["grads"] + one["grads"]) > 0


def test_FrozenParameters_OfALayer_TheOthersHaveTheirGradients(ranks2: MegatronRanks) -> None:
    assert ranks2.run("mg_cases:frozen_parameters") == [[], []]


def test_BackwardDw_AfterBackward_ChangesNothing(ranks2: MegatronRanks) -> None:
    for found in ranks2.run("mg_cases:delayed_weight_gradients"):
        assert found["count"] == 4 and found["same"]


@pytest.mark.parametrize("saved_by, loaded_by", [("stock", "decorated"), ("decorated", "stock")])
def test_Checkpoint_SavedByOne_LoadedByTheOther_GoesOn(
    ranks2: MegatronRanks, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    found = ranks2.run("mg_cases:checkpoint", folder=str(tmp_path), saved_by=saved_by, loaded_by=loaded_by)
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


def test_Checkpoint_Keys_AreThoseOfStock(ranks2: MegatronRanks) -> None:
    for stock, mine in ranks2.run("mg_cases:checkpoint_keys"):
        assert stock == mine and any("mlp.experts.experts.linear_fc1.weight" in key for _, key, _, _ in mine)


def test_RankDies_TheOtherIsToldWho(fresh2: MegatronRanks) -> None:
    zero, one = fresh2.try_run("mg_cases:rank_dies", dying=(1,))
    assert one == {"died": True}
    assert "PeerLost" in zero["result"] and "rank 1" in zero["result"], zero


def test_OptionsThatDiffer_AreAnErrorOnBothRanks(ranks2: MegatronRanks) -> None:
    for said in ranks2.run("mg_cases:options_differ"):
        assert said.startswith("DisagreementError") and '"chunks" is 2 on rank 0 and 3 on rank 1' in said


def test_OneRankSwitchedOff_IsNamedAtTheDeadline(fresh2: MegatronRanks) -> None:
    zero, one = fresh2.run("mg_cases:one_switched_off")
    assert "rank 1 did not enable Sluice" in zero and one == "nothing was raised"


def test_Checkpoint_OtherSizeOfExpertParallelism_LoadsAsStock(oldest4: MegatronRanks, tmp_path: Path) -> None:
    for losses in oldest4.run("mg_cases:resharded", folder=str(tmp_path)):
        assert len(losses) == 4 and max(losses.values()) - min(losses.values()) <= LOSS, losses
