# SPDX-License-Identifier: Apache-2.0
"""Tests that both ranks of a split model report a deviation of one rank, and continue if possible."""

from typing import Any

import pytest
from rank_harness import Ranks

SOON = 60.0  # seconds: far below the timeout of the groups
BAD_ID = "top_k_index[1, 1] is {}; ids lie in [0, 8): see the router"
# How rank 1 deviates: the error of rank 0, that of rank 1, and words of both.
DEVIATIONS = {
    "id -1": ("PeerRefused", "InvalidArgument", BAD_ID.format(-1)),
    "id 8": ("PeerRefused", "InvalidArgument", BAD_ID.format(8)),
    "dtype": ("PeerRefused", "Unsupported", "float64"),
    "config": ("PeerRefused", "ConfigError", "chunks"),
    "options": ("Mismatch", "Mismatch", "chunks"),
    "forward mode": ("PeerRefused", "Unsupported", "forward-mode"),
}


@pytest.mark.parametrize("case", DEVIATIONS)
def test_Deviation_OfOneRank_BothAreToldAndGoOn(ranks: Ranks, saved: Any, case: str) -> None:
    of_zero, of_one, words = DEVIATIONS[case]
    number = 0 if case == "dtype" else 1
    for kind, said in zip((of_zero, of_one), ranks.run("tf_ep_failures:deviates", path=saved(), case=case)):
        told = said.pop(number)
        assert told.startswith(kind) and words in told and said == ["", ""], (told, said)
        assert kind != "PeerRefused" or "rank 1" in told, told


def test_AdaptersOfAnotherR_OnOneRank_BothAreToldByName(ranks: Ranks, saved: Any) -> None:
    for found in ranks.run("tf_ep_failures:adapters", path=saved(), targets="differing r"):
        assert found["said"].startswith("Mismatch") and found["said"].endswith("give all ranks the same"), found
        assert all(part in found["said"] for part in ("lora_rank", "2 on rank 0", "3 on rank 1")), found


@pytest.mark.parametrize("targets", ["wrapper", "parametrization", "other experts"])
def test_Adapters_OfExpertsThatAreShared_AreRefusedByName(ranks: Ranks, saved: Any, targets: str) -> None:
    """Unknown wrappers are refused before anything runs; unsupported adapters in the first forward."""
    for found in ranks.run("tf_ep_failures:adapters", path=saved(), targets=targets):
        said = found["said"]
        assert said.startswith("Unsupported") and "put other adapters on attention alone" in said, found
        assert "gate_up_proj" in said and ("peft." in said) == (targets == "wrapper"), found
        assert found["began"] == (targets != "wrapper")


def test_RankKilledInBackward_TheOthersLoopNamesItSoon(fresh2: Ranks, saved: Any) -> None:
    survivor, dead = fresh2.try_run("tf_ep_failures:dies_in_backward", dying=(1,), path=saved())
    assert dead == {"died": True}
    found = survivor["result"]
    assert "PeerLost" in found["said"] and "rank 1" in found["said"] and found["s"] < SOON, found
