# SPDX-License-Identifier: Apache-2.0
"""Formats the report for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..timeline.schedule import LANE_NAMES
from . import explain
from .passes import Pass

KINDS = ("preparing", "starting", "nothing left")
COLUMNS = ("busy", "waiting", "starting", "preparing", "nothing left")


def lane_shares(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """Returns, per rank and lane over all passes, busy time, and idle time by reason."""
    rows = []
    for rank in sorted({one.rank for one in passes}):
        mine = [one for one in passes if one.rank == rank and one.schedule is not None]
        total = sum(one.seconds for one in mine)
        stretches = [stretch for one in mine for stretch in explain.idle_of(one)]
        for lane in LANE_NAMES:
            busy = sum(event.seconds for one in mine for event in one.events if event.lane == lane)
            if not busy:
                continue
            idle = [stretch for stretch in stretches if stretch.lane == lane]
            kinds = {kind: sum(each.seconds for each in idle if each.reason == kind) for kind in KINDS}
            waiting = sum(each.seconds for each in idle if each.reason not in KINDS)
            rows.append({"rank": rank, "lane": lane, "total": total, "busy": busy, "waiting": waiting, **kinds})
    return rows


def lines_of(report: dict[str, Any], passes: Sequence[Pass], longest: int = 12) -> list[str]:
    """Returns the lines of the whole report."""
    lines = [f"{len(report['ranks'])} ranks, the last {report['steps']} steps"]
    for clock in report["clocks"]:
        if clock["error"] is None:
            lines.append(f"  clock of rank {clock['rank']}: as it is, since no exchange ties it to the others")
        elif clock["how"] != "one machine":
            moved = f"shifted by {clock['shift'] * 1e3:.3f} ms, right to {clock['error'] * 1e3:.3f} ms"
            lines.append(f"  clock of rank {clock['rank']}: {moved} ({clock['how']})")
    lines += ["", "  ms, medians over passes; predicted = the schedule with the ops' own median times"]
    machine = report.get("machine")
    if machine is not None:
        lines[-1] += f"; planned = by the planner on {machine}"
    planned = "" if machine is None else "    planned"
    lines.append(f"  rank layer direction  n   whole pass    its ops  predicted{planned}")
    for row in report["layers"]:
        predicted = f"{row['predicted_s'] * 1e3:10.2f}" if "predicted_s" in row else " unknown schedule"
        planned = f" {row['machine_s'] * 1e3:10.2f}" if "machine_s" in row else ""
        place = f"  {row['rank']:4} {row['layer']:5} {row['direction']:9} {row['num_chunks']:2}"
        measured = f"{row['whole_pass_s'] * 1e3:10.2f} {row['measured_s'] * 1e3:10.2f}"
        lines.append(f"{place}   {measured} {predicted}{planned}")
    lines += planned_lines(report)
    lines += ["", "  % of the time in passes", "  rank lane         " + "".join(f"{name:>13}" for name in COLUMNS)]
    shares = lane_shares(passes)
    for row in shares:
        columns = "".join(f"{100 * row[name] / row['total']:13.1f}" for name in COLUMNS)
        lines.append(f"  {row['rank']:4} {row['lane']:13}{columns}")
    lines += ["", "  the longest waits, summed over the steps:"]
    # During the preparation all lanes wait: report it once, for the compute lane.
    waits = [row for row in report["idle"] if row["waited_for"] != "nothing left"]
    waits = [row for row in waits if row["waited_for"] != "preparing" or row["lane"] == "compute"]
    lines += ["  " + sentence(row) for row in waits[:longest]]
    for row in report["peers"][:3]:
        what = f"{row['before']} waited for {row['waited_for']} to begin: {row['seconds'] * 1e3:.1f} ms"
        lines.append(f"  rank {row['rank']}: {what} ({row['direction']} of layer {row['layer']})")
    lines += [_outside(row) for row in report.get("outside", [])]
    lines += [_memory(row) for row in report.get("memory", [])]
    if report["unexplained_passes"]:
        why = "ran no whole schedule (parts called alone, or cut off at the start of the ring)"
        lines.append(f"  {report['unexplained_passes']} passes {why}: not explained")
    said = _conclusion(report, shares)
    return [*lines, "", said] if said else lines


def _outside(row: dict[str, Any]) -> str:
    whole, inside, rest = (f"{1e3 * row[name]:.2f}" for name in ("step_s", "passes_s", "outside_s"))
    what = "the rest of the model, optimizer, data, Python, autograd; in no prediction"
    return f"  rank {row['rank']}: a step takes {whole} ms, {inside} in passes and {rest} outside of passes ({what})"


def _memory(row: dict[str, Any]) -> str:
    planned = row["planned_outstanding"]
    beside = f" (planned for {planned}: max_outstanding)" if planned else ""
    most = f"at most {row['most_outstanding']} forwards waited for their backward at one time{beside}"
    where = f"rank {row['rank']} in the group of {len(row['ranks'])}"
    return f"  {where}: {most}; {row['peak_bytes'] / 2**20:.1f} MiB at the peak"


def sentence(row: dict[str, Any]) -> str:
    """Returns `rank 1: compute waited for dispatch 3: 41.0 ms in 3 waits (before gemm1 3, forward of layer 0)`."""
    where = f"{row['direction']} of layer {row['layer']}"
    what = {
        "preparing": "idle while the pass was prepared",
        "starting": f"free, {row['before']} not started yet",
        "nothing left": "had nothing left to do",
    }.get(row["waited_for"], f"waited for {row['waited_for']}")
    before = f"before {row['before']}, " if row["before"] and row["waited_for"] != "starting" else ""
    times = f"{row['seconds'] * 1e3:.1f} ms in {row['times']} {'wait' if row['times'] == 1 else 'waits'}"
    return f"rank {row['rank']}: {row['lane']} {what}: {times} ({before}{where})"


def planned_lines(report: dict[str, Any], most_ops: int = 6) -> list[str]:
    """Returns lines about the longest pass: ops, lanes and waits on the machine next to those that ran."""
    rows = [row for row in report["layers"] if "machine_s" in row]
    problems = dict.fromkeys(row["machine_problem"] for row in report["layers"] if "machine_problem" in row)
    lines = [f"  not planned: {problem}" for problem in problems]
    if not rows:
        return lines
    row = max(rows, key=lambda each: each["measured_s"])
    where = f"{row['direction']} of layer {row['layer']}, rank {row['rank']}"
    lines += ["", f"  {where}, ms: measured and planned; ops of all chunks, what differs most first"]
    for op in row["machine_ops"][:most_ops]:
        lines.append(f"    {op['op']:<16} {op['measured_s'] * 1e3:9.3f} {op['machine_s'] * 1e3:9.3f}")
    for lane, busy in row["machine_busy_s"].items():
        if busy > 0:
            own = f"{row['busy_s'][lane] * 1e3:9.3f}" if "busy_s" in row else " unknown "
            lines.append(f"    lane {lane:<11} {own} {busy * 1e3:9.3f}  busy")
    waits = [wait for wait in row["machine_idle"] if wait["waited_for"] not in KINDS]
    lines += [f"  planned: {sentence(wait)}" for wait in waits[:3]]
    return lines


# ---- the last line: what limits a recorded step, and what would help ----

_MOST_OUTSIDE = 0.5  # share of a step outside of passes above which passes are not the first thing to change
_LATE = 0.1  # share of the time in passes above which ranks that begin late are named first
_LIMITS = 0.85  # share of the time in passes above which a busy lane leaves nothing to overlap
_IDLE = 0.15  # share of the time in passes in which a pass was prepared or an op was late to start


def _conclusion(report: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]) -> str:
    """Returns one or two sentences. shares: lane_shares of the same passes. "": no pass was explained."""
    if not shares:
        return ""
    parts = [_mostly_outside(report.get("outside", [])), _in_passes(report, shares)]
    return " ".join(part for part in parts if part)


def _mostly_outside(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    row = max(rows, key=lambda each: each["step_s"])
    share = row["outside_s"] / row["step_s"] if row["step_s"] else 0.0
    if share < _MOST_OUTSIDE:
        return ""
    what = "attention, optimizer, data, Python"
    return f"{100 * share:.0f} % of a step lie outside of MoE passes ({what}): look there first."


def _in_passes(report: Mapping[str, Any], shares: Sequence[Mapping[str, Any]]) -> str:
    total = sum(row["total"] for row in {row["rank"]: row for row in shares}.values())
    busy = {
        lane: sum(row["busy"] for row in shares if row["lane"] == lane) / total
        for lane in dict.fromkeys(row["lane"] for row in shares)
    }
    late = sum(row["seconds"] for row in report["peers"]) / total
    said = " and ".join(f"{lane} is busy {100 * share:.0f} %" for lane, share in busy.items() if lane in _NAMES)
    said = f"Of the time in passes {said}"
    if late > _LATE:
        return (
            f"{said}; ranks wait {100 * late:.0f} % for a rank that begins later: even out what ranks do before the "
            "layer, or the rows that they receive (placement)."
        )
    lane = max(busy, key=lambda each: busy[each])
    if busy[lane] >= _LIMITS:
        return f"{said}: {_WHAT[lane]}"
    compute = [row for row in shares if row["lane"] == "compute"]
    unready = sum(row["preparing"] + row["starting"] for row in compute) / total
    waiting = sum(row["waiting"] for row in compute) / total
    if unready > max(_IDLE, waiting):
        return (
            f"{said}; {100 * unready:.0f} % pass before ops begin: fewer chunks, or more tokens in a batch, would help."
        )
    return (
        f"{said}; compute waits {100 * waiting:.0f} %: other chunks, or adaptive ones, may hide more of it, and no "
        f"order of these ops takes less than {100 * max(busy.values()):.0f} % of today's time."
    )


_NAMES = ("comm", "compute")
_WHAT = {
    "compute": "computation limits, and more chunks would not help; faster GEMMs (16 bits, another library) would.",
    "comm": "communication limits, and more chunks would not help; fewer bytes (deduplicate, wire_dtype) would.",
    "copy_out": "copies to host memory limit; another restore policy would help.",
    "copy_in": "copies from host memory limit; another restore policy would help.",
}
