"""What grid.py keeps of its cells, and when one counts as slower, on made-up records."""

from __future__ import annotations

import json
from pathlib import Path

from integration_tests.benchmarks import grid
from integration_tests.benchmarks.grid_cells import CELLS


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


def test_Kept_RecordWithACellNoLongerListed_WithoutIt(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    cells = [_record(CELLS[0].name, 0.9), _record("a cell of another list", 0.9)]
    file.write_text(json.dumps({"limit": grid.LIMIT, "slower": [], "cells": cells}))
    assert list(grid.kept(file)) == [CELLS[0].name]


def test_Kept_NoRecord_Nothing(tmp_path: Path) -> None:
    assert grid.kept(tmp_path / "grid.json") == {}


def test_IsSlower_StockAlone_NotSlower() -> None:
    assert not grid.is_slower({"cell": {"name": CELLS[0].name}})
