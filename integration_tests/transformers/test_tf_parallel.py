"""`DistributedConfig(ep_implementation="sluice")` on two ranks: forward and every gradient as the unsplit model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tf_models
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent
LAYOUTS = {"tp": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}}


class TransformersRanks(Ranks):
    worker = HERE / "tf_rank_worker.py"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = TransformersRanks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def path(kind: str) -> str:
        if not (folder / kind).exists():
            tf_models.make(kind).save_pretrained(folder / kind)
        return str(folder / kind)

    return path


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_TwoRanks_SaveAfterLoad_SameBits(ranks: Ranks, saved: Any, layout: str) -> None:
    assert ranks.run("tf_models:ep_save", kind="qwen3_moe", path=saved("qwen3_moe"), layout=LAYOUTS[layout]) == [
        True,
        True,
    ]


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
        kind="deepseek_v3",  # K = 4 of 8 experts, in groups that lie on one rank: four rows become one
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


@pytest.mark.full
@pytest.mark.parametrize("experts", ["sluice", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_FourRanks_MixedTpAndFsdp_AsUnsplit(saved: Any, kind: str, experts: str) -> None:
    ranks = TransformersRanks(4)
    try:
        layout = {"tp_size": 2, "fsdp_size": 2}
        found = ranks.run(
            "tf_models:ep_step", deadline=200, kind=kind, path=saved(kind), experts=experts, layout=layout
        )
    finally:
        ranks.stop()
    for rank, worst in enumerate(found):
        for name, gap in worst.items():
            assert gap < 2e-5, (rank, name, gap)


def test_TwoRanks_FirstCallRefusedOnOne_BothAreToldAndGoOn(ranks: Ranks, saved: Any) -> None:
    found = ranks.run("tf_models:ep_refused", kind="qwen3_moe", path=saved("qwen3_moe"))
    assert found[1]["told"].startswith("Unsupported") and "float64" in found[1]["told"]
    assert found[0]["told"].startswith("PeerRefused") and "rank 1" in found[0]["told"]
    assert all(said["shape"] == "[3, 32]" for said in found)
    assert all(said["computed_by"] == "the module's own functions" for said in found)


def test_TwoRanks_DecisionsKept_SecondRunBeginsWithThem(ranks: Ranks, saved: Any, tmp_path: Path) -> None:
    case = {"kind": "qwen3_moe", "path": saved("qwen3_moe"), "folder": str(tmp_path)}
    first = ranks.run("tf_models:ep_kept", **case)
    assert all(found["why"] and "imported" not in found["why"] for found in first)
    assert not (tmp_path / "kept1.json").exists()
    again = ranks.run("tf_models:ep_kept", **case)
    for found in again:
        assert set(found["why"]) == {"imported"} and found["race_passes"] == 0, again
