# SPDX-License-Identifier: Apache-2.0
"""Tests the harness of the benchmarks: cases, records, pages, and tiny runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks import cases
from integration_tests.benchmarks.measuring import bench, pages, records
from integration_tests.benchmarks.scenarios import scenarios, scenarios_drawn
from integration_tests.benchmarks.stages import stages_simulated

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted(file.stem for file in records.FOLDER.glob("*.json") if not file.name.endswith(".raw.json"))
EVERY_DAY = ("overlap", "stock")  # cases with tiny runs every day; --full runs all
RANKS_TUNE = "finetune --ranks 2"
EXACT = ("stock",)  # cases that judge exact numbers in a tiny run, and not times


def module(name: str) -> Any:
    return cases.CASES[name].load()


@pytest.mark.parametrize("name", cases.CASES)
def test_Case_HasItsPartsAndAPlaceForEachTable(name: str) -> None:
    found = module(name)
    assert set(found.SMOKE) <= set(found.OPTIONS) and callable(found.run) and found.__doc__
    assert bench.parser_of(name, found).format_help()
    if hasattr(found, "PAGE"):
        text = (pages.PAGES / found.PAGE).read_text()
        for table in found.tables(records.runs(records.FOLDER, name)):
            assert pages.between(name, table).search(text), f"{found.PAGE} has no place for {table}"


def test_Pages_EachPlace_IsOfACase() -> None:
    for page in pages.PAGES.rglob("*.md"):
        for case, table in re.findall(r"<!-- (\S+) (\S+): written by the benchmark -->", page.read_text()):
            assert table in module(case).tables(records.runs(records.FOLDER, case)), (page.name, case, table)


@pytest.mark.parametrize("name", RECORDED)
def test_Record_EachRun_CanBeRepeatedByItsCommandOnAMachineOfThePages(name: str) -> None:
    parser = bench.parser_of(name, module(name))
    commands = [run["command"] for run in records.runs(records.FOLDER, name)]
    assert commands and len(set(commands)) == len(commands)
    for run in records.runs(records.FOLDER, name):
        first, *options = run["command"].split()
        assert first == name and parser.parse_args(options)
        assert records.machine_of(run) and {"python", "torch", "sluice"} <= set(run["versions"])
        assert records.rows_of(run)


def test_Scenarios_Simulated_BestPairsDifferAndAdaptiveIsNeverSlower() -> None:
    lines, found = scenarios.simulate(scenarios_drawn.draw(), 2)
    picks = {pair for line in lines for pair in line["picks"].values()}
    assert len(picks) >= 8 and len({pair.split()[0] for pair in picks}) >= 5, picks
    for line in lines:
        assert min(line["over_adaptive"].values()) >= 1 - 1e-9, line["name"]
    assert found["kept"]["list's pair"]["mean"] > 1.01 and found["reuse"]["list's pair"]["mean"] > 1.01
    assert found["kept"]["best fixed"]["most"] > 1.01  # the best n differs between batch sizes of a run
    assert found["budget"]["best fixed"]["most"] > 1.05  # small batches fit policies that large ones do not
    assert found["kept"]["split"]["mean"] > 1.01 and found["kept"]["unsplit"]["mean"] > 1.03
    for name, (held, of) in found["hypotheses"].items():
        assert of >= 15 and held >= 0.9 * of, name  # for the schedule in virtual time, without closed forms


def test_Stages_SimulatedSpeedups_AreWhatIsKnown() -> None:
    plan = {"forward_s": 1 / 3, "backward_s": 2 / 3, "micro_batches": 16, "pairs": 3, "stages": 4, "in_flight": 8}

    def found(policy: str = "backward_first", **changes: Any) -> dict[str, float]:
        return stages_simulated.speedup({**plan, **changes}, 0.25, policy)

    two = found("1f1b_hint", stages=2, in_flight=4)
    assert two["speedup"] == pytest.approx(1.43, abs=0.01)  # one message at a time in each direction
    assert found()["speedup"] == pytest.approx(1.71, abs=0.01)  # a stage's two messages share its network card
    assert found(in_flight=4)["speedup"] == pytest.approx(1.31, abs=0.005)  # 1.32 with separate links
    jitter, slow, stall = found(sigma=0.4), found(slow={"1": 1.5}), found(stalls={"rank": 1})
    assert all(each["stock_s"] > found()["stock_s"] for each in (jitter, slow, stall))
    assert jitter["stock_s"] != slow["stock_s"] and found(sigma=0.4) == jitter


def tiny(name: str) -> Any:
    return name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*(tiny(name) for name in cases.CASES if name != "papers"), tiny(RANKS_TUNE)])
def test_TinyRun_LeavesARecordWithTheColumnsOfThePage(root: str, tmp_path: Path, name: str) -> None:
    told = [*name.split(), "--smoke"]
    name = told[0]
    command = [sys.executable, "-m", "integration_tests.benchmarks", *told, "--records", str(tmp_path)]
    command += ["--check"] if name in EXACT else []
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0 and "marks are" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = records.runs(tmp_path, name)
    assert run["command"] == " ".join(told) and run["rows"]
    known = {column for each in records.runs(records.FOLDER, name) for column in each["columns"]}
    if not set(run["columns"]) <= known | {"is_missed", "of_bound", "refused", "possible"}:
        # No run of this kind is committed. Then the page must have a table that shows it.
        assert run["command"] in "".join(module(name).tables([run]).values())
    assert (tmp_path / f"{name}.raw.json").exists()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_StockModel_StepsOfDeepSpeed_MedianErrorIsAtMostFifteenPercent(root: str) -> None:
    """Rates and layers are timed in turns by CPU time, in up to three tries, because the machine may be slow in one."""
    command = [sys.executable, "-m", "integration_tests.benchmarks", "stock", "--hosts", "DeepSpeed", "--ranks", "1"]
    told = ""
    for _ in range(3):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1100)
        told += done.stdout + done.stderr
        median = re.search(r"error of a step: median ([\d.]+) %", done.stdout)
        if median and float(median[1]) <= 15:
            return
    raise AssertionError(told[-6000:])
