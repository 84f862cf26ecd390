"""Recorded expert loads in the benchmarks: replayed to the row, and what recording them costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.layer import layer, routing
from integration_tests.benchmarks.overhead import routing_cost

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("loads", [(5, 3, 1, 0, 7), (1, 1, 1, 1, 1), (1000, 1, 1, 1, 0), (2, 2, 2, 0, 0)])
def test_Replay_RecordedLoads_AreSharedOutToTheRow(loads: tuple[int, ...], K: int) -> None:
    T = 97
    quotas = routing.quotas_like(T, K, loads)
    chosen = routing.assignments_like(T, K, loads, seed=3)
    assert chosen.shape == (T, K)
    assert [int((chosen == e).sum()) for e in range(len(loads))] == quotas
    assert all(len(set(row)) == K for row in chosen.tolist())  # a token goes to an expert once
    assert sum(quotas) == T * K
    for quota, load in zip(quotas, loads, strict=True):
        wanted = T * K * load / sum(loads)
        assert (load > 0 or quota == 0) and (max(quotas) == T or abs(quota - wanted) <= 1)


def test_Replay_FewerExpertsThanAToken_IsRefused() -> None:
    with pytest.raises(ValueError, match="fewer than 2 experts"):
        routing.assignments_like(8, 2, (0, 3, 0), seed=1)


def _trace(folder: Path, steps: list[list[list[int]]]) -> str:
    path = folder / "routing.jsonl"
    head: dict[str, Any] = {"sluice_routing": 1, "layers": len(steps[0]), "experts": len(steps[0][0])}
    rows = [head, *({"step": s, "loads": loads} for s, loads in enumerate(steps))]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_Replay_OfTheLayerBenchmark_TakesTheMedianStep(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    path = _trace(tmp_path, [[[9, 1, 1, 1], [1, 1, 1, 1]], [[2, 2, 2, 2], [1, 1, 1, 1]], [[4, 2, 1, 1], [1, 1, 1, 1]]])
    assert layer.replayed(path, 0, 4, 2) == (4, 2, 1, 1)
    for wrong, text in (
        ((path, 2, 4, 2), "layers 0 to 1"),
        ((path, 0, 8, 2), "give --E 4"),
        ((path, 0, 4, 3), "--ranks"),
    ):
        with pytest.raises(ValueError, match=text):
            layer.replayed(*wrong)


def _rank(inside: float, excess: float) -> dict[str, Any]:
    without = [1.0 + 0.01 * (i % 7) for i in range(100)]
    clock = {"with": [s * (1 + excess) for s in without], "without": without, "inside": inside}
    return {"wall": clock, "cpu": clock}


@pytest.mark.parametrize(
    ("inside", "excess", "holds"), [(0.1, 0.0, True), (0.3, 0.0, False), (0.1, 0.001, True), (0.1, 0.01, False)]
)
def test_Cost_DirectAndPairs_BothCount(inside: float, excess: float, holds: bool) -> None:
    text, good = routing_cost.judge([_rank(0.0, 0.0), _rank(inside, excess)])
    assert good is holds, text
    assert f"direct {100 * inside / sum(_rank(0, excess)['cpu']['with']):.4f} %" in text[1]


@pytest.mark.timeout(900)
def test_Cost_TwoRealRanks_RecordsHalfOfTheSteps(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    command = [sys.executable, "-m", "integration_tests.benchmarks.routing_cost"]
    shape = ["--T", "64", "--M", "16", "--H", "32", "--E", "4", "--pairs", "6", "--records", str(tmp_path)]
    done = subprocess.run([*command, *shape], capture_output=True, text=True, timeout=850, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "recorded 6 backwards of 12" in done.stdout
    record = json.loads((tmp_path / "routing-cost.raw.json").read_text())
    for rank in record["ranks"]:
        for clock in ("wall", "cpu"):
            assert len(rank[clock]["with"]) == len(rank[clock]["without"]) == 6
            assert 0 < rank[clock]["inside"] < sum(rank[clock]["with"])
