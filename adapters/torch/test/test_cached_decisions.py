# SPDX-License-Identifier: Apache-2.0
"""Tests decisions in files: stored and damaged files, a file of one rank, pinned files."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import sluice
import torch
import torch.distributed as dist
from layer_cases import Case, group, world
from sluice.adapters.torch import Context, ContextOptions
from sluice.config import TunerOptions
from sluice.errors import InvalidArgument, InvalidState, SluiceError
from sluice.planning import plan_command
from sluice.planning.machines import Machine
from sluice.planning.planner import Choice, Planner, Workload


def _steps(case, layer, rank, most, until=lambda: False):
    """Runs at most `most` steps, and stops when `until` returns true."""
    for _ in range(most):
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
        if until():
            break


def kept_file(folder, first, others):
    """Runs a context with `first` in the first rank's file and `others` in the files of the others. Returns its report,
    and the contents of the first rank's file afterwards."""
    W, rank = world()
    path = Path(folder) / f"kept{rank}.json"
    text = first if rank == 0 else others
    if text is not None:
        path.write_text(text)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(decisions=str(path))))
    case = Case(W, tokens=(60, 60, 60), seed=51)
    layer = case.layer(context, chunks=0)
    _steps(case, layer, rank, 100, context.decisions)  # until a decision, which all ranks make at the same step
    why = [entry["why"] for entry in context.decisions()]
    exported = Path(folder) / f"exported{rank}.json"
    count = sluice.export_decisions(exported)
    context.close()
    dist.barrier()
    return why, count, exported.read_text()


def strange_file(folder, text):
    """If the first rank's file is not of Sluice, all ranks are told, and the file stays."""
    W, rank = world()
    path = Path(folder) / f"kept{rank}.json"
    if rank == 0:
        path.write_text(text)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(decisions=str(path))))
    for turn in range(2):  # as in a notebook, in which a cell is run again after its error
        words = "kept0.json' is a file that Sluice did not write"
        words = words if rank == 0 else "rank 0 could not begin with kept decisions.*did not write"
        with pytest.raises(SluiceError, match=words if turn == 0 else "") as told:
            Case(W, tokens=(8, 8), seed=51).layer(context, chunks=0)
        assert type(told.value).__name__ == ("PeerRefused" if rank else "NotOurs")
    context.close()
    dist.barrier()


def exported_machine(folder):
    """Exporting a machine without any layer and before any step is refused. Returns the machine that a run exports and
    with which a second run starts."""
    W, rank = world()
    model, path = torch.nn.Module(), Path(folder) / f"machine{rank}.json"
    with pytest.raises(InvalidArgument, match="Module does not run on Sluice: it holds no MoE layer"):
        sluice.export_machine(model, path)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(calibrate=0.1, cache=folder)))
    case = Case(W, tokens=(60, 60, 60), seed=51)
    layer = case.layer(context, chunks=0)
    model._sluice = SimpleNamespace(contexts=lambda: [context])  # as a host's layer has it
    with pytest.raises(InvalidState):
        sluice.export_machine(model, path)
    _steps(case, layer, rank, 60)
    made = sluice.export_machine(model, path)
    context.close()
    again = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(mode="model", machine=str(path))))
    layer = case.layer(again, chunks=0)
    _steps(case, layer, rank, 3)
    why = {entry["why"] for entry in again.decisions()}
    again.close()
    dist.barrier()
    assert why == {"predicted"}
    return made, path.read_text()


def test_Kept_FirstRanksFileAlone_BeginsAllRanks(tmp_path):
    first = ranks.run(2, kept_file, folder=str(tmp_path), first=None, others=None)
    assert all("imported" not in why and count == 1 for why, count, _ in first)
    assert first[0][2] == first[1][2]  # all ranks export the same
    assert not (tmp_path / "kept1.json").exists()
    kept = (tmp_path / "kept0.json").read_text()
    (machine,) = json.loads(kept)["machines"]
    assert "2 ranks" in machine and "link tcp" in machine
    again = ranks.run(2, kept_file, folder=str(tmp_path), first=kept, others="not for me")
    assert all(why == ["imported"] and count == 1 for why, count, _ in again)
    assert (tmp_path / "kept1.json").read_text() == "not for me"
    assert json.loads((tmp_path / "kept0.json").read_text()) == json.loads(kept)
    exported = ranks.run(2, kept_file, folder=str(tmp_path), first=first[1][2], others=None)
    assert all(why == ["imported"] for why, _, _ in exported)


def test_Kept_InAFileOfTheUsers_AllRanksAreToldAndItStays(tmp_path):
    ranks.run(2, strange_file, folder=str(tmp_path), text="import torch\n")
    assert (tmp_path / "kept0.json").read_text() == "import torch\n" and os.listdir(tmp_path) == ["kept0.json"]


@pytest.mark.parametrize("text, words", [(None, "cannot be read"), ("{", "decisions"), ("{}", "sluice_decisions")])
def test_Pinned_NotGood_IsAnError(tmp_path, text, words):
    path = tmp_path / "pinned.json"
    if text is not None:
        path.write_text(text)
    context = Context(None, ContextOptions(tuner=TunerOptions(pinned=str(path))))
    with pytest.raises(InvalidArgument, match=words):
        Case(1, tokens=(8,)).layer(context)
    context.close()
    assert os.listdir(tmp_path) == ([] if text is None else ["pinned.json"])


def test_ExportMachine_OfARun_IsWhatPlanAndTheNextRunTake(tmp_path, capsys):
    found = ranks.run(2, exported_machine, folder=str(tmp_path))
    for made, text in found:
        assert made == json.loads(text) and made["provenance"] == "refined"
        assert text == found[0][1]  # all ranks have the same
    path = str(tmp_path / "machine0.json")
    flags = "--ranks 2 --model-width 64 --hidden-width 128 --experts 4 --top-k 2 --tokens 512 --dtype f32".split()
    assert plan_command.main(["--machine", path, *flags, "--json"]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    chosen = {name: value for name, value in layer["chosen"].items() if name != "policy"}
    work = Workload(64, 128, 512, 4, 2, 2, "f32")
    planner = Planner(Machine(found[1][0], {}))
    assert layer["prediction"]["seconds"] == planner.predict(work, Choice(**chosen)).seconds
    assert layer["prediction"]["error_median"] == found[0][0]["error"]["median"] > 0
    (cached,) = (path.read_text() for path in tmp_path.glob("machine-*.json"))  # as before the steps
    before = Planner(Machine(json.loads(cached.split("\n", 2)[2]), {})).predict(work, Choice(**chosen)).seconds
    assert before != layer["prediction"]["seconds"]
