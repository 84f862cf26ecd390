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
    for _ in range(100):  # until there is a decision, which all ranks make at the same step
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
        if context.decisions():
            break
    why = [entry["why"] for entry in context.decisions()]
    exported = Path(folder) / f"exported{rank}.json"
    count = sluice.export_decisions(exported)
    context.close()
    dist.barrier()
    return why, count, exported.read_text()


def strange_file(folder, text):
    """Returns the error on each rank, twice, if the first rank's file is not of Sluice: kind and message."""
    W, rank = world()
    path = Path(folder) / f"kept{rank}.json"
    if rank == 0:
        path.write_text(text)
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(decisions=str(path))))
    told = []
    for _ in range(2):  # as in a notebook, in which a cell is run again after its error
        try:
            Case(W, tokens=(8, 8), seed=51).layer(context, chunks=0)
        except SluiceError as error:
            told.append((type(error).__name__, str(error)))
    context.close()
    dist.barrier()
    return told


def pinned_file(folder, text):
    """An invalid pinned file is an error on the rank that has the file."""
    path = Path(folder) / "pinned.json"
    if text is not None:
        path.write_text(text)
    context = Context(None, ContextOptions(tuner=TunerOptions(pinned=str(path))))
    try:
        Case(1, tokens=(8,)).layer(context)
    except InvalidArgument as error:
        return str(error)
    finally:
        context.close()
    return None


def exported_machine(folder):
    """Returns the errors of exporting a machine without any layer and before any step, and the machine that a run
    exports and with which a second run starts."""
    W, rank = world()
    model, path = torch.nn.Module(), Path(folder) / f"machine{rank}.json"
    refusals = []

    def refused():
        try:
            sluice.export_machine(model, path)
        except (InvalidArgument, InvalidState) as error:
            refusals.append(str(error))

    refused()
    context = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(calibrate=0.1, cache=folder)))
    case = Case(W, tokens=(60, 60, 60), seed=51)
    layer = case.layer(context, chunks=0)
    model._sluice = SimpleNamespace(contexts=lambda: [context])  # as a host's layer has it
    refused()
    for _ in range(60):
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    made = sluice.export_machine(model, path)
    context.close()
    again = Context(group(), ContextOptions(gemm="ref", tuner=TunerOptions(mode="model", machine=str(path))))
    layer = case.layer(again, chunks=0)
    for _ in range(3):
        tokens, ids, weights, params = case.inputs(rank)
        layer(tokens, ids, weights, params).backward(case.cotangents[rank])
    why = {entry["why"] for entry in again.decisions()}
    again.close()
    dist.barrier()
    return refusals, made, path.read_text(), why


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
    found = ranks.run(2, strange_file, folder=str(tmp_path), text="import torch\n")
    (first, again), (second, again2) = found
    assert first[0] == again[0] == "NotOurs" and "kept0.json' is a file that Sluice did not write" in first[1]
    assert second[0] == again2[0] == "PeerRefused"
    assert "rank 0 could not begin with kept decisions" in second[1] and "did not write" in second[1]
    assert (tmp_path / "kept0.json").read_text() == "import torch\n" and os.listdir(tmp_path) == ["kept0.json"]


@pytest.mark.parametrize("text, words", [(None, "cannot be read"), ("{", "decisions"), ("{}", "sluice_decisions")])
def test_Pinned_NotGood_IsAnError(tmp_path, text, words):
    (told,) = ranks.run(1, pinned_file, folder=str(tmp_path), text=text)
    assert words in told
    assert os.listdir(tmp_path) == ([] if text is None else ["pinned.json"])


def test_ExportMachine_OfARun_IsWhatPlanAndTheNextRunTake(tmp_path, capsys):
    found = ranks.run(2, exported_machine, folder=str(tmp_path))
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
