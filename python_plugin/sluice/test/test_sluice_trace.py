"""`sluice trace`: schedules recognised, clocks aligned, every idle second accounted for, a real run of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sluice.planning import machines
from sluice.planning.planner import Choice, Planner, Workload
from sluice.timeline import Schedule
from sluice.timeline.schedule import POLICIES
from sluice.tracing import clocks, command, explain, passes, report
from sluice.tracing import text as report_text
from two_ranks import launcher

HERE = Path(__file__).resolve().parent
COSTS = {
    **dict.fromkeys(("dispatch", "dispatch_grad", "redispatch"), 4e-3),
    **dict.fromkeys(("combine", "combine_grad"), 1e-3),
    **dict.fromkeys(("gemm1", "gemm2", "gemm1_grad", "gemm2_grad", "recompute"), 1e-3),
    **dict.fromkeys(("unpack", "unpack_grad", "activation", "activation_grad", "copy_out", "copy_in"), 2.5e-4),
    **dict.fromkeys(("reduce", "reduce_grad"), 1.25e-4),
    "weight_grad": 2e-3,
}
HEADER = 5e-4  # before the first op, and behind the last


def _events(schedule: Schedule, at: float) -> list[dict]:
    """As the engine records a pass that took what the schedule predicts."""
    prediction = schedule.predict(COSTS)
    direction = schedule.data["direction"]
    place = {"layer": 3, "direction": direction, "bytes": 0}
    rows = [
        {"op": op["kind"], "lane": op["lane"], "chunk": op["chunk"], "begin_ns": begin, "end_ns": end, **place}
        for op, begin, end in zip(schedule.data["ops"], prediction.begin, prediction.end)
    ]
    for row in rows:
        row["begin_ns"], row["end_ns"] = (round((at + HEADER + row[key]) * 1e9) for key in ("begin_ns", "end_ns"))
    end = round((at + 2 * HEADER + prediction.seconds) * 1e9)
    whole = {"op": "pass", "lane": "compute", "chunk": -1, "begin_ns": round(at * 1e9), "end_ns": end, **place}
    return [*rows, whole]


def _pair(policy: str, chunks: int = 4, **options) -> list[Schedule]:
    alike = {name: options[name] for name in ("under_plan", "cut_rows", "gated", "deduplicate") if name in options}
    forward = Schedule.build("forward", chunks, *POLICIES[policy], **alike)
    return [forward, Schedule.build("backward", chunks, *POLICIES[policy], may_reuse_saved=True, **options)]


FACTS = {"gated": False, "model_width": 64, "hidden_width": 256, "dtype": "float32", "received_rows": 400}


def _record(
    schedules: list[Schedule], rank: int = 0, late: float = 0.0, boot: str = "a", world: int = 2, facts: dict = FACTS
) -> dict:
    events = [event for place, one in enumerate(schedules) for event in _events(one, 10 + place + late)]
    context = {"ranks": list(range(world)), "layers": {"3": facts}, "events": events}
    return {"form": 1, "rank": rank, "world_size": world, "boot": boot, "contexts": [context]}


def _passes(schedules: list[Schedule], **options) -> list[passes.Pass]:
    found = passes.read_record(_record(schedules, **options), "rank0.json")
    passes.identify(found)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [{}, {"wgrad": "per_chunk"}, {"under_plan": True, "wgrad": "per_chunk"}], ids=str)
def test_Identify_RecordedPair_FindsItsSchedules(policy: str, options: dict) -> None:
    schedules = _pair(policy, **options)
    found = _passes(schedules)
    for one, schedule in zip(found, schedules):
        # Where flags change nothing, another one with equal ops and waits is as good.
        assert [op["waits_for"] for op in one.schedule.data["ops"]] == [op["waits_for"] for op in schedule.data["ops"]]
        assert one.schedule.data["restore_di"] == schedule.data["restore_di"]
        assert one.schedule.data["restore_m"] == schedule.data["restore_m"]


@pytest.mark.parametrize("wgrad", ["deferred", "per_chunk"])
def test_Identify_ChunksOutOfRows_FindsItsSchedules(wgrad: str) -> None:
    """What layers of several ranks do by default."""
    schedules = _pair("none", wgrad=wgrad, cut_rows=True)
    for one, schedule in zip(_passes(schedules), schedules):
        assert one.schedule is not None and one.schedule.data["cut_rows"] == 1
        assert one.schedule.data["ops"] == schedule.data["ops"]
    assert _passes(_pair("none", wgrad=wgrad))[0].schedule.data["cut_rows"] == 0


@pytest.mark.parametrize("policy", ["S3", "S4"])
@pytest.mark.parametrize("facts", [{"deduplicate": True}, {"gated": True}, {"deduplicate": True, "gated": True}])
def test_Identify_DeduplicatedOrGatedLayers_FindsTheirSlots(policy: str, facts: dict) -> None:
    """Their ops are those of other layers; their slots are not."""
    schedules = _pair(policy, **facts)
    assert any(one.data["rings"] != other.data["rings"] for one, other in zip(schedules, _pair(policy)))
    for one, schedule in zip(_passes(schedules, facts={**FACTS, **facts}), schedules):
        assert one.schedule.data["ops"] == schedule.data["ops"]
        assert one.schedule.data["rings"] == schedule.data["rings"]


def test_Identify_CutOffPass_HasNoSchedule() -> None:
    data = _record(_pair("none"))
    del data["contexts"][0]["events"][:3]
    found = passes.read_record(data, "rank0.json")
    passes.identify(found)
    assert found[0].schedule is None and found[1].schedule is not None
    assert explain.idle_of(found[0]) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_Idle_EveryLane_AddsUpToThePass(policy: str) -> None:
    for one in _passes(_pair(policy)):
        idle = explain.idle_of(one)
        for lane in {event.lane for event in one.events}:
            busy = sum(event.seconds for event in one.events if event.lane == lane)
            explained = sum(stretch.seconds for stretch in idle if stretch.lane == lane)
            assert busy + explained == pytest.approx(one.seconds, abs=1e-8)


def test_Idle_SlowDispatches_AreNamedWithTheirTime() -> None:
    """n = 4, everything kept: dispatches of 4 ms and 0.25 ms of unpacking, then 2.25 ms of computation."""
    forward = _passes(_pair("none"))[0]
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


def test_Clocks_OtherMachine_IsAlignedByItsExchanges() -> None:
    schedules = _pair("S4")
    found = {rank: passes.read_record(_record(schedules, rank, late), "r") for rank, late in ((0, 0.0), (1, 321.5))}
    one, other = clocks.align(found, {0: "a", 1: "b"})
    assert one.shift == 0 and other.how == "exchanges"
    assert abs(other.shift + 321.5) <= other.error <= 1e-3  # the shortest exchange lasts 1 ms
    same = clocks.align(found, {0: "a", 1: "a"})[1]
    assert (same.shift, same.error, same.how) == (0.0, 0.0, "one machine")
    alone = {0: found[0], 1: []}
    assert clocks.align(alone, {0: "a", 1: "b"})[1].how == "unknown"


def test_Peers_LateRank_IsNamed() -> None:
    schedules = _pair("none", 1)
    both = [
        one
        for rank, late in ((0, 0.0), (1, 2e-3))
        for one in passes.read_record(_record(schedules, rank, late), "r")
        if one.direction == "forward"
    ]
    waits = explain.late_peers(both)
    assert {(wait.rank, wait.reason) for wait in waits} == {(0, "rank 1")}
    assert max(wait.seconds for wait in waits) == pytest.approx(2e-3, abs=1e-6)


def test_Steps_TheNewestAreKept() -> None:
    found = passes.read_record(_record(_pair("none") * 5), "r")
    kept = passes.keep_steps(found, 2)
    assert [one.direction for one in kept] == ["forward", "backward"] * 2
    assert kept[0].begin == found[6].begin
    assert len(passes.keep_steps(found, 99)) == 10


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"form": 2}, "form is 2, not 1; record again"),
        ({"rank": "0"}, "rank is '0'; it must be of type int"),
        ({"contexts": [{}]}, r"contexts\[0\]: events is missing"),
        ({"contexts": [{"events": [{"op": "gemm1"}]}]}, r"events\[0\].lane is missing"),
    ],
)
def test_Record_Damaged_IsNamed(change: dict, text: str) -> None:
    with pytest.raises(passes.BadRecord, match=text):
        passes.read_record({**_record(_pair("none")), **change}, "rank0.json")


def test_Command_NothingRecorded_SaysSo(tmp_path, capsys) -> None:
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "no passes were recorded" in capsys.readouterr().err
    assert command.main(["--out", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert command.main(["--out", str(tmp_path), "--", "no-such-program"]) == 127
    (tmp_path / "rank0-1.json").write_text("{")
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "rank0-1.json: not JSON" in capsys.readouterr().err
    taken = ["--out", str(tmp_path / "rank0-1.json"), "--", "true"]  # a file
    for bad in (["--steps", "0"], ["--events", "0"], ["--out", str(tmp_path / "none")], taken):
        with pytest.raises(SystemExit) as ended:
            command.main(bad)
        assert ended.value.code == 2


def test_Command_Help_HasAnExampleAndExitCodes(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "sluice trace --out trace_out -- torchrun" in text and "exit status:" in text


def test_Report_TwoRanks_PredictsWhatWasRecorded(tmp_path) -> None:
    """A recording that equals its schedule is predicted exactly."""
    for rank in (0, 1):
        (tmp_path / f"rank{rank}-9.json").write_text(json.dumps(_record(_pair("S2") * 3, rank)))
    found, alignment = report.load(tmp_path, 2)
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


def test_Report_WithAMachine_PlansWhatWasRecorded(tmp_path, capsys) -> None:
    """The fullest rank of two received 500 rows for 400 on average; the schedule is the recorded one."""
    loads = {0: 300, 1: 500}
    for rank, rows in loads.items():
        facts = {**FACTS, "received_rows": rows, "num_experts": 4, "top_k": 2, "chunk_cut": "tokens"}
        record = _record(_pair("S4", wgrad="per_chunk") * 3, rank, facts=facts)
        (tmp_path / f"rank{rank}-9.json").write_text(json.dumps(record))
    words = ["--out", str(tmp_path), "--steps", "2", "--machine", "a100-8x8-200g"]
    assert command.main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    work = Workload(64, 256, 200, 4, 2, 2, "f32", skew=1.25, chunk_cut="tokens")
    planner = Planner(machines.load("a100-8x8-200g"))
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
    assert command.main(words) == 0
    text = capsys.readouterr().out
    assert "planned = by the planner on a100-8x8-200g" in text and "lane compute" in text
    picture = (tmp_path / "timeline.svg").read_text()
    assert "planned: backward of layer 3" in picture and "planned: forward of layer 3" in picture


def test_Report_ChunksThatCameBackInDifferentWays_ArePlanned(tmp_path, capsys) -> None:
    """As under a budget that has room for two chunks of four."""
    restores = ["keep", "keep", "redispatch", "redispatch"], ["keep", "keep", "recompute", "recompute"]
    pair = [
        Schedule.build("forward", 4, *restores, under_plan=True),
        Schedule.build("backward", 4, *restores, under_plan=True, may_reuse_saved=True, wgrad="per_chunk"),
    ]
    facts = {**FACTS, "num_experts": 4, "top_k": 2, "chunk_cut": "tokens"}
    for rank in (0, 1):
        (tmp_path / f"rank{rank}-9.json").write_text(json.dumps(_record(pair * 2, rank, facts=facts)))
    assert command.main(["--out", str(tmp_path), "--machine", "a100-8x8-200g", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["layers"]:
        assert row["policy"] == dict(zip(("restore_input", "restore_middle"), restores))
        assert row.get("machine_problem") is None and row["machine_s"] > 0
        redispatches = [op for op in row["machine_ops"] if op["op"] == "redispatch"]
        assert len(redispatches) == (row["direction"] == "backward")


def test_Report_RecordWithoutShapes_SaysWhyItIsNotPlanned(tmp_path, capsys) -> None:
    (tmp_path / "rank0-9.json").write_text(json.dumps(_record(_pair("none"), 0)))
    assert command.main(["--out", str(tmp_path), "--machine", "h200-8x8"]) == 0
    assert "not planned: the record does not say num_experts: record again" in capsys.readouterr().out
    assert command.main(["--out", str(tmp_path), "--machine", "cached"]) == 2
    assert "--machine cached: the record does not say num_experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "inputs", "middles"), [("S3", "offload", "recompute"), ("none", "keep", "keep")], ids=["S3", "default"]
)
def test_Trace_TwoRealRanks_AreRecordedAndExplained(tmp_path, policy: str, inputs: str, middles: str) -> None:
    """`none` is what a layer does when nothing is said: its chunks come out of rows."""
    pytest.importorskip("torch")
    arguments = [sys.executable, "-m", "sluice", "trace", "--json", "--steps", "2", "--out", str(tmp_path)]
    arguments += ["--machine", "a100-8x8-200g"]
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*arguments, "--", *launcher(tmp_path), str(HERE / "trace_rank.py"), "4", "3", policy],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert made["ranks"] == [0, 1] and made["unexplained_passes"] == 0
    rows = made["layers"]
    assert {(row["rank"], row["layer"], row["direction"]) for row in rows} == {
        (rank, layer, direction) for rank in (0, 1) for layer in (0, 1) for direction in ("forward", "backward")
    }
    for row in rows:
        assert row["num_chunks"] == 3 and row["passes"] == 2
        assert set(row["policy"]["restore_input"]) == {inputs}
        assert row["policy"]["restore_middle"] == [middles] * 3
        assert 0 < row["predicted_s"]
        assert 0 < row["machine_s"], row.get("machine_problem")  # though the layers are gone when ranks end
    assert any(row["lane"] == "compute" and row["waited_for"].startswith("dispatch") for row in made["idle"])
    memory = [
        (row["rank"], row["ranks"], row["most_outstanding"], row["planned_outstanding"]) for row in made["memory"]
    ]
    assert memory == [(rank, [0, 1], 2, 0) for rank in (0, 1)]  # both layers forward, then back; no budget
    assert all(row["peak_bytes"] > 0 for row in made["memory"])
    assert (tmp_path / "trace.json").exists() and (tmp_path / "timeline.svg").exists()
