# SPDX-License-Identifier: Apache-2.0
"""Tests decisions in files: stored and damaged files, a file of one rank, pinned files."""

import json
import os

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)
from sluice.planning import plan_command
from sluice.planning.machines import Machine
from sluice.planning.planner import Choice, Planner, Workload


def test_Kept_FirstRanksFileAlone_BeginsAllRanks(tmp_path):
    first = ranks.run(2, "cached_decisions_jobs:kept_file", folder=str(tmp_path), first=None, others=None)
    assert all("imported" not in why and count == 1 for why, count, _ in first)
    assert first[0][2] == first[1][2]  # all ranks export the same
    assert not (tmp_path / "kept1.json").exists()
    kept = (tmp_path / "kept0.json").read_text()
    (machine,) = json.loads(kept)["machines"]
    assert "2 ranks" in machine and "link tcp" in machine
    again = ranks.run(2, "cached_decisions_jobs:kept_file", folder=str(tmp_path), first=kept, others="not for me")
    assert all(why == ["imported"] and count == 1 for why, count, _ in again)
    assert (tmp_path / "kept1.json").read_text() == "not for me"
    assert json.loads((tmp_path / "kept0.json").read_text()) == json.loads(kept)
    exported = ranks.run(2, "cached_decisions_jobs:kept_file", folder=str(tmp_path), first=first[1][2], others=None)
    assert all(why == ["imported"] for why, _, _ in exported)


def test_Kept_InAFileOfTheUsers_AllRanksAreToldAndItStays(tmp_path):
    found = ranks.run(2, "cached_decisions_jobs:strange_file", folder=str(tmp_path), text="import torch\n")
    (first, again), (second, again2) = found
    assert first[0] == again[0] == "NotOurs" and "kept0.json' is a file that Sluice did not write" in first[1]
    assert second[0] == again2[0] == "PeerRefused"
    assert "rank 0 could not begin with kept decisions" in second[1] and "did not write" in second[1]
    assert (tmp_path / "kept0.json").read_text() == "import torch\n" and os.listdir(tmp_path) == ["kept0.json"]


@pytest.mark.parametrize("text, words", [(None, "cannot be read"), ("{", "decisions"), ("{}", "sluice_decisions")])
def test_Pinned_NotGood_IsAnError(tmp_path, text, words):
    (told,) = ranks.run(1, "cached_decisions_jobs:pinned_file", folder=str(tmp_path), text=text)
    assert words in told
    assert os.listdir(tmp_path) == ([] if text is None else ["pinned.json"])


def test_ExportMachine_OfARun_IsWhatPlanAndTheNextRunTake(tmp_path, capsys):
    found = ranks.run(2, "cached_decisions_jobs:exported_machine", folder=str(tmp_path))
    for refusals, made, text, why in found:
        assert "Module does not run on Sluice: it holds no MoE layer" in refusals[0] and len(refusals) == 2
        assert made == json.loads(text) and made["provenance"] == "refined"
        assert text == found[0][2]  # all ranks have the same
        assert why == {"predicted"}
    path = str(tmp_path / "machine0.json")
    flags = "--ranks 2 --model-width 64 --hidden-width 128 --experts 4 --top-k 2 --tokens 512 --dtype f32".split()
    assert plan_command.main(["--machine", path, *flags, "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    chosen = {name: value for name, value in layer["chosen"].items() if name != "policy"}
    work = Workload(64, 128, 512, 4, 2, 2, "f32")
    planner = Planner(Machine(found[1][1], {}))
    assert layer["prediction"]["seconds"] == planner.predict(work, Choice(**chosen)).seconds
    assert layer["prediction"]["error_median"] == found[0][1]["error"]["median"] > 0
    (cached,) = (path.read_text() for path in tmp_path.glob("machine-*.json"))  # as before the steps
    before = Planner(Machine(json.loads(cached.split("\n", 2)[2]), {})).predict(work, Choice(**chosen)).seconds
    assert before != layer["prediction"]["seconds"]
