# SPDX-License-Identifier: Apache-2.0
"""Tests recorded expert loads, joined and replayed, and files that cannot be joined; ranks: test_sluice_trace.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sluice.planning import routing
from sluice.planning.errors import BadInput


def _write(folder: Path, rank: int, ranks: list[int], rows: list) -> None:
    head = {"sluice_routing_rank": 1, "rank": rank, "ranks": ranks}
    (folder / f"loads{rank}.jsonl").write_text("\n".join(json.dumps(row) for row in [head, *rows]) + "\n")


def test_Join_CopiesOfExperts_AreSummed(tmp_path) -> None:
    """Ranks 0, 1 and ranks 2, 3 have the same four experts; the last step is not complete."""
    for rank, ranks in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        rows = [[7, [1 + rank, 10]], [7, [0, 2]]]
        _write(tmp_path, rank, ranks, rows[: 1 if rank == 3 else 2])
    out = tmp_path / "out.jsonl"
    assert routing.join(str(tmp_path), str(out)) == 2
    trace = routing.read(str(out))
    assert trace.loads == (((4, 20, 6, 20),),)


def test_Record_TwoGroups_DoNotMix(tmp_path) -> None:
    """The model has expert parallelism over two ranks in one layer, and over one rank in another."""
    program = """if True:
        import types
        from sluice import routing
        class Library:
            class ffi:
                NULL = None
                new = staticmethod(lambda kind, count: [0] * count)
            class lib:
                @staticmethod
                def sluice_step_info(step, info, rows):
                    rows[:] = step
                    return 0
        def layer(number, ranks, experts):
            context = types.SimpleNamespace(ep_group=types.SimpleNamespace(ranks=ranks, rank=0))
            return types.SimpleNamespace(layer_id=number, num_local_experts=experts, context=context)
        wide, own = layer(3, (0, 1), 2), layer(4, (0,), 4)
        for step in range(2):
            routing.note(wide, [1, step], Library)
            routing.note(own, [5, 6, 7, 8], Library)
    """
    folder = tmp_path / "loads"
    environment = dict(os.environ, SLUICE_ROUTING_DIR=str(folder), RANK="0")
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    _write(folder, 1, [0, 1], [[3, [9, 10]], [3, [11, 12]]])
    out = str(tmp_path / "out.jsonl")
    with pytest.raises(BadInput, match="groups of 1 and 2 ranks, which are traces of their own: choose by --ranks"):
        routing.join(str(folder), out)
    assert routing.join(str(folder), out, 2) == 2
    assert routing.read(out).loads == (((1, 0, 9, 10),), ((1, 1, 11, 12),))
    assert routing.join(str(folder), out, 1) == 1
    assert routing.read(out).loads == (((5, 6, 7, 8),),) * 2
    with pytest.raises(BadInput, match="--ranks is 4; .* has groups of 1 and 2 ranks"):
        routing.join(str(folder), out, 4)


def test_Join_RanksWithAllExperts_AreSummed(tmp_path) -> None:
    for rank in (0, 1):
        _write(tmp_path, rank, [0], [[0, [1, 2, 3]]])
    out = tmp_path / "out.jsonl"
    assert routing.join(str(tmp_path), str(out)) == 1
    assert routing.read(str(out)).loads == (((2, 4, 6),),)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], "no loads.*.jsonl there; train with SLUICE_ROUTING_DIR="),
        ([(0, [0, 1], [[0, [1]]])], "loads of rank 1 are missing"),
        ([(0, [0, 1], [[0, [1]]]), (1, [0, 1], [[3, [1]]])], "ranks recorded different layers"),
        ([(0, [0], [{"layer": 0}])], r"loads0.jsonl: line 2 must be \[layer"),
        ([(0, [0], [])], "loads0.jsonl: it holds no steps"),
        ([(0, [0], [["0", [1]]])], r"loads0.jsonl: line 2 must be \[layer"),
        ([(0, [0], [[0, [1, -2]]])], r"loads0.jsonl: line 2 must be \[layer"),
        ([(0, [0], [[0, [1, 2]], [0, [1]]])], r"loads0.jsonl: line 3 must be \[layer"),
        ([(0, 7, [[0, [1]]])], "loads0.jsonl: line 1 must have rank and ranks as whole numbers"),
    ],
)
def test_Join_BadFiles_AreNamed(tmp_path, files: list, text: str, capsys) -> None:
    for rank, ranks, rows in files:
        _write(tmp_path, rank, ranks, rows)
    assert routing.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert re.search(text, capsys.readouterr().err)
    (tmp_path / "loads0.jsonl").write_text('{"form": 3}\n')
    assert routing.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "line 1 is no head of this version" in capsys.readouterr().err
    (tmp_path / "loads0.jsonl").write_bytes(b"\x80\x81")
    assert routing.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "loads0.jsonl: 'utf-8' codec can't decode" in capsys.readouterr().err
    assert routing.main([str(tmp_path), "--out", str(tmp_path / "no" / "out")]) == 2
    assert "--out" in (said := capsys.readouterr().err) and "there is no folder" in said
