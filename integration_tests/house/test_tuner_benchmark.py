"""The tuner's benchmark runs and writes a whole record: one tiny scenario, whose numbers mean nothing here."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(280)
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
    assert record["summary"]["scenarios"] == 2 and record["summary"]["under_budget"]["scenarios"] == 1
