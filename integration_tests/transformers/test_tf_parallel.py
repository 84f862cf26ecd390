# SPDX-License-Identifier: Apache-2.0
"""Compares `DistributedConfig(ep_implementation="sluice")` on two ranks with the unsplit model."""

from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent
LAYOUTS = {"tp": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", ["sluice", "grouped_mm", "eager"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_TwoRanks_EachLayoutAndExperts_AsUnsplit(
    ranks: Ranks, saved: Any, kind: str, experts: str, layout: str
) -> None:
    found = ranks.run("tf_models:ep_step", kind=kind, path=saved(kind), experts=experts, layout=LAYOUTS[layout])
    for rank, worst in enumerate(found):
        for name, gap in worst.items():
            assert gap < 2e-5, (rank, name, gap)


@pytest.mark.parametrize(
    "transport, layout", [("all_reduce", "tp"), ("all_to_all", "tp"), ("all_to_all", "fsdp2"), ("auto", "tp")]
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_TwoRanks_SluicesExpertsUnderStockTransports_AsUnsplit(
    ranks: Ranks, saved: Any, kind: str, transport: str, layout: str
) -> None:
    """all_reduce marks routes to the other rank's experts; all_to_all calls with K = 1 and constant weights."""
    case = {"kind": kind, "path": saved(kind), "experts": "sluice", "transport": transport, "layout": LAYOUTS[layout]}
    for rank, worst in enumerate(ranks.run("tf_models:ep_step", **case)):
        for name, gap in worst.items():
            assert gap < 2e-5, (rank, name, gap)


# Pairs of implementations of transformers 5.23 that no test above covers, with the layout if it is not "tp". (): trains
# like the unsplit model; otherwise: words of the error.
CUDA_ALONE = ('experts_implementation="{}" cannot compute the rows of one expert', 'or ep_implementation="all_to_all"')
MIXTURES = {
    "batched_mm sluice": (),
    "batched_mm sluice fsdp2": (),
    "sluice auto fsdp2": (),
    "sluice all_reduce fsdp2": ("AllReduceEP needs every rank of the expert group to hold the same batch",),
    "sluice deepgemm_megamoe": ('ep_implementation="deepgemm_megamoe" runs with', 'set ep_implementation="sluice" or'),
    "deepgemm sluice": CUDA_ALONE,
    "deepgemm sluice fsdp2": CUDA_ALONE,
    "sonicmoe sluice": CUDA_ALONE,
    "deepgemm_megamoe sluice": ("ep_implementation='sluice'", 'with `ep_implementation="auto"` or'),
    "sluice no_such": ("ep_implementation='no_such'", "use one of", "'sluice'"),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_TwoRanks_EachMixtureOfNames_AsUnsplitOrRefusedByName(ranks: Ranks, saved: Any, mixture: str) -> None:
    """deepgemm_megamoe refuses ranks that do not share a batch."""
    experts, transport, *layout = mixture.split()
    case = {"kind": "qwen3_moe", "path": saved("qwen3_moe"), "experts": experts, "transport": transport}
    for found in ranks.run("tf_ep_jobs:mixed", config=LAYOUTS[layout[0] if layout else "tp"], **case):
        if MIXTURES[mixture]:
            assert all(text.format(experts) in found["said"] for text in MIXTURES[mixture]), found
        else:
            assert found["said"] == "" and found["gap"] < 2e-5, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_SaveAfterLoad_SameBits(ranks: Ranks, saved: Any, tmp_path: Path, layout: str) -> None:
    kind = "qwen3_moe"
    assert ranks.run(
        "tf_models:ep_save", kind=kind, path=saved(kind), layout=LAYOUTS[layout], folder=str(tmp_path)
    ) == [True, True]


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_OtherModelsFused_AsUnsplit(ranks: Ranks, saved: Any, kind: str, layout: str) -> None:
    found = ranks.run("tf_models:ep_step", kind=kind, path=saved(kind), experts="sluice", layout=LAYOUTS[layout])
    for rank, worst in enumerate(found):
        for name, gap in worst.items():
            assert gap < 2e-5, (rank, name, gap)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "experts, options", [("sluice", {}), ("grouped_mm", {}), ("sluice", {"memory_budget": "1GiB"})]
)
def test_TwoRanks_Deduplicated_AsUnsplitWithFewerBytes(
    ranks: Ranks, saved: Any, experts: str, options: dict[str, Any], layout: str
) -> None:
    found = ranks.run(
        "tf_models:ep_deduplicated",
        deadline=200,
        kind="deepseek_v3",  # K = 4 of 8 experts, in groups that are on one rank: four rows become one
        path=saved("deepseek_v3"),
        experts=experts,
        layout=LAYOUTS[layout],
        options=options,
    )
    for rank, result in enumerate(found):
        for name, gap in result["worst"].items():
            assert gap < 2e-5, (rank, name, gap)
    without, with_it = (sum(result["sent"][on] for result in found) for on in (0, 1))
    assert 0 < with_it < 0.6 * without, (without, with_it)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_Bf16_AsFarFromF32AsOneProcess(ranks: Ranks, saved: Any, layout: str) -> None:
    found = ranks.run("tf_ep_jobs:bfloat16", kind="qwen3_moe", path=saved("qwen3_moe"), layout=LAYOUTS[layout])
    for rank, each in enumerate(found):
        assert any("experts" in name for name in each)
        for name, (gap, alone) in each.items():
            assert gap <= 1.5 * alone + 0.02, (rank, name, gap, alone)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_TwoRanks_Checkpointed_AsWithout(ranks: Ranks, saved: Any, reentrant: bool, layout: str) -> None:
    case = {"kind": "qwen3_moe", "path": saved("qwen3_moe"), "layout": LAYOUTS[layout], "reentrant": reentrant}
    for found in ranks.run("tf_ep_jobs:checkpointed", **case):
        assert found["worst"] < 2e-6, found
        assert found["calls"] == 2, found


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


def test_TwoRanks_TrainerWithLoraOnExperts_AsOneProcess(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    """The adapter is trained, clipped, saved by stock PEFT and loaded; A and B of experts are never all-reduced."""
    for found in ranks.run("tf_ep_jobs:trainer_adapted", deadline=300, path=saved("qwen3_moe"), folder=str(tmp_path)):
        _check_trained(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_Compiled_AsWithout(ranks: Ranks, saved: Any, layout: str) -> None:
    for found in ranks.run("tf_ep_jobs:compiled", path=saved("mixtral"), layout=LAYOUTS[layout]):
        assert found["worst"] < 2e-6, found
        assert found["passes"] >= 2 * 2, found  # layers, directions; and those before it
        assert any("Sluice's experts are a call into a C library" in reason for reason in found["breaks"]), found


def test_TwoRanks_OneInForwardMode_BothAreToldAndGoOn(ranks: Ranks, saved: Any) -> None:
    for rank, said in enumerate(ranks.run("tf_ep_jobs:watched", path=saved("mixtral"))):
        assert len(said) == 2, said
        assert "forward-mode" in said[rank] and 'ep_implementation="all_to_all"' in said[rank], said
        assert "PeerRefused" in said[1 - rank] and "forward-mode" in said[1 - rank], said


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
    """Cases include a rank without tokens, no tokens at all, and a rank whose experts get no row."""
    for rank, found in enumerate(ranks.run("tf_ep_families:family", kind=kind, options=options)):
        assert found["computed_by"] == FAMILIES[kind]
        assert len(found["gaps"]) == 5 and max(found["gaps"]) < 2e-5, (rank, found)


def test_TwoRanks_Checkpointing_BothKinds_FreesTheActivations(ranks: Ranks) -> None:
    tokens = 16384
    kept_by_a_step = tokens * 2 * (64 + 2 * 256) * 4  # received rows and pre-activations; half of the rows are its own
    found = {
        reentrant: ranks.run("tf_ep_families:growth_of_a_forward", tokens=tokens, reentrant=reentrant)
        for reentrant in (None, True, False)
    }
    assert min(found[None]) > 0.8 * kept_by_a_step, found
    assert max(*found[True], *found[False]) < 0.35 * kept_by_a_step, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_MicroSteps_AddToTheDTensorsOwnGradients(ranks: Ranks, saved: Any, layout: str) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout]}
    for found in ranks.run("tf_ep_jobs:accumulated", **case):
        assert found["worst"] < 2e-6, found
        assert found["passes"] == 2, found  # two layers, in the second micro-step


def test_TwoRanks_MicroStepsWatched_LeaveTheGradientsToAutograd(ranks: Ranks, saved: Any) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS["tp"], "watched": True}
    for found in ranks.run("tf_ep_jobs:accumulated", **case):
        assert found["worst"] < 2e-6, found
        assert (found["passes"], found["seen"]) == (1, 4), found  # one layer is not watched; two models, two steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_Generation_TokensOfTheWholeModel(ranks: Ranks, saved: Any, layout: str) -> None:
    """With a batch for each rank, one rank generates its last token when the other still has nine to generate."""
    found = ranks.run("tf_ep_jobs:generation", kind="qwen3_moe", path=saved("qwen3_moe"), layout=LAYOUTS[layout])
    assert [each["new"] for each in found] == ([12, 12] if layout == "tp" else [3, 12])
    for each in found:
        assert each["split"] == each["whole"], each


def test_TwoRanks_NoGradRowsOnOneAlone_AsWhole(ranks: Ranks, saved: Any) -> None:
    first, second = ranks.run("tf_ep_jobs:uneven_rows", path=saved("qwen3_moe"))
    assert first["rows"] == [5, 0, 1, 0, 33] and second["rows"] == [0, 7, 64, 0, 1]
    assert max(first["worst"], second["worst"]) < 2e-5


@pytest.fixture(scope="module")
def stock_losses(ranks: Ranks, saved: Any) -> Any:
    """Returns a function that trains a layout once with stock, and returns the losses by rank."""
    found: dict[str, list[list[float]]] = {}

    def of(layout: str) -> list[list[float]]:
        if layout not in found:
            case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout]}
            found[layout] = ranks.run("tf_ep_jobs:stock_losses", **case)
        return found[layout]

    return of


@pytest.mark.parametrize("options", [{}, {"memory_budget": "12MiB"}, {"deduplicate": True}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_TwentySteps_LossesOfAllToAll(
    ranks: Ranks, saved: Any, stock_losses: Any, layout: str, options: dict[str, Any]
) -> None:
    case = {"path": saved("qwen3_moe"), "layout": LAYOUTS[layout], "options": options}
    for stock, found in zip(stock_losses(layout), ranks.run("tf_ep_jobs:losses", **case)):
        assert stock[-1] < 0.9 * stock[0], "nothing was learnt"
        assert found["losses"] == pytest.approx(stock, rel=1e-4)
        if "memory_budget" in options:
            assert 0 < found["stats"]["peak_bytes"] <= 12 << 20


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
    case = {"kind": kind, "path": saved(kind), "experts": experts, "layout": MIXED[layout]}
    found = four_ranks.run("tf_models:ep_step", deadline=200, **case)
    for rank, worst in enumerate(found):
        for name, gap in worst.items():
            assert gap < 2e-5, (rank, name, gap)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}], ids=str)
def test_FourRanks_MixedDeduplicated_AsUnsplitWithFewerBytes(
    four_ranks: Ranks, saved: Any, options: dict[str, Any]
) -> None:
    found = four_ranks.run(
        "tf_models:ep_deduplicated",
        deadline=250,
        kind="deepseek_v3",
        path=saved("deepseek_v3"),
        experts="sluice",
        layout={"tp_size": 2, "fsdp_size": 2},
        options=options,
    )
    for rank, result in enumerate(found):
        for name, gap in result["worst"].items():
            assert gap < 2e-5, (rank, name, gap)
    without, with_it = (sum(result["sent"][on] for result in found) for on in (0, 1))
    assert 0 < with_it < 0.9 * without, (without, with_it)  # four experts of a token in groups of four, on two ranks


def test_FourRanks_TrainerWithLoraOnExperts_AsOneProcess(four_ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    case = {"path": saved("qwen3_moe"), "folder": str(tmp_path)}
    for found in four_ranks.run("tf_ep_jobs:trainer_adapted", deadline=400, **case):
        _check_trained(found)


def test_TwoRanks_FirstCallRefusedOnOne_BothAreToldAndGoOn(ranks: Ranks, saved: Any) -> None:
    found = ranks.run("tf_models:ep_refused", kind="qwen3_moe", path=saved("qwen3_moe"))
    assert found[1]["told"].startswith("Unsupported") and "float64" in found[1]["told"]
    assert found[0]["told"].startswith("PeerRefused") and "rank 1" in found[0]["told"]
    assert all(said["shape"] == "[3, 32]" for said in found)
    assert all(said["computed_by"] == "the module's own functions" for said in found)


def test_TwoRanks_ConfigWrongLaterOnOne_BothAreToldAndGoOn(ranks: Ranks, saved: Any) -> None:
    first, second = ranks.run("tf_models:ep_misconfigured", kind="qwen3_moe", path=saved("qwen3_moe"))
    assert first[0] == first[2] == second[0] == second[2] == ""
    assert second[1].startswith("ConfigError") and "chunks" in second[1]
    assert first[1].startswith("PeerRefused") and "rank 1" in first[1]


def test_TwoRanks_TransportNamedByAModel_IsRefused(ranks: Ranks, saved: Any) -> None:
    for said in ranks.run("tf_models:ep_of_a_stranger", kind="qwen3_moe", path=saved("qwen3_moe")):
        assert said.startswith("ConfigError") and '"transport"' in said and '"timeout"' in said, said
        assert "the model's own config" in said and "sluice.configure(transport=..., timeout=...)" in said, said


def test_TwoRanks_DecisionsInAFileOfTheUsers_AllAreToldAndItStays(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    own = tmp_path / "train.py"
    own.write_text("import torch\n")
    first, second = ranks.run("tf_models:ep_mistyped", kind="qwen3_moe", path=saved("qwen3_moe"), file=str(own))
    assert all(said.startswith("NotOurs") and "did not write" in said for said in first), first
    assert all(said.startswith("PeerRefused") and "did not write" in said for said in second), second
    assert own.read_text() == "import torch\n" and [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_TwoRanks_DecisionsKept_SecondRunBeginsWithThem(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    case = {"kind": "qwen3_moe", "path": saved("qwen3_moe"), "folder": str(tmp_path)}
    first = ranks.run("tf_models:ep_kept", **case)
    assert all(found["why"] and "imported" not in found["why"] for found in first)
    assert not (tmp_path / "kept1.json").exists()
    again = ranks.run("tf_models:ep_kept", **case)
    for found in again:
        assert set(found["why"]) == {"imported"} and found["race_passes"] == 0, again
