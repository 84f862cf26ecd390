"""What one communication lane, groups on it, and two lanes would take, simulated over skews and links.

    .venv/bin/python -m integration_tests.benchmarks.lanes [--ranks 2] [--records FOLDER]

Three forms of the same layer, everything kept, each with the n that is best for it:

    single   S1 .. Sn, then R1 .. Rn, one exchange after the other
    grouped  S1 S2 (R1 S3) .. Rn-1 Rn: a chunk that returns and one that leaves, under way together on one lane
    two      dispatches on one lane and returns on another, each as soon as it can

The planner prices the first two with the real schedules. The third is walked here, with the seconds that the planner
has for each op of the first by itself: two messages under way share each direction of the link between them, as long
as both have bytes for it. Nothing is measured, and the machine has no contention between lanes, so that exchanges
alone tell the forms apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from sluice.planning.machines import Machine  # noqa: E402
from sluice.planning.planner import Choice, Planner, Workload  # noqa: E402
from sluice.timeline.model import Event  # noqa: E402

from integration_tests.benchmarks.measuring import records  # noqa: E402

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
SKEWS = (1.0, 1.3, 1.6, 2.0, 3.0, 5.0)  # on two ranks no rank can have more than twice its part
LINKS = {"4gbit": 5e8, "1gbit": 1.25e8, "0.4gbit": 5e7, "0.2gbit": 2.5e7, "0.1gbit": 1.25e7}
STARTUP_S = 2e-4
FLOPS = 8e10  # of one core
# T, M, H, E, K: few and many rows, fine and coarse experts.
SHAPES = {
    "coarse": (2048, 512, 2048, 8, 1),
    "fine": (2048, 512, 256, 32, 4),
    "long": (8192, 256, 1024, 8, 2),
    "short": (256, 512, 2048, 8, 2),
}
WORTH = 0.03  # what a second lane must save beyond groups


def machine(bytes_per_second: float) -> Machine:
    """One core, and a link of that rate each way."""
    return Machine(
        {
            "sluice_machine": 2,
            "name": "lanes",
            "provenance": "profile",
            "world_size": 2,
            "gemm": {"f32": {"flops_per_second": FLOPS, "half_rows": 8}},
            "rows": {"bytes_per_second": 4e9},
            "activation_seconds": 5e-10,
            "activation_grad_seconds": 1e-9,
            "exchange": {"bytes_per_second": bytes_per_second, "startup_seconds": STARTUP_S},
            "op_seconds": 5e-6,
            "pass_seconds": 1e-4,
        },
        {},
    )


# ---- two lanes ---------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """An op on its lane: seconds by itself, then bytes of each direction of the link."""

    lane: str
    seconds: float
    link: list[float] = field(default_factory=lambda: [0.0, 0.0])  # line seconds out and in, of the fullest rank
    waits: list[int] = field(default_factory=list)
    end: float | None = None


def walk(jobs: Sequence[Job]) -> float:
    """When the last job ends. Lanes run theirs in order; those under way share each direction of the link."""
    now, running = 0.0, {}
    queues = {
        lane: [i for i, job in enumerate(jobs) if job.lane == lane] for lane in dict.fromkeys(j.lane for j in jobs)
    }
    left = [(job.seconds, list(job.link)) for job in jobs]
    while True:
        for lane, queue in queues.items():
            if lane not in running and queue and all(jobs[w].end is not None for w in jobs[queue[0]].waits):
                running[lane] = queue.pop(0)
        if not running:
            assert all(job.end is not None for job in jobs), "jobs wait for each other"
            return now
        users = [[i for i in running.values() if left[i][0] <= 0 and left[i][1][d] > 0] for d in (0, 1)]
        steps = [left[i][0] for i in running.values() if left[i][0] > 0]
        steps += [left[i][1][d] * len(users[d]) for d in (0, 1) for i in users[d]]
        step = min(steps, default=0.0)
        now += step
        for i in list(running.values()):
            seconds, link = left[i]
            if seconds > 0:
                left[i] = (max(0.0, seconds - step) if seconds > step * (1 + 1e-12) else 0.0, link)
                continue
            for d in (0, 1):
                if i in users[d]:
                    rest = link[d] - step / len(users[d])
                    link[d] = rest if rest > 1e-12 * jobs[i].link[d] else 0.0
        for lane, i in list(running.items()):
            if left[i][0] <= 0 and left[i][1] == [0.0, 0.0]:
                jobs[i].end = now
                del running[lane]


RETURNS = ("combine", "combine_grad")
SENDS = ("dispatch", "dispatch_grad")


def on_two_lanes(events: Sequence[Event], line: Sequence[float], skew: float, ranks: int) -> list[Job]:
    """The ops of one direction, returns and their sums on a lane of their own. line: line seconds of each exchange.

    The fullest rank has skew / ranks of all rows; so many of its own stay there, and the rest leaves.
    """
    leaving = (ranks - skew) / ((ranks - 1) * skew)  # of what comes in
    jobs: list[Job] = []
    arrived: dict[int, int] = {}
    computed: dict[int, int] = {}
    exchanges = iter(line)
    for event in events:
        back = event.op in RETURNS or event.op.startswith("reduce")
        lane = "return" if back else event.lane
        job = Job(lane, event.end - event.begin)
        if event.op in RETURNS or event.op in SENDS:
            whole = next(exchanges)
            job.seconds -= whole
            job.link = [whole, leaving * whole] if back else [leaving * whole, whole]
        if event.op in RETURNS:
            job.waits.append(computed[event.chunk])
        index = len(jobs)
        if event.op.startswith("unpack"):
            arrived[event.chunk] = index
        elif event.lane == "compute":
            if event.chunk in arrived:
                job.waits.append(arrived[event.chunk])
            computed[event.chunk] = index
        jobs.append(job)
    return jobs


def two_lanes(planner: Planner, rate: float, work: Workload, n: int) -> float:
    """Seconds of a step."""
    p = planner.predict(work, Choice(n, "keep", "keep", "deferred"), timeline=True)
    seconds = p.overhead
    for events in p.events.values():
        exchanges = [e for e in events if e.op in RETURNS or e.op in SENDS]
        packing = {id(e): _packing(e, events) for e in exchanges}
        line = [max(0.0, e.end - e.begin - packing[id(e)]) for e in exchanges]
        seconds += walk(on_two_lanes(events, line, work.skew, work.world_size))
    return seconds


def _packing(event: Event, events: Sequence[Event]) -> float:
    """Of an exchange, what is not its line: start-up, and about what unpacking the same chunk takes."""
    place = "unpack_grad" if event.op.endswith("grad") else "unpack"
    took = next(e.end - e.begin for e in events if e.op == place and e.chunk == event.chunk)
    return min(event.end - event.begin, STARTUP_S + took)


# ---- the grid ----------------------------------------------------------------------------------------------------


def cell(planner: Planner, rate: float, work: Workload) -> dict[str, Any]:
    """Each form with its best n."""
    found: dict[str, Any] = {}

    def best(name: str, seconds: dict[int, float]) -> None:
        n = min(seconds, key=lambda k: seconds[k])
        found[name], found[f"{name} n"] = seconds[n], n

    def priced(grouped: bool) -> dict[int, float]:
        return {
            n: planner.predict(work.with_(grouped=grouped), Choice(n, "keep", "keep", "deferred")).seconds
            for n in SIZES
        }

    best("single", priced(False))
    best("grouped", priced(True))
    best("two", {n: two_lanes(planner, rate, work, n) for n in SIZES})
    # What the tuner takes: grouped where that is predicted to pay.
    found["chosen"] = min(found["single"], found["grouped"])
    return found


def grid(ranks: int) -> list[dict[str, Any]]:
    """All cells."""
    rows = []
    for link, rate in LINKS.items():
        planner = Planner(machine(rate))
        for shape, (T, M, H, E, K) in SHAPES.items():
            for skew in (s for s in SKEWS if s <= ranks):
                work = Workload(M, H, T, E, K, ranks, dtype="f32", skew=skew, activation="relu")
                rows.append({"link": link, "shape": shape, "skew": skew, **cell(planner, rate, work)})
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios over the grid."""

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"least": min(values), "median": statistics.median(values), "most": max(values)}

    beyond = [row["two"] / row["chosen"] for row in rows]
    return {
        "cells": len(rows),
        "chosen_over_single": spread([row["chosen"] / row["single"] for row in rows]),
        "grouped_over_single": spread([row["grouped"] / row["single"] for row in rows]),
        "two_over_chosen": spread(beyond),
        "cells_where_two_lanes_save": sum(ratio <= 1 - WORTH for ratio in beyond),
    }


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each link and skew: medians over shapes."""
    lines = [f"{'link':<8} {'skew':>4}  grouped/single  two lanes/chosen (least)"]
    for link in LINKS:
        for skew in SKEWS:
            here = [row for row in rows if (row["link"], row["skew"]) == (link, skew)]
            if not here:
                continue
            grouped = statistics.median(row["grouped"] / row["single"] for row in here)
            two = [row["two"] / row["chosen"] for row in here]
            lines.append(f"{link:<8} {skew:>4g}  {grouped:14.3f}  {statistics.median(two):10.3f} ({min(two):.3f})")
    return lines


def main() -> int:
    """Print the grid; write its record where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    rows = grid(options.ranks)
    found = summary(rows)
    print("\n".join(lines_of(rows)))
    for name, value in found.items():
        text = value if isinstance(value, int) else ", ".join(f"{k} {v:.3f}" for k, v in value.items())
        print(f"{name.replace('_', ' ')}: {text}")
    if options.records:
        records.write(options.records / "lanes.json", {"ranks": options.ranks, "summary": found, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
