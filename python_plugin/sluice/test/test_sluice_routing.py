"""Recorded expert loads: two real ranks, joined, replayed; and files that cannot be joined."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sluice.planning import routing, routing_join

HERE = Path(__file__).resolve().parent


def _write(folder: Path, rank: int, ranks: list[int], rows: list) -> None:
    head = {"sluice_routing_rank": 1, "rank": rank, "ranks": ranks}
    (folder / f"loads{rank}.jsonl").write_text("\n".join(json.dumps(row) for row in [head, *rows]) + "\n")


def test_Record_TwoRealRanks_CountEveryRouteOnce(tmp_path, capsys) -> None:
    """T 256, K 2 on each of two ranks, so 1,024 rows a layer and step; 4 experts, 2 layers."""
    pytest.importorskip("torch")
    folder = tmp_path / "loads"
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", SLUICE_ROUTING_DIR=str(folder))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / "trace_rank.py"), "3", "2", "S4"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "routing.jsonl"
    assert routing_join.main([str(folder), "--out", str(out), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["steps"], made["experts"], len(made["layers"])) == (3, 4, 2)
    trace = routing.read(str(out))
    assert [[sum(layer) for layer in step] for step in trace.loads] == [[1024, 1024]] * 3
    assert all(1 <= row["rank_skew"] <= row["expert_skew"] <= 2 for row in made["layers"])


def test_Join_CopiesOfExperts_AreSummed(tmp_path) -> None:
    """Ranks 0, 1 and ranks 2, 3 hold the same four experts; the last step is not complete."""
    for rank, ranks in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        rows = [[7, [1 + rank, 10]], [7, [0, 2]]]
        _write(tmp_path, rank, ranks, rows[: 1 if rank == 3 else 2])
    out = tmp_path / "out.jsonl"
    assert routing_join.join(str(tmp_path), str(out)) == 2
    trace = routing.read(str(out))
    assert trace.loads == (((4, 20, 6, 20),),)


def test_Join_RanksWithAllExperts_AreSummed(tmp_path) -> None:
    for rank in (0, 1):
        _write(tmp_path, rank, [0], [[0, [1, 2, 3]]])
    out = tmp_path / "out.jsonl"
    assert routing_join.join(str(tmp_path), str(out)) == 1
    assert routing.read(str(out)).loads == (((2, 4, 6),),)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "no loads.*.jsonl there; train with SLUICE_ROUTING_DIR="),
        ([(0, [0, 1], [[0, [1]]])], "loads of rank 1 are missing"),
        ([(0, [0, 1], [[0, [1]]]), (1, [0, 1], [[3, [1]]])], "ranks recorded different layers"),
        ([(0, [0], [{"layer": 0}])], r"loads0.jsonl: line 2 must be \[layer"),
        ([(0, [0], [])], "loads0.jsonl: it holds no steps"),
    ],
)
def test_Join_BadFiles_AreNamed(tmp_path, files: list, text: str, capsys) -> None:
    for rank, ranks, rows in files:
        _write(tmp_path, rank, ranks, rows)
    assert routing_join.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert re.search(text, capsys.readouterr().err)
    (tmp_path / "loads0.jsonl").write_text('{"form": 3}\n')
    assert routing_join.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "line 1 is no head of this version" in capsys.readouterr().err
