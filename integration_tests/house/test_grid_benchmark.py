"""The committed list of cells; what grid.py keeps of them, and when one counts as slower, on made-up records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration_tests.benchmarks.layer import grid
from integration_tests.benchmarks.layer.grid_cells import CELLS
from integration_tests.benchmarks.measuring import records

AXES = {
    "T": {256, 512, 1024, 2048, 4096},
    "M": {256, 512, 1024},
    "H": {1024, 2048, 4096},
    "E": {8, 16, 32, 64},
    "K": {1, 2, 4, 8},
    "W": {2, 4},
    "skew": {1, 5, 10},
    "drop": {True, False},
    "dtype": {"float32", "bfloat16"},
    "link": {"none", "4gbit", "1gbit", "0.4gbit", "0.2gbit"},
}


def test_Cells_AtMostSixty_CoverEveryAxisAndBothSidesOfMostOnEveryLink() -> None:
    assert len(CELLS) <= grid.MOST_CELLS == 60 and len({cell.name for cell in CELLS}) == len(CELLS)
    for axis, values in AXES.items():
        assert {getattr(cell, axis) for cell in CELLS} == values, axis
    for link in AXES["link"]:
        cells = [cell for cell in CELLS if cell.link == link]
        for axis in ("W", "drop", "dtype"):
            assert {getattr(cell, axis) for cell in cells} == AXES[axis], (link, axis)
        assert {cell.skew > 1 for cell in cells} == {True, False} == {cell.K > 1 for cell in cells}, link


def _record(name: str, lower_quartile: float) -> dict:
    return {"cell": {"name": name}, "sluice_over_stock": {"q1": lower_quartile, "median": 1.1, "q3": 1.2}}


def test_Write_CellsInAnyOrder_InTheOrderOfTheListWithTheSlowerOnes(tmp_path: Path) -> None:
    file = tmp_path / "records" / "grid.json"
    last, first = CELLS[5].name, CELLS[1].name
    slower = grid.write(file, {last: _record(last, 1.04), first: _record(first, 1.03)})
    assert slower == [last]
    found = json.loads(file.read_text())
    assert [record["cell"]["name"] for record in found["cells"]] == [first, last]
    assert found["slower"] == [last]


def test_Write_CutInTheMiddle_LeavesTheRecordAsItWas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "grid.json"
    first = {CELLS[0].name: _record(CELLS[0].name, 0.9)}
    grid.write(file, first)
    write_text = Path.write_text

    def cut(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        grid.write(file, {**first, CELLS[1].name: _record(CELLS[1].name, 0.9)})
    assert grid.kept(file) == first


def test_Write_MeasuredCellBesideAnEarlierRow_RowsOfBothAndSamplesInTheRawFile(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    grid.write(file, {CELLS[0].name: _record(CELLS[0].name, 0.9)})
    sides = {side: {"wall_s": [1.0, 3.0], "wall": {"median": 2.0}} for side in ("stock", "sluice")}
    stats = [{"chunks": 4}, {"chunks": 6}]
    measured = _record(CELLS[1].name, 0.8) | {"sides": sides, "sluice_stats": stats, "reached_over_possible": 0.5}
    grid.write(file, {**grid.kept(file), CELLS[1].name: measured})
    raw = json.loads(records.raw_file(file).read_text())["cells"]
    assert raw == [measured]
    assert grid.kept(file) == {
        CELLS[0].name: _record(CELLS[0].name, 0.9),
        CELLS[1].name: _record(CELLS[1].name, 0.8)
        | {"stock_s": 2.0, "sluice_s": 2.0, "reached_over_possible": 0.5, "n": 6},
    }


def test_Resume_SomeMeasured_ListsTheOthersInOrder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    grid.write(file, {CELLS[at].name: _record(CELLS[at].name, 0.9) for at in (0, 2)})
    monkeypatch.setattr("sys.argv", ["grid.py", "--resume", "--list", "--most", "2", "--record", str(file)])
    assert grid.main() == 0
    assert capsys.readouterr().out.split() == [CELLS[1].name, CELLS[3].name]


def test_Kept_RecordWithACellNoLongerListed_WithoutIt(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    cells = [_record(CELLS[0].name, 0.9), _record("a cell of another list", 0.9)]
    file.write_text(json.dumps({"limit": grid.LIMIT, "slower": [], "cells": cells}))
    assert list(grid.kept(file)) == [CELLS[0].name]


def test_Kept_NoRecord_Nothing(tmp_path: Path) -> None:
    assert grid.kept(tmp_path / "grid.json") == {}


def test_IsSlower_StockAlone_NotSlower() -> None:
    assert not grid.is_slower({"cell": {"name": CELLS[0].name}})
