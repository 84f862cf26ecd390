"""The benchmark of layers that move: its marks; a tiny run leaves a whole record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.live import live


def _stall(live_s: float, drained_s: float, in_batch: int = 3) -> list[bool]:
    seconds = {"still": [0.5] * 4, "drained": [0.5 + drained_s] * 4, "live": [0.5 + live_s] * 4}
    found = {"seconds": seconds, "live": {"in_batch": in_batch, "at_flush": 0, "sums_early": 2}}
    return [good for _, good in live.judged_stall({}, found)]


def test_Stall_EachMark_IsMissedByItsOwn() -> None:
    assert _stall(0.04, 0.2) == [True, True, True]
    assert _stall(0.06, 0.2) == [False, True, True]
    assert _stall(0.04, 0.1) == [True, False, True]
    assert _stall(0.04, 0.2, in_batch=0) == [True, True, False]


def test_Latencies_AreThoseOfThe99thPercentile() -> None:
    still = [1.0] * 98 + [2.0, 50.0]
    found = {"still": still, "giving way": [*still[:98], 2.1, 90.0], "sharing": [*still[:98], 4.1, 4.2]}
    assert [good for _, good in live.judged_latencies({}, found)] == [True, True, True]
    found["giving way"] = found["sharing"]
    found["sharing"] = still
    assert [good for _, good in live.judged_latencies({}, found)] == [True, False, False]


def _decided(**changes: Any) -> list[bool]:
    found = {
        **{"took": [[1.0] * 10] * 2, "off": [[0.5] * 5 + [0.0] * 5] * 2, "static": [1.5, 1.5], "noise_batches": 200},
        **{"ideal": [0.97, 0.97], "moves": 2, "noise_moves": 1},
        **{"live": {"in_batch": 1}, **changes},
    }
    return [good for _, good in live.judged_decided({"batches": 10}, found)]


def test_Decided_EachMark_IsMissedByItsOwn() -> None:
    assert _decided() == [True] * 4
    assert _decided(took=[[1.0] * 5 + [1.1] * 5] * 2) == [False, True, True, True]
    assert _decided(took=[[1.5] * 5 + [1.0] * 5] * 2, static=[2.0] * 2) == [True, False, True, True]
    assert _decided(took=[[1.2] * 10] * 2, ideal=[1.15] * 2) == [True, True, False, True]
    assert _decided(noise_moves=2) == [True, True, True, False]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_TinyRun_LeavesAWholeRecord(root: str, tmp_path: Path) -> None:
    options = ["--smoke", "--link", "none", "--records", str(tmp_path)]
    command = [sys.executable, "-m", "integration_tests.benchmarks.live", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "live.raw.json").read_text())
    assert [name for name in live.CELLS if record[name]["said"]] == list(live.CELLS)
    moved = record["stall"]["found"]["live"]
    assert moved["in_batch"] + moved["at_flush"] == 3  # one beforehand
    assert all(len(each) == 2 for each in record["stall"]["found"]["seconds"].values())
    assert len(record["latencies"]["found"]["still"]) == 4
    assert "slept layers" in done.stdout
