"""Which layers of a pipeline should run again in their backward, and where all should lie, while it trains under a
budget.

Every rank that knows the same numbers decides alike. A stage that takes more than its budget runs layers again before
it gives any away: that costs no word between ranks. Layers move where the best plan of the whole chain is faster by
more than moving takes, or where no choice within the stages fits.

Nothing swings: bytes that a layer holds grow at once and shrink after some batches; a plan is changed at once where a
stage takes too much, and else where the other one is faster twice in a row and leaves a rest of the budget.

Source: swap, recompute and repartition while training: vPipe (TPDS 2022). Plans are those of sluice_planner_stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from . import stages
from .layer_moves import NEAR, LayerLook, MoveOptions, Trained, moved_bytes_of
from .layer_times import LayerTimes
from .placement import move_verdict
from .stages import Layer, Link, Problem

_REMEMBERED = 8  # batches whose largest bytes of a layer count
_REST = 0.97  # of the budget, for a plan that is changed because another is faster
_MOST_TRIES = 4  # budgets with which a partition is sought that fits while its layers arrive


class Costs(NamedTuple):
    """Of each layer: seconds of forward and backward where it is kept, seconds more where it runs again, bytes wherever
    it lies, bytes that a micro-batch leaves in it where it is kept and where it runs again, and bytes that it hands
    on."""

    seconds: Sequence[float]
    again: Sequence[float]
    resident: Sequence[int]
    kept: Sequence[int]
    rerun: Sequence[int]
    output: Sequence[int]
    may_rerun: Sequence[bool]


class Pipe(NamedTuple):
    """budget: bytes of each stage; in_flight: micro-batches of each that may be outstanding; links: between neighbours,
    empty: messages take no time."""

    budget: int
    in_flight: Sequence[int]
    micro_batches: int
    links: Sequence[Link] = ()


class Way(NamedTuple):
    """Where stages begin, and the layers that run again."""

    parts: tuple[int, ...]
    rerun: frozenset[int]


def bytes_of(costs: Costs, pipe: Pipe, way: Way, stage: int) -> int:
    """What a stage takes, by the planner's formula."""
    begin, end = way.parts[stage : stage + 2]
    count, working, held = pipe.in_flight[stage], 0, 0
    for layer in range(begin, end):
        held += costs.rerun[layer] if layer in way.rerun else costs.kept[layer]
        working = max(working, costs.kept[layer] - costs.rerun[layer] if layer in way.rerun else 0)
    return sum(costs.resident[begin:end]) + count * held + working + _message_bytes(costs, pipe, begin, end, stage)


def _message_bytes(costs: Costs, pipe: Pipe, begin: int, end: int, stage: int) -> int:
    given = costs.output[begin - 1] if begin else 0
    handed_on = costs.output[end - 1] if stage + 1 < len(pipe.in_flight) else 0
    return given + pipe.in_flight[stage] * handed_on


def turn_of(costs: Costs, pipe: Pipe, way: Way, stage: int) -> float:
    """Seconds of a stage for a micro-batch: what its layers take, or its messages where these take longer."""
    begin, end = way.parts[stage : stage + 2]
    took = sum(costs.seconds[n] + (costs.again[n] if n in way.rerun else 0.0) for n in range(begin, end))
    ends = [(stage - 1, begin), (stage, end)]
    return max([took, *(_sent(costs, pipe, link, cut) for link, cut in ends if 0 <= link < len(pipe.links))])


def _sent(costs: Costs, pipe: Pipe, number: int, cut: int) -> float:
    link, size = pipe.links[number], costs.output[cut - 1]
    once = link.latency_seconds + size / link.bytes_per_second if size else 0.0
    return once if link.full_duplex else 2 * once


def slowest_of(costs: Costs, pipe: Pipe, way: Way) -> float:
    return max(turn_of(costs, pipe, way, stage) for stage in range(len(way.parts) - 1))


def fits(costs: Costs, pipe: Pipe, way: Way) -> bool:
    return all(bytes_of(costs, pipe, way, stage) <= pipe.budget for stage in range(len(way.parts) - 1))


def best_kinds(costs: Costs, pipe: Pipe, parts: Sequence[int], less: Sequence[int] = ()) -> Way | None:
    """The fastest choice for this partition. less: bytes of each stage that are taken otherwise. None: none fits."""
    rerun: set[int] = set()
    for stage, (begin, end) in enumerate(zip(parts, parts[1:])):
        problem = Problem(
            layers=tuple(_layer(costs, n) for n in range(begin, end)),
            budget_bytes=(pipe.budget,),
            in_flight=(pipe.in_flight[stage],),
            base_bytes=_message_bytes(costs, pipe, begin, end, stage) + (less[stage] if less else 0),
            num_micro_batches=pipe.micro_batches,
        )
        found = stages.plan(problem)
        if found.shortfall:
            return None
        rerun.update(begin + n for n, choice in enumerate(found.choices) if choice.kind == stages.RECOMPUTE)
    return Way(tuple(parts), frozenset(rerun))


def best_way(costs: Costs, pipe: Pipe, less: Sequence[int] = ()) -> Way | None:
    """The fastest plan of the chain. None: nothing fits. less: bytes of each stage that are taken otherwise."""
    count = len(pipe.in_flight)
    problem = Problem(
        layers=tuple(_layer(costs, n) for n in range(len(costs.seconds))),
        links=tuple(pipe.links),
        budget_bytes=tuple(max(1, pipe.budget - taken) for taken in less) or (pipe.budget,) * count,
        in_flight=tuple(pipe.in_flight),
        num_stages=count,
        num_micro_batches=pipe.micro_batches,
    )
    found = stages.plan(problem)
    if found.shortfall:
        return None
    stage_of = [choice.stage for choice in found.choices]
    parts = tuple(sum(stage < s for stage in stage_of) for s in range(count + 1))
    return Way(parts, frozenset(n for n, choice in enumerate(found.choices) if choice.kind == stages.RECOMPUTE))


def _layer(costs: Costs, n: int) -> Layer:
    return Layer(
        forward_seconds=costs.seconds[n],
        recompute_seconds=costs.again[n],
        activation_bytes=costs.kept[n],
        checkpoint_bytes=min(costs.rerun[n], costs.kept[n]),
        parameter_bytes=costs.resident[n],
        output_bytes=costs.output[n],
        may_recompute=costs.may_rerun[n],
        may_offload=False,
    )


class KindDecider:
    """The layers of one pipeline under a budget. way: in force."""

    def __init__(self, way: Way, pipe: Pipe, link: float, options: MoveOptions = MoveOptions()) -> None:
        self.way = way
        self.num_moves = 0
        self._pipe, self._link, self._options = pipe, link, options
        layers = way.parts[-1]
        self._seconds, self._again = LayerTimes(layers), LayerTimes(layers)
        self._held: deque[tuple[list[int], list[int]]] = deque(maxlen=_REMEMBERED)
        self._is_faster = 0  # batches in a row in which another choice of what runs again was faster
        self._has_chosen = False
        self._since_move = -1
        self._is_pinned = False

    @property
    def parts(self) -> tuple[int, ...]:
        """In force."""
        return self.way.parts

    def set_link(self, link: float) -> None:
        """Bytes a second, as a move has shown."""
        self._link = link

    def set_pipe(self, pipe: Pipe) -> None:
        """As the newest batch has shown it."""
        self._pipe = pipe

    def pin(self, parts: tuple[int, ...]) -> None:
        """The layers lie so, since they could not move, and stay: what runs again may still change."""
        self.way, self._is_pinned, self._has_chosen = Way(parts, self.way.rerun), True, False

    def after_batch(self, costs: Costs, trained: Trained | None = None) -> LayerLook:
        """After each batch, with what it has measured, alike on all ranks. The caller puts the way in force that the
        look has: the decider takes it for that."""
        if self._since_move >= 0:
            self._since_move += 1
        self._seconds.add(costs.seconds)
        self._again.add(costs.again)
        self._held.append(([*costs.kept], [*costs.rerun]))
        kept, rerun = ([max(sizes) for sizes in zip(*lists)] for lists in zip(*self._held))
        costs = costs._replace(seconds=self._seconds.means(), again=self._again.means(), kept=kept, rerun=rerun)
        now = slowest_of(costs, self._pipe, self.way)
        has_to = not fits(costs, self._pipe, self.way)
        own = best_kinds(costs, self._pipe, self.parts)
        target = self._target(costs, trained)
        if own is None:
            return self._take(target[1], "to_fit", costs, now) if target else self._look("over_budget", costs, now)
        verdict = self._move_verdict(costs, own, target[0] if target else own)
        if target is not None and verdict == "pays":
            return self._take(target[1], verdict, costs, now)
        if has_to or not self._has_chosen:
            return self._take(own, "to_fit" if has_to else verdict, costs, now)
        return self._relax(verdict, costs, now)

    def _relax(self, verdict: str, costs: Costs, now: float) -> LayerLook:
        """Where another choice is faster twice in a row, with a rest of the budget, it is taken."""
        calm = best_kinds(costs, self._pipe._replace(budget=int(_REST * self._pipe.budget)), self.parts)
        is_faster = calm is not None and slowest_of(costs, self._pipe, calm) * NEAR < now
        self._is_faster = self._is_faster + 1 if is_faster else 0
        if calm is None or self._is_faster < 2:
            return self._look(verdict, costs, now)
        return self._take(calm, verdict, costs, now)

    def _take(self, way: Way, verdict: str, costs: Costs, now: float) -> LayerLook:
        look = self._look(verdict, costs, now, way)
        self._is_faster, self._has_chosen = 0, way.parts == self.parts  # once layers have arrived there is more room
        if way.parts != self.parts:
            self._since_move, self.num_moves = 0, self.num_moves + 1
        self.way = way
        return look

    def _look(self, verdict: str, costs: Costs, now: float, way: Way | None = None) -> LayerLook:
        way = way or self.way
        then = slowest_of(costs, self._pipe, way)
        moved = moved_bytes_of(self.parts, way.parts, costs.resident)
        return LayerLook(verdict, now, then, way.parts, moved, tuple(sorted(way.rerun)))

    def _move_verdict(self, costs: Costs, own: Way, goal: Way) -> str:
        is_unsure = self._seconds.is_settling()
        verdict = move_verdict(
            slowest_of(costs, self._pipe, own) * self._pipe.micro_batches,
            slowest_of(costs, self._pipe, goal) * self._pipe.micro_batches,
            moved_bytes_of(self.parts, goal.parts, costs.resident) / self._link,
            self._options.unsure if is_unsure else self._options.horizon,
            self._options.least_gain,
            self._since_move,
            self._options.least_batches,
        )
        return "settling" if is_unsure and verdict == "costs_more" else verdict

    # ---- where layers should go ----

    def _target(self, costs: Costs, trained: Trained | None) -> tuple[Way, Way] | None:
        """The best plan that can be reached, where each stage trains something, and the same with what runs again while
        its layers arrive. None: none is found, or it is the partition in force."""
        less = [0] * len(self._pipe.in_flight)
        if self._is_pinned:
            return None
        for _ in range(_MOST_TRIES):
            found = best_way(costs, self._pipe, less)
            if found is None or found.parts == self.parts:
                return None
            found = self._nearer(costs, found, trained)
            if found.parts == self.parts or self._lacks(found, trained):
                return None
            twice = [self._arrives(costs, found.parts, stage) for stage in range(len(less))]
            on_the_way = best_kinds(costs, self._pipe, found.parts, twice)
            if on_the_way is not None:
                return best_kinds(costs, self._pipe, found.parts) or found, on_the_way
            less = [max(pair) for pair in zip(less, twice)]
        return None

    def _arrives(self, costs: Costs, parts: Sequence[int], stage: int) -> int:
        """Bytes of a stage's new layers, which are there twice until they have arrived."""
        stays = range(self.parts[stage], self.parts[stage + 1])
        return sum(costs.resident[n] for n in range(parts[stage], parts[stage + 1]) if n not in stays)

    def _lacks(self, way: Way, trained: Trained | None) -> bool:
        runs = enumerate(zip(way.parts, way.parts[1:]))
        return trained is not None and any(
            trained.missing(begin, end, self.parts[stage : stage + 2]) for stage, (begin, end) in runs
        )

    def _nearer(self, costs: Costs, target: Way, trained: Trained | None) -> Way:
        """The cuts walk back to where they are while that costs next to nothing: fewer bytes move."""
        limit = slowest_of(costs, self._pipe, target) * NEAR
        for cut in range(1, len(target.parts) - 1):
            while target.parts[cut] != self.parts[cut]:
                step = 1 if self.parts[cut] > target.parts[cut] else -1
                parts = list(target.parts)
                parts[cut] += step
                if not parts[cut - 1] < parts[cut] < parts[cut + 1]:
                    break
                found = best_kinds(costs, self._pipe, parts)
                if found is None or slowest_of(costs, self._pipe, found) > limit or self._lacks(found, trained):
                    break
                target = found
        return target
