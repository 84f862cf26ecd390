# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice trace`: identified schedules, aligned clocks, a reason for all idle time, a real run of two ranks."""

import json
import sys
from pathlib import Path

import pytest
from made_record import COSTS, EVENT, FACTS, HEADER, SLOW_COPIES, pair, record
from sluice.planning import machines, routing
from sluice.planning.planner import Choice, Planner, Workload
from sluice.restore import SETS
from sluice.timeline import Schedule, from_trace, svg
from sluice.timeline.stages import arrows, bubble, panel
from sluice.tracing import clocks, explain, passes, report
from sluice.tracing import text as report_text
from two_ranks import launcher, output_of

HERE = Path(__file__).resolve().parent


@pytest.fixture
def trace(command, tmp_path):
    """trace(*words) reports what the folder holds: (exit status, stdout, stderr)."""
    return lambda *words: command("trace", "--out", str(tmp_path), *words)


def _write(folder: Path, data: dict) -> None:
    (folder / f"rank{data['rank']}-9.json").write_text(json.dumps(data))


def _passes(schedules: list[Schedule], **options) -> list[passes.Pass]:
    found = passes.read_record(record(schedules, **options), "rank0.json")
    passes.identify(found)
    return found


# (policy, options of both schedules, facts of the layer)
PAIRS = [
    *((policy, {}, {}) for policy in SETS),
    *((policy, {"wgrad": "per_chunk", "under_plan": plan}, {}) for policy in SETS for plan in (False, True)),
    # Layers of several ranks run chunks of rows by default.
    *(("none", {"wgrad": wgrad, "chunks_by_experts": True}, {}) for wgrad in ("deferred", "per_chunk")),
    # The ops are those of other layers; the slots are not.
    *((policy, facts, facts) for policy in ("S3", "S4")
      for facts in ({"deduplicate": True}, {"gated": True}, {"deduplicate": True, "gated": True})),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "options", "facts"), PAIRS, ids=str)
def test_Identify_RecordedPair_FindsItsSchedules(policy: str, options: dict, facts: dict) -> None:
    schedules = pair(policy, **options)
    assert not facts or any(one.data["rings"] != other.data["rings"] for one, other in zip(schedules, pair(policy)))
    for one, schedule in zip(_passes(schedules, costs=SLOW_COPIES, facts={**FACTS, **facts}), schedules):
        # Without restores a plan changes the slots alone, which a record does not show.
        slots = () if policy == "none" and options.get("under_plan") else ("ops", "rings")
        for name in ("restore_input", "restore_pre_activation", "chunks_by_experts", *slots):
            assert one.schedule.data[name] == schedule.data[name], name


def test_Identify_CutOffPass_HasNoSchedule() -> None:
    data = record(pair("none"))
    del data["contexts"][0]["events"][:3]
    found = passes.read_record(data, "rank0.json")
    passes.identify(found)
    assert found[0].schedule is None and found[1].schedule is not None
    assert explain.idle_of(found[0]) == []


@pytest.mark.parametrize("policy", SETS)
def test_Idle_EveryLane_AddsUpToThePass(policy: str) -> None:
    for one in _passes(pair(policy)):
        idle = explain.idle_of(one)
        for lane in {event.lane for event in one.events}:
            busy = sum(event.seconds for event in one.events if event.lane == lane)
            explained = sum(stretch.seconds for stretch in idle if stretch.lane == lane)
            assert busy + explained == pytest.approx(one.seconds, abs=1e-8)


def test_Idle_SlowDispatches_AreNamedWithTheirTime() -> None:
    """n = 4, everything kept: dispatches of 4 ms and 0.25 ms of unpacking, then 2.25 ms of computation."""
    forward = _passes(pair("none"))[0]
    waited = {
        (stretch.reason, stretch.before): stretch.seconds
        for stretch in explain.idle_of(forward)
        if stretch.lane == "compute"
    }
    assert waited["dispatch 3", "gemm1 3"] == pytest.approx(4e-3 - 2.25e-3, abs=1e-8)
    assert waited["unpack 3", "gemm1 3"] == pytest.approx(0.25e-3, abs=1e-8)
    assert waited["preparing", "gemm1 0"] == pytest.approx(HEADER, abs=1e-8)
    row = {"rank": 1, "layer": 0, "direction": "forward", "lane": "compute", "waited_for": "dispatch 3"}
    sentence = report_text.sentence({**row, "before": "gemm1 3", "seconds": 0.041, "times": 3})
    assert sentence == "rank 1: compute waited for dispatch 3: 41.0 ms in 3 waits (before gemm1 3, forward of layer 0)"


SLOW_NET = {**COSTS, **dict.fromkeys(("dispatch", "combine", "dispatch_grad", "combine_grad"), 9e-3)}
SLOW_GEMMS = {**COSTS, **dict.fromkeys(("gemm1", "gemm2", "gemm1_grad", "gemm2_grad", "weight_grad"), 2e-2)}


@pytest.mark.parametrize(
    ("costs", "chunks", "late", "outside", "says"),
    [
        (SLOW_NET, 4, 0.0, 0.0, "communication limits, and more chunks would not help; fewer bytes"),
        (SLOW_GEMMS, 4, 0.0, 0.0, "computation limits, and more chunks would not help; faster GEMMs"),
        (COSTS, 4, 3e-2, 0.0, "for a rank that begins later"),
        (COSTS, 1, 0.0, 0.0, "other chunks, or adaptive ones, may hide more of it"),
        (COSTS, 1, 0.0, 0.75, "75 % of a step lie outside of MoE passes"),
    ],
    ids=["network", "compute", "late rank", "neither", "outside"],
)
def test_Conclusion_NamesWhatLimits(costs: dict, chunks: int, late: float, outside: float, says: str) -> None:
    both = [
        one
        for rank, shift in ((0, 0.0), (1, late))
        for one in passes.read_record(record(pair("none", chunks), rank, shift, costs=costs), "r")
    ]
    passes.identify(both)
    made = report.make(both, [], 1)
    made["outside"] = [{"rank": 0, "step_s": 1.0, "passes_s": 1 - outside, "outside_s": outside}]
    last = report_text.lines_of(made, both)[-1]
    assert says in last and ("outside" in last) == (outside > 0), last


def test_Clocks_OtherMachine_IsAlignedByItsExchanges() -> None:
    schedules = pair("S4")
    found = {rank: passes.read_record(record(schedules, rank, late), "r") for rank, late in ((0, 0.0), (1, 321.5))}
    one, other = clocks.align(found, {0: "a", 1: "b"})
    assert one.shift == 0 and other.how == "exchanges"
    assert abs(other.shift + 321.5) <= other.error <= 1e-3  # the shortest exchange lasts 1 ms
    same = clocks.align(found, {0: "a", 1: "a"})[1]
    assert (same.shift, same.error, same.how) == (0.0, 0.0, "one machine")
    alone = {0: found[0], 1: []}
    assert clocks.align(alone, {0: "a", 1: "b"})[1].how == "unknown"


def test_Peers_LateRank_IsNamed() -> None:
    schedules = pair("none", 1)
    both = [
        one
        for rank, late in ((0, 0.0), (1, 2e-3))
        for one in passes.read_record(record(schedules, rank, late), "r")
        if one.direction == "forward"
    ]
    waits = explain.late_peers(both)
    assert {(wait.rank, wait.reason) for wait in waits} == {(0, "rank 1")}
    assert max(wait.seconds for wait in waits) == pytest.approx(2e-3, abs=1e-6)


def test_Steps_TheNewestAreKept() -> None:
    found = passes.read_record(record(pair("none") * 5), "r")
    kept = passes.keep_steps(found, 2)
    assert [one.direction for one in kept] == ["forward", "backward"] * 2
    assert kept[0].begin == found[6].begin
    assert len(passes.keep_steps(found, 99)) == 10


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"form": 3}, "form is 3, not 2; record again"),
        ({"rank": "0"}, "rank is '0'; it must be of type int"),
        ({"contexts": [{}]}, r"contexts\[0\]: events is missing"),
        ({"contexts": [{"events": [{"op": "gemm1"}]}]}, r"events\[0\].lane is missing"),
        ({"contexts": [{"events": [7]}]}, r"events\[0\] is 7; it must be an object"),
        (
            {"contexts": [{"events": [{**EVENT, "begin_ns": "0"}]}]},
            r"events\[0\].begin_ns is '0'; it must be of type int",
        ),
        ({"contexts": [{"events": [{**EVENT, "lane": "warp"}]}]}, r"events\[0\].lane is 'warp'; known are comm"),
        ({"contexts": [{"events": [{**EVENT, "end_ns": 0}]}]}, r"events\[0\].end_ns is before begin_ns"),
        ({"contexts": [{"events": [], "layers": [1]}]}, r"layers is \[1\]; it must be an object"),
        ({"contexts": [{"events": [], "ranks": 2}]}, r"ranks is 2; it must be a list"),
    ],
)
def test_Record_Damaged_IsNamed(change: dict, text: str) -> None:
    with pytest.raises(passes.BadRecord, match=text):
        passes.read_record({**record(pair("none")), **change}, "rank0.json")


def test_Command_NothingRecorded_SaysSo(tmp_path, trace) -> None:
    status, _, err = trace()
    assert status == 1 and "no passes were recorded" in err
    assert trace("--", sys.executable, "-c", "raise SystemExit(7)")[0] == 7
    assert trace("--", "no-such-program")[0] == 127
    (tmp_path / "rank0-1.json").write_text("{")
    status, _, err = trace()
    assert status == 1 and "rank0-1.json: not JSON" in err
    taken = ["--out", str(tmp_path / "rank0-1.json"), "--", "true"]  # a file
    for bad in (["--steps", "0"], ["--events", "0"], ["--out", str(tmp_path / "none")], taken):
        with pytest.raises(SystemExit) as ended:
            trace(*bad)
        assert ended.value.code == 2


def test_Report_TwoRanks_PredictsWhatWasRecorded(tmp_path) -> None:
    """A recording that equals its schedule is predicted exactly."""
    for rank in (0, 1):
        _write(tmp_path, record(pair("S2") * 3, rank))
    by_rank, alignment = report.read(tmp_path)
    found = report.newest(by_rank, 2)
    made = report.make(found, alignment, 2)
    assert made["ranks"] == [0, 1] and made["unexplained_passes"] == 0
    for row in made["layers"]:
        assert row["passes"] == 2 and row["predicted_s"] == pytest.approx(row["measured_s"], rel=1e-5)
    written = report.write(tmp_path, found, made)
    assert {"report.json", "trace.json", "timeline.svg"} <= set(written)
    picture = (tmp_path / "timeline.svg").read_text()
    assert picture.count(">bytes in slots<") == 4 and picture.count(">slots<") == 4  # measured, predicted, twice
    assert any("predicted: backward of layer 3" in line for line in (tmp_path / "timeline.svg").read_text().split("<"))
    assert "2 ranks, the last 2 steps" in "\n".join(report_text.lines_of(made, found))


def test_Report_WithAMachine_PlansWhatWasRecorded(tmp_path, trace) -> None:
    """The most loaded of two ranks received 500 rows, the mean is 400; schedule and activation are as recorded."""
    data = {**machines.load("a100-8x8-200g").data, "activation_seconds": 1e-8, "activation_grad_seconds": 1e-8}
    machine = tmp_path / "m.json"
    machine.write_text(json.dumps({**data, "relu_seconds": 1e-13, "relu_grad_seconds": 1e-13}))
    loads = {0: 300, 1: 500}
    for rank, rows in loads.items():
        facts = {**FACTS, "received_rows": rows, "num_experts": 4, "top_k": 2, "chunking": "tokens"}
        facts["activation"] = "relu"
        _write(tmp_path, record(pair("S4", wgrad="per_chunk") * 3, rank, facts=facts))
    words = ["--steps", "2", "--machine", str(machine)]
    made = json.loads(trace(*words, "--json")[1])
    work = Workload(64, 256, 200, 4, 2, 2, "f32", skew=1.25, chunking="tokens", activation="relu")
    planner = Planner(machines.load(str(machine)))
    planned = planner.predict(work, Choice(4, "redispatch", "recompute", "per_chunk"), timeline=True)
    for row in made["layers"]:
        events = planned.events[row["direction"]]
        assert row["machine_s"] == pytest.approx(max(event.end for event in events), rel=1e-9)
        ops = {op["op"]: op for op in row["machine_ops"]}
        assert ops.keys() == {event.op for event in events}
        assert ops["reduce" if row["direction"] == "forward" else "reduce_grad"]["measured_s"] == pytest.approx(5e-4)
        busy = row["machine_busy_s"]["compute"]
        idle = sum(wait["seconds"] for wait in row["machine_idle"] if wait["lane"] == "compute")
        assert busy + idle == pytest.approx(row["machine_s"], rel=1e-9)
    status, text, _ = trace(*words)
    assert status == 0 and "planned = by the planner on a100-8x8-200g" in text and "lane compute" in text
    picture = (tmp_path / "timeline.svg").read_text()
    assert "planned: backward of layer 3" in picture and "planned: forward of layer 3" in picture


def test_Outside_StepsOfTwoSeconds_AreWhatPassesLeave(tmp_path, trace) -> None:
    """A pass begins every second, so that a step of two passes takes two."""
    schedules = pair("none")
    for rank in (0, 1):
        _write(tmp_path, record(schedules * 4, rank))
    inside = sum(2 * HEADER + one.predict(COSTS).seconds for one in schedules)
    for rank, row in enumerate(json.loads(trace("--steps", "2", "--json")[1])["outside"]):
        assert (row["rank"], row["steps"]) == (rank, 2)
        measured = [row["step_s"], row["passes_s"], row["outside_s"]]
        assert measured == pytest.approx([2, inside, 2 - inside], abs=1e-6)
    text = trace("--steps", "99")[1]
    assert f"rank 1: a step takes 2000.00 ms, {1e3 * inside:.2f} in passes and" in text and "outside of passes" in text


def test_Outside_AnotherGroupsRingBeganLater_ItsStepsAreNotCounted() -> None:
    """Otherwise passes that the younger ring has lost would count as outside."""
    schedules = pair("none")
    first = passes.read_record(record(schedules * 4), "r")  # backwards end at 11, 13, 15 and 17 s
    other = passes.read_record(record(schedules * 2, late=3.5), "r")  # 13.5, 14.5, ...
    for one in other:
        one.ranks = (0, 7)
    assert len(report.steps_of(first, 9)) == 3
    assert len(report.steps_of([*first, *other], 9)) == 1
    assert report.steps_of(first[:2], 9) == [] == report.steps_of(first[:1], 9)


def test_Outside_PassesThatOverlap_CountOnce() -> None:
    assert report.covered([(0, 2), (1, 3), (5, 9)], 1, 6) == 3


def test_Report_ClocksThatNothingTies_IsJsonAllTheSame(tmp_path, trace) -> None:
    """Each rank is alone in its group, on a separate machine."""
    for rank in (0, 1):
        data = record(pair("none") * 2, rank, boot=str(rank))
        data["contexts"][0]["ranks"] = [rank]
        _write(tmp_path, data)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for text in (trace("--json")[1], (tmp_path / "report.json").read_text()):
        made = json.loads(text, parse_constant=refuse)
        assert [clock["error"] for clock in made["clocks"]] == [0, None]
    assert "clock of rank 1: as it is, since no exchange ties it to the others" in trace()[1]


def test_Report_ChunksThatCameBackInDifferentWays_ArePlanned(tmp_path, trace) -> None:
    """A budget with room for two of four chunks gives such passes."""
    restores = ["keep", "keep", "redispatch", "redispatch"], ["keep", "keep", "recompute", "recompute"]
    both = [
        Schedule.build("forward", 4, *restores, under_plan=True),
        Schedule.build("backward", 4, *restores, under_plan=True, may_reuse_saved=True, wgrad="per_chunk"),
    ]
    facts = {**FACTS, "num_experts": 4, "top_k": 2, "chunking": "tokens"}
    for rank in (0, 1):
        _write(tmp_path, record(both * 2, rank, facts=facts))
    for row in json.loads(trace("--machine", "a100-8x8-200g", "--json")[1])["layers"]:
        assert row["policy"] == dict(zip(("restore_input", "restore_pre_activation"), restores))
        assert row.get("machine_problem") is None and row["machine_s"] > 0
        redispatches = [op for op in row["machine_ops"] if op["op"] == "redispatch"]
        assert len(redispatches) == (row["direction"] == "backward")


def test_Report_RecordWithoutShapes_SaysWhyItIsNotPlanned(tmp_path, trace) -> None:
    _write(tmp_path, record(pair("none"), 0))
    assert "not planned: the record does not say num_experts: record again" in trace("--machine", "h200-8x8")[1]
    status, _, err = trace("--machine", "cached")
    assert status == 2 and "--machine cached: the record does not say num_experts" in err


@pytest.mark.parametrize(
    ("policy", "inputs", "pre_activations"),
    [("S3", "offload", "recompute"), ("none", "keep", "keep")],
    ids=["S3", "default"],
)
def test_Trace_TwoRealRanks_AreRecordedAndExplained(
    tmp_path, capsys, policy: str, inputs: str, pre_activations: str
) -> None:
    """`none` is the default of a layer: its chunks consist of rows. The ranks also record the loads of their experts:
    T 256, K 2 on each of two ranks, so 1,024 rows a layer and step; 4 experts, 2 layers."""
    pytest.importorskip("torch")
    arguments = [sys.executable, "-m", "sluice", "trace", "--json", "--steps", "2", "--out", str(tmp_path)]
    arguments += ["--machine", "a100-8x8-200g"]
    loads, routes = tmp_path / "loads", tmp_path / "routing.jsonl"
    words = [*arguments, "--", *launcher(), str(HERE / "layers_rank.py"), *f"4 256 2 3 {policy} -".split()]
    made = json.loads(output_of(tmp_path, *words, SLUICE_ROUTING_DIR=str(loads)))
    assert made["ranks"] == [0, 1] and made["unexplained_passes"] == 0
    rows = made["layers"]
    assert {(row["rank"], row["layer"], row["direction"]) for row in rows} == {
        (rank, layer, direction) for rank in (0, 1) for layer in (0, 1) for direction in ("forward", "backward")
    }
    for row in rows:
        assert row["num_chunks"] == 3 and row["passes"] == 2
        assert set(row["policy"]["restore_input"]) == {inputs}
        assert row["policy"]["restore_pre_activation"] == [pre_activations] * 3
        assert 0 < row["predicted_s"]
        assert 0 < row["machine_s"], row.get("machine_problem")  # although the layers no longer exist when ranks end
    assert any(row["lane"] == "compute" and row["waited_for"].startswith("dispatch") for row in made["idle"])
    assert [row["rank"] for row in made["outside"]] == [0, 1]
    for row in made["outside"]:
        assert row["steps"] == 2 and 0 < row["passes_s"] < row["step_s"] and 0 < row["outside_s"] < row["step_s"]
    facts = [json.loads(path.read_text())["contexts"][0]["layers"] for path in tmp_path.glob("rank*.json")]
    assert [layer["activation"] for rank in facts for layer in rank.values()] == ["silu"] * 4
    memory = [
        (row["rank"], row["ranks"], row["most_outstanding"], row["planned_outstanding"]) for row in made["memory"]
    ]
    assert memory == [(rank, [0, 1], 2, 0) for rank in (0, 1)]  # both layers forward, then back; no budget
    assert all(row["peak_bytes"] > 0 for row in made["memory"])
    assert (tmp_path / "trace.json").exists() and (tmp_path / "timeline.svg").exists()
    assert routing.main([str(loads), "--out", str(routes), "--json"]) == 0
    joined = json.loads(capsys.readouterr().out)
    assert (joined["steps"], joined["experts"], len(joined["layers"])) == (4, 4, 2)
    assert [[sum(layer) for layer in step] for step in routing.read(str(routes)).loads] == [[1024, 1024]] * 4
    assert all(1 <= row["rank_skew"] <= row["expert_skew"] <= 2 for row in joined["layers"])


# ---- pipelines: a row for each stage, an arrow for each message, predicted next to measured ----

MS = 1_000_000


def _op(op: str, stage: int, begin: int, end: int, micro_batch: int = 0, lane: str = "compute") -> dict:
    place = {"chunk": micro_batch, "layer": stage, "rank": stage, "begin_ns": begin * MS, "end_ns": end * MS}
    direction = "forward" if op in ("forward", "send_activation") else "backward"
    return {"op": op, "lane": lane, "direction": direction, **place}


# One micro-batch over two stages, and back.
FIRST = [_op("forward", 0, 0, 10), _op("send_activation", 0, 10, 11, lane="comm"), _op("backward", 0, 33, 53)]
SECOND = [_op("forward", 1, 12, 22), _op("backward", 1, 22, 32), _op("send_gradient", 1, 32, 33, lane="comm")]


def _record(rank: int, events: list, predicted: list, boot: str = "one", **more) -> dict:
    entry = {"number": 0, "ranks": [0, 1], "events": events, "predicted": predicted}
    return {"form": 2, "rank": rank, "world_size": 2, "boot": boot, "contexts": [], "pipelines": [entry], **more}


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


def test_Command_RecordedPipeline_IsReportedBesideThePrediction(tmp_path, trace) -> None:
    _write(tmp_path, _record(0, FIRST, [*FIRST, *SECOND]))
    _write(tmp_path, _record(1, SECOND, []))
    out = trace()[1]
    assert "pipeline of 2 stages, ranks 0, 1: its last batch took 53.00 ms, predicted 53.00; bubble 52.8 %" in out
    assert "stage 1:     20.00 ms computing, 20.00 predicted" in out and "stages.svg" in out
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    flows = [row for row in rows if row["ph"] in "sf"]
    assert len(flows) == 8 and all(row["ts"] >= 0 for row in flows)  # two messages, measured and predicted
    assert (tmp_path / "stages.svg").read_text().count('class="message"') == 4
    assert json.loads((tmp_path / "report.json").read_text())["pipelines"][0]["busy_s"] == {"0": 0.03, "1": 0.02}
    _write(tmp_path, _record(1, SECOND, [], boot="another"))  # the clocks of two machines are not compared
    assert "on several machines" in trace()[1] and "measured: pipeline" not in (tmp_path / "stages.svg").read_text()


def test_Command_Moves_AreReported(tmp_path, trace) -> None:
    for rank, events in enumerate((FIRST, SECOND)):
        times = {"begin_ns": 5 * MS, "end_ns": (9 + rank) * MS, "commit_s": 0.001 * rank}
        sizes = {"moved": 2, "left_bytes": 1_000_000, "hidden_bytes": 500_000 * rank}
        move = {"what": "experts", "of": "MoE layer 'moe'", "number": 0, **times, **sizes}
        _write(tmp_path, _record(rank, events, [*FIRST, *SECOND] if rank == 0 else [], moves=[move]))
    line = "0: 2 experts of MoE layer 'moe', 2.00 MB in 5.0 ms, 25 % of it hidden; commit 1.00 ms"
    assert line in trace()[1]
    assert json.loads((tmp_path / "report.json").read_text())["moves"][0]["ranks"] == 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (_record(0, FIRST, [], moves=[{}]), "rank0-9.json: moves: KeyError"),
        (_record(0, [{"op": "forward"}], []), "rank0-9.json: pipelines: KeyError"),
    ],
)
def test_Record_DamagedPipelineOrMove_IsNamed(tmp_path, trace, data: dict, text: str) -> None:
    _write(tmp_path, data)
    status, _, err = trace()
    assert status == 1 and text in err


def test_Trace_TwoRealRanks_TheirLastTrainingBatchIsReported(tmp_path) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "sluice", "trace", "--json", "--out", str(tmp_path), "--", *launcher()]
    (row,) = json.loads(output_of(tmp_path, *words, str(HERE / "trace_stage_rank.py"), "2"))["pipelines"]
    assert row["ranks"] == [0, 1] and row["one_clock"]
    for stage in ("0", "1"):  # four micro-batches, which sleep for 12 ms each at least
        assert row["busy_s"][stage] >= 0.048 and row["predicted_busy_s"][stage] > 0.04
    assert row["measured_s"] >= 0.06 and 0 < row["bubble"] < 1 and row["predicted_s"] > 0.05
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "s"]
    assert len(events) == 16  # eight messages, measured and predicted
