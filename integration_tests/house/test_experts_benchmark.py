"""What experts.py and ep.py promise, on made-up numbers, and that tiny runs of both leave whole records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.ep import ep_marks
from integration_tests.benchmarks.experts import experts_marks
from integration_tests.benchmarks.measuring import records

ROOT = Path(__file__).resolve().parents[2]


def _cell(gradients: str = "kept", **changes: float) -> dict[str, Any]:
    """A cell that keeps every mark just so. changes: roofline, fresh_roofline, speedup, peak, saved."""
    given = {"roofline": 0.75, "fresh_roofline": 0.75, "speedup": 2.5, "saved": 50.0, **changes}
    given.setdefault("peak", experts_marks.MOST_PEAK[gradients])
    cell: dict[str, Any] = {"shape": "qwen3", "tokens": 256, "dtype": "bfloat16", "threads": 1, "gradients": gradients}
    cell["of_roofline"] = {"sluice": {"median": given["roofline"]}}
    if gradients == "fresh":
        cell["of_roofline_with_fresh_pages"] = {"sluice": {"median": given["fresh_roofline"]}}
    cell["speedup_over"] = {"grouped_mm": {"median": given["speedup"]}}
    cell["memory"] = {
        "sluice": {"peak_over_gradients": given["peak"], "saved_mib": given["saved"]},
        "grouped_mm": {"peak_over_gradients": 2.0, "saved_mib": 100.0},
    }
    return cell


def test_Experts_JustKept_IsNotMissed() -> None:
    cells = [_cell("fresh", roofline=0.3), _cell("kept")]
    assert experts_marks.verdicts(cells) == (["all 2 cells keep the marks"], True)


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
@pytest.mark.parametrize(
    "change, word",
    [
        ({"roofline": 0.74, "fresh_roofline": 0.74}, "0.74 of the roofline"),
        ({"speedup": 2.49}, "2.49 x grouped_mm, wanted 2.5"),
        ({"peak": 2.26}, "backward's peak 2.26"),
        ({"saved": 51.0}, "saved bytes 0.51"),
    ],
)
def test_Experts_EachMark_IsMissedByName(gradients: str, change: dict[str, float], word: str) -> None:
    lines, good = experts_marks.verdicts([_cell(gradients), _cell(gradients, **change)])
    assert not good and len(lines) == 1
    assert word in lines[0] and f"qwen3 T 256 bfloat16 1 threads, gradients {gradients}" in lines[0]


def test_Experts_Mixtral_HasItsOwnSpeedups() -> None:
    cell = _cell(speedup=1.3) | {"shape": "mixtral", "dtype": "float32"}
    assert experts_marks.missed(cell) == []
    assert experts_marks.missed(cell | {"dtype": "bfloat16"}) == ["1.30 x grouped_mm, wanted 1.5"]


def test_Experts_Nothing_KeepsNothing() -> None:
    assert not experts_marks.verdicts([])[1]


def _calls(overhead: float, call: float) -> dict[str, Any]:
    return {"sluice": {"overhead_us": overhead, "call_us": call}, "gemms_us": 1000.0}


def test_Experts_Decode_SlowCalls_AreNamed() -> None:
    calls = {"1": _calls(30.0, 1030.0), "4": _calls(31.4, 900.0), "8": _calls(20.0, 1031.0)}
    lines, good = experts_marks.verdicts([_cell()], {"qwen3 bfloat16 1 threads": calls})
    assert not good and lines == [
        "missed: qwen3 bfloat16 1 threads, decode T 4: 31 us over GEMMs, at most 30",
        "missed: qwen3 bfloat16 1 threads, decode T 8: 31 us over a loop of torch.mm",
    ]
    assert experts_marks.verdicts([_cell()], {"qwen3 bfloat16 1 threads": {"1": calls["1"]}})[1]


def _line(median: float, q3: float, comm: float) -> dict[str, Any]:
    gain = {"q1": 1.0, "median": median, "q3": q3}
    return {"name": "qwen3", "dtype": "float32", "link": "1gbit", "comm_s": comm, "compute_s": 1.0, "speedup": gain}


def test_Ep_BalancedAndUnbalanced_AreAskedForTheirOwn() -> None:
    assert ep_marks.verdicts([_line(1.5, 1.6, 1.2), _line(1.0, 0.98, 0.1)])[1]
    lines, good = ep_marks.verdicts([_line(1.49, 1.6, 1.2), _line(0.9, 0.96, 0.1)])
    assert not good and len(lines) == 2
    assert "1.49 x stock" in lines[0] and "1.04 of its time" in lines[1]


def test_Ep_NoBalancedCell_ShowsNothing() -> None:
    lines, good = ep_marks.verdicts([_line(2.0, 2.1, 0.1)])
    assert not good and "not shown" in lines[0]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=ROOT)


@pytest.mark.full
def test_Experts_TinyRun_LeavesAWholeRecord(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    done = _run("-m", "integration_tests.benchmarks.experts", "--smoke", "--check", "--record", str(file))
    assert "wrote experts.json" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads(records.raw_file(file).read_text())
    cells = record["cells"]
    kinds = [(cell["threads"], cell["dtype"], cell["gradients"]) for cell in cells]
    wanted = [(n, dtype, kind) for n in (1, 2) for dtype in ("float32", "bfloat16") for kind in ("fresh", "kept")]
    assert kinds == wanted
    for cell in cells:
        kept = cell["gradients"] == "kept"
        assert cell["sluice_stats"]["passes_in_place"] == (4 if kept else 0)  # two rounds of two steps
        assert ("of_roofline_with_fresh_pages" in cell) != kept
        assert all(cell["seconds"][side]["backward"]["median"] > 0 for side in ("sluice", "grouped_mm", "dense"))
        memory = cell["memory"]
        assert 0 < memory["sluice"]["saved_mib"] <= 0.5 * memory["grouped_mm"]["saved_mib"]
    for calls in record["decode"].values():
        assert all(0 < cell["sluice"]["narrow_gemms_us"] < cell["sluice"]["narrow_us"] for cell in calls.values())
    assert done.returncode == 0 and "all 8 cells keep the marks" in done.stdout  # only saved bytes count for this shape


@pytest.mark.full
@pytest.mark.parametrize("deduplicate", (False, True))
def test_Ep_TinyRun_LeavesAWholeRecord(tmp_path: Path, deduplicate: bool) -> None:
    options = ("--smoke", "--links", "none", "--pairs", "2", "--warm-up", "2", "--records", str(tmp_path))
    done = _run("-m", "integration_tests.benchmarks.ep", *options, *(("--deduplicate",) if deduplicate else ()))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "ep.raw.json").read_text())
    (line,) = record["lines"]
    assert record["ranks"] == 2 and (line["name"], line["link"]) == ("smoke", "none")
    assert line["deduplicate"] == deduplicate
    assert all(len(line["wall_s"][side]) == 2 for side in ("stock", "sluice"))
    assert line["difference"] < 1e-5 and line["comm_s"] > 0 and line["compute_s"] > 0 and line["chunks"] >= 1
    assert isinstance(ep_marks.missed(line), list)


@pytest.mark.full
def test_TwoLevels_TinyRunOnTwoNodes_SendsLessBetweenThem(tmp_path: Path) -> None:
    options = ("--smoke", "--links", "1gbit", "--pairs", "2", "--warm-up", "2", "--records", str(tmp_path))
    done = _run("-m", "integration_tests.benchmarks.two_levels", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = json.loads((tmp_path / "two_levels.raw.json").read_text())["lines"]
    assert all(len(line["wall_s"][side]) == 2 for side in ("one", "two"))
    assert line["between_bytes"]["two"] < line["between_bytes"]["one"]
    assert line["difference"] < 1e-5
