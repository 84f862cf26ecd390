# SPDX-License-Identifier: Apache-2.0
"""`sluice simulate --stages`: predicts seconds, bubble, micro-batches in flight and bytes of a batch by policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from .. import timeline
from ..timeline import stages as timeline_stages
from ..timeline.slots import levels
from . import arguments, batches, command, files
from .errors import BadInput
from .planner import size

EXAMPLE = """examples:
  sluice simulate --stages 8 --micro-batches 16 --forward 0.02 --backward 0.02 --weight 0.02
  sluice simulate --stages 4 --micro-batches 16 --forward 0.1 --backward 0.2 --message 0.075 --rendezvous --in-flight 8
  sluice simulate --stages 2 --virtual 2 --micro-batches 8 --forward 0.1,0.1,0.1,0.2 --backward 0.2,0.2,0.2,0.4 \\
                  --activation-bytes 256MiB --budget 2GiB --json

exit status: 0 some policy fits; 1 none does; 2 wrong arguments
"""


@command.refuses("sluice simulate")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice simulate --stages", __doc__, EXAMPLE)
    one = "; one number, or one for each virtual stage"
    parser.add_argument("--stages", type=int, required=True, metavar="P")
    parser.add_argument("--virtual", type=int, default=1, metavar="V", help="virtual stages of each (1)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="M", help="of a batch (1)")
    parser.add_argument("--forward", required=True, metavar="S", help="seconds of a micro-batch" + one)
    parser.add_argument("--backward", required=True, metavar="S", help="the same, for the gradient of its input")
    parser.add_argument("--weight", metavar="S", help="the same, for the gradients of weights (0)")
    parser.add_argument("--message", metavar="S", help="seconds to the next virtual stage and back (0)")
    parser.add_argument("--rendezvous", action="store_true", help="messages begin when both sides are ready")
    parser.add_argument("--policy", help="only this policy (all)")
    parser.add_argument("--placement", choices=("looped", "v"), help="of virtual stages (that of the policy)")
    parser.add_argument(
        "--in-flight", type=int, default=0, metavar="L", help="micro-batches in flight (chosen for each policy)"
    )
    parser.add_argument("--activation-bytes", metavar="BYTES", help="of a micro-batch in flight" + one)
    parser.add_argument("--held-bytes", metavar="BYTES", help="of a micro-batch that waits for its weight gradients")
    parser.add_argument("--budget", metavar="BYTES", help="of every stage")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="of the model; prints the interval of activation checkpoints"
    )
    options = command.parsed(parser, words, picture="batches under the fastest policies, with bytes")
    batch = batch_of(options)
    found, refused = batches.candidates(batch)
    if options.policy is not None:
        found, refused = _alone(options.policy, found, refused)
    if options.picture and found:
        title = f"{options.stages} stages of {options.virtual}, {options.micro_batches} micro-batches, predicted"
        drawn = _picture(batch, [(_name(each), each) for each in found], title)
        files.write("--picture", options.picture, drawn)
    elif options.picture:
        print(f"sluice simulate: no {options.picture}: no policy takes the batch", file=sys.stderr)
    given = (options, found, refused)
    return command.answer(options.json, lambda: as_dict(*given), lambda: _lines(*given), bool(found))


def batch_of(options: Any) -> batches.Batch:
    """Returns the batch that the arguments describe."""
    if options.stages < 1 or options.virtual < 1:
        raise BadInput(f"--stages is {options.stages} and --virtual {options.virtual}: give at least 1")
    count = options.stages * options.virtual

    def bytes_of(text: str) -> int:
        return arguments.budget_of(text, "--activation-bytes, --held-bytes") or 0

    budget = arguments.budget_of(options.budget)
    return batches.Batch(
        num_stages=options.stages,
        num_virtual=options.virtual,
        num_micro_batches=options.micro_batches,
        **{
            f"{name}_seconds": _each(f"--{name}", getattr(options, name), count, _seconds)
            for name in ("forward", "backward", "weight", "message")
        },
        activation_bytes=_each("--activation-bytes", options.activation_bytes, count, bytes_of),
        held_bytes=_each("--held-bytes", options.held_bytes, count, bytes_of),
        memory_budget=() if budget is None else (budget,) * options.stages,
        placement=options.placement,
        in_flight=options.in_flight,
        rendezvous=options.rendezvous,
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"{text!r} is no number of seconds") from None


def _each(name: str, text: str | None, count: int, read: Callable[[str], Any]) -> list[Any]:
    """Returns one value for each virtual stage."""
    if text is None:
        return []
    values = [read(word) for word in text.split(",")]
    if len(values) not in (1, count):
        raise BadInput(f"{name} has {len(values)} values: give one, or {count}")
    return values * count if len(values) == 1 else values


def _alone(policy: str, found: list[batches.Prediction], refused: dict[str, str]) -> tuple[list, dict]:
    known = batches.policies()
    if policy not in known:
        raise BadInput(f"--policy is {policy!r}; known are {', '.join(known)}")
    return [each for each in found if each.policy == policy], {k: why for k, why in refused.items() if k == policy}


def _name(each: batches.Prediction) -> str:
    return each.policy + (" W apart" if each.separate_wgrad and each.policy not in ("zero_bubble", "v") else "")


def _lines(options: Any, found: list[batches.Prediction], refused: dict[str, str]) -> list[str]:
    lines = [f"{options.stages} stages of {options.virtual}, {options.micro_batches} micro-batches", ""]
    heads = {"policy": "<24", "seconds": ">10", "bubble": ">8", "L": ">4", "held": ">5", "bytes": ">11", "": ""}
    rows = []
    for each in found:
        held = max(stage["most_held"] for stage in each.stages)
        share, note = f"{100 * each.bubble:.1f} %", " best" if each is found[0] else ""
        rows.append((_name(each), f"{each.seconds:.4g}", share, each.in_flight, held, size(each.most_bytes), note))
    lines += command.table(heads, rows) if found else []
    lines += ["", *(f"  not {policy}: {why}" for policy, why in refused.items())] if refused else []
    if options.layers:
        interval = batches.checkpoint_interval(options.layers, options.stages)
        rule = "of the factors of N / P the nearest to sqrt(N)"
        lines += ["", f"with activation checkpointing keep the input of every {interval}. layer ({rule})"]
    return lines


def as_dict(options: Any, found: list[batches.Prediction], refused: dict[str, str]) -> dict[str, Any]:
    """Returns what --json prints."""
    interval = batches.checkpoint_interval(options.layers, options.stages) if options.layers else None
    return {
        "form": 1,
        "best": None if not found else _name(found[0]),
        "policies": [{"name": _name(each), **asdict(each), "most_bytes": each.most_bytes} for each in found],
        "refused": refused,
        "checkpoint_interval": interval,
    }


SHOWN = 4  # policies


def _picture(batch: batches.Batch, named: Sequence[tuple[str, batches.Prediction]], title: str) -> str:
    """Returns the picture. named: predictions by the name of the policy, the fastest first."""
    panels = [_panel(batch, name, each) for name, each in named[:SHOWN]]
    return timeline.svg(panels, title, note="F, B, dW: of a micro-batch; lines: messages")


def _panel(batch: batches.Batch, name: str, each: batches.Prediction) -> timeline.Panel:
    events = _events(batch, each)
    planned = [stage["planned_bytes"] for stage in each.stages]
    fullest = planned.index(max(planned))
    words = f"{name}: {each.seconds:.4g} s, bubble {100 * each.bubble:.1f} %, L {each.in_flight}"
    budget = batch.memory_budget[fullest] if batch.memory_budget else 0
    if each.most_bytes:
        words += f", {size(each.most_bytes)} in stage {fullest}" + (f" of {size(budget)}" if budget else "")
    panel = timeline_stages.panel(words, events)
    if each.most_bytes:
        panel.bytes = _bytes(batch, events, fullest)
        panel.bytes_words = (f"stage {fullest}", "budget")
        panel.reserved_bytes = float(budget) or None
    return panel


def _events(batch: batches.Batch, each: batches.Prediction) -> list[timeline.Event]:
    """Returns the ops of the batch that the simulator has chosen. It calls `note` for the seconds of each op."""
    tried: list[dict[tuple[str, int, int], timeline.Event]] = [{}]

    def note(op: str, virtual_stage: int, micro_batch: int, begin: float, seconds: float) -> float:
        key = (op, virtual_stage, micro_batch)
        if key in tried[-1]:  # the simulator has begun another batch with different limits
            tried.append({})
        tried[-1][key] = timeline.Event(
            op=op,
            lane="compute" if op in timeline_stages.COMPUTED else "comm",
            begin=begin,
            end=begin + seconds,
            chunk=micro_batch,
            direction="forward" if op in ("forward", "send_activation") else "backward",
            layer=virtual_stage,
            rank=_stage_of(batch, each.policy, virtual_stage),
        )
        return seconds

    batches.predict(replace(batch, policy=each.policy, separate_wgrad=each.separate_wgrad, op_seconds=note))
    found = [list(events.values()) for events in reversed(tried)]
    return min(found, key=lambda events: abs(max(event.end for event in events) - each.seconds))


def _stage_of(batch: batches.Batch, policy: str, virtual_stage: int) -> int:
    turn, place = divmod(virtual_stage, batch.num_stages)
    is_v = (batch.placement or ("v" if policy == "v" else "looped")) == "v"
    return batch.num_stages - 1 - place if is_v and turn % 2 else place


def _bytes(batch: batches.Batch, events: Sequence[timeline.Event], stage: int) -> list[tuple[float, float]]:
    """Returns (time, bytes from then on) of a stage: micro-batches between their forward and their backward, and
    tensors that wait for weight gradients."""
    activation = batch.activation_bytes or [0] * (batch.num_stages * batch.num_virtual)
    held = batch.held_bytes or [0] * (batch.num_stages * batch.num_virtual)
    is_separate = any(event.op == "weight_grad" for event in events)
    changes: dict[float, float] = {}
    for event in events:
        if event.rank != stage:
            continue
        if event.op == "forward":
            time, change = event.begin, activation[event.layer]
        elif event.op == "backward":
            time, change = event.end, (held[event.layer] if is_separate else 0) - activation[event.layer]
        elif event.op == "weight_grad":
            time, change = event.end, -held[event.layer]
        else:
            continue
        changes[time] = changes.get(time, 0.0) + change
    return levels(changes)
