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
    (line,) = record["lines"]
    assert set(line["regret"]) == {"adaptive", "profile", "model", "schedule", "mpmoe", "mpipemoe"}
    for mode, found in line["modes"].items():
        assert str(found["n"]) in line["measured"]
        assert found["decisions"][0]["why"] == ("predicted" if mode == "model" else "raced")
        assert found["stats"]["timed_passes"] > 40
    assert record["summary"]["error"]["count"] == len(line["measured"])
    assert record["summary"]["scenarios"] == 1
