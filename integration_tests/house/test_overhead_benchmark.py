"""The benchmark of what tuning costs: its sums, and that it runs."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.measuring import stats
from integration_tests.benchmarks.overhead import overhead

ROOT = Path(__file__).resolve().parents[2]


def _found(tuned: list[float], fixed: list[float], raced: list[bool]) -> dict[str, Any]:
    sides = {"tuned": tuned, "fixed": fixed, "twin": fixed}
    stats = {"excess_seconds": 0.3, "switch_seconds": 0.1, "total_seconds": 100.0}
    blocks = {"raced": raced, "stolen": [0.0] * len(raced), "most_stolen": 0.05}
    return {"wall": sides, "cpu": {**sides, "tuned": fixed}, "stats": stats, **blocks}


def test_Judge_RacesAtTheStart_CountByTheirSum_OthersByTheMedian() -> None:
    tuned = [1.5] + [1.01] * 8 + [2.0]  # the last one: something else took the machine
    judged = overhead.judge(_found(tuned, [1.0] * 10, [True] + [False] * 9))
    assert judged["wall"]["sums"] == pytest.approx(0.158)
    assert judged["wall"]["races"] == pytest.approx(0.05)
    assert judged["wall"]["pairs"] == pytest.approx(0.01)
    assert judged["wall"]["cost"] == pytest.approx(0.05 + 0.9 * 0.01)
    assert judged["wall"]["low"] <= judged["wall"]["cost"] <= judged["wall"]["high"]
    assert judged["cpu"]["cost"] == 0 and judged["account"] == pytest.approx(0.004)
    assert not judged["kept"]


def test_Judge_BlocksThatWereStolenFrom_CountForNeitherSide() -> None:
    found = _found([9.0, 1.001, 1.0, 1.002, 9.0], [1.0] * 4 + [0.5], [True] + [False] * 4)
    found["stolen"] = [0.3, 0.05, 0.0, 0.01, 0.06]
    judged = overhead.judge(found)
    assert judged["left_out"] == 2 and judged["wall"]["races"] == 0
    assert judged["wall"]["sums"] == pytest.approx(0.001) and judged["wall"]["cost"] == pytest.approx(0.001)


def test_Judge_ConfiguredLayersThatDiffer_TunedCountsAgainstTheirMean() -> None:
    found = _found([1.02] * 9, [1.0] * 9, [False] * 9)
    found["wall"] = {**found["wall"], "twin": [1.04] * 9}
    judged = overhead.judge(found)
    assert judged["wall"]["cost"] == pytest.approx(0) and judged["wall"]["twins"] == pytest.approx(0.04)


def test_MeanOfRuns_ThatDiffer_TheirMeanIsJudged_TheirRangeShown() -> None:
    runs = [overhead.judge(_found([cost] * 9, [1.0] * 9, [False] * 9)) for cost in (0.998, 1.004, 1.01)]
    judged = overhead.mean_of_runs(runs)
    assert judged["wall"]["cost"] == pytest.approx(0.004) and judged["kept"] and not runs[2]["kept"]
    assert judged["wall"]["low"] == pytest.approx(-0.002) and judged["wall"]["high"] == pytest.approx(0.01)


@pytest.mark.parametrize(("clock", "kept"), [(None, True), ("wall", False), ("cpu", False), ("account", False)])
def test_Judge_AnyOfTheThreeAboveThePromise_IsMissed(clock: str | None, kept: bool) -> None:
    found = _found([1.001] * 9, [1.0] * 9, [False] * 9)
    found["cpu"] = {"tuned": [1.002] * 9, "fixed": [1.0] * 9, "twin": [1.0] * 9}
    if clock == "account":
        found["stats"]["excess_seconds"] = 0.6
    elif clock is not None:
        found[clock] = {"tuned": [1.007] * 9, "fixed": [1.0] * 9, "twin": [1.0] * 9}
    found["judged"] = overhead.judge(found)
    assert found["judged"]["kept"] == kept
    text = overhead.verdict({"changing": found}, 10000)
    assert text.startswith("kept by changing: " if kept else "MISSED by changing: ") and "10000 steps" in text


def test_MedianOfPairs_Interval_CoversTheTrueMedianAsOftenAsItSays() -> None:
    draw = random.Random(1)
    covered = 0
    for _ in range(500):
        found = stats.median_of_pairs([1 + draw.gauss(0.003, 0.05) for _ in range(200)])
        assert found["low"] <= found["median"] <= found["high"]
        covered += found["low"] <= 1.003 <= found["high"]
    assert 0.93 * 500 <= covered <= 0.98 * 500


@pytest.mark.timeout(900)
def test_TwoRealRanks_BothWorkloads_LeaveARecord(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    command = [sys.executable, "-m", "integration_tests.benchmarks.overhead", "--steps", "60", "--block", "20"]
    command += ["--runs", "2", "--calibrate", "0.2", "--records", str(tmp_path)]

    def run(*more: str) -> str:
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=400, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    out = run("--workloads", "constant") + run("--resume")
    lines = out.splitlines()
    assert sum(line.startswith("constant  60 steps: wall ") for line in lines) == 2
    assert sum(line.startswith("changing  60 steps: wall ") for line in lines) == 1
    record = json.loads((tmp_path / "overhead.raw.json").read_text())
    for name, sizes in overhead.WORKLOADS.items():
        found = record["workloads"][name]
        assert len(found["runs"]) == 2
        assert found["stats"]["timed_passes"] >= 2 * 60 - 4  # the last step is told by none
        assert {int(T) for T in found["chosen"]} == set(sizes)
        assert len(found["raced"]) == 3 and found["raced"][0] is True
        assert found["calibration_s"][0] > found["calibration_s"][1] > 0  # from the cache
        for clock in ("wall", "cpu"):
            assert all(len(found[clock][side]) == 3 for side in ("tuned", "fixed", "twin"))

    assert sum(line.startswith(("kept by ", "MISSED by ")) for line in lines) == 2  # one verdict a run
    # What was measured with other settings is measured again, and what the first run measured is as it was.
    same = argparse.Namespace(**record["settings"], resume=True)
    other = argparse.Namespace(**{**record["settings"], "seed": 8}, resume=True)
    assert overhead.measured(other, tmp_path / "overhead.json") == {}
    assert set(overhead.measured(same, tmp_path / "overhead.json")) == {"constant", "changing"}


def test_BlockLongerThanTheRun_IsRefused() -> None:
    command = [sys.executable, "-m", "integration_tests.benchmarks.overhead", "--steps", "10", "--block", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 2 and "--steps must be at least --block" in done.stderr
