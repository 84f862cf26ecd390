# SPDX-License-Identifier: Apache-2.0
"""Tests the harness of the benchmarks: cases, options, records, pages, and tiny runs."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks import cases
from integration_tests.benchmarks.layer import routing
from integration_tests.benchmarks.layer.grid_cells import CELLS
from integration_tests.benchmarks.measuring import bench, pages, records, stolen

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted(file.stem for file in records.FOLDER.glob("*.json") if not file.name.endswith(".raw.json"))
EVERY_DAY = ("overlap", "stock")  # cases with tiny runs every day; --full runs all
RANKS_TUNE = "finetune --ranks 2"
EXACT = ("stock",)  # cases that judge exact numbers in a tiny run, and not times


def module(name: str) -> Any:
    return importlib.import_module(cases.CASES[name].module)


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


def test_RawFiles_AreIgnoredByGit() -> None:
    raw = str((records.FOLDER / "grid.raw.json").relative_to(ROOT))
    assert subprocess.run(["git", "check-ignore", "-q", raw], cwd=ROOT).returncode == 0


def test_Record_RunOfTheSameCommand_IsReplacedAndOthersStay(tmp_path: Path) -> None:
    records.write(
        tmp_path, "x", "x --a 1", [{"n": 1, "s": 1 / 3}, {"n": 2, "more": {"q1": 123456.7}}], {"samples": [1]}
    )
    records.write(tmp_path, "x", "x", [{"n": 3}])
    records.write(tmp_path, "x", "x --a 1", [{"n": 4}])
    assert [run["command"] for run in records.runs(tmp_path, "x")] == ["x --a 1", "x"]
    assert records.rows(tmp_path, "x", "x --a 1") == [{"n": 4}] and records.rows(tmp_path, "x", "x --a 2") == []
    assert records.table([{"n": 1, "s": 1 / 3}, {"n": 2, "m": {"q1": 123456.7}}]) == {
        "columns": ["n", "s", "m"],
        "rows": [[1, 0.33333, None], [2, None, {"q1": 123457}]],
    }


def test_Record_CutWhileItIsWritten_IsAsItWas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(tmp_path, "x", "x", [{"n": 1}])
    write_text = Path.write_text

    def cut(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        records.write(tmp_path, "x", "x", [{"n": 2}])
    assert records.rows(tmp_path, "x", "x") == [{"n": 1}]


def test_Record_MachineWithoutAName_IsRefused() -> None:
    assert records.machine_of({"machine": {"cpu": "AMD EPYC", "isa": ["avx2"]}}) == "D"
    with pytest.raises(LookupError, match="no Other with avx2"):
        records.machine_of({"machine": {"cpu": "Other", "isa": ["avx2"]}})


def test_Command_LeavesOutPlacesAndKeepsTheRest() -> None:
    given = ["--pairs", "3", "--records", "/else/where", "--routing", "/here/loads.json", "--check", "--smoke"]
    parser = bench.parser_of("layer", module("layer"))
    found = bench.Bench("layer", parser.parse_args(given), given)
    assert found.command == "layer --pairs 3 --routing loads.json --smoke"


@pytest.mark.parametrize(
    "given, text",
    [
        (["nothing"], "no benchmark is called 'nothing'"),
        (["overhead", "--steps", "10", "--block", "20"], "--steps must be at least --block"),
        (["grid", "--pairs", "3"], "at least 20 pairs"),
    ],
)
def test_Options_ThatCannotBeMeasured_AreRefused(given: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(text)):
        bench.main(given)


def spread(value: float) -> dict[str, float]:
    return {name: value for name in ("median", "q1", "q3", "low", "high")}


# For each case, a change that makes a committed row worse, and the expected message.
WORSE = {
    "layer": ({"speedup": spread(0.5)}, "x stock"),
    "experts": ({"of_roofline": 0.1}, "of the roofline"),
    "megatron": ({"speedup": spread(0.5)}, "slower than stock"),
    "ep": ({"speedup": spread(1.2), "is_balanced": True}, "wanted 1.5"),
    "overhead": ({"account": 0.5}, "account: 50.00 %"),
    "stages": ({"speedup": spread(0.5)}, "x stock"),
    "optimizer": ({"over_torch_fused": spread(0.5)}, "over_torch_fused"),
}


@pytest.mark.parametrize("name", WORSE)
def test_Marks_RowThatIsWorse_IsMissedByName(name: str) -> None:
    found, (change, text) = module(name), WORSE[name]
    row = records.rows_of(records.runs(records.FOLDER, name)[0])[0]
    missed = getattr(found, "missed", None) or importlib.import_module(f"{cases.ROOM}hosts.compare").missed
    assert any(text in each for each in missed({**row, **change}))
    assert not any(text in each for each in missed(row))


def test_Grid_Cells_CoverEveryAxis() -> None:
    axes = {"T": 5, "M": 3, "H": 3, "E": 4, "K": 4, "W": 2, "skew": 3, "drop": 2, "dtype": 2, "link": 5}
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 57
    assert {axis: len({getattr(cell, axis) for cell in CELLS}) for axis in axes} == axes


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("loads", [(5, 3, 1, 0, 7), (1, 1, 1, 1, 1), (1000, 1, 1, 1, 0), (2, 2, 2, 0, 0)])
def test_Replay_RecordedLoads_AreSharedOutToTheRow(loads: tuple[int, ...], K: int) -> None:
    T = 97
    quotas = routing.quotas_like(T, K, loads)
    chosen = routing.assignments_like(T, K, loads, seed=3)
    assert [int((chosen == e).sum()) for e in range(len(loads))] == quotas and sum(quotas) == T * K
    assert all(len(set(row)) == K for row in chosen.tolist())  # a token goes to an expert once
    for quota, load in zip(quotas, loads, strict=True):
        assert (load > 0 or quota == 0) and (max(quotas) == T or abs(quota - T * K * load / sum(loads)) <= 1)


def test_Replay_OfTheLayerBenchmark_TakesTheMedianStep(tmp_path: Path) -> None:
    steps = [[[9, 1, 1, 1]], [[2, 2, 2, 2]], [[4, 2, 1, 1]]]
    rows = [{"sluice_routing": 1, "layers": 1, "experts": 4}, *({"step": s, "loads": x} for s, x in enumerate(steps))]
    path = tmp_path / "routing.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    assert module("layer").replayed(str(path), 0, 4, 2) == (4, 2, 1, 1)
    with pytest.raises(ValueError, match="give --E 4"):
        module("layer").replayed(str(path), 0, 8, 2)


def test_Stolen_RoundsThatLostTime_AreRepeatedWhileThereIsTime(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lost = [0.0], [0.0]
    monkeypatch.setattr(stolen.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(stolen.Stolen, "_now", staticmethod(lambda: lost[0]))
    monkeypatch.setattr(stolen, "slowest", lambda values: values)
    guard = stolen.Stolen(0.05, 25.0)

    def spoiled(took: float, taken: float) -> bool:
        guard.begin()
        clock[0] += took
        lost[0] += taken
        return guard.spoiled()

    rounds = [spoiled(10, taken) for taken in (0.4, 0.6, 9, 9, 9)]
    assert rounds == [False, True, True, True, False]  # 5 s of waiting were left before the fourth
    assert guard.found() == {"share_of_rounds": [0.04, 0.9], "most": 0.05, "rounds_repeated": 3}


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
