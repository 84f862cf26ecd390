"""What layer.py says of memory, on made-up records."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.benchmarks import layer, memory_marks


def _record(peaks: tuple[int, int] = (1000, 480), stock: int = 4000) -> dict[str, Any]:
    """Two ranks; the first receives 300 of 1000 padded rows, the second 100."""
    record: dict[str, Any] = {
        "cell": {"must_reach": 1.0, "must_pipeline": None},
        "speedup": {"median": 1.5},
        "one_chunk_over_chosen": {"median": 1.0},
        "parts": {"rows_received": [300, 100], "rows_padded": 1000},
        "memory": [{"stock": {"peak_bytes": stock}}] * 2,
        "sluice_stats": [
            {"peak_bytes": peaks[0], "slot_bytes": 550, "saved_bytes": 400},
            {"peak_bytes": peaks[1], "slot_bytes": 250, "saved_bytes": 200},
        ],
    }
    record["memory_over_parts"] = memory_marks.memory_over_parts(record["sluice_stats"])
    record["memory_bound"] = memory_marks.memory_bound(record)
    return record


def test_MemoryMarks_WithinBoth_AreKept() -> None:
    record = _record()
    assert record["memory_over_parts"] == pytest.approx(480 / 450)
    bound = record["memory_bound"]
    assert bound["rank"] == 0 and bound["bound_bytes"] == 1200
    assert bound["of_bound"] == pytest.approx(1000 / 1200)
    assert bound["of_ranks"] == pytest.approx([1000 / 1200, 480 / 400])  # few rows arrive, many of its own return
    assert layer.promises_kept(record)


def test_MemoryMarks_OneRankAboveItsParts_IsNotKept() -> None:
    record = _record(peaks=(1000, 500))
    assert record["memory_over_parts"] == pytest.approx(500 / 450)
    assert not layer.promises_kept(record)


def test_MemoryMarks_AboveStocksShare_IsNotKept() -> None:
    record = _record(stock=3200)
    assert record["memory_bound"]["of_bound"] == pytest.approx(1000 / 960)
    assert not layer.promises_kept(record)


def test_MemoryMarks_StockNotWatched_OnlyPartsCount() -> None:
    record = _record(stock=3200)
    del record["memory"], record["memory_bound"]
    assert layer.promises_kept(record)
