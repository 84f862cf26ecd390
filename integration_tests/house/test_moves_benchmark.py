"""The benchmark of moved experts: what it asks of its numbers, and tiny runs over loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.moves import moves

SIDES = ("stock", "unmoved", "moved", "shadowing", "weights in each step")


def test_Marks_EachPromise_IsMissedByItself() -> None:
    good: dict[str, Any] = {
        "of_unmoved": {"median": 0.6},
        "of_stock": {"median": 0.5},
        "share": 0.02,
        "moved_experts": 4,
        "processor_share": 0.5,
    }
    assert moves.is_good(good, is_even=False)
    worse = ({"of_unmoved": {"median": 0.7}}, {"of_stock": {"median": 0.6}}, {"share": 0.04}, {"moved_experts": 0})
    assert not any(moves.is_good({**good, **change}, is_even=False) for change in worse)
    even = {"moved_experts": 0, "processor_share": 0.004}
    assert moves.is_good(even, is_even=True)
    worse = ({"moved_experts": 2}, {"processor_share": 0.02})
    assert not any(moves.is_good({**even, **change}, is_even=True) for change in worse)


@pytest.mark.full
@pytest.mark.parametrize("skew", ["1.7", "1"])
def test_TinyRun_LeavesAWholeRecord(root: str, tmp_path: Path, skew: str) -> None:
    shape = {"T": 96, "M": 64, "H": 64, "E": 8, "skew": skew, "pairs": 2, "ranks": 2, "link": "none"}
    command = [sys.executable, "-m", "integration_tests.benchmarks.moves", "--records", str(tmp_path)]
    command += [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "moves-2-none.raw.json").read_text())["found"]
    assert set(found["seconds"]) == set(SIDES) and found["of_unmoved"]["count"] == 2
    assert 0 < found["processor_share"] < 1
    if skew == "1":
        assert found["moved_experts"] == 0 and "deciding took" in done.stdout
    else:
        assert found["moved_experts"] >= 2 and found["hidden_bytes"] <= found["sent_bytes"] > 0
        assert "moved of shadowing, at least" in done.stdout
