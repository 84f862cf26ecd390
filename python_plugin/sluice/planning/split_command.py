# SPDX-License-Identifier: Apache-2.0
"""`sluice plan --split`: divides ranks into pipeline stages, replicas and expert-parallel groups, under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..timeline import colours
from ..timeline.shapes import document, text
from . import arguments, command, files, machines, split, split_file, stages_command
from .errors import BadInput
from .optimizer import FAR, NEAR
from .planner import size
from .split import Found, Model, Priced, Search, Wanted
from .stages import KEEP, RECOMPUTE, SCHEDULES
from .stages_picture import LEFT, RIGHT, WIDTH, drawn

EXAMPLE = """examples:
  sluice plan --split model.json --ranks 8 --machine h200-8x8 --budget 100GiB
  sluice plan --split mixtral/config.json --ranks 64 --machine h200-8x8 --batch 256 --sequence-length 4096 \\
              --picture split.svg
  sluice plan --split model.json --ranks 8 --machine machine.json --budget 6GiB --pipeline 4      of these splits alone

  {"sluice_split": 1, "batch": 64, "tokens": 512, "dtype": "bf16",
   "layers": [{"name": "block", "parameters": 1.2e7, "flops": 1.3e10, "activation_bytes": "20MiB",
               "checkpoint_bytes": "1MiB", "output_bytes": "1MiB", "repeat": 24}]}

exit status: 0 a split fits; 1 none does; 2 wrong arguments or files, or a split that the groups cannot form
"""


@command.refuses("sluice plan")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice plan --split", __doc__, EXAMPLE)
    parser.add_argument(
        "--split",
        required=True,
        metavar="FILE",
        help="the model as JSON (docs/tools.md), or a config.json of transformers",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="of the whole training")
    parser.add_argument("--budget", metavar="BYTES", help="of every rank; default: the memory of the machine's device")
    arguments.add_machine(parser)
    parser.add_argument("--batch", type=int, metavar="SAMPLES", help="of a step; overrides the file")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a sample; overrides the file")
    fixed = parser.add_argument_group("fixed (default: chosen)")
    fixed.add_argument("--pipeline", type=int, default=0, metavar="P", help="stages")
    fixed.add_argument("--data", type=int, default=0, metavar="D", help="replicas of each stage")
    fixed.add_argument("--expert-ranks", type=int, default=0, metavar="E", help="replicas that share experts")
    fixed.add_argument("--micro-batch", type=int, default=0, metavar="SAMPLES")
    fixed.add_argument("--tier", choices=(NEAR, FAR), help="where masters and moments of the optimizer are stored")
    fixed.add_argument("--recompute", choices=(split.ALWAYS, split.NEVER), help="all layers that may, or none")
    fixed.add_argument("--neighbours", choices=split.ORDERS, default="", help="ranks that are next to each other")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (1f1b)")
    options = command.parsed(parser, words, picture="the best split by stages, and the frontier")
    for name in ("ranks", "batch", "sequence_length", "pipeline", "data", "expert_ranks", "micro_batch"):
        value = getattr(options, name)
        if value is not None and value < (name in ("ranks", "batch", "sequence_length")):
            raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    given = split_file.read(options.split, options.batch, options.sequence_length)
    machine = _machine(options.machine or given.machine)
    budget = arguments.budget_of(options.budget)
    if budget is None:
        budget = machine.memory_bytes
    if not budget:
        raise BadInput(f"--budget is missing: machine {machine.name} does not say what a device has")
    tiers = (options.tier,) if options.tier else (NEAR, FAR)
    fixed_counts = (options.pipeline, options.data, options.expert_ranks, options.micro_batch)
    wanted = Wanted(*fixed_counts, tiers, options.schedule, options.recompute or "", options.neighbours)
    found = Search(machine, given.model, budget, wanted).run(options.ranks, command.progress)
    if options.picture and found.priced:
        title = _title(options.ranks, given.model, found)
        files.write("--picture", options.picture, _picture(found, budget, title))
    return command.answer(
        options.json,
        lambda: as_dict(options.ranks, budget, found),
        lambda: lines_of(options.ranks, budget, given.model, found),
        bool(found.priced),
    )


def _machine(name: str | None) -> machines.Machine:
    if name is None:
        raise BadInput("--machine is missing: give it, or the field 'machine' of the file")
    if name == machines.CACHED:
        raise BadInput(
            f"--machine {machines.CACHED}: a calibration is of one number of ranks: name its file, or a profile"
        )
    machine = machines.load(name)
    for field in ("gemm", "exchange", "rows"):
        if not isinstance(machine.data.get(field), dict):
            raise BadInput(f"machine {name}: the field {field!r} is missing; splits are priced with it")
    return machine


def _title(ranks: int, model: Model, found: Found) -> list[str]:
    best = found.priced[0]
    return [
        f"{ranks} ranks, {stages_command.counted(len(model.layers), 'layer')}, a batch of {model.batch} samples",
        f"best: {best.split}: {best.seconds:.4g} s a step, {size(best.bytes)} on the fullest rank",
    ]


_HEADS = {
    "p": ">4", "d": ">4", "e": ">4", "samples": ">7", "m": ">6", "again": ">6", "states": "<6", "neighbours": "<10",
    "seconds": ">10", "bubble": ">8", "optimizer": ">9", "bytes": ">11", "": "",
}  # fmt: skip


def lines_of(ranks: int, budget: int, model: Model, found: Found) -> list[str]:
    """Returns the lines for a terminal."""
    lines = [
        f"{ranks} ranks, {stages_command.counted(len(model.layers), 'layer')}, a batch of {model.batch} samples, "
        f"{size(budget)} on each rank; {stages_command.counted(found.tried, 'split')} tried"
    ]
    if not found.priced:
        return [*lines, f"DOES NOT FIT: {shortfall(budget, found)}"]
    best = found.priced[0]
    parts = f"{best.batch_seconds:.4g} pipeline, {best.optimizer_seconds:.4g} all-reduce and optimizer"
    lines += [
        f"best: {best.split}: {best.seconds:.4g} s a step ({parts})",
        "",
        *command.table(_HEADS, (_row(each, found) for each in found.priced)),
    ]
    lines += ["", "p, d, e: ranks of a pipeline, replicas, ranks that share experts; m: micro-batches of a replica;"]
    lines += ["again: layers that are recomputed; neighbours: ranks that are next to each other on a node"]
    return lines + [f"not tried: {why}" for why in found.refused]


def shortfall(budget: int, found: Found) -> str:
    """Returns the message if nothing fits. It names the smallest budget."""
    return (
        f"no split fits {size(budget)} ({budget} bytes); the smallest budget is {found.smallest_budget} bytes "
        f"({size(found.smallest_budget)}), for {found.smallest_split}, states {_tier(found.smallest_split)}"
    )


def _tier(one: split.Split | None) -> str:
    return one.tier if one else ""


def _row(each: Priced, found: Found) -> list[Any]:
    own = each.split
    marks = [word for word, holds in (("best", each is found.priced[0]), ("frontier", each in found.frontier)) if holds]
    return [
        own.pipeline, own.data, own.experts, own.micro_batch, each.micro_batches, each.recomputed, own.tier, own.order,
        f"{each.seconds:.4g}", f"{100 * each.bubble:.1f} %", f"{each.optimizer_seconds:.4g}", size(each.bytes),
        " " + ", ".join(marks),
    ]  # fmt: skip


def as_dict(ranks: int, budget: int, found: Found) -> dict[str, Any]:
    """Returns what --json prints."""
    return {
        "form": 1,
        "ranks": ranks,
        "budget": budget,
        "fits": bool(found.priced),
        "shortfall": None if found.priced else shortfall(budget, found),
        "smallest_budget": None if found.priced else found.smallest_budget,
        "tried": found.tried,
        "refused": list(found.refused),
        "splits": [_as_dict(each, found) for each in found.priced],
    }


def _as_dict(each: Priced, found: Found) -> dict[str, Any]:
    own = each.split
    return {
        "pipeline": own.pipeline,
        "data": own.data,
        "expert_ranks": own.experts,
        "micro_batch": own.micro_batch,
        "micro_batches": each.micro_batches,
        "tier": own.tier,
        "neighbours": own.order,
        "recomputed": each.recomputed,
        "seconds": each.seconds,
        "batch_seconds": each.batch_seconds,
        "optimizer_seconds": each.optimizer_seconds,
        "sum_seconds": each.sum_seconds,
        "bubble": each.bubble,
        "bytes": each.bytes,
        "on_frontier": each in found.frontier,
        "message_bytes": each.message_bytes,
        "stage_of": [choice.stage for choice in each.plan.choices],
        "kinds": [choice.kind for choice in each.plan.choices],
    }


HEIGHT, TOP = 220, 30


def _picture(found: Found, budget: int, title: Sequence[str]) -> str:
    """Returns the picture. At least one split must fit."""
    best = found.priced[0]
    body, y = drawn(best.problem, best.plan, title)
    return document(WIDTH, y + TOP + HEIGHT + 48, [*body, *_frontier(found, budget, y + TOP)])


def _colour(each: Priced) -> str:
    return colours.POLICIES[RECOMPUTE if each.recomputed else KEEP].colour


def _frontier(found: Found, budget: int, top: float) -> list[str]:
    room, slowest = WIDTH - LEFT - RIGHT, max(each.seconds for each in found.priced)
    most = max(budget, *(each.bytes for each in found.priced))

    def place(each: Priced) -> tuple[float, float]:
        return LEFT + each.bytes / most * room, top + HEIGHT - each.seconds / slowest * (HEIGHT - 20)

    body = [text(LEFT, top - 8, "seconds of a step against bytes of the fullest rank; line: the frontier", 12)]
    body.append(f'<path d="M{LEFT} {top} V{top + HEIGHT} H{LEFT + room}" fill="none" stroke="{colours.LINE}"/>')
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, sorted(found.frontier, key=lambda each: each.bytes)))
    body.append(f'<polyline points="{points}" fill="none" stroke="{colours.LINE}"/>')
    for each in found.priced:
        x, y = place(each)
        tip = f"<title>{each.split}: {each.seconds:.4g} s, {size(each.bytes)}</title>"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(each)}">{tip}</circle>')
        body.append(text(x + 8, y - 4, f"{each.split.pipeline}x{each.split.data}", 10))
    line = LEFT + budget / most * room
    ends = f'x1="{line:.1f}" x2="{line:.1f}" y1="{top:.1f}" y2="{top + HEIGHT:.1f}"'
    body.append(f'<line {ends} stroke="{colours.LIMIT}"/>')
    body.append(text(line, top + HEIGHT + 16, f"budget {size(budget)}", 11, "end"))
    body.append(text(LEFT - 8, top + 20, f"{slowest:.4g} s", 11, "end"))
    return body
