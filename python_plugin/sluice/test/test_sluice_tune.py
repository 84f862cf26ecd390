"""`sluice tune`: a short calibration alone and of two ranks, a machine that `sluice plan` takes, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sluice import doctor
from sluice.planning import machines, tune_command
from sluice.planning.planner import Choice, Planner, Workload

SIZES = ["--model-width", "64", "--hidden-width", "128", "--dtype", "f32", "--seconds", "0.2", "--cache-dir", ""]


def test_Tune_OneRank_MakesAMachineThatPlans(tmp_path, capsys) -> None:
    out = tmp_path / "machine.json"
    status = tune_command.main([*SIZES, "--out", str(out)])
    captured = capsys.readouterr()
    assert status == 0 and "products f32: to" in captured.out and "calibrated" in captured.err
    machine = machines.load(str(out))
    assert machine.data["provenance"] == "calibrated"
    work = Workload(64, 128, 256, 4, 2, 1, "f32")
    assert Planner(machine).predict(work, Choice(1, "keep", "keep", "deferred")).seconds > 0


def test_Tune_TwoRanks_MeasureExchangesAndDecide(tmp_path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "machine.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sluice"]
    model = ["--experts", "4", "--top-k", "2", "--tokens", "256", "--json"]
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    command = [*launcher, "tune", *SIZES, "--out", str(out), *model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert made["machine"]["world_size"] == 2 and made["machine"]["exchange"]
    assert made["machine"]["exchange_late"]["points"][0][0] == made["machine"]["exchange_taken"]["points"][0][0] == 1024
    assert made["plan"]["layers"][0]["fits"]
    assert json.loads(out.read_text()) == made["machine"]


def test_Said_SmallExchanges_AloneAndBesideProducts() -> None:
    data = {
        "exchange": {"startup_seconds": 2e-4, "points": [[64, 0], [1e6, 1e-2]]},
        "exchange_late": {"points": [[1024, 1.5e-3], [1e6, 5e-4]]},
        "exchange_taken": {"points": [[1024, 2e-5], [1e6, 1e-3]]},
    }
    lines = "\n".join(tune_command.said(machines.Machine({"name": "made up", **data}, {}), "m.json"))
    assert "(1024 bytes): 0.2 ms alone, 1.5 ms more beside products, which lose 0.02 ms" in lines
    del data["exchange_late"]
    assert "small exchanges" not in "\n".join(tune_command.said(machines.Machine({"name": "x", **data}, {}), "m.json"))


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


def test_Doctor_SaysWhatTheCacheHolds(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    (finding,) = doctor._calibration()
    assert finding.state == doctor.OK and f"none in {tmp_path}" in finding.detail
    assert tune_command.main([*SIZES[:-2], "--out", str(tmp_path / "out.json")]) == 0
    (finding,) = doctor._calibration()
    assert finding.state == doctor.OK and "1 measured machines" in finding.detail
    (tmp_path / "machine-0.json").write_text("sluice cache 1\nkey\n{}\n")
    (finding,) = doctor._calibration()
    assert finding.state == doctor.NOTE and "1 of 2 machines" in finding.detail and "machine-0.json" in finding.detail
    (tmp_path / "machine-0.json").write_text("{")
    (finding,) = doctor._calibration()
    assert finding.state == doctor.NOTE and "machine-0.json" in finding.detail
