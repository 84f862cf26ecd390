# SPDX-License-Identifier: Apache-2.0
"""Plans a whole model over one or more pipeline stages, under budgets, by `sluice/stages.h`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .._library import load
from .errors import BadInput
from .planner import Candidate, Planner, Workload

KINDS = KEEP, RECOMPUTE, OFFLOAD, MIXED = ("keep", "recompute", "offload", "mixed")
SCHEDULES = ("1f1b", "gpipe", "message_driven")
METHODS = ("auto", "exact", "heuristic", "uncoarsened")
REASONS = ("fastest", "free", "saves", "unburdens", "no_time", "over_budget")


@dataclass(frozen=True)
class Option:
    """Describes one way to run a layer (sluice_stages_option_t). Seconds and bytes are of one micro-batch."""

    kind: str = MIXED
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    resident_bytes: int = 0
    held_bytes: int = 0
    copied_bytes: int = 0
    working_bytes: int = 0
    arena_bytes: int = 0


@dataclass(frozen=True)
class Layer:
    """Has the measurements of a layer (sluice_planner_layer_t). Seconds and bytes are of one micro-batch.

    moe: a Mixture-of-Experts layer, priced on the planner's machine. options: the layer's own, instead of keep,
    recompute and offload.
    """

    name: str = ""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    activation_bytes: int = 0
    checkpoint_bytes: int = 0
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0
    output_bytes: int = 0
    may_recompute: bool = True
    may_offload: bool = True
    moe: Workload | None = None
    options: tuple[Option, ...] = ()


_NUMBERS = tuple(each.name for each in fields(Layer) if each.type in ("float", "int", "bool"))


@dataclass(frozen=True)
class Link:
    """Has the link between a stage and the next one."""

    bytes_per_second: float
    latency_seconds: float = 0.0
    full_duplex: bool = False


@dataclass(frozen=True)
class Problem:
    """Has the fields of sluice_planner_problem_t. links: between neighbouring stages; empty: messages take no time.
    budget_bytes: by stage, 0: no limit; empty: no limits. in_flight: by stage, instead of the schedule's."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    links: tuple[Link, ...] = ()
    budget_bytes: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    base_bytes: int = 0
    copy_bytes_per_second: float = 0.0
    num_stages: int = 1
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    in_flight_limit: int = 0
    weight_versions: bool = False
    copies_share_links: bool = False
    method: str = "auto"


@dataclass(frozen=True)
class Choice:
    """Has the stage of a layer and how the layer runs. reason: a sentence; why: one of REASONS. moe: the plan of a MoE
    layer, whose total_bytes are its share of the budget."""

    stage: int
    kind: str
    option: int
    why: str
    reason: str
    reason_bytes: int
    reason_seconds: float
    moe: Candidate | None = None

    @property
    def policy(self) -> str:
        """Returns the policy in one or two words."""
        if self.moe is not None:
            return f"n {self.moe.choice.num_chunks}, {self.moe.choice.policy}"
        return self.kind if self.kind != MIXED else f"mixed {self.option}"


@dataclass(frozen=True)
class Plan:
    """stages: the members of sluice_stages_stage_t by name, and "reason" with a sentence. shortfall: "" or why nothing
    fits; then the other fields are of the plan with the fewest bytes."""

    choices: tuple[Choice, ...]
    stages: tuple[dict[str, Any], ...]
    slowest_seconds: float
    step_seconds: float
    slowest_stage: int
    is_optimal: bool
    shortfall: str = ""
    blocking_stage: int = -1
    smallest_budget_bytes: int = 0
    short_bytes: int = 0


class _Memory(list[Any]):
    """Keeps C values alive that other C values point to."""

    def keep(self, value: Any) -> Any:
        self.append(value)
        return value


def plan(problem: Problem, planner: Planner | None = None) -> Plan:
    """Finds the fastest plan that fits. planner: has the machine of MoE layers. Any thread.

    Raises InvalidArgument that names layer and field. If nothing fits, the plan has a `shortfall`; no error is raised.
    """
    return _asked("sluice_planner_stages", problem, planner)


def price(problem: Problem, stage_of: Sequence[int], options: Sequence[int] = ()) -> Plan:
    """Prices a plan with these stages of the layers, by sluice_planner_price_stages. options: for each layer the index
    of its option, or of its kind in KINDS if it has no options; empty: the fastest options that fit are chosen. Like
    `plan` otherwise, but without MoE layers."""
    given = list(zip(stage_of, options or [-1] * len(stage_of)))
    if not len(stage_of) == len(given) == len(problem.layers):
        raise BadInput(f"{len(stage_of)} stages and {len(options)} options are given of {len(problem.layers)} layers")
    return _asked("sluice_planner_price_stages", problem, None, given)


def _asked(call: str, problem: Problem, planner: Planner | None, choices: Sequence[tuple[int, int]] = ()) -> Plan:
    library, memory = load(), _Memory()
    ffi, count, stages = library.ffi, len(problem.layers), max(problem.num_stages, 1)
    given = _problem(problem, planner, memory)
    result = library.new("planner_result")
    result.choices = memory.keep(ffi.new("sluice_stages_choice_t[]", max(count, 1)))
    result.stages = memory.keep(ffi.new("sluice_stages_stage_t[]", stages))
    result.moe = memory.keep(ffi.new("sluice_planner_candidate_t[]", max(count, 1)))
    result.text_room = 512 * (count + stages + 1)
    result.text = text = memory.keep(ffi.new("char[]", result.text_room))
    for choice, (stage, option) in zip(result.choices[0 : len(choices)], choices):
        choice.stage, choice.option = stage, option
    shortfall = library.shortfall(getattr(library.lib, call)(given, result))
    return _plan_of(problem, planner, result, ffi.string(text).decode(), shortfall)


# ---- to C ----


def _problem(problem: Problem, planner: Planner | None, memory: _Memory) -> Any:
    library = load()
    ffi = library.ffi
    value = library.new("planner_problem")
    works: dict[Workload, Any] = {}
    layers = [memory.keep(_layer(layer, planner, works, memory)) for layer in problem.layers]
    value.layers = memory.keep(ffi.new("sluice_planner_layer_t *[]", layers or [ffi.NULL]))
    value.num_layers, value.num_stages = len(layers), problem.num_stages
    edges = [{"from": a, "to": b} for a, b in problem.edges]
    value.num_edges = len(edges)
    if edges:
        value.edges = memory.keep(ffi.new("sluice_stages_edge_t[]", edges))
    for name, kind, given, wanted in (
        ("links", "sluice_stages_link_t[]", [asdict(link) for link in problem.links], problem.num_stages - 1),
        ("budget_bytes", "uint64_t[]", list(problem.budget_bytes), problem.num_stages),
        ("in_flight", "int32_t[]", list(problem.in_flight), problem.num_stages),
    ):
        if given and len(given) != wanted:
            raise BadInput(f"{name} has {len(given)} entries instead of {wanted} for {problem.num_stages} stages")
        if given:
            setattr(value, name, memory.keep(ffi.new(kind, given)))
    value.base_bytes, value.copy_bytes_per_second = problem.base_bytes, problem.copy_bytes_per_second
    value.num_micro_batches, value.in_flight_limit = problem.num_micro_batches, problem.in_flight_limit
    value.schedule = _number("schedule", problem.schedule, SCHEDULES)
    value.method = _number("method", problem.method, METHODS)
    value.weight_versions, value.copies_share_links = int(problem.weight_versions), int(problem.copies_share_links)
    return value


def _layer(layer: Layer, planner: Planner | None, works: dict[Workload, Any], memory: _Memory) -> Any:
    """Converts a layer. works: C workloads, so that equal MoE layers are priced once."""
    library = load()
    value = library.new("planner_layer")
    for name in _NUMBERS:
        setattr(value, name, getattr(layer, name))
    if layer.options:
        options = [{**asdict(option), "kind": _number("kind", option.kind, KINDS)} for option in layer.options]
        value.options = memory.keep(library.ffi.new("sluice_stages_option_t[]", options))
        value.num_options = len(options)
    if layer.moe is not None:
        if planner is None:
            raise BadInput(f"layer {layer.name!r} is a MoE layer, and there is no machine to price it on: give one")
        if layer.moe not in works:
            works[layer.moe] = memory.keep(planner.workload(layer.moe))
        value.moe, value.planner = works[layer.moe], planner.handle
    return value


def _number(name: str, word: str, known: Sequence[str]) -> int:
    if word not in known:
        raise BadInput(f"{name} is {word!r}; known are {', '.join(known)}")
    return known.index(word)


# ---- from C ----


def _plan_of(problem: Problem, planner: Planner | None, result: Any, text: str, shortfall: str) -> Plan:
    reasons = dict(re.findall(r"^  layer (\d+): (.*)$", text, re.MULTILINE))
    sentences = dict(re.findall(r"^stage (\d+): (.*)$", text, re.MULTILINE))
    choices = tuple(
        _choice(result.choices[i], reasons[str(i)], planner, result.moe[i] if layer.moe is not None else None)
        for i, layer in enumerate(problem.layers)
    )
    stages = tuple({**_members(result.stages[s]), "reason": sentences[str(s)]} for s in range(problem.num_stages))
    times = result.slowest_seconds, result.step_seconds, result.slowest_stage, bool(result.is_optimal)
    lacks = result.blocking_stage, result.smallest_budget_bytes, result.short_bytes
    return Plan(choices, stages, *times, shortfall, *lacks)


def _choice(value: Any, line: str, planner: Planner | None, moe: Any) -> Choice:
    """Converts a choice. The line begins with the option's name, which is removed since `policy` returns it."""
    candidate = planner.candidate(moe) if moe is not None and planner is not None else None
    how = value.stage, KINDS[value.kind], value.option
    why = REASONS[value.reason], line.split(": ", 1)[1], value.reason_bytes, value.reason_seconds
    return Choice(*how, *why, candidate)


def _members(stage: Any) -> dict[str, Any]:
    ffi = load().ffi
    names = [name for name, _ in ffi.typeof("sluice_stages_stage_t").fields]
    return {name: getattr(stage, name) for name in names if not name.startswith("begins_")}
