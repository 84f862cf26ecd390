# SPDX-License-Identifier: Apache-2.0
"""`sluice trace`: runs a training command, and says where the time of its MoE layers went.

Every rank keeps its newest events in a ring, and writes them when the process ends. So let the command run a few steps
and end by itself. Then the clocks of the ranks are aligned, each pass is matched to the schedule that it ran, and the
idle time of every lane is attributed to the op for which the lane waited.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import SluiceError
from ..planning import machines
from ..planning.command import parser as parser_of
from ..planning.errors import BadInput
from ..planning.planner import Planner
from . import planned, report, stages, text
from .passes import BadRecord, Pass

EXAMPLE = """examples:
  sluice trace --out trace_out -- torchrun --nproc-per-node 2 -m sluice.run train.py --steps 20
  sluice trace --out trace_out --steps 5 --json          (reads what trace_out holds again)
  sluice trace --out trace_out --machine cached          (also the planner's timeline, on what was calibrated here)

writes into the folder: rank*.json (recorded), report.json, trace.json (open at ui.perfetto.dev), timeline.svg, and
timeline.png where resvg-py is installed (pip install "sluice[png]").

exit status: 0 reported; 1 nothing was recorded, or a record is damaged; 2 wrong arguments or machine; else that of the
command
"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = parser_of("sluice trace", __doc__, EXAMPLE)
    parser.add_argument("--out", default="trace_out", metavar="DIR", help="for records and pictures (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of last steps to report (%(default)s)"
    )
    parser.add_argument(
        "--events", type=int, default=1 << 16, metavar="N", help="events that each rank keeps (%(default)s)"
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="also show the planner's prediction on this machine: a file, a profile, or cached",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON; the command's output goes to stderr")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="-- COMMAND to run and record; none: report from the records again"
    )
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; record at least 1")
    if options.events < 1:
        parser.error(f"--events is {options.events}; keep at least 1")
    if command:
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror}; name a folder that can be made")
        status = _record(options, command)
        if status != 0:
            print(f"sluice trace: the command ended with status {status}", file=sys.stderr)
            return status
    elif not os.path.isdir(options.out):
        parser.error(f"--out {options.out}: no such folder; give `-- COMMAND` to record one")
    try:
        batches = stages.read(options.out)
        moved = stages.read_moves(options.out)
        by_rank, alignment = report.read(options.out, may_be_empty=bool(batches))
        passes = report.newest(by_rank, options.steps)
    except BadRecord as error:
        print(f"sluice trace: {error}", file=sys.stderr)
        return 1
    try:
        planner = None if options.machine is None else _planner(options.machine, passes)
    except SluiceError as error:
        print(f"sluice trace: {error.message}", file=sys.stderr)
        return 2
    plans = None if planner is None else planned.plan(planner, passes)
    made = report.make(passes, alignment, options.steps, plans)
    made["outside"] = report.outside_of(by_rank, options.steps)
    made["memory"] = report.memory_of(options.out)
    if planner is not None:
        made["machine"] = planner.machine.name
    if batches:
        made["pipelines"] = stages.rows_of(batches)
    if moved:
        made["moves"] = moved
    written = report.write(options.out, passes, made, plans, batches)
    if options.json:
        print(json.dumps(made, indent=1))
        return 0
    lines = text.lines_of(made, passes) if passes else []
    for line in [*lines, *stages.lines_of(made.get("pipelines", [])), *stages.lines_of_moves(moved)]:
        print(line)
    print(f"\n  {options.out}/{{{', '.join(written)}}}")
    if "timeline.svg" in written and "timeline.png" not in written:
        print("  (no timeline.png: it needs resvg-py, pip install 'sluice[png]')")
    return 0


def _planner(name: str, passes: Sequence[Pass]) -> Planner:
    """Returns the planner of the named machine; for the cache, of the calibration for the first known layer's shape."""
    if name != machines.CACHED:
        return Planner(machines.load(name))
    groups: dict[planned.Place, list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.ranks, one.layer), []).append(one)
    found = [planned.workload_of(place, mine) for place, mine in groups.items()]
    work = next((each for each in found if not isinstance(each, str)), None)
    if work is None:
        raise BadInput(f"--machine {name}: {found[0]}; name a file")
    return Planner(machines.from_cache(None, work.world_size, work.dtype, work.model_width, work.hidden_width))


def _record(options: argparse.Namespace, command: list[str]) -> int:
    folder = Path(options.out).resolve()
    for old in folder.glob("rank*.json"):
        old.unlink()
    environment = dict(os.environ, SLUICE_TRACE_DIR=str(folder), SLUICE_TRACE_EVENTS=str(options.events))
    try:
        status = subprocess.run(command, env=environment, stdout=sys.stderr if options.json else None).returncode
    except OSError as error:
        print(f"sluice trace: {command[0]} does not start: {error.strerror}", file=sys.stderr)
        return 127
    return status if status >= 0 else 128 - status
