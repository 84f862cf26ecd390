# SPDX-License-Identifier: Apache-2.0
"""Tests that --json of every command prints one valid JSON value, with the members that docs/tools.md lists, and that
output that nobody reads is no error."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_record import FACTS, pair, record
from sluice import __main__ as entry

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tools.md"
LAYER = "--model-width 64 --hidden-width 128 --experts 8 --top-k 2 --tokens 256 --dtype f32".split()


def _documented() -> dict[str, dict[str, set[str]]]:
    """Returns {command: {where: names}}; names in parentheses are optional, and begin with "(" here."""
    section = PAGE.read_text().split("## What `--json` prints", 1)[1].split("\n## ", 1)[0]
    found: dict[str, dict[str, set[str]]] = {}
    for command, where, names in re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", section, re.M):
        listed = re.findall(r"(\(?)`(\w+)`", names)
        found.setdefault(command, {})[where] = {f"{mark}{name}" for mark, name in listed}
    return found


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def _printed(capsys, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    status = entry.main(list(words))
    captured = capsys.readouterr()
    assert status in (0, 1), captured.err
    return json.loads(captured.out, parse_constant=_refuse)


def _at(made: Any, where: str) -> list[dict[str, Any]]:
    """Returns the objects that `where` names: "$" is the whole value, "layers[].prediction" that of each layer."""
    found = [made]
    for step in [] if where == "$" else where.split("."):
        name, many = step.removesuffix("[]"), step.endswith("[]")
        found = [each[name] for each in found if each.get(name) is not None]
        found = [item for each in found for item in each] if many else found
    return found


def _check(command: str, made: dict[str, Any]) -> None:
    documented = _documented()[command]
    for where, names in documented.items():
        objects = _at(made, where)
        assert objects, f"{command}: nothing at {where}"
        required = {name for name in names if not name.startswith("(")}
        allowed = {name.lstrip("(") for name in names}
        for each in objects:
            assert required <= each.keys() <= allowed, (command, where, each.keys() ^ allowed)


def test_Plan_FitsAndDoesNot(capsys) -> None:
    words = ("plan", "--machine", "h200-8x8", "--ranks", "8", *LAYER, "--json")
    _check("plan", _printed(capsys, *words))
    tight = _printed(capsys, *words, "--budget", "1KiB")
    assert tight["layers"][0]["fits"] is False and tight["layers"][0]["shortfall"]


def test_Simulate_FitsAndDoesNot(capsys) -> None:
    words = ("simulate", "--machine", "h200-8x8", "--ranks", "8,16", *LAYER, "--json")
    _check("simulate", _printed(capsys, *words))
    tight = _printed(capsys, *words, "--budget", "1KiB")
    assert tight["scaling"]["weak"][0]["choice"] is None


def test_Routing(tmp_path, capsys) -> None:
    head = {"sluice_routing_rank": 1, "rank": 0, "ranks": [0]}
    (tmp_path / "loads0.jsonl").write_text(f"{json.dumps(head)}\n[0, [3, 5]]\n")
    _check("routing", _printed(capsys, "routing", str(tmp_path), "--out", str(tmp_path / "out.jsonl"), "--json"))


def test_Trace_WithAMachine(tmp_path, capsys) -> None:
    facts = {**FACTS, "num_experts": 4, "top_k": 2, "chunking": "tokens", "activation": "gelu"}
    memory = {"peak_bytes": 1, "most_outstanding": 1, "planned_outstanding": 0}
    times = {"begin_ns": 5_000_000, "end_ns": 9_000_000, "commit_s": 0.001}
    sizes = {"moved": 2, "left_bytes": 1_000_000, "hidden_bytes": 500_000}
    move = {"what": "experts", "of": "MoE layer 'moe'", "number": 0, **times, **sizes}
    for rank in (0, 1):
        data = record(pair("S4") * 3, rank, late=2e-3 * rank, facts=facts)
        data["contexts"][0]["memory"] = memory
        data["moves"] = [move]
        (tmp_path / f"rank{rank}-9.json").write_text(json.dumps(data))
    _check("trace", _printed(capsys, "trace", "--out", str(tmp_path), "--machine", "h200-8x8", "--json"))


def test_Tune_WithAModel(tmp_path, capsys) -> None:
    out = str(tmp_path / "m.json")
    words = ("tune", *LAYER, "--seconds", "0.2", "--cache-dir", "", "--out", out, "--json")
    made = _printed(capsys, *words)
    _check("tune", made)
    assert made["plan"].keys() == _printed(capsys, "plan", "--machine", out, "--ranks", "1", *LAYER, "--json").keys()


def test_Doctor(capsys) -> None:
    pytest.importorskip("torch")
    _check("doctor", _printed(capsys, "doctor", "--json"))


MODEL = "--machine a100-8x8-1600g --ranks 8,16 --experts 64 --top-k 2 --tokens 256 --model-width 64 --hidden-width 128"


@pytest.mark.parametrize("words", ["version", "help", "plan --help", f"simulate {MODEL}"])
def test_Output_ThatNobodyReads_EndsQuietly(words: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "sluice", *words.split()], stdout=nobody, stderr=subprocess.PIPE)
    assert done.stderr == b"" and done.returncode in (0, 128 + signal.SIGPIPE), done
