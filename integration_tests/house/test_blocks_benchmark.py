"""The benchmark of `sluice.plan_model`: its marks, and that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER = "runs of sqrt(N)"


def _sides(**changes: tuple[float, int]) -> list[SimpleNamespace]:
    """Budgets that take less and less time, within their bytes; `changes`: (seconds, peak) by the side's number."""
    sides = []
    for i in range(10):
        seconds, peak = changes.get(f"budget_{i + 1}", (2.0 - i / 10, 90 + i))
        sides.append(SimpleNamespace(name=f"budget {i + 1}", seconds=[seconds] * 3, peak=peak, budget=100 + i))
    for name, budget in ((OTHER, None), (f"its bytes: {OTHER}", 95)):
        seconds, peak = changes.get("other" if budget is None else "plan", (1.5, 95))
        sides.append(SimpleNamespace(name=name, seconds=[seconds] * 3, peak=peak, budget=budget))
    return sides


def test_Missed_EachMark_IsNamed() -> None:
    pytest.importorskip("sluice")
    from integration_tests.benchmarks.blocks.blocks import missed

    assert missed(_sides()) == []
    assert missed(_sides(budget_3=(1.8, 103))) == ["budget 3 is over its bytes"]
    assert missed(_sides(budget_10=(1.32, 99))) == ["budget 10 takes 1.100 of budget 9"]
    assert missed(_sides(plan=(1.6, 95))) == [f"in the bytes of '{OTHER}' a plan takes 1.067 of it"]


def test_TinyModel_LeavesARecord(tmp_path: Path) -> None:
    pytest.importorskip("sluice")
    command = [sys.executable, "-m", "integration_tests.benchmarks.blocks", "--smoke", "--record"]
    done = subprocess.run(
        [*command, str(tmp_path / "blocks.json")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = json.loads((tmp_path / "blocks.raw.json").read_text())["lines"]
    budgets = [line for line in lines if line["budget_bytes"] is not None]
    assert len(budgets) == 12 and all(line["peak_bytes"] <= line["budget_bytes"] for line in budgets)
    again = [line["recomputed"] for line in budgets[:10]]
    assert again == sorted(again, reverse=True) and again[0] > again[-1] == 0
