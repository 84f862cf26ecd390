# SPDX-License-Identifier: Apache-2.0
"""Groups recorded events into passes, each with the schedule that it ran."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import restore
from ..timeline.model import LANES, Event, from_trace
from ..timeline.schedule import Schedule
from ..timeline.slots import tensor_bytes

FORWARD_EXCHANGES = ("dispatch", "combine", "node_dispatch", "node_combine")
BACKWARD_EXCHANGES = (
    "dispatch_grad",
    "combine_grad",
    "redispatch",
    "node_dispatch",
    "node_dispatch_grad",
    "node_combine_grad",
)
ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FIELDS = {"op": str, "lane": str, "chunk": int, "layer": int, "direction": str, "begin_ns": int, "end_ns": int}
WORDS = {"lane": tuple(LANES), "direction": ("forward", "backward")}


@dataclass
class Pass:
    """Describes one forward or backward of one layer on one rank. Events are in program order, times in seconds."""

    rank: int
    layer: int
    direction: str
    begin: float
    end: float
    events: list[Event]
    ranks: tuple[int, ...] = (0,)
    layer_facts: Mapping[str, Any] = field(default_factory=dict)  # the record's description of the layer
    number: int = 0  # among passes of its kind in its context, from the newest; equal on all ranks if rings overflow
    schedule: Schedule | None = field(default=None, repr=False)

    @property
    def num_chunks(self) -> int:
        return 1 + max((event.chunk for event in self.events), default=0)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def slot_bytes(self) -> dict[str, int] | None:
        """Returns the bytes of a slot of each tensor, for chunks of mean size; None if the record lacks the shape."""
        facts = self.layer_facts
        element = ELEMENT_BYTES.get(facts.get("dtype", ""))
        rows, model, hidden = (facts.get(name) for name in ("received_rows", "model_width", "hidden_width"))
        if element is None or not rows or not model or not hidden:
            return None
        return tensor_bytes(-(-rows // self.num_chunks), model, hidden, element, bool(facts.get("gated", False)))

    @property
    def run_seconds(self) -> float:
        """Returns the time from the first op to the last, which a schedule predicts: without header and binding."""
        return max(e.end for e in self.events) - min(e.begin for e in self.events)


class BadRecord(ValueError):
    """The file is not a recording. The message names the field."""


def files_of(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yields name and data of each rank's file."""
    for path in sorted(Path(folder).glob("rank*.json")):
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise BadRecord(f"{path.name}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            lost = "the process may have been killed while writing"
            raise BadRecord(f"{path.name}: not JSON ({error}); {lost}") from error
        yield path.name, data


def read_record(data: Any, name: str) -> list[Pass]:
    """Returns the passes of one rank's file, oldest first."""
    if not isinstance(data, Mapping) or data.get("form") != 2:
        form = data.get("form") if isinstance(data, Mapping) else None
        raise BadRecord(f"{name}: form is {form!r}, not 2; record again with this version (sluice trace -- COMMAND)")
    for key, kind in (("rank", int), ("contexts", list), ("boot", str)):
        if not isinstance(data.get(key), kind):
            raise BadRecord(f"{name}: {key} is {data.get(key)!r}; it must be of type {kind.__name__}")
    passes: list[Pass] = []
    for place, context in enumerate(data["contexts"]):
        found = list(_passes_of(context, data["rank"], f"{name}: contexts[{place}]"))
        counts: dict[tuple[int, str], int] = {}
        for one in reversed(found):
            one.number = counts[one.layer, one.direction] = counts.get((one.layer, one.direction), 0) + 1
        passes += found
    return sorted(passes, key=lambda one: one.begin)


def _passes_of(context: Any, rank: int, name: str) -> Iterator[Pass]:
    if not isinstance(context, Mapping) or not isinstance(context.get("events"), list):
        raise BadRecord(f"{name}: events is missing; it must be a list")
    layers, ranks = context.get("layers", {}), context.get("ranks", [rank])
    if not isinstance(layers, Mapping) or not all(isinstance(facts, Mapping) for facts in layers.values()):
        raise BadRecord(f"{name}: layers is {layers!r}; it must be an object of what is known of each layer")
    if not isinstance(ranks, list) or not all(isinstance(one, int) for one in ranks):
        raise BadRecord(f"{name}: ranks is {ranks!r}; it must be a list of whole numbers")
    run: list[Mapping[str, Any]] = []
    for index, event in enumerate(context["events"]):
        _check_event(event, f"{name}: events[{index}]")
        if event["end_ns"] < event["begin_ns"]:
            raise BadRecord(f"{name}: events[{index}].end_ns is before begin_ns")
        if event["op"] != "pass":
            run.append(event)
            continue
        # The ring may hold only the end of its oldest pass, which then matches no schedule.
        kind = event["layer"], event["direction"]
        facts = layers.get(str(event["layer"]), {})
        begin, end = event["begin_ns"] / 1e9, event["end_ns"] / 1e9
        if run:
            yield Pass(rank, *kind, begin, end, from_trace(run, rank), tuple(ranks), facts)
        run = []


def _check_event(event: Any, name: str) -> None:
    if not isinstance(event, Mapping):
        raise BadRecord(f"{name} is {event!r}; it must be an object")
    for key, kind in FIELDS.items():
        if key not in event:
            raise BadRecord(f"{name}.{key} is missing")
        if not isinstance(event[key], kind):
            raise BadRecord(f"{name}.{key} is {event[key]!r}; it must be of type {kind.__name__}")
        if key in WORDS and event[key] not in WORDS[key]:
            raise BadRecord(f"{name}.{key} is {event[key]!r}; known are {', '.join(WORDS[key])}")


def keep_steps(passes: Sequence[Pass], steps: int) -> list[Pass]:
    """Returns the newest `steps` backwards of each layer with the forwards since the backward before them; without
    backwards, the newest forwards."""
    kept: list[Pass] = []
    for layer in sorted({one.layer for one in passes}):
        mine = [one for one in passes if one.layer == layer]
        backwards = [one for one in mine if one.direction == "backward"]
        of_kind = backwards or mine
        since = of_kind[-steps - 1].end if len(of_kind) > steps else float("-inf")
        kept += [one for one in mine if one.begin >= since]
    return sorted(kept, key=lambda one: one.begin)


# ---- the schedule of a pass ----


def identify(passes: Sequence[Pass]) -> None:
    """Sets the schedule of each pass that ran the ops of a schedule in its order; prefers one that fits the times.

    A forward does not show the restore policy of its chunks; the next backward of the same layer does.
    """
    policies: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for one in reversed(passes):
        one.schedule = _find(one, policies.get((one.layer, one.num_chunks)))
        if one.schedule is not None and one.direction == "backward":
            data = one.schedule.data
            policies[one.layer, one.num_chunks] = data["restore_input"], data["restore_pre_activation"]


def _signature(ops: Sequence[Any]) -> tuple[tuple[str, str, int], ...]:
    return tuple((op["kind"], op["lane"], op["chunk"]) for op in ops)


def _find(one: Pass, hint: tuple[list[str], list[str]] | None) -> Schedule | None:
    wanted = tuple((event.op, event.lane, event.chunk) for event in one.events)
    kinds = [event.op for event in one.events]
    flags = {
        "single_rank": not any(kind in FORWARD_EXCHANGES + BACKWARD_EXCHANGES for kind in kinds),
        "callback_experts": "expert" in kinds or "expert_grad" in kinds,
        "gated": bool(one.layer_facts.get("gated", False)),
    }
    by_rank = bool(one.layer_facts.get("deduplicate", False)) and not flags["single_rank"]
    flags["deduplicate"] = 2 if any(kind.startswith("node_") for kind in kinds) else int(by_rank)
    if one.direction == "backward":
        flags["dgrad"] = any(kind in ("gemm1_grad", "expert_grad", "combine_grad") for kind in kinds)
        per_chunk = any(event.op == "weight_grad" and event.chunk >= 0 for event in one.events)
        flags["wgrad"] = "per_chunk" if per_chunk else "deferred"
    # Chunks of rows share one reduce; chunks of tokens have one reduce each.
    if any(event.op in ("reduce", "reduce_grad") and event.chunk < 0 for event in one.events):
        flags["chunks_by_experts"] = True
    refuted = None
    for policy in _policies(one, kinds, hint):
        for extra in _extras(one.direction, kinds):
            try:
                made = Schedule.build(one.direction, one.num_chunks, *policy, **flags, **extra)
            except Exception:  # a combination that no layer can have
                continue
            if _signature(made.data["ops"]) != wanted:
                continue
            if _agrees(made, one.events):
                return made
            refuted = refuted or made
    return refuted


def _extras(direction: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    for under_plan in (False, True):
        if direction == "forward":
            for needs_backward in (True, False):
                yield {"under_plan": under_plan, "needs_backward": needs_backward}
            continue
        calls = (1,) if "weight_grad" in kinds else (0, 2, 1)
        for wgrad_call, reuse in itertools.product(calls, (True, False)):
            yield {"under_plan": under_plan, "wgrad_call": wgrad_call, "may_reuse_saved": reuse}


def _total(what: str, policies: Sequence[str]) -> int:
    """Returns the sum of a column of the table over the policies of all chunks."""
    return sum(getattr(restore.POLICIES[name], what) for name in policies)


def _policies(one: Pass, kinds: Sequence[str], hint: tuple[list[str], list[str]] | None) -> Iterator[tuple[Any, Any]]:
    """Yields candidates with as many restoring ops as the pass: one policy for the first k chunks, S4 for the rest."""
    if hint is not None and one.direction == "forward":
        yield hint
    n = one.num_chunks
    count = {kind: kinds.count(kind) for kind in ("copy_out", "copy_in", "redispatch", "recompute")}
    for di, m in itertools.product(restore.INPUT, restore.PRE_ACTIVATION):
        for first in range(n, -1, -1):
            inputs = [di] * first + [restore.LEAST[0]] * (n - first)
            pre_activations = [m] * first + [restore.LEAST[1]] * (n - first)
            copies = _total("host_rows", inputs) + _total("host_rows", pre_activations)
            if one.direction == "forward":
                fits = copies == count["copy_out"]
            else:
                fits = copies >= count["copy_in"] and _total("exchanges", inputs) >= count["redispatch"]
                fits = fits and _total("gemms", pre_activations) == count["recompute"]
            if fits:
                yield inputs, pre_activations


def _agrees(schedule: Schedule, events: Sequence[Event]) -> bool:
    """Returns whether every op began after the ops that it waits for had ended."""
    return all(
        events[other].end <= event.begin for op, event in zip(schedule.data["ops"], events) for other in op["waits_for"]
    )
