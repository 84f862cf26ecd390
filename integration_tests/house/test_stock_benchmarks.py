"""The benchmarks beside stock DeepSpeed run and write whole records: tiny ones, whose numbers mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SIDES = ("stock", "sluice")


def _smoke(root: str, benchmark: str, *more: str) -> str:
    command = [sys.executable, "-m", f"integration_tests.benchmarks.{benchmark}", "--smoke", *more]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _record(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.raw.json")
    return json.loads(file.read_text())


def _is_spread(quartiles: dict[str, float]) -> bool:
    return 0 < quartiles["q1"] <= quartiles["median"] <= quartiles["q3"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_LayerBenchmark_Smoke_WritesAWholeRecord(root: str, tmp_path: Path) -> None:
    text = _smoke(root, "layer", "--records", str(tmp_path))
    record = _record(tmp_path)
    assert record["cell"]["name"] == "smoke" and record["link"] == "loopback" and record["seed"] == 1
    assert set(record["sides"]) == {*SIDES, "one_chunk"}
    for side in record["sides"].values():
        assert len(side["wall_s"]) == len(side["cpu_s_all_ranks"]) == 1
        assert _is_spread(side["wall"]) and side["cpu"]["median"] > 0
    for ratio in ("speedup", "sluice_over_stock", "one_chunk_over_chosen"):
        assert _is_spread(record[ratio])
    assert record["speedup"]["median"] == pytest.approx(1 / record["sluice_over_stock"]["median"])
    parts = record["parts"]
    assert sum(parts["rows_received"]) == 2 * 64 * 2  # W T K: nothing is dropped
    assert min(parts[name] for name in ("comm_per_pass_s", "forward_compute_s", "backward_compute_s")) > 0
    assert record["possible"] == pytest.approx(record["sides"]["stock"]["wall"]["median"] / parts["possible_s"])
    assert record["max_output_difference"] < 1e-5
    assert set(record["settling_steps"]) == {"sluice", "one_chunk"}
    assert len(record["stock_parts"]) == len(record["sluice_stats"]) == 2
    for stats in record["sluice_stats"]:
        assert stats["bytes_sent"] > 0 and stats["chunks"] >= 1 and stats["comm_cpu_s"] > 0
    assert record["memory_over_parts"] > 0
    if "memory" in record:  # no compiler, no count
        assert all(rank[side]["peak_bytes"] > 0 for rank in record["memory"] for side in SIDES)
        assert record["memory_bound"]["of_bound"] > 0
    assert record["machine"]["cores"] >= 1 and {"torch", "deepspeed", "sluice"} <= set(record["versions"])
    assert {"gflops_before_rounds"} <= set(record["quiet"]) and {"share_of_rounds"} <= set(record["stolen"])
    assert "smoke  (loopback, W 2, T 64" in text and "reached / possible" in text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_TrainBenchmark_Smoke_WritesAWholeRecord(root: str, tmp_path: Path) -> None:
    text = _smoke(root, "train", "--records", str(tmp_path))
    record = _record(tmp_path)
    assert record["link"] == "loopback" and record["ranks"] == 2 and record["seed"] == 1
    assert record["shape"]["ep_size"] == 2 and record["config"]["sluice"]["enabled"] is True
    assert set(record["sides"]) == set(SIDES)
    for side in record["sides"].values():
        assert len(side["wall_s"]) == len(side["cpu_s_all_ranks"]) == 1 and len(side["loss"]) == 2
        assert _is_spread(side["wall"])
    assert _is_spread(record["speedup"])
    assert record["max_loss_difference"] < 1e-4  # of a loss near ln 256, in f32
    assert all(stats["bytes_sent"] > 0 for stats in record["sluice_stats"])
    assert record["machine"]["cores"] >= 1 and {"torch", "deepspeed", "sluice"} <= set(record["versions"])
    assert "losses differ by at most" in text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_TrainBenchmark_SmokeOfStockAloneWithoutAFolder_LeavesNoRecord(root: str) -> None:
    folder = Path(root) / "integration_tests" / "benchmarks" / "records"
    before = sorted(folder.iterdir())
    assert "stock  step" in _smoke(root, "train", "--stock-only")
    assert sorted(folder.iterdir()) == before
