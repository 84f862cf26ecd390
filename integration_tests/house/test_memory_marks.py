"""What layer.py says of memory, on made-up records."""

from __future__ import annotations

from typing import Any

import pytest

from integration_tests.benchmarks.layer import layer, layer_shares
from integration_tests.benchmarks.memory import memory_marks


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


def test_MemoryMarks_ByTensor_CountsWhatARankSendsByItself() -> None:
    record = _record()
    record["cell"] |= {"M": 1, "H": 4}  # 2 numbers of a row that is sent, 10 of one that is received
    record["parts"]["rows_sent"] = [200, 200]
    shares = memory_marks.real_shares(record)
    assert shares == pytest.approx([(300 * 10 + 200 * 2) / 12000, (100 * 10 + 200 * 2) / 12000])
    found = memory_marks.memory_bound(record)
    assert found["of_ranks_by_tensor"] == pytest.approx([1000 / (4000 * shares[0]), 480 / (4000 * shares[1])])
    del record["parts"]["rows_sent"]  # as many as arrive, on average
    assert memory_marks.real_shares(record) == pytest.approx(shares)


def test_LayerShares_OfAStep_AddUpAndChargeTheLane() -> None:
    parts = {"comm_per_pass_s": 0.3, "forward_compute_s": 0.2, "backward_compute_s": 0.4, "possible_s": 0.7}
    sides = {"sluice": {"wall": 1.0, "cpu": 1.7}, "one_chunk": {"wall": 1.2, "cpu": {"median": 1.5}}}
    record = {
        "parts": {**parts, "rows_received": [100, 100]},
        "sides": sides,
        "sluice_stats": [{"comm_cpu_s": 0.04}, {"comm_cpu_s": 0.06}],
    }
    found = layer_shares.shares(record)
    assert found["possible"] == pytest.approx(0.7)
    assert found["charged"] == pytest.approx(0.3 + 0.43)  # the forward waits for its exchanges in any case
    assert found["lane"] == pytest.approx(0.05) and found["chunks"] == pytest.approx(0.1)
    assert sum(found[name] for name in ("experts", "lane", "chunks", "else", "idle")) == pytest.approx(1.0)


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
