"""The cells that drawn.py draws, and what it says of them, on made-up numbers."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.benchmarks.drawn import drawn, drawn_page, families
from integration_tests.benchmarks.measuring import records


def test_Families_AreAlmostAllOfTheRegistry() -> None:
    known, others = families.families()
    assert len(known) >= 50 and len(others) <= 8, others
    published = {family.kind: family for family in known}
    mixtral, gpt_oss = published["mixtral"], published["gpt_oss"]
    assert (mixtral.model, mixtral.hidden, mixtral.experts, mixtral.top_k) == (4096, 14336, 8, 2)
    assert (gpt_oss.model, gpt_oss.hidden, gpt_oss.top_k) == (2880, 2880, 4)
    assert gpt_oss.gated and not published["nemotron_h"].gated
    assert {family.experts for family in known} >= {8, 16, 64, 128, 256, 512}
    assert {family.top_k for family in known} >= {1, 2, 4, 6, 8, 10}


def test_Drawn_SameSeed_SameCellsNoneTwiceWithinTheBytes() -> None:
    first = families.drawn(40, 7)
    assert first == families.drawn(40, 7) and first != families.drawn(40, 8)
    assert len(set(first)) == 40
    assert all(cell.family.bytes_over(cell.divisor, cell.dtype) <= families.MOST_BYTES for cell in families.cells())
    assert {cell.tokens for cell in families.cells()} == set(families.TOKENS)
    assert {cell.family.kind for cell in families.drawn(9, 7, ["lfm2_moe"])} == {"lfm2_moe"}
    assert {cell.dtype for cell in families.drawn(9, 7, dtypes=["float32"])} == {"float32"}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_Module_HasTheWidthsOfItsCell(kind: str) -> None:
    family = next(family for family in families.families()[0] if family.kind == kind)
    cell = families.Cell(family, 32, 64, 1, "bfloat16")
    module = families.make_module(cell)
    up, down = [parameter.shape for parameter in module.parameters() if parameter.dim() == 3]
    model, hidden = cell.widths
    assert sorted(down[1:]) == sorted((model, hidden)) and down[0] == up[0] == family.experts
    assert all(str(parameter.dtype) == "torch.bfloat16" for parameter in module.parameters())


def _cell(name: str, median: float, upper: float, dense: float = 0.5) -> dict[str, Any]:
    ratio = {"q1": median - 0.1, "median": median, "q3": upper}
    return {
        "cell": name,
        "of_grouped_mm": ratio,
        "of_dense": {**ratio, "median": dense},
        "computed_by": "sluice",
    }


def test_Verdicts_NameTheWorstAndThoseBelow() -> None:
    found = [_cell(f"cell {index}", 1.1 + index / 100, 1.3) for index in range(20)]
    lines, good = drawn.verdicts(found)
    assert good and len(lines) == 2 * (1 + drawn.WORST) + 1
    assert "cell 0" in lines[1] and "20 cells, median 1.20 of grouped_mm, 0 below 1.0" in lines[-1]
    lines, good = drawn.verdicts([*found, _cell("slow", 0.8, 0.99)])
    assert not good and "slow" in lines[1] and any(line.startswith("below 1.0 in 3 tries: slow") for line in lines)
    lines, good = drawn.verdicts([*found, {"cell": "none", "refused": {"grouped_mm": "TypeError: no"}}])
    assert good and any(line.startswith("refused: none") for line in lines)
    assert not drawn.verdicts([])[1]


@pytest.mark.parametrize(("most_seconds", "tries", "rounds", "steps"), [(0, 1, 1, 2), (1e9, 3, 3, 24)])
def test_Cell_WhoseSecondsAreOver_EndsWithItsRound(monkeypatch, most_seconds, tries, rounds, steps) -> None:
    ran = []

    def step(module: Any, side: str, rows: Any, keep_grads: bool) -> tuple[float, float]:
        ran.append(side)
        return (1.0, 1.0) if side == "grouped_mm" else (2.0, 2.0)

    monkeypatch.setattr(drawn, "step", step)
    monkeypatch.setattr(drawn, "seconds", lambda function: (1.0, None))
    monkeypatch.setattr(drawn.sluice, "stats", lambda module: {"computed_by": "sluice"})
    family = next(family for family in families.families()[0] if family.kind == "mixtral")
    record = drawn.run_cell(families.Cell(family, 64, 64, 1, "float32"), 3, most_seconds)
    assert (record["tries"], record["rounds"]) == (tries, rounds)
    assert len(ran) == 2 * steps  # a counted step follows one of its own kind
    assert record["of_grouped_mm"]["median"] == 0.5 and record["of_dense"]["median"] == 0.5


def test_Page_TablesOfTheWorst_AreThoseOfTheRecords() -> None:
    (found,) = drawn_page.BETWEEN.findall(drawn_page.PAGE.read_text())
    assert found == drawn_page.text(), "run drawn_page"


def test_Page_MadeUpRecord_HasTheWorstFirstAndMissedOnesBold() -> None:
    cells = [_cell(f"cell {index}", 1.1 + index / 100, 1.3, 0.9 - index / 100) for index in range(20)]
    record = {"date": "2026-01-02", "seed": 3, "cells": records.reduced([*cells, _cell("slow", 0.8, 0.99)])}
    text = drawn_page.tables(record)
    assert "seed 3: 21 cells, median 1.19 of `grouped_mm`; 1 stayed" in text
    rows = [line for line in text.splitlines() if line.startswith(("| 0", "| 1", "| **"))]
    assert rows[0] == "| **0.80 [0.70, 0.99]** | slow |" and rows[1].endswith("| cell 0 |")
    assert len(rows) == 2 * drawn.WORST
    assert drawn_page.tables(record, ["of_grouped_mm"]).splitlines() == text.splitlines()[: -3 - drawn.WORST]
