# SPDX-License-Identifier: Apache-2.0
"""Compares `DistributedConfig(ep_implementation="sluice")` on two ranks with the unsplit model."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import torch
import torch.distributed as dist
from rank_harness import Ranks
from tf_compare import Rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import apply_expert_parallelism

MODEL, HIDDEN, EXPERTS, TOP_K = 37, 29, 6, 3
# The tokens of the first ranks, and whether only the first rank's experts are chosen.
CASES = (((23, 17), False), ((0, 9), False), ((12, 5), True), ((0, 0), False), ((1, 300), False))


class _Block(torch.nn.Module):
    """The unit that transformers' plan splits: a module with `experts`."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts


def share_out(whole: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy whose experts are split over the ranks; each rank has its own batch."""
    block = _Block(copy.deepcopy(whole))
    stacked = [name for name, _ in whole.named_parameters(recurse=False)]
    plan = {f"experts.{name}": "grouped_gemm" for name in stacked} | {"experts": "ep_dispatch_experts"}
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, "sluice")
    return block.experts


def _rows_of_each(case: int) -> list[Rows]:
    """Returns the rows of every rank; all tokens of a case also choose expert 0, so that some choose it twice."""
    counts, first_alone = CASES[case]
    found = []
    for rank in range(dist.get_world_size()):
        tokens = counts[rank] if rank < len(counts) else 4
        given = tf_compare.rows(MODEL, EXPERTS, tokens, TOP_K, seed=10 * case + rank, hot=True)
        if first_alone:
            given.ids.remainder_(EXPERTS // dist.get_world_size())
        found.append(given)
    return found


def _joined(each: list[Rows]) -> Rows:
    return Rows(*(torch.cat([getattr(given, name) for given in each]) for name in ("tokens", "ids", "weights", "grad")))


def _whole_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the whole gradient. Collective. For a parameter that is no DTensor it is the sum over ranks."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    dist.all_reduce(grad)
    return grad


def family(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the worst gap of every case to eager in f64 over all ranks' rows, and what computed the experts."""
    sluice.configure(**options)
    try:
        whole = tf_families.make(kind, MODEL, HIDDEN, EXPERTS)
        experts = share_out(whole)
        gaps = []
        for case in range(len(CASES)):
            each = _rows_of_each(case)
            wanted = tf_compare.reference(whole, _joined(each), torch.float32)
            mine = each[dist.get_rank()]
            start = sum(given.tokens.shape[0] for given in each[: dist.get_rank()])
            for name in ("output", "tokens", "weights"):
                wanted[name] = wanted[name][start : start + mine.tokens.shape[0]]
            found = tf_compare.run(experts, mine, torch.float32)
            with torch.no_grad():
                found["without gradients"] = experts(mine.tokens, mine.ids, mine.weights)
            wanted["without gradients"] = wanted["output"]
            for name, parameter in experts.named_parameters():
                found[name] = _whole_gradient(parameter)
            gaps.append(max(tf_compare.gaps(found, wanted).values()))
        return {"gaps": gaps, "computed_by": sluice.stats(experts)["layers"][0]["computed_by"]}
    finally:
        sluice.configure()


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
    for rank, found in enumerate(ranks.run("test_tf_parallel:family", kind=kind, options=options)):
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
