"""Layers of Megatron and of AutoEP beside Sluice: tiny runs leave whole records, and marks are asked."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.hosts import beside, beside_page


def _line(link: str, median: float, q3: float, possible: float = 1.5, **more: Any) -> dict[str, Any]:
    gain = {"q1": 0.9, "median": median, "q3": q3}
    return {"name": "layer", "dtype": "float32", "link": link, "speedup": gain, "possible": possible, **more}


def test_Marks_EachPromise_IsMissedByItsOwnLines() -> None:
    marks = {"must_reach": {"1gbit": 1.22}}
    good = [_line("1gbit", 1.3, 1.4, **marks), _line("0.4gbit", 1.01, 1.1, **marks), _line("none", 0.98, 0.99)]
    assert beside.verdicts(good) == (["all 3 cells keep the marks"], True)
    said, kept = beside.verdicts(
        [_line("1gbit", 1.2, 1.4, **marks), _line("0.4gbit", 1.0, 1.1), _line("none", 0.9, 0.96)]
    )
    assert not kept and len(said) == 3
    assert "wanted 1.22" in said[0] and "wanted more than 1" in said[1] and "1.04 of its time" in said[2]


@pytest.mark.parametrize("possible, median, is_kept", [(1.59, 1.44, True), (1.59, 1.42, False), (1.61, 1.44, False)])
def test_Marks_AboveWhatIsPossible_WantNineTenthsOfIt(possible: float, median: float, is_kept: bool) -> None:
    line = _line("0.4gbit", median, 1.6, possible, must_reach={"0.4gbit": 1.6})
    assert beside.verdicts([line])[1] == is_kept


def test_Cells_LinksOfAShape_UnlessSomeAreNamed() -> None:
    shapes = {"few": {"T": 1, "links": ("1gbit",)}, "all": {"T": 2}}
    named = {"smoke": False, "shapes": ["all", "few"], "dtypes": ["float32"]}

    def cells(links: Any) -> dict[str, list[str]]:
        found = beside.cells_of(argparse.Namespace(**named, links=links), shapes, {})
        return {link: [cell["name"] for cell in of_link] for link, of_link in found.items()}

    assert cells(None) == {"1gbit": ["few", "all"], "0.4gbit": ["all"], "0.2gbit": ["all"]}
    assert cells(["none"]) == {"none": ["few", "all"]}


@pytest.mark.parametrize("name", beside_page.NAMES)
def test_Page_EachTable_IsThatOfItsRecord(name: str) -> None:
    (found,) = beside_page.between(name).findall(beside_page.PAGE.read_text())
    assert found == beside_page.table(name, beside_page.record(name)), "run beside_page"


def test_Page_TableOfARecord_SaysWhatIsMissed() -> None:
    lines = [_line("1gbit", 1.3, 1.4, possible=1.5), _line("none", 0.9, 0.95, possible=1.0)]
    text = beside_page.table("megatron", {"date": "D", "ranks": 2, "lines": lines}).splitlines()
    assert text[0] == "D, record `megatron.json`, 2 ranks. Bold: missed."
    assert "| 1gbit | 1.30 [0.90, 1.40] of 1.50 |" in text and "| none | **0.90 [0.90, 0.95]** of 1.00 |" in text


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("benchmark, record", [("megatron_layer", "megatron"), ("autoep_layer", "autoep")])
def test_TinyRun_LeavesAWholeRecord(root: str, tmp_path: Path, benchmark: str, record: str) -> None:
    options = ["--smoke", "--links", "none", "--pairs", "2", "--records", str(tmp_path)]
    command = [sys.executable, "-m", f"integration_tests.benchmarks.{benchmark}", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = json.loads((tmp_path / f"{record}.raw.json").read_text())["lines"]
    assert (line["name"], line["link"]) == ("smoke", "none")
    assert all(len(line["wall_s"][side]) == 2 for side in ("stock", "sluice"))
    assert line["difference"] < 1e-5 and line["possible"] > 0 and line["chunks"] >= 1
    assert min(line["comm_per_pass_s"], line["forward_compute_s"], line["backward_compute_s"]) > 0
    assert (tmp_path / f"{record}.json").exists() and "possible" in done.stdout
