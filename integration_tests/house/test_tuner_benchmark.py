"""The tuner's benchmarks run and write whole records: tiny layers, whose numbers mean nothing here."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(900)
def test_TunerBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.tuner", "--smoke", "--records", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "tuner.json").read_text())
    line, planned = record["lines"]
    assert set(line["regret"]) == {"adaptive", "profile", "model", "schedule", "mpmoe", "mpipemoe"}
    assert set(planned["regret"]) == {"adaptive", "profile", "model"}  # under a budget
    for each in (line, planned):
        for mode, found in each["modes"].items():
            assert found["key"] in each["measured"]
            assert found["decisions"][0]["why"] == ("predicted" if mode == "model" else "raced")
            assert found["stats"]["timed_passes"] > 40
            assert (found["decisions"][0]["restore_input"] is None) == (each is line)
    assert record["summary"]["error"]["count"] >= len(line["measured"])
    assert (tmp_path / "tuner.svg").read_text().count("<circle") == record["summary"]["error"]["count"]
    assert record["summary"]["scenarios"] == 2 and record["summary"]["under_budget"]["scenarios"] == 1


@pytest.mark.timeout(900)
def test_OverlapBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.overlap", "--smoke", "--rounds", "3"]
    done = subprocess.run([*command, "--records", str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "overlap.json").read_text())["cases"]["smoke"]
    ideal = sum(max(p["comm_s"], p["compute_s"] + p["comm_cpu_s"]) for p in found["parts"].values())
    assert found["ideal_s"] == pytest.approx(ideal) and ideal > 0
    assert all(p["comm_s"] > 0 and p["comm_cpu_s"] > 0 and p["compute_s"] >= 0 for p in found["parts"].values())
    assert len(found["chosen_s"]) == len(found["one_chunk_s"]) == 3
