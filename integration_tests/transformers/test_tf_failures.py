# SPDX-License-Identifier: Apache-2.0
"""Tests that both ranks of a split model report a deviation of one rank, and continue if possible."""

from pathlib import Path

import pytest
import tf_models
from rank_harness import Ranks

SOON = 60.0  # seconds: far below the timeout of the groups


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3_moe"
    tf_models.make("qwen3_moe").save_pretrained(folder)
    return folder


def test_OptionsThatDiffer_BothAreToldAndGoOn(fresh2: Ranks, path: Path) -> None:
    for found in fresh2.run("tf_ep_failures:options_differ", path=str(path)):
        assert found["said"].startswith("Mismatch") and "chunks" in found["said"] and found["finite"], found


def test_IdsOutOfRange_OnOneRank_BothAreToldAndGoOn(fresh2: Ranks, path: Path) -> None:
    zero, one = fresh2.run("tf_ep_failures:ids_out_of_range", path=str(path))
    for number, bad in enumerate((-1, 8)):
        text = f"top_k_index[1, 1] is {bad}; ids lie in [0, 8): see the router"
        assert one[number].startswith("InvalidArgument") and text in one[number], one
        assert zero[number].startswith("PeerRefused") and text in zero[number], zero
    assert zero[2] == one[2] == ""


def test_AdaptersOfAnotherR_OnOneRank_BothAreToldByName(fresh2: Ranks, path: Path) -> None:
    for found in fresh2.run("tf_ep_failures:adapters", path=str(path), targets="differing r"):
        assert found["said"].startswith("Mismatch") and found["said"].endswith("give all ranks the same"), found
        assert all(part in found["said"] for part in ("lora_rank", "2 on rank 0", "3 on rank 1")), found


def test_SevenExperts_OnTwoRanks_AreRefusedOnBoth(fresh2: Ranks, tmp_path: Path) -> None:
    tf_models.make("qwen3_moe", num_experts=7).save_pretrained(tmp_path)
    said = fresh2.run("tf_ep_failures:does_not_divide", path=str(tmp_path))
    assert said == ["Cannot evenly shard 7 experts across 2 expert-parallel ranks."] * 2


@pytest.mark.parametrize("targets", ["wrapper", "parametrization", "other experts", "attention"])
def test_Adapters_OfExpertsThatAreShared_AreRefusedByName(fresh2: Ranks, path: Path, targets: str) -> None:
    """Unknown wrappers are refused before anything runs; unsupported adapters in the first forward. On attention they
    train."""
    for found in fresh2.run("tf_ep_failures:adapters", path=str(path), targets=targets):
        if targets == "attention":
            assert found["said"] == "" and found["loss"] > 0, found
            continue
        assert found["said"].startswith("Unsupported") and "put other adapters on attention alone" in found["said"], (
            found
        )
        assert "gate_up_proj" in found["said"] and ("peft." in found["said"]) == (targets == "wrapper"), found
        assert found["began"] == (targets != "wrapper")


def test_RankSkipsACall_IsNamedAtTheDeadline(fresh2: Ranks, path: Path) -> None:
    zero, one = fresh2.run("tf_ep_failures:one_rank_skips", path=str(path))
    assert zero.startswith("TimedOut") and "rank 1" in zero and one == "", (zero, one)


def test_RankKilledInBackward_TheOthersLoopNamesItSoon(fresh2: Ranks, path: Path) -> None:
    survivor, dead = fresh2.try_run("tf_ep_failures:dies_in_backward", dying=(1,), path=str(path))
    assert dead == {"died": True}
    found = survivor["result"]
    assert "PeerLost" in found["said"] and "rank 1" in found["said"] and found["s"] < SOON, found
