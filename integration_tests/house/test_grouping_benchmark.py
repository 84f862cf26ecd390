"""What simulates lanes agrees with the planner; the benchmark of groups writes a whole record from a tiny layer."""

import json
import subprocess
import sys

import pytest
from sluice.planning.planner import Choice, Planner, Workload

from integration_tests.benchmarks.grouping import lanes

WORK = Workload(256, 512, 1024, 8, 2, 4, dtype="f32", skew=2.0, activation="relu")


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("skew", [1.0, 2.5])
def test_Lanes_OneLaneWalked_TakesWhatThePlannerSays(n, skew):
    """The walk of two lanes, with both of them on one, is the schedule of the planner."""
    rate = lanes.LINKS["0.4gbit"]
    planner, work = Planner(lanes.machine(rate)), WORK.with_(skew=skew)
    p = planner.predict(work, Choice(n, "keep", "keep", "deferred"), timeline=True)
    seconds = p.overhead
    for events in p.events.values():
        exchanges = [e for e in events if e.op in lanes.RETURNS or e.op in lanes.SENDS]
        jobs = lanes.on_two_lanes(events, [(e.end - e.begin) / 2 for e in exchanges], skew, 4)
        for job, event in zip(jobs, events, strict=True):
            job.lane = event.lane
        seconds += lanes.walk(jobs)
    assert seconds == pytest.approx(p.seconds, rel=1e-9)


def test_Lanes_TwoMessages_ShareEachDirectionWhileBothHaveBytes():
    """Out 1 and in 3 beside out 3 and in 1: each direction carries 4, both ways at once."""
    jobs = [lanes.Job("comm", 0.5, [1.0, 3.0]), lanes.Job("return", 0.5, [3.0, 1.0])]
    assert lanes.walk(jobs) == pytest.approx(4.5)
    assert lanes.walk([lanes.Job("comm", 0.0, [1.0, 3.0]), lanes.Job("comm", 0.0, [3.0, 1.0])]) == pytest.approx(6.0)


def test_Lanes_Chosen_IsNeverSlowerThanOneExchangeAfterTheOther():
    rows = lanes.grid(2)
    found = lanes.summary(rows)
    assert found["chosen_over_single"]["most"] <= 1.0
    assert found["chosen_over_single"]["least"] < 0.9  # and gains where loads are uneven and links slow
    assert all(row["grouped"] >= 0.99 * row["single"] for row in rows if row["skew"] == 1.0 and row["link"] == "4gbit")


@pytest.mark.timeout(600)
def test_GroupingBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.grouping", "--smoke", "--records", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "grouping.raw.json").read_text())
    (cell,) = record["cells"]
    assert set(cell["seconds"]) == {"single", "grouped", "pipemoe", "adaptive"}
    assert all(len(seconds) == 2 for seconds in cell["seconds"].values())
    assert cell["n"]["grouped"] > 2 and cell["predicted"] > 0
    assert "adaptive/pipemoe" in done.stdout
