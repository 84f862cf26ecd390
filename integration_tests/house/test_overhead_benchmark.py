"""The benchmark of what tuning costs: its sums, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.benchmarks import overhead

ROOT = Path(__file__).resolve().parents[2]


def test_Judge_RacesAtTheStart_CountInTheCostAndNotInThePairs() -> None:
    fixed = [1.0, 1.0, 1.0, 1.0, 1.0]
    sides = {"tuned": [1.5, 1.01, 1.01, 1.01, 1.01], "fixed": fixed}
    stats = {"excess_seconds": 0.4, "switch_seconds": 0.1, "total_seconds": 100.0}
    judged = overhead.judge({"wall": sides, "cpu": {"tuned": fixed, "fixed": fixed}, "stats": stats})
    assert judged["wall"]["cost"] == pytest.approx(0.108)
    assert judged["wall"]["pairs"] == pytest.approx(0.01)
    assert judged["cpu"] == {"cost": 0, "pairs": 0}
    assert judged["account"] == pytest.approx(0.005)


@pytest.mark.timeout(900)
def test_TwoRealRanks_BothWorkloads_LeaveARecord(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    command = [sys.executable, "-m", "integration_tests.benchmarks.overhead", "--steps", "60", "--block", "20"]
    done = subprocess.run(
        [*command, "--scout", "20", "--records", str(tmp_path)], capture_output=True, text=True, timeout=850, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "overhead.json").read_text())
    for name, sizes in overhead.WORKLOADS.items():
        found = record["workloads"][name]
        assert found["stats"]["timed_passes"] >= 2 * 60 - 4  # the last step is told by none
        assert {int(T) for T in found["chosen"]} == set(sizes)
        for clock in ("wall", "cpu"):
            assert all(len(found[clock][side]) == 3 for side in ("tuned", "fixed"))


def test_BlockLongerThanTheRun_IsRefused() -> None:
    command = [sys.executable, "-m", "integration_tests.benchmarks.overhead", "--steps", "10", "--block", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 2 and "--steps must be at least --block" in done.stderr
