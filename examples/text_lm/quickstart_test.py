# SPDX-License-Identifier: Apache-2.0
"""Tests of the quickstart: its order of blocks, how it counts memory, its table, and a short run."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import quickstart  # noqa: E402

from integration_tests.benchmarks.memory import memory  # noqa: E402


def test_table_of_memory_compares_the_budget_with_what_it_bounds() -> None:
    """All memory of the MoE layers is compared with stock's, Sluice's own with the budget: two rows."""
    mib = 2**20
    side = {"loss": [5.0, 4.0], "step_ms": 100.0, "moe_peak_bytes": 90 * mib}
    record = {
        "stock": side,
        "sluice": {**side, "moe_peak_bytes": 60 * mib},
        "max_loss_difference": 0.0,
        "one_chunk": {"step_ms": 101.0, "chosen_step_ms": 99.0, "chunks": 2},
        "under_budget": {"memory_budget": 25 * mib, "sluice_peak_bytes": 18 * mib, "moe_peak_bytes": 27 * mib},
    }
    rows = [re.split(r"  +", line.strip()) for line in quickstart.table(record)]
    assert ["with memory_budget 25.0 MiB", "27.0 MiB", "3.33x less"] in rows
    assert ["of it Sluice's own", "18.0 MiB", "the budget of 25.0 MiB bounds this"] in rows
    assert ["with one chunk", "101 ms", "with 2, in turns with these steps: 99 ms"] in rows


@pytest.mark.parametrize("steps", [4, 7, 24, 60])
def test_quickstart_turns_are_blocks_a_b_b_a_of_equally_many_steps(steps: int) -> None:
    """So that a slow moment, or a drift, of the machine affects both sides equally."""
    turns = quickstart.turns(steps, quickstart.block_of(steps))
    order = "".join(side for side, _ in turns)
    assert order == ("ABBA" * len(turns))[: len(turns)] and len(turns) >= 8
    for at in range(0, len(turns), 2):
        assert turns[at][1] == turns[at + 1][1] >= 1
    assert sum(size for side, size in turns if side == "A") == steps


def test_memory_watch_counts_tensors_and_no_kept_gradient(tmp_path: Path) -> None:
    """Three tensors of 1 MiB: one from before is freed, one lives for a moment, and one stays, as a gradient does."""
    path, why = memory.build_watch(tmp_path)
    if path is None:
        pytest.skip(why)
    script = (
        "import torch\n"
        "from integration_tests.benchmarks.memory.memory import Kept, Watch, live_bytes\n"
        "old = torch.ones(2**18); w = Watch(); w.start(); del old\n"
        "moment = torch.ones(2**18); del moment; stays = torch.ones(2**18)\n"
        "kept = Kept(w.position(), (stays[100:].data_ptr(),)); events = w.stop()\n"
        "for live in (live_bytes(events, []), live_bytes(events, [kept])): print(int(live.max()), int(live[-1]))\n"
    )
    environment = {"LD_PRELOAD": str(path), "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    found = [int(number) for number in done.stdout.split()]
    wanted = [2**20, 2**20, 2**20, 0]  # the peak and what is left, with the gradient and without it
    assert all(0 <= value - least < 65536 for value, least in zip(found, wanted, strict=True)), found


@pytest.mark.timeout(900)
@pytest.mark.alone
def test_quickstart_both_sides_writes_what_it_promises(tmp_path: Path) -> None:
    """The main job, four steps over loopback: the record of both sides, one table, a picture and a trace."""
    pytest.importorskip("sluice")
    record_file = tmp_path / "record.json"
    command = [sys.executable, str(HERE / "quickstart.py"), "--steps", "4", "--link", "none"]
    command += ["--json", str(record_file), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(record_file.read_text())
    for side in ("stock", "sluice"):
        assert len(record[side]["loss"]) == 4
        assert 3.0 < record[side]["loss"][0] < 6.0
        assert record[side]["step_ms"] > 0
    assert record["speedup"] == pytest.approx(record["stock"]["step_ms"] / record["sluice"]["step_ms"])
    # Four steps from one initial state, in f32: the bound is 1e-5 of a loss near 5.
    gaps = [abs(a - b) for a, b in zip(record["stock"]["loss"], record["sluice"]["loss"], strict=True)]
    assert record["max_loss_difference"] == max(gaps) <= 5e-5
    assert {"link", "ranks", "machine", "versions", "one_chunk"} <= set(record)
    if record["stock"]["moe_peak_bytes"] is not None:  # no compiler, no count
        assert 0 < record["sluice"]["moe_peak_bytes"] < record["stock"]["moe_peak_bytes"]
        under = record["under_budget"]
        assert 0 < under["sluice_peak_bytes"] <= under["memory_budget"] < record["sluice"]["moe_peak_bytes"]
        assert under["moe_peak_bytes"] < record["sluice"]["moe_peak_bytes"]
        assert "with memory_budget" in done.stdout
    for line in ("loss, last step", "step time, median", "with one chunk", "MoE activation memory"):
        assert done.stdout.count(line) == 1, line
    assert re.search(r"train .*(stock|sluice) step +\d+  loss \d", done.stdout), "no live progress"
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event.get("ph") for event in trace} >= {"X"}
    ElementTree.parse(tmp_path / "out" / "timeline.svg")


def test_quickstart_options_that_do_not_fit_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing folder is created; a path that is not a folder is an error."""
    (tmp_path / "file").write_text("")
    for option, words in (
        ("--link=fast", ["rate 'fast' is not understood; write for example 1gbit"]),
        (f"--json={tmp_path / 'file' / 'x.json'}", ["cannot be written", "--json"]),
        (f"--json={tmp_path}", ["cannot be written", "--json"]),
    ):
        monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(tmp_path / "out"), option])
        with pytest.raises(SystemExit) as end:
            quickstart.arguments()
        said = " ".join(capsys.readouterr().err.split())
        assert end.value.code == 2 and all(each in said for each in words), said
