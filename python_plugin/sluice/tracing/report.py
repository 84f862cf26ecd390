# SPDX-License-Identifier: Apache-2.0
"""Makes the report of a recording: measured and predicted time per layer and direction, and reasons of idle time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import timeline
from ..timeline.model import Panel
from ..timeline.schedule import LANE_NAMES, Prediction
from . import clocks, explain, planned, stages
from . import passes as recorded
from .passes import BadRecord, Pass
from .planned import Place, Planned


def read(
    folder: str | os.PathLike[str], may_be_empty: bool = False
) -> tuple[dict[int, list[Pass]], list[clocks.Alignment]]:
    """Reads all passes of all ranks of a folder, on one clock. may_be_empty: something else was recorded."""
    by_rank: dict[int, list[Pass]] = {}
    boots: dict[int, str] = {}
    for name, data in recorded.files_of(folder):
        found = recorded.read_record(data, name)
        by_rank.setdefault(data["rank"], []).extend(found)
        boots[data["rank"]] = data["boot"]
    if not any(by_rank.values()) and not may_be_empty:
        raise BadRecord(
            f"{folder}: no passes were recorded; did the command train with Sluice switched on, and end by itself? "
            "`python -m sluice doctor` says what is missing"
        )
    alignment = clocks.align(by_rank, boots)
    for one in alignment:
        clocks.shift(by_rank[one.rank], one.shift)
    return by_rank, alignment


def newest(by_rank: Mapping[int, Sequence[Pass]], steps: int) -> list[Pass]:
    """Returns the passes of the newest `steps`, each with its schedule."""
    kept = [one for rank in sorted(by_rank) for one in recorded.keep_steps(by_rank[rank], steps)]
    for rank in sorted(by_rank):
        recorded.identify([one for one in kept if one.rank == rank])
    return kept


def memory_of(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the recorded memory of each rank and group: peak bytes, and measured and planned outstanding forwards."""
    rows = []
    for _, data in recorded.files_of(folder):
        for context in data["contexts"]:
            if isinstance(context.get("memory"), Mapping):
                rows.append({"rank": data["rank"], "ranks": context.get("ranks", [data["rank"]]), **context["memory"]})
    return sorted(rows, key=lambda row: (row["rank"], row["ranks"]))


def _groups(passes: Sequence[Pass]) -> dict[tuple[Any, ...], list[Pass]]:
    """Groups passes by rank, layer, direction and hash of the schedule."""
    groups: dict[tuple[Any, ...], list[Pass]] = {}
    for one in passes:
        key = one.rank, one.layer, one.direction, one.schedule.data["hash"] if one.schedule else ""
        groups.setdefault(key, []).append(one)
    return groups


def median_costs(group: Sequence[Pass]) -> list[float]:
    """Returns the seconds of each op: the median over passes of one schedule."""
    return [statistics.median(one.events[i].seconds for one in group) for i in range(len(group[0].events))]


def predict(group: Sequence[Pass]) -> Prediction:
    """Predicts the schedule that the group ran, from the group's median costs."""
    return group[0].schedule.predict(median_costs(group))


def make(
    passes: Sequence[Pass],
    alignment: Sequence[clocks.Alignment],
    steps: int,
    plans: Mapping[Place, Planned] | None = None,
) -> dict[str, Any]:
    """Returns the report as data, which --json prints. plans: of the recorded layers on a machine."""
    rows = []
    for (rank, layer, direction, digest), group in sorted(_groups(passes).items()):
        row: dict[str, Any] = {
            "rank": rank,
            "layer": layer,
            "direction": direction,
            "passes": len(group),
            "num_chunks": group[0].num_chunks,
            "schedule": digest or None,
            "measured_s": statistics.median(one.run_seconds for one in group),
            "whole_pass_s": statistics.median(one.seconds for one in group),
        }
        if digest:
            data = group[0].schedule.data
            row["policy"] = {
                "restore_input": data["restore_input"],
                "restore_pre_activation": data["restore_pre_activation"],
            }
            prediction = predict(group)
            row["predicted_s"] = prediction.seconds
            row["busy_s"] = {lane: prediction.busy[lane] for lane in LANE_NAMES}
        if plans is not None:
            row |= _on_machine(group, plans[group[0].ranks, layer])
        rows.append(row)
    idle = [one for each in passes for one in explain.idle_of(each)]
    return {
        "form": 1,
        "steps": steps,
        "ranks": sorted({one.rank for one in passes}),
        "clocks": [{**vars(one), "error": one.error if math.isfinite(one.error) else None} for one in alignment],
        "layers": rows,
        "idle": _sum_idle(idle),
        "peers": _sum_idle(explain.late_peers(passes)),
        "unexplained_passes": sum(one.schedule is None for one in passes),
    }


def _on_machine(group: Sequence[Pass], plan: Planned) -> dict[str, Any]:
    """Returns the planner's prediction next to what ran: the pass, its lanes, its ops, and its waits."""
    if plan.prediction is None:
        return {"machine_problem": plan.problem}
    direction = group[0].direction
    busy = plan.prediction.forward_busy if direction == "forward" else plan.prediction.backward_busy
    one = plan.as_pass(group[0])
    return {
        "machine_s": plan.seconds(direction),
        "machine_busy_s": busy,
        "machine_ops": planned.ops_of(group, plan),
        "machine_idle": [] if one is None else _sum_idle(explain.idle_of(one)),
    }


def _sum_idle(stretches: Sequence[explain.Idle]) -> list[dict[str, Any]]:
    """Returns the idle time by reason, summed over passes, longest first."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for one in stretches:
        key = one.rank, one.layer, one.direction, one.lane, one.reason, one.before
        entry = sums.setdefault(key, [0.0, 0])
        entry[0] += one.seconds
        entry[1] += 1
    names = ("rank", "layer", "direction", "lane", "waited_for", "before")
    rows = [{**dict(zip(names, key)), "seconds": total, "times": count} for key, (total, count) in sums.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def panels(passes: Sequence[Pass], plans: Mapping[Place, Planned] | None = None, machine: str = "") -> list[Panel]:
    """Returns panels of the layer and rank whose passes take longest: measured (the pass of median time), predicted,
    and the planner's. Slots are drawn, and bytes if the record has the rows that the layer received."""
    groups = {key: group for key, group in _groups(passes).items() if group[0].schedule is not None}
    if not groups:
        return []
    weight: dict[tuple[int, int], float] = {}
    for (rank, layer, _, _), group in groups.items():
        weight[rank, layer] = weight.get((rank, layer), 0) + sum(one.seconds for one in group)
    rank, layer = max(weight, key=lambda key: weight[key])
    drawn = []
    for direction in ("forward", "backward"):
        mine = [group for key, group in groups.items() if key[:3] == (rank, layer, direction)]
        if not mine:
            continue
        group = max(mine, key=len)
        middle = sorted(group, key=lambda one: one.run_seconds)[len(group) // 2]
        begin = [event.begin for event in middle.events]
        end = [event.end for event in middle.events]
        sizes = middle.slot_bytes()
        where = f"{direction} of layer {layer}, rank {rank}"
        title = f"measured: {where}: {middle.run_seconds * 1e3:.2f} ms"
        drawn.append(middle.schedule.panel(title, middle.events, begin, end, sizes))
        prediction = predict(group)
        title = f"predicted: {where}: {prediction.seconds * 1e3:.2f} ms from the medians of {len(group)} passes"
        drawn.append(prediction.panel(title, sizes, layer, rank))
        plan = None if plans is None else plans[group[0].ranks, layer]
        if plan is not None and plan.prediction is not None:
            title = f"planned: {where}: {plan.seconds(direction) * 1e3:.2f} ms on {machine}"
            drawn.append(Panel(title, [event for event in plan.prediction.events[direction] if event.seconds > 0]))
    return drawn


def write(
    folder: str | os.PathLike[str],
    passes: Sequence[Pass],
    report: dict[str, Any],
    plans: Mapping[Place, Planned] | None = None,
    batches: Sequence[stages.Batch] = (),
) -> list[str]:
    """Writes report.json, trace.json of all ranks, and the picture of the longest layer; returns their names."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    events = [event for one in passes for event in one.events]
    drawn = panels(passes, plans, str(report.get("machine")))
    all_ranks = Panel("measured", events)
    of_pipelines = stages.panels(batches, with_messages=True)
    (place / "trace.json").write_text(json.dumps(timeline.perfetto([all_ranks, *drawn, *of_pipelines])))
    written = ["report.json", "trace.json"]
    if of_pipelines:
        picture = timeline.svg(stages.panels(batches), "The last batch of each pipeline, measured and predicted")
        (place / "stages.svg").write_text(picture)
        written.append("stages.svg")
    if drawn:
        picture = timeline.svg(
            drawn, f"One layer, measured and predicted; the last {report['steps']} steps were recorded"
        )
        (place / "timeline.svg").write_text(picture)
        written.append("timeline.svg")
        with contextlib.suppress(timeline.PngUnavailable):
            timeline.write_png(picture, place / "timeline.png")
            written.append("timeline.png")
    return written


# ---- the time of a step outside of its passes ----

# The rest of the model, the optimizer, data, and the overhead of Python, autograd and the binding of tensors in each
# call, which no prediction includes. A step lasts from the end of one backward to the end of the next, for the layer
# whose backward comes last.


def outside_of(by_rank: Mapping[int, Sequence[Pass]], steps: int) -> list[dict[str, Any]]:
    """Returns, for each rank with at least two backwards, medians over its newest `steps` steps, in seconds."""
    rows = []
    for rank in sorted(by_rank):
        found = steps_of(by_rank[rank], steps)
        if not found:
            continue
        rows.append(
            {
                "rank": rank,
                "steps": len(found),
                "step_s": statistics.median(whole for whole, _ in found),
                "passes_s": statistics.median(inside for _, inside in found),
                "outside_s": statistics.median(whole - inside for whole, inside in found),
            }
        )
    return rows


def steps_of(passes: Sequence[Pass], steps: int) -> list[tuple[float, float]]:
    """Returns (seconds of a step, its seconds in passes), oldest first, without steps that a ring may hold in part."""
    backwards = [one for one in passes if one.direction == "backward"]
    if not backwards:
        return []
    last = max(backwards, key=lambda one: one.end)
    ends = sorted(one.end for one in backwards if (one.ranks, one.layer) == (last.ranks, last.layer))[-steps - 1 :]
    firsts: dict[tuple[int, ...], float] = {}  # by group, as each group has its own ring
    for one in passes:
        firsts[one.ranks] = min(firsts.get(one.ranks, one.end), one.end)
    known = max(firsts.values())
    spans = [(begin, end) for begin, end in zip(ends, ends[1:]) if begin >= known]
    return [(end - begin, covered(((one.begin, one.end) for one in passes), begin, end)) for begin, end in spans]


def covered(stretches: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Returns how much of [begin, end] is in at least one interval."""
    total, free = 0.0, begin
    for first, last in sorted(stretches):
        first, last = max(first, free), min(last, end)
        if last > first:
            total += last - first
            free = last
    return total
