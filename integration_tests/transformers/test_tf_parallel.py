# SPDX-License-Identifier: Apache-2.0
"""Compares `DistributedConfig(ep_implementation="sluice")` on two ranks with the unsplit model."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks

LAYOUTS = {"tp": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}}


# Implementations of experts and transports: "model, experts, transport, layout".
ALL_REDUCE = "all_reduce"  # marks routes to the other rank's experts
ALL_TO_ALL = "all_to_all"  # calls with K = 1 and constant weights
TRAINED = [
    *itertools.product(("qwen3_moe", "gpt_oss"), ("sluice", "grouped_mm", "eager"), ("sluice",), LAYOUTS),
    *itertools.product(("mixtral", "deepseek_v3"), ("sluice",), ("sluice",), LAYOUTS),
    *itertools.product(("qwen3_moe", "gpt_oss"), ("sluice",), (ALL_REDUCE, ALL_TO_ALL, "auto"), ("tp",)),
    *itertools.product(("qwen3_moe", "gpt_oss"), ("sluice",), (ALL_TO_ALL, "auto"), ("fsdp2",)),
    *itertools.product(("qwen3_moe",), ("batched_mm",), ("sluice",), LAYOUTS),
]
CUDA_ALONE = ('experts_implementation="{}" cannot compute the rows of one expert', 'or ep_implementation="all_to_all"')
MEGA = "deepgemm_megamoe"  # refuses ranks that do not share a batch
REFUSED = {  # with words of the error
    ("sluice", ALL_REDUCE, "fsdp2"): ("AllReduceEP needs every rank of the expert group to hold the same batch",),
    ("sluice", MEGA, "tp"): ('ep_implementation="deepgemm_megamoe" runs with', 'set ep_implementation="sluice" or'),
    ("deepgemm", "sluice", "tp"): CUDA_ALONE,
    ("deepgemm", "sluice", "fsdp2"): CUDA_ALONE,
    ("sonicmoe", "sluice", "tp"): CUDA_ALONE,
    (MEGA, "sluice", "tp"): ("ep_implementation='sluice'", 'with `ep_implementation="auto"` or'),
    ("sluice", "no_such", "tp"): ("ep_implementation='no_such'", "use one of", "'sluice'"),
}


def _compared(ranks: Ranks, saved: Any, kind: str, experts: str, transport: str, layout: dict[str, int]) -> list[Any]:
    case = {"kind": kind, "path": saved(kind), "experts": experts, "transport": transport, "layout": layout}
    return ranks.run("tf_ep_jobs:compared", **case)


@pytest.mark.parametrize("mixture", TRAINED, ids="-".join)
def test_TwoRanks_EachMixtureOfNames_AsUnsplit(ranks: Ranks, saved: Any, mixture: tuple[str, ...]) -> None:
    *names, layout = mixture
    for found in _compared(ranks, saved, *names, LAYOUTS[layout]):
        assert found["said"] == "" and found["gap"] < 2e-5, found


@pytest.mark.parametrize("mixture", REFUSED, ids="-".join)
def test_TwoRanks_EachMixtureThatCannot_IsRefusedByName(ranks: Ranks, saved: Any, mixture: tuple[str, ...]) -> None:
    experts, transport, layout = mixture
    for found in _compared(ranks, saved, "qwen3_moe", experts, transport, LAYOUTS[layout]):
        assert all(text.format(experts) in found["said"] for text in REFUSED[mixture]), found


def _check_adapted(found: dict[str, Any], world: int) -> None:
    assert max(found["gaps"].values()) < 1e-4, max(found["gaps"].items(), key=lambda item: item[1])
    assert found["frozen"] and any("experts" in name for name in found["gaps"])
    assert set(found["started"].values()) == {0.0}, found["started"]
    assert found["owned"] == sorted(name for name in found["started"] if "experts" in name)
    assert found["shares"] == [1 / world]


@pytest.mark.parametrize("moved", [False, True], ids=["at home", "moved"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_TwoRanks_LoraOnExperts_AsUnsplitPeft(ranks: Ranks, saved: Any, kind: str, moved: bool) -> None:
    """Each rank has A and B of its own experts; gradients of the others are averaged, as Trainer does."""
    for found in ranks.run("tf_ep_jobs:adapted", kind=kind, path=saved(kind), layout=LAYOUTS["fsdp2"], moved=moved):
        _check_adapted(found, 2)


def _check_trained(found: dict[str, Any]) -> None:
    for mine, theirs in (found["losses"], found["norms"]):
        assert len(mine) == 6 and mine == pytest.approx(theirs, rel=1e-4)
    assert min(found["norms"][1]) > 0.1, "nothing was clipped"
    assert max(found["trained"].values()) < 1e-5, found["trained"]
    for values in (found["saved"], *found["loaded"]):
        assert set(values.values()) == {0.0}, values
    assert found["owned"] == [8, 8, 8]
    of_attention, of_experts = found["sizes"]
    assert set(of_attention) <= set(found["reduced"]) and not set(of_experts) & set(found["reduced"]), found["reduced"]
    assert max(found["reduced"]) <= max(of_attention), found["reduced"]


@pytest.mark.parametrize("world", [2, 4])
def test_Ranks_TrainerWithLoraOnExperts_AsOneProcess(
    ranks: Ranks, four_ranks: Ranks, saved: Any, tmp_path: Path, world: int
) -> None:
    """The adapter is trained, clipped, saved by stock PEFT and loaded; A and B of experts are never all-reduced."""
    case = {"path": saved("qwen3_moe"), "folder": str(tmp_path)}
    group = ranks if world == 2 else four_ranks
    for found in group.run("tf_ep_jobs:trainer_adapted", deadline=400, **case):
        _check_trained(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_Compiled_AsWithout(ranks: Ranks, saved: Any, layout: str) -> None:
    for found in ranks.run("tf_ep_jobs:compiled", path=saved("mixtral"), layout=LAYOUTS[layout]):
        assert found["worst"] < 2e-6, found
        assert found["passes"] >= 2 * 2, found  # layers, directions; and those before it
        assert any("Sluice's experts are a call into a C library" in reason for reason in found["breaks"]), found


# One family for each layout of the tensors and each kind of gate.
FAMILIES = {
    "mixtral": "sluice",
    "beam": "sluice",
    "aria": "sluice",
    "openai_privacy_filter": "sluice",
    "gpt_oss": "sluice",
    "nemotron_h": "sluice",
    "minimax_m3_vl": "sluice",
    "inkling2": "the module's own functions",
    "muse_spark": "the module's own functions",
}


@pytest.mark.parametrize("options", [{}, {"deduplicate": True, "chunks": 2}], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_TwoRanks_EachFamily_AsEagerOnAllRows(ranks: Ranks, kind: str, options: dict[str, Any]) -> None:
    """Cases include a rank without tokens, no tokens at all, and a rank whose experts get no row. Outputs without
    gradients are compared, too."""
    for rank, found in enumerate(ranks.run("tf_ep_families:family", kind=kind, options=options)):
        assert found["computed_by"] == FAMILIES[kind]
        assert len(found["gaps"]) == 5 and max(found["gaps"]) < 2e-5, (rank, found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_MicroSteps_AddToTheDTensorsOwnGradients(ranks: Ranks, saved: Any, layout: str) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout]}
    for found in ranks.run("tf_ep_jobs:accumulated", **case):
        assert found["worst"] < 2e-6, found
        assert found["passes"] == 2, found  # two layers, in the second micro-step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_Generation_TokensOfTheWholeModel(ranks: Ranks, saved: Any, layout: str) -> None:
    """With a batch for each rank, one rank generates its last token when the other still has nine to generate."""
    found = ranks.run("tf_ep_jobs:generation", kind="qwen3_moe", path=saved("qwen3_moe"), layout=LAYOUTS[layout])
    assert [each["new"] for each in found] == ([12, 12] if layout == "tp" else [3, 12])
    for each in found:
        assert each["split"] == each["whole"], each


def check_trainer(stock: dict[str, Any], mine: dict[str, Any]) -> None:
    """Compares two results of tf_ep_jobs.trainer."""
    assert stock["passes"] == 0 and mine["passes"] > 0
    assert len(mine["losses"]) == 4 and mine["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert len(mine["evaluated"]) == 2 and mine["evaluated"] == pytest.approx(stock["evaluated"], rel=1e-4)
    assert mine["evaluated"][0] != mine["evaluated"][1], "nothing was learnt"
    assert mine["mine"] == pytest.approx(stock["mine"], rel=1e-4)
    assert mine["saved"] == pytest.approx(mine["mine"], rel=1e-5)


def test_TwoRanks_Trainer_LossesOfAllToAllAndWholeWhenSaved(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    """Each rank has its own batch: on a CPU, accelerate refuses a model that is split by tensor parallelism."""
    found = {}
    for experts, transport in (("grouped_mm", "all_to_all"), ("sluice", "sluice")):
        case = {"path": saved("qwen3_moe"), "layout": LAYOUTS["fsdp2"], "folder": str(tmp_path / transport)}
        found[transport] = ranks.run("tf_ep_jobs:trainer", experts=experts, transport=transport, **case)
    for stock, mine in zip(found["all_to_all"], found["sluice"]):
        check_trainer(stock, mine)


# ep_size 2: two groups of ranks have all experts each, and FSDP also shards their parameters.
MIXED = {
    "tp 2, fsdp 2": {"tp_size": 2, "fsdp_size": 2},
    "tp 2, fsdp 2, ep 2": {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},
    "fsdp 4, ep 2": {"fsdp_size": 4, "ep_size": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("layout", MIXED)
@pytest.mark.parametrize("experts", ["sluice", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_FourRanks_Mixed_AsUnsplit(four_ranks: Ranks, saved: Any, kind: str, experts: str, layout: str) -> None:
    for found in _compared(four_ranks, saved, kind, experts, "sluice", MIXED[layout]):
        assert found["said"] == "" and found["gap"] < 2e-5, found


def test_TwoRanks_TransportNamedByAModel_IsRefused(ranks: Ranks, saved: Any) -> None:
    for said in ranks.run("tf_ep_jobs:of_a_stranger", path=saved("qwen3_moe")):
        assert said.startswith("ConfigError") and '"transport"' in said and '"timeout"' in said, said
        assert "the model's own config" in said and "sluice.configure(transport=..., timeout=...)" in said, said
