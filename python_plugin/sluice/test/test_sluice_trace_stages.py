# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice trace` of pipelines: a row for each stage, an arrow for each message, predicted next to measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sluice.timeline import from_trace, svg
from sluice.timeline.stages import arrows, bubble, panel
from sluice.tracing import command
from two_ranks import launcher

HERE = Path(__file__).resolve().parent
MS = 1_000_000


def _op(op: str, stage: int, begin: int, end: int, micro_batch: int = 0, lane: str = "compute") -> dict:
    direction = "forward" if op in ("forward", "send_activation") else "backward"
    times = {"begin_ns": begin * MS, "end_ns": end * MS}
    return {
        "op": op,
        "lane": lane,
        **times,
        "chunk": micro_batch,
        "direction": direction,
        "layer": stage,
        "rank": stage,
    }


# One micro-batch over two stages, and back.
FIRST = [_op("forward", 0, 0, 10), _op("send_activation", 0, 10, 11, lane="comm"), _op("backward", 0, 33, 53)]
SECOND = [_op("forward", 1, 12, 22), _op("backward", 1, 22, 32), _op("send_gradient", 1, 32, 33, lane="comm")]


def _write(folder: Path, rank: int, events: list, predicted: list, boot: str = "one") -> None:
    entry = {"number": 0, "ranks": [0, 1], "events": events, "predicted": predicted}
    record = {"form": 2, "rank": rank, "world_size": 2, "boot": boot, "contexts": [], "pipelines": [entry]}
    (folder / f"rank{rank}-1.json").write_text(json.dumps(record))


def test_Panel_OfABatch_HasItsMessagesAsArrowsAndItsBubble() -> None:
    events = from_trace([*FIRST, *SECOND])
    found = arrows(events)
    assert [(arrow.source, arrow.begin, arrow.target, arrow.end) for arrow in found] == [
        (0, 0.01, 1, 0.012),
        (1, 0.032, 0, 0.033),
    ]
    assert bubble(events) == pytest.approx(1 - 50 / 106)
    picture = svg([panel("both", events)], "a batch")
    assert picture.count('class="message"') == 2 and "stage 1" in picture and 'text-anchor="middle"' in picture
    assert arrows(events[:2]) == []  # the op that reads it is missing


def test_Command_RecordedPipeline_IsReportedBesideThePrediction(tmp_path, capsys) -> None:
    _write(tmp_path, 0, FIRST, [*FIRST, *SECOND])
    _write(tmp_path, 1, SECOND, [])
    assert command.main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pipeline of 2 stages, ranks 0, 1: its last batch took 53.00 ms, predicted 53.00; bubble 52.8 %" in out
    assert "stage 1:     20.00 ms computing, 20.00 predicted" in out and "stages.svg" in out
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    flows = [row for row in rows if row["ph"] in "sf"]
    assert len(flows) == 8 and all(row["ts"] >= 0 for row in flows)  # two messages, measured and predicted
    assert (tmp_path / "stages.svg").read_text().count('class="message"') == 4
    assert json.loads((tmp_path / "report.json").read_text())["pipelines"][0]["busy_s"] == {"0": 0.03, "1": 0.02}


def test_Command_ClocksOfTwoMachines_AreNotCompared(tmp_path, capsys) -> None:
    _write(tmp_path, 0, FIRST, [*FIRST, *SECOND])
    _write(tmp_path, 1, SECOND, [], boot="another")
    assert command.main(["--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "on several machines" in out and "measured: pipeline" not in (tmp_path / "stages.svg").read_text()


def test_Command_Moves_AreReported(tmp_path, capsys) -> None:
    for rank, events in enumerate((FIRST, SECOND)):
        _write(tmp_path, rank, events, [*FIRST, *SECOND] if rank == 0 else [])
        path = tmp_path / f"rank{rank}-1.json"
        times = {"begin_ns": 5 * MS, "end_ns": (9 + rank) * MS, "commit_s": 0.001 * rank}
        sizes = {"moved": 2, "left_bytes": 1_000_000, "hidden_bytes": 500_000 * rank}
        move = {"what": "experts", "of": "MoE layer 'moe'", "number": 0, **times, **sizes}
        path.write_text(json.dumps({**json.loads(path.read_text()), "moves": [move]}))
    assert command.main(["--out", str(tmp_path)]) == 0
    line = "0: 2 experts of MoE layer 'moe', 2.00 MB in 5.0 ms, 25 % of it hidden; commit 1.00 ms"
    assert line in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["moves"][0]["ranks"] == 2
    path.write_text(json.dumps({**json.loads(path.read_text()), "moves": [{}]}))
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "rank1-1.json: moves: KeyError" in capsys.readouterr().err


def test_Record_DamagedPipeline_IsNamed(tmp_path, capsys) -> None:
    _write(tmp_path, 0, [{"op": "forward"}], [])
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "rank0-1.json: pipelines: KeyError" in capsys.readouterr().err


def test_Trace_TwoRealRanks_TheirLastTrainingBatchIsReported(tmp_path) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "sluice", "trace", "--json", "--out", str(tmp_path), "--", *launcher()]
    done = subprocess.run(
        [*words, str(HERE / "trace_stage_rank.py"), "2"],
        env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)["pipelines"]
    assert row["ranks"] == [0, 1] and row["one_clock"]
    for stage in ("0", "1"):  # four micro-batches, which sleep for 12 ms each at least
        assert row["busy_s"][stage] >= 0.048 and row["predicted_busy_s"][stage] > 0.04
    assert row["measured_s"] >= 0.06 and 0 < row["bubble"] < 1 and row["predicted_s"] > 0.05
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "s"]
    assert len(events) == 16  # eight messages, measured and predicted
