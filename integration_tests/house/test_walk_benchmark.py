"""The benchmark of binding and walking: its sums, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.benchmarks.overhead import walk

ROOT = Path(__file__).resolve().parents[2]


def _rank(bind: int, walked: int, readings: int = 1000) -> dict[str, float]:
    """Of ten steps; a reading takes 200 ns."""
    names = {"num_walks": 20, "wait_ns": 40_000_000, "num_wakes": 300, "wake_cpu_ns": 3_000_000}
    return {
        "bind_cpu_ns": bind,
        "walk_cpu_ns": walked,
        "num_readings": readings,
        "readings_cpu_ns": 200 * readings,
        **names,
    }


def test_Judge_TheRankWithTheLargerSum_CountsPerStep() -> None:
    found = {"seconds": [0.02, 0.9, 0.02], "traced_seconds": [0.021], "traced_steps": 10}
    judged = walk.judge({**found, "ranks": [_rank(600_000, 500_000), _rank(1_000_000, 300_000)]})
    assert judged["bind_ms"] == pytest.approx(0.1) and judged["walk_ms"] == pytest.approx(0.03)
    assert judged["share"] == pytest.approx(0.0055) and judged["share"] > walk.PROMISED
    assert judged["share_with_readings"] == pytest.approx(0.0065)
    assert judged["wakes"] == 30 and judged["wait_ms"] == pytest.approx(4)
    shown = walk.show(judged)
    assert "bind 100 us + walk 30 us - instrument 20 us of a step of 20.00 ms: 0.55 %" in shown
    assert "clock readings 100 x 200 ns; with them 0.65 %" in shown
    assert "30 wake-ups with 300 us" in shown


def test_Judge_TheInstrument_IsNotTheRanks() -> None:
    """A rank whose sum is larger by its readings alone does not count."""
    found = {"seconds": [0.02], "traced_seconds": [0.021], "traced_steps": 10}
    judged = walk.judge({**found, "ranks": [_rank(600_000, 500_000, 1000), _rank(700_000, 500_000, 3000)]})
    assert judged["bind_ms"] == pytest.approx(0.06) and judged["readings"] == 100
    assert judged["share"] == pytest.approx(0.0045)


def test_Smallest_OfTheGrid_IsTheOneOfTheIssue() -> None:
    assert walk.smallest() == {"T": 256, "M": 256, "H": 1024, "E": 8, "K": 1}


@pytest.mark.timeout(900)
def test_TwoRealRanks_LeaveARecord(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    command = [sys.executable, "-m", "integration_tests.benchmarks.walk", "--blocks", "2", "--steps", "3"]
    done = subprocess.run(
        [*command, "--T", "64", "--M", "32", "--H", "64", "--gemm", "native", "--records", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=850,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "walk.raw.json").read_text())
    for rank in record["ranks"]:
        assert rank["num_walks"] == 2 * 2 * (3 + 1)
        assert rank["bind_cpu_ns"] > 0 and rank["walk_cpu_ns"] > 0
        assert rank["num_readings"] > rank["num_walks"]
        assert 0 < rank["readings_cpu_ns"] < rank["bind_cpu_ns"] + rank["walk_cpu_ns"]
