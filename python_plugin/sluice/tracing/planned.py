# SPDX-License-Identifier: Apache-2.0
"""Predicts the passes of recorded layers on a machine with the planner, to compare them with the recorded passes.

The layer's shape, the schedule and the load are those of the record. T is the mean number of rows that ranks received,
divided by top_k, and the skew is the largest number of rows divided by that mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SluiceError
from ..planning.planner import Choice, Planner, Prediction, Workload, priced_activation
from ..timeline.model import Event
from ..timeline.schedule import WGRAD
from .passes import Pass

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
FACTS = ("model_width", "hidden_width", "num_experts", "top_k")
MANY_BYTES = 1 << 50  # a plan without a limit

Place = tuple[tuple[int, ...], int]  # ranks of the group, layer


@dataclass(frozen=True)
class Planned:
    """Describes one layer on the machine, or `problem`: why there is no prediction."""

    work: Workload | None = None
    choice: Choice | None = None
    prediction: Prediction | None = None
    problem: str = ""

    def seconds(self, direction: str) -> float:
        """Returns the seconds of the ops of a pass, as `Pass.run_seconds` counts them."""
        assert self.prediction is not None
        return max(event.end for event in self.prediction.events[direction])

    def as_pass(self, like: Pass) -> Pass | None:
        """Returns the planned pass in the form of a recorded one, so that its idle time can be explained; None if the
        recorded pass ran other ops."""
        assert self.prediction is not None
        events = self.prediction.events[like.direction]
        if [(e.op, e.chunk) for e in events] != [(e.op, e.chunk) for e in like.events]:
            return None
        seconds = self.seconds(like.direction)
        return Pass(like.rank, like.layer, like.direction, 0.0, seconds, events, like.ranks, schedule=like.schedule)


def sums_of(events: Sequence[Event]) -> dict[str, float]:
    """Returns seconds by kind of op."""
    found: dict[str, float] = {}
    for event in events:
        found[event.op] = found.get(event.op, 0.0) + event.seconds
    return found


def plan(planner: Planner, passes: Sequence[Pass]) -> dict[Place, Planned]:
    """Plans each layer, by group and layer."""
    groups: dict[Place, list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.ranks, one.layer), []).append(one)
    return {place: _planned(planner, place, mine) for place, mine in groups.items()}


def _planned(planner: Planner, place: Place, passes: Sequence[Pass]) -> Planned:
    work = workload_of(place, passes)
    if isinstance(work, str):
        return Planned(problem=work)
    choice = choice_of(passes)
    if isinstance(choice, str):
        return Planned(problem=choice)
    if any(one.schedule is not None and one.schedule.data["bounded"] for one in passes):
        work = work.with_(memory_budget=MANY_BYTES)
    try:
        return Planned(work, choice, planner.predict(work, choice, timeline=True))
    except SluiceError as error:
        return Planned(problem=str(error))


def workload_of(place: Place, passes: Sequence[Pass]) -> Workload | str:
    """Returns the load in the record, or a text that says what the record lacks."""
    ranks, _ = place
    facts: Mapping[str, Any] = passes[0].layer_facts
    missing = [name for name in FACTS if not facts.get(name)]
    if missing:
        return f"the record does not say {missing[0]}: record again with this version"
    if facts.get("callback"):
        return "its experts are the host's own modules, whose cost no machine has"
    if facts.get("dtype") not in DTYPES:
        return f"no machine has GEMMs in {facts.get('dtype')}"
    rows = {one.rank: one.layer_facts.get("received_rows") or 0 for one in passes}
    if sum(rows.values()) == 0 or len(rows) < len(ranks):
        return "the record lacks the rows that its ranks received"
    mean = sum(rows.values()) / len(rows)
    return Workload(
        **{name: facts[name] for name in FACTS},
        num_tokens=max(1, round(mean / facts["top_k"])),
        world_size=len(ranks),
        dtype=DTYPES[facts["dtype"]],
        gated=bool(facts.get("gated")),
        skew=max(rows.values()) / mean,
        deduplicate=bool(facts.get("deduplicate")) and len(ranks) > 1,
        chunking=facts.get("chunking", "adaptive"),
        activation=priced_activation(facts.get("activation")),
    )


def choice_of(passes: Sequence[Pass]) -> Choice | str:
    """Returns the choice of the newest backward: a forward does not show its restore policy."""
    for one in reversed(passes):
        if one.direction != "backward" or one.schedule is None:
            continue
        data = one.schedule.data
        wgrad = next(name for name, number in WGRAD.items() if number == data["wgrad_mode"])
        both = (tuple(data[name]) for name in ("restore_input", "restore_pre_activation"))
        words = (one[0] if len({*one}) == 1 else one for one in both)
        return Choice(one.num_chunks, *words, wgrad)
    return "no backward with a schedule was recorded"


def ops_of(group: Sequence[Pass], planned: Planned) -> list[dict[str, Any]]:
    """Returns measured and planned seconds by kind of op, for passes of one schedule, by decreasing difference."""
    measured: dict[str, list[float]] = {}
    for one in group:
        for op, seconds in sums_of(one.events).items():
            measured.setdefault(op, []).append(seconds)
    assert planned.prediction is not None
    machine = sums_of(planned.prediction.events[group[0].direction])
    rows = [
        {"op": op, "measured_s": statistics.median(measured.get(op, [0.0])), "machine_s": machine.get(op, 0.0)}
        for op in {**measured, **machine}
    ]
    return sorted(rows, key=lambda row: -abs(row["measured_s"] - row["machine_s"]))
