# SPDX-License-Identifier: Apache-2.0
"""Tests timelines: slots of real schedules, pictures that have every op, traces that parse."""

from __future__ import annotations

import collections
import itertools
import json
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from sluice import timeline
from sluice.errors import SluiceError
from sluice.restore import SETS
from sluice.timeline import Event, Panel, Schedule, colours
from sluice.timeline.svg import IN_BOXES

COSTS = {
    **dict.fromkeys(("dispatch", "dispatch_grad", "redispatch", "combine", "combine_grad"), 2.0),
    **dict.fromkeys(("unpack", "unpack_grad", "reduce", "reduce_grad", "activation", "activation_grad"), 0.25),
    **dict.fromkeys(("gemm1", "gemm2", "gemm1_grad", "gemm2_grad", "recompute"), 1.5),
    **dict.fromkeys(("copy_out", "copy_in"), 1.0),
    "weight_grad": 3.0,
}


def _prediction(direction: str, policy: str, chunks: int = 4) -> timeline.Prediction:
    restore = SETS[policy]
    return Schedule.build(direction, chunks, *restore, wgrad="per_chunk", under_plan=True).predict(COSTS)


def test_Schedule_OneChunkForward_TakesTheSumOfItsOps() -> None:
    prediction = Schedule.build("forward").predict({"dispatch": 2, "gemm1": 3, "gemm2": 4, "combine": 5})
    assert prediction.seconds == 14
    assert prediction.busy == {"compute": 7, "comm": 7, "copy_out": 0, "copy_in": 0}
    assert [event.op for event in prediction.events(at=1)] == ["dispatch", "gemm1", "gemm2", "combine"]
    assert prediction.events(at=1)[0].begin == 1


def test_Schedule_CostByChunk_OverridesTheKind() -> None:
    schedule = Schedule.build("forward", 2)
    costs = schedule.costs({"gemm1": 1.0, ("gemm1", 1): 7.0})
    assert [c for op, c in zip(schedule.data["ops"], costs) if op["kind"] == "gemm1"] == [1.0, 7.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"direction": "sideways"}, "direction is 'sideways'; known are forward, backward"),
        ({"chunks": 2, "restore_input": ["keep"]}, "restore_input names 1 chunks, there are 2"),
        (
            {"restore_pre_activation": "redispatch"},
            "restore_pre_activation is 'redispatch'; known are keep, offload, recompute",
        ),
        ({"chunks": 999}, "num_chunks is 999; it must be in"),
    ],
)
def test_Schedule_BadInput_IsNamed(arguments: dict, text: str) -> None:
    with pytest.raises((ValueError, SluiceError), match=text):
        Schedule.build(**arguments)


def test_Schedule_UnknownCost_IsNamed() -> None:
    with pytest.raises(ValueError, match="none of dispath is an op here"):
        Schedule.build("forward").predict({"dispath": 1.0})
    with pytest.raises(ValueError, match="2 costs; the schedule has"):
        Schedule.build("forward").predict([1.0, 2.0])


def test_Occupancy_EverySchedule_HoldsOneChunkAtATime() -> None:
    """Two holds of a slot never overlap, and a slot is held whenever an op of its chunk touches it."""
    for direction in ("forward", "backward"):
        for policy in SETS:
            prediction = _prediction(direction, policy)
            holds = timeline.occupancy(prediction.schedule.data, prediction.begin, prediction.end)
            by_slot: dict[tuple[str, int], list[timeline.Hold]] = {}
            for hold in holds:
                by_slot.setdefault((hold.tensor, hold.slot), []).append(hold)
            for rows in by_slot.values():
                for earlier, later in zip(rows, rows[1:]):
                    assert earlier.end <= later.begin
            for index, op in enumerate(prediction.schedule.data["ops"]):
                for tensor, slot in [*op["reads"], *op["writes"]]:
                    if tensor in ("T_OUT", "dW") or slot < 0 or op["chunk"] < 0:
                        continue
                    begin, end = prediction.begin[index], prediction.end[index]
                    assert any(
                        h.chunk == op["chunk"] and h.begin <= begin and end <= h.end for h in by_slot[tensor, slot]
                    ), f"{policy} {direction}: {tensor}[{slot}] during {op['kind']} {op['chunk']}"


def test_Occupancy_ReusedSlots_AreNoMoreThanTheRing() -> None:
    prediction = _prediction("forward", "S4", chunks=8)
    holds = timeline.occupancy(prediction.schedule.data, prediction.begin, prediction.end)
    slots = {(hold.tensor, hold.slot) for hold in holds if hold.tensor == "T_DI"}
    assert len(slots) == prediction.schedule.data["rings"]["T_DI"] == 2
    assert sorted(hold.chunk for hold in holds if hold.tensor == "T_DI") == list(range(8))


def test_Occupancy_HoldsEnd_WithTheirReleases() -> None:
    """The last op that releases a slot ends its hold; an unreleased slot is held to the end of the pass."""
    prediction = _prediction("forward", "S3")  # rows of a chunk are released by their copy and by the first GEMM
    ops = prediction.schedule.data["ops"]
    ends = {
        tuple(ref): max(end for op, end in zip(ops, prediction.end) if list(ref) in op["releases"])
        for op in ops
        for ref in op["releases"]
    }
    holds = timeline.occupancy(prediction.schedule.data, prediction.begin, prediction.end)
    last = {(hold.tensor, hold.slot): hold.end for hold in holds}
    assert ends and all(last[key] == end for key, end in ends.items())
    data = json.loads(json.dumps(prediction.schedule.data))
    for op in data["ops"]:
        op["releases"] = [ref for ref in op["releases"] if ref != ["T_DI", 1]]
    changed = timeline.occupancy(data, prediction.begin, prediction.end)
    held = [hold.end for hold in changed if (hold.tensor, hold.slot, hold.chunk) == ("T_DI", 1, 3)]
    assert held == [max(prediction.end)]


def test_Occupancy_WrongTimes_AreRefused() -> None:
    data = Schedule.build("forward").data
    with pytest.raises(ValueError, match="ops, 1 begins and 0 ends"):
        timeline.occupancy(data, [0.0], [])
    with pytest.raises(ValueError, match="the field 'ops' is missing"):
        timeline.occupancy({"direction": "forward"}, [], [])


def test_Bytes_ReturnToZero_AndStayBelowAllSlots() -> None:
    sizes = timeline.tensor_bytes(rows=16, model_width=8, hidden_width=32, element_bytes=2)
    assert sizes["T_DI"] == 16 * 8 * 2 and sizes["T_M"] == 16 * 32 * 2 and sizes["dGATE"] == 64
    assert timeline.tensor_bytes(16, 8, 32, 2, gated=True)["T_M"] == 2 * sizes["T_M"]
    for policy in SETS:
        panel = _prediction("backward", policy).panel("x", sizes)
        assert panel.bytes[-1][1] == 0
        assert 0 < max(size for _, size in panel.bytes) <= panel.reserved_bytes


def test_Write_PredictedBesideRecorded_HoldsEveryOp(tmp_path) -> None:
    prediction = _prediction("forward", "S1")
    recorded = [
        {"op": "gemm1", "lane": "compute", "chunk": 0, "layer": 2, "direction": "forward", "begin_ns": 5, "end_ns": 9},
        {"op": "pass", "lane": "compute", "chunk": -1, "layer": 2, "direction": "forward", "begin_ns": 0, "end_ns": 9},
    ]
    measured = Panel("measured", timeline.from_trace(recorded, rank=3))
    assert [(event.op, event.rank) for event in measured.events] == [("gemm1", 3)]
    predicted = prediction.panel("predicted <&>", timeline.tensor_bytes(4, 4, 4, 4))
    written = timeline.write([predicted, measured], tmp_path, "a < b & c")
    assert {"timeline.svg", "trace.json"} <= set(written)
    root = ElementTree.fromstring((tmp_path / "timeline.svg").read_text())
    tips = [title.text for title in root.findall(".//{*}title")]
    assert len(tips) == prediction.schedule.num_ops + 1 + len(predicted.holds)
    assert any("copy_out T_M forward layer 0 chunk 3" in tip for tip in tips)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in trace) == prediction.schedule.num_ops + 1
    assert sum(event.get("cat") == "slot" for event in trace) == len(predicted.holds)
    assert {event["pid"] for event in trace if event.get("cat") == "forward"} == {0, 1003}


def test_Legend_EveryColourOfThePicture_IsNamed() -> None:
    panel = _prediction("backward", "S4").panel("x", timeline.tensor_bytes(4, 4, 4, 4))
    for colour in (timeline.by_chunk, timeline.by_op):
        root = ElementTree.fromstring(timeline.svg([panel], "t", colour))
        boxes = root.findall("{*}rect")
        named = {box.get("fill") for box in boxes if (box.get("width"), box.get("height")) == ("12.00", "12.0")}
        decoration = {colours.PAPER, colours.LANE, colours.SLOT}
        assert {box.get("fill") for box in boxes} - decoration <= named
        words = " ".join(text.text for text in root.findall("{*}text"))
        ops = {event.label if event.label in IN_BOXES else event.op for event in panel.events}
        assert [op for op in ops if f"{IN_BOXES[op]} = {op}" not in words] == []
        assert [
            each.tensor for each in panel.holds if f"{each.tensor} = {colours.TENSORS[each.tensor]}" not in words
        ] == []


@pytest.mark.parametrize(
    ("op", "lane", "letter"),
    [("redispatch", "comm", "S"), ("dispatch_grad", "comm", "S"), ("combine", "comm", "R"), ("gemm1", "compute", "C"),
     ("recompute", "compute", "C"), ("copy_in", "copy_in", "M"), ("S", "comm", "S"), ("a stranger", "comm", None)],
)  # fmt: skip
def test_ByOp_GivesEachOpTheColourOfItsLetter(op: str, lane: str, letter: str | None) -> None:
    wanted = colours.OTHER_OP if letter is None else colours.OPS[letter]
    assert timeline.by_op(Event(op, lane, 0.0, 1.0)) == wanted.colour


def test_Colours_OfTwoMeanings_Differ() -> None:
    groups = (colours.OPS.values(), colours.POLICIES.values(), colours.PARTS.values())
    marks = [colours.ALL_CHUNKS, colours.OTHER_OP, *(mark for group in groups for mark in group)]
    meanings = {*colours.NUMBERED, *(mark.colour for mark in marks), colours.LIMIT, colours.BYTES, colours.LINE}
    shared = {
        colours.COPIES.colour: 3,
        colours.KEPT.colour: 2,
        colours.MOE.colour: 2,
    }  # the same thing in several groups
    uses = collections.Counter([*colours.NUMBERED, *(mark.colour for mark in marks)])
    assert {colour: count for colour, count in uses.items() if count > 1} == shared
    for one, other in itertools.combinations(sorted(meanings), 2):  # closer ones are hard to tell in a legend
        channels = ([int(each[at : at + 2], 16) for at in (1, 3, 5)] for each in (one, other))
        assert sum((a - b) ** 2 for a, b in zip(*channels)) ** 0.5 >= 40, (one, other)


def test_Colours_AreThoseOfTheTable_InEveryDrawer() -> None:
    root = Path(__file__).parents[3]
    tables = [root / "python_plugin/sluice/timeline/colours.py", Path(__file__).resolve()]
    folders = ("python_plugin", "adapters", "examples", "docs", "contrib", "integration_tests", "quickstart", "tools")
    files = [path for name in folders for path in (root / name).rglob("*.py") if path.resolve() not in tables]
    own = re.compile(r"""#[0-9a-fA-F]{6}\b|["'=]#[0-9a-fA-F]{3}\b|(?:fill|stroke)=\\?"(?!none|\{)[^"]*\"""")
    found = [f"{path}:{n}: {line.strip()}" for path in files for n, line in _lines(path) if own.search(line)]
    assert len(files) > 100 and found == []


def _lines(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(path.read_text().split("\n"), 1))


def test_Write_WithoutResvg_LeavesThePngOutAndSaysWhatToInstall(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    written = timeline.write([_prediction("forward", "none").panel("x")], tmp_path, "t")
    assert written == ["timeline.svg", "trace.json"] and not (tmp_path / "timeline.png").exists()
    with pytest.raises(
        timeline.PngUnavailable, match=r"x.png: PNG pictures need resvg-py: pip install 'sluice\[png\]'"
    ):
        timeline.write_png("<svg/>", tmp_path / "x.png")


def test_Write_Png_HasTheSizeOfThePictureTwiceAndItsText(tmp_path) -> None:
    panel = _prediction("forward", "S1").panel("a title", timeline.tensor_bytes(4, 4, 4, 4))
    assert "timeline.png" in timeline.write([panel], tmp_path, "one layer")
    svg, drawn = (tmp_path / "timeline.svg").read_text(), (tmp_path / "timeline.png").read_bytes()
    root = ElementTree.fromstring(svg)
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", drawn[16:24]) == (2 * int(root.get("width")), 2 * int(root.get("height")))
    timeline.write_png(svg.replace(">one layer<", "><"), tmp_path / "untitled.png")
    assert drawn != (tmp_path / "untitled.png").read_bytes(), "no letter is drawn where the title stands"


def test_Panel_BadEvents_AreRefused() -> None:
    with pytest.raises(ValueError, match="is on lane 'gpu'; known are comm, compute, copy_out, copy_in"):
        Panel("p", [Event("gemm1", "gpu", 0, 1)])
    with pytest.raises(ValueError, match="ends before it begins"):
        Panel("p", [Event("gemm1", "compute", 2, 1)])
    with pytest.raises(ValueError, match="nothing to draw"):
        timeline.svg([Panel("p", [])], "t")
