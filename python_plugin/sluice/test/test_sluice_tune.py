# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice tune`: a short calibration of one rank and of two, a machine for `sluice plan`, errors."""

import json
import os
from pathlib import Path

import pytest
from sluice import decision_cache, doctor
from sluice.planning import machines, plan_command, tune_command
from sluice.planning.errors import BadInput
from two_ranks import launcher, output_of, torchrun

HERE = Path(__file__).resolve().parent
SIZES = ["--model-width", "64", "--hidden-width", "128", "--dtype", "f32", "--seconds", "0.2", "--cache-dir", ""]


def test_Tune_TwoRanks_MeasureExchangesAndKeepADecision_WithWhichTrainingBegins(tmp_path) -> None:
    """Activation, GEMMs and transport come from the configs; `layers_rank.py` runs with the same section."""
    pytest.importorskip("torch")
    section = {"enabled": True, "gemm": "native", "tuner": {"decisions": str(tmp_path / "kept.json")}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 2, "sluice": section}))
    words = [*SIZES[:-2], "--cache-dir", str(tmp_path / "cache"), "--config", "ds.json", "--keep", "--json"]
    model = ["--experts", "4", "--top-k", "2", "--tokens", "64", "--activation", "relu", "--steps", "300"]
    command = ["sh", "-c", '"$@" 2>errors', "sh", *torchrun(tmp_path), "-m", "sluice", "tune", *words, *model]
    made = json.loads(output_of(tmp_path, *command, SLUICE_LOG="decision"))
    machine, kept = made["machine"], made["kept"]
    logged = (tmp_path / "errors").read_text().count("sluice: decision: M ")
    assert logged == len(kept["decisions"])  # by the first rank alone
    assert machine["world_size"] == 2 and machine["exchange"] and made["plan"]["layers"][0]["fits"]
    sizes = [machine[f"{name}_contention"]["points"][0][0] for name in ("exchange", "compute")]
    assert sizes == [1024, 1024] and json.loads((tmp_path / "machine.json").read_text()) == machine
    assert kept["path"] == str(tmp_path / "kept.json") and kept["decisions"][-1]["why"] in ("raced", "predicted")
    ((words_of_machine, answers),) = decision_cache.machines(kept["path"]).items()
    assert "2 ranks on 1 host; GEMMs native" in words_of_machine
    assert answers == kept["answers"] and answers[-1]["rows"] == 128
    # Sets a number that is no run's initial value, so that it can only come from the file.
    answers[-1]["num_chunks"] = 3
    decision_cache.merge(kept["path"], words_of_machine, answers)
    run = [*launcher(), str(HERE / "layers_rank.py"), "4", "64", "1", "-", "-", kept["path"]]
    began = json.loads(output_of(tmp_path, *run).splitlines()[-1])
    # The first forward shows the size of batches, and the header of the second one sends it to all ranks.
    assert began["settled"][1:] == [True, True, True] and began["chunks"] == [3, 3, 3, 3]


def test_Tune_KeepInAFileOfTheUsers_IsRefusedBeforeAnyStep(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "train.py"
    own.write_text("import torch\n")
    model = ["--experts", "4", "--top-k", "2", "--tokens", "64", "--activation", "relu", "--budget", "1GB"]
    for named, word in ((own, "did not write"), (tmp_path, "Is a directory")):
        assert tune_command.main([*SIZES, "--keep", str(named), *model]) == 2
        said = capsys.readouterr().err
        assert str(named) in said and word in said
    assert own.read_text() == "import torch\n" and os.listdir(tmp_path) == ["train.py"]


def test_Tune_KeepTooFewSteps_SaysSoAndKeepsNothing(tmp_path, capsys, monkeypatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    words = [*SIZES[:-2], "--cache-dir", "cache", "--keep", "kept.json", "--json", "--budget", "1GB"]
    model = ["--experts", "4", "--top-k", "2", "--tokens", "64", "--activation", "relu", "--steps", "2"]
    assert tune_command.main([*words, *model]) == 1
    said = capsys.readouterr()
    assert "nothing kept: undecided after 2 steps; allow more: --steps" in said.err
    made = json.loads(said.out)
    assert made["kept"] is None and made["plan"]["layers"][0]["fits"] and not (tmp_path / "kept.json").exists()


def test_Tune_KeepBadInput_IsNamed(capsys, monkeypatch) -> None:
    pytest.importorskip("torch")
    model = [*SIZES, "--experts", "4", "--top-k", "2", "--tokens", "64", "--keep"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    for words, text in (
        (model, "one rank without a budget has nothing to choose"),
        ([*model, "--budget", "1GiB"], "--activation is missing"),
        ([*model, "--budget", "1GiB", "--activation", "sin"], "known are identity, relu"),
        ([*model, "--budget", "1GiB", "--activation", "relu"], '--cache-dir is ""'),
        ([*model, "--steps", "0"], "--steps is 0"),
    ):
        assert tune_command.main(words) == 2
        assert text in capsys.readouterr().err


def test_Said_SmallExchanges_AloneAndBesideGemms() -> None:
    data = {
        "exchange": {"startup_seconds": 2e-4, "points": [[64, 0], [1e6, 1e-2]]},
        "exchange_contention": {"points": [[1024, 1.5e-3], [1e6, 5e-4]]},
        "compute_contention": {"points": [[1024, 2e-5], [1e6, 1e-3]]},
    }
    lines = "\n".join(tune_command.said(machines.Machine({"name": "made up", **data}, {}), "m.json"))
    assert "(1024 bytes): 0.2 ms alone, 1.5 ms more during GEMMs, which lose 0.02 ms" in lines
    del data["exchange_contention"]
    assert "small exchanges" not in "\n".join(tune_command.said(machines.Machine({"name": "x", **data}, {}), "m.json"))


def test_Interference_IsThePapersGridAndItsRule() -> None:
    share = [
        {"lane": "comm", "beside": ["compute"], "share": 0.8},
        {"lane": "compute", "beside": ["comm"], "share": 0.6},
    ]
    share += [{"lane": "comm", "beside": ["copy_out", "compute"], "share": 0.3}]
    found = tune_command.alphas({"share": share})
    assert len(found) == 9 and found["comm", "comp"] == 0.8 and found["comp", "comm"] == 0.6
    assert found["comm", "all"] == 0.3 and found["mem", "comm"] == 1.0
    assert tune_command.is_feasible(found)
    share[1]["share"] = 0.5
    assert not tune_command.is_feasible(tune_command.alphas({"share": share}))
    lines = "\n".join(tune_command.said(machines.Machine({"name": "x", "share": share}, {}), "m.json"))
    assert "comm keeps 0.80 during comp, 1.00 during mem, 0.30 during all" in lines
    assert "above 0.5: sequential is faster" in lines
    assert "while copies" not in lines  # an older file has one share for all copies
    for size, lane, kept in ((1e5, "copy_out", 0.9), (4e6, "copy_out", 0.7), (4e6, "copy_in", 0.4)):
        share += [{"lane": "compute", "beside": [lane], "share": kept, "bytes": size}]
    by_size = {"share": share[:3], "copy_share": share[3:]}
    assert tune_command.alphas(by_size)["comp", "mem"] == 0.7
    assert tune_command.alphas(by_size, "copy_out", 1e5)["comp", "mem"] == 0.9
    lines = "\n".join(tune_command.said(machines.Machine({"name": "x", **by_size}, {}), "m.json"))
    assert "while copies of 4e+06 bytes go in: comm keeps 1.00, comp keeps 0.40" in lines


def test_Profiles_AreFoundByTheNameOfADevice() -> None:
    assert machines.for_device("NVIDIA A100-SXM4-40GB").name == "a100-8x8-1600g"
    assert machines.for_device("Tesla V100-SXM2-16GB").name == "v100-4x4-56g"
    assert machines.for_device("NVIDIA H200").name == "h200-8x8"
    with pytest.raises(BadInput, match="profile of the GPU that trains"):
        machines.load("device")
    for name in ("", "NVIDIA H100 80GB HBM3", "XA100"):
        with pytest.raises(BadInput, match="no profile is of a"):
            machines.for_device(name)


def test_Tune_BadInput_IsNamed(capsys) -> None:
    for words, text in (
        (["--hidden-width", "8"], "--model-width is missing"),
        ([*SIZES, "--seconds", "0"], "--seconds is 0"),
        ([*SIZES, "--experts", "4"], "--top-k is missing"),
        ([*SIZES, "--model-width", "-4"], "--model-width is -4"),
        ([*SIZES, "--out", "no/such/m.json"], "--out no/such/m.json: there is no folder no/such"),
    ):
        assert tune_command.main(words) == 2
        assert text in capsys.readouterr().err


def test_Plan_CachedMachine_IsTheOneMeasuredForSuchLayers(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    (finding,) = doctor._calibration()
    assert finding.state == doctor.OK and f"none in {tmp_path}" in finding.detail
    model = ["--ranks", "1", "--experts", "4", "--top-k", "2", "--tokens", "256", *SIZES[:6]]
    assert plan_command.main(["--machine", "cached", *model]) == 2
    said = capsys.readouterr().err
    assert "no calibration of 1 ranks in f32" in said and "sluice tune" in said
    assert tune_command.main([*SIZES[:-2], "--out", str(tmp_path / "out.json")]) == 0
    captured = capsys.readouterr()
    assert "GEMMs f32: to" in captured.out and "calibrated" in captured.err
    assert machines.load(str(tmp_path / "out.json")).data["provenance"] == "calibrated"
    wide = ["--model-width", "96", *SIZES[2:-2]]
    assert tune_command.main([*wide, "--out", str(tmp_path / "out.json")]) == 0
    capsys.readouterr()
    (finding,) = doctor._calibration()
    assert finding.state == doctor.OK and "2 measured machines" in finding.detail
    assert plan_command.main(["--machine", "cached", *model]) == 0
    assert "calibrated at 1 ranks over none, f32, M 64, H 128" in capsys.readouterr().out
    # Uses the widths of a run's config; the nearest calibrated width is taken.
    (tmp_path / "ds.json").write_text(json.dumps({"sluice": {"tuner": {"calibrate": True}}}))
    model[model.index("64")] = "512"
    assert plan_command.main(["--config", str(tmp_path / "ds.json"), *model]) == 0
    assert "calibrated at 1 ranks over none, f32, M 96, H 128" in capsys.readouterr().out
    assert plan_command.main(model) == 2
    assert "--machine is missing" in capsys.readouterr().err
    # A file of another version is no machine, and is reported.
    for path in tmp_path.glob("machine-*.json"):
        path.write_text(path.read_text().replace(machines.FORM, "sluice cache 1", 1))
    assert plan_command.main(["--machine", "cached", *model]) == 2
    assert "there: nothing of this processor" in capsys.readouterr().err
    (finding,) = doctor._calibration()
    assert finding.state == doctor.NOTE and "2 of 2 machines" in finding.detail
    assert "are of another version's form (machine-" in finding.detail
    path.write_text("{")
    (finding,) = doctor._calibration()
    assert finding.state == doctor.NOTE and path.name in finding.detail


def test_Doctor_SaysWhichDecisionsAreKept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    (finding,) = doctor._kept()
    assert f"none in {tmp_path}/kept_decisions.json" in finding.detail
    answer = {"layer": "00000000000000ab", "rows": 128, "num_chunks": 4, "wgrad_mode": "per_chunk"}
    decision_cache.merge(str(tmp_path / "kept_decisions.json"), "here", [answer, {**answer, "rows": 4096}])
    sent = {"deduplicate": "ranks", "grouped": True}
    decision_cache.merge(str(tmp_path / "kept_decisions.json"), "there", [{**answer, **sent}])
    head, here, there = doctor._kept()
    assert f"3 for 2 machines in {tmp_path}/kept_decisions.json, written 20" in head.detail
    words = "last of 2: layers 00000000000000ab, 4096 rows: n 4, weight gradients per chunk (here)"
    assert here.detail == words
    assert there.detail.endswith("n 4, deduplicate ranks, grouped, weight gradients per chunk (there)")
    (tmp_path / "kept_decisions.json").write_text("{")
    (finding,) = doctor._kept()
    assert finding.state == doctor.NOTE and "is damaged" in finding.detail
