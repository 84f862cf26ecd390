# SPDX-License-Identifier: Apache-2.0
"""Draws batches of a pipeline in virtual time as SVG: for each of the fastest policies one row for each stage, and the
bytes of the stage with the most, with its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import timeline
from ..timeline import stages as timeline_stages
from .batches import Batch, Prediction, predict
from .planner import size

SHOWN = 4  # policies


def svg(batch: Batch, named: Sequence[tuple[str, Prediction]], title: str) -> str:
    """Returns the picture. named: predictions by the name of the policy, the fastest first."""
    panels = [_panel(batch, name, each) for name, each in named[:SHOWN]]
    return timeline.svg(panels, title, note="F, B, dW: of a micro-batch; lines: messages")


def _panel(batch: Batch, name: str, each: Prediction) -> timeline.Panel:
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


def _events(batch: Batch, each: Prediction) -> list[timeline.Event]:
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

    predict(replace(batch, policy=each.policy, separate_wgrad=each.separate_wgrad, op_seconds=note))
    found = [list(events.values()) for events in reversed(tried)]
    return min(found, key=lambda events: abs(max(event.end for event in events) - each.seconds))


def _stage_of(batch: Batch, policy: str, virtual_stage: int) -> int:
    turn, place = divmod(virtual_stage, batch.num_stages)
    is_v = (batch.placement or ("v" if policy == "v" else "looped")) == "v"
    return batch.num_stages - 1 - place if is_v and turn % 2 else place


def _bytes(batch: Batch, events: Sequence[timeline.Event], stage: int) -> list[tuple[float, float]]:
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
    level, found = 0.0, []
    for time in sorted(changes):
        level += changes[time]
        found.append((time, level))
    return found
