# SPDX-License-Identifier: Apache-2.0
"""Decides, while a pipeline trains under a budget, which layers are recomputed and on which stage each layer runs.

All ranks have the same numbers and make the same decisions. A stage that exceeds its budget recomputes layers before
it moves any, since recomputation needs no communication. Layers move if the best plan of the whole chain is faster by
more than the move takes, or if no choice within the stages fits.

Decisions do not oscillate: a layer's bytes grow at once, but shrink only after some batches. A plan changes at once if
a stage exceeds its budget, else only if another plan is faster in two successive batches and leaves some of the budget.

Source: swap, recompute and repartition while training: vPipe (TPDS 2022). Plans are those of sluice_planner_stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from . import stages
from .layer_moves import (
    NEAR,
    LayerLook,
    LayerTimes,
    MoveOptions,
    MoveRates,
    Price,
    Trained,
    moved_bytes_of,
    priced,
    stages_of,
    trains_enough,
    verdict_of,
)
from .stages import Layer, Link, Plan, Problem

_REMEMBERED = 8  # number of batches over which the maximum of a layer's bytes is taken
_REST = 0.97  # share of the budget that a plan may use if it is chosen because it is faster
_MOST_TRIES = 4  # budgets tried in the search for a partition that fits while its layers arrive


class Costs(NamedTuple):
    """By layer. seconds: forward and backward without recomputation; again: of recomputation in addition. resident:
    bytes on any stage; kept, rerun: bytes of a micro-batch's activations without and with recomputation; output: bytes
    that the layer passes on."""

    seconds: Sequence[float]
    again: Sequence[float]
    resident: Sequence[int]
    kept: Sequence[int]
    rerun: Sequence[int]
    output: Sequence[int]
    may_rerun: Sequence[bool]


class Pipe(NamedTuple):
    """budget: bytes of each stage; in_flight: micro-batches that may be outstanding, by stage; links: between
    neighbouring stages, empty: messages take no time."""

    budget: int
    in_flight: Sequence[int]
    micro_batches: int
    links: Sequence[Link] = ()


class Way(NamedTuple):
    """parts: where stages begin; rerun: layers that are recomputed."""

    parts: tuple[int, ...]
    rerun: frozenset[int]


class Priced(NamedTuple):
    """Describes a way with its price."""

    way: Way
    slowest: float  # seconds of a micro-batch in the slowest stage
    fits: bool


def price(costs: Costs, pipe: Pipe, way: Way) -> Priced:
    """Returns the price of this way."""
    kinds = [int(layer in way.rerun) for layer in range(way.parts[-1])]
    costs = costs._replace(may_rerun=[any(pair) for pair in zip(costs.may_rerun, kinds)])
    return _priced(stages.price(_problem(costs, pipe), stages_of(way.parts), kinds))


def best_kinds(costs: Costs, pipe: Pipe, parts: Sequence[int], less: Sequence[int] = ()) -> Priced | None:
    """Returns the fastest choice for this partition. None: none fits. less: bytes of each stage that others use."""
    found = _priced(stages.price(_problem(costs, pipe, less), stages_of(parts)))
    return found if found.fits else None


def best_way(costs: Costs, pipe: Pipe, less: Sequence[int] = ()) -> Priced | None:
    """Returns the fastest plan of the chain. None: nothing fits. less: bytes of each stage that others use."""
    found = _priced(stages.plan(_problem(costs, pipe, less)))
    return found if found.fits else None


def _priced(plan: Plan) -> Priced:
    sizes = accumulate(stage["num_layers"] for stage in plan.stages)
    rerun = frozenset(layer for layer, choice in enumerate(plan.choices) if choice.kind == stages.RECOMPUTE)
    return Priced(Way((0, *sizes), rerun), plan.slowest_seconds, not plan.shortfall)


def _problem(costs: Costs, pipe: Pipe, less: Sequence[int] = ()) -> Problem:
    count = len(pipe.in_flight)
    return Problem(
        layers=tuple(
            Layer(
                forward_seconds=costs.seconds[n],
                recompute_seconds=costs.again[n],
                activation_bytes=costs.kept[n],
                checkpoint_bytes=min(costs.rerun[n], costs.kept[n]),
                parameter_bytes=costs.resident[n],
                output_bytes=costs.output[n],
                may_recompute=costs.may_rerun[n],
                may_offload=False,
            )
            for n in range(len(costs.seconds))
        ),
        links=tuple(pipe.links),
        budget_bytes=tuple(max(1, pipe.budget - taken) for taken in less or [0] * count),
        in_flight=tuple(pipe.in_flight),
        num_stages=count,
        num_micro_batches=pipe.micro_batches,
    )


class KindDecider:
    """Decides for the layers of one pipeline. way: in force."""

    def __init__(self, way: Way, pipe: Pipe, link: float, options: MoveOptions = MoveOptions()) -> None:
        self.way = way
        self.num_moves = 0
        self._pipe, self._rates, self._options = pipe, MoveRates(link), options
        layers = way.parts[-1]
        self._seconds, self._again = LayerTimes(layers), LayerTimes(layers)
        self._held: deque[tuple[list[int], list[int]]] = deque(maxlen=_REMEMBERED)
        self._is_faster = 0  # successive batches in which recomputing other layers was faster
        self._has_chosen = False
        self._since_move = -1
        self._is_pinned = False

    @property
    def parts(self) -> tuple[int, ...]:
        """Returns the partition in force."""
        return self.way.parts

    def set_rates(self, rates: MoveRates) -> None:
        """Sets the rates that moves have measured."""
        self._rates = rates

    def set_pipe(self, pipe: Pipe) -> None:
        """Sets the pipe of the newest batch."""
        self._pipe = pipe

    def pin(self, parts: tuple[int, ...]) -> None:
        """Keeps the layers at these parts, since a move failed. Recomputation may still change."""
        self.way, self._is_pinned, self._has_chosen = Way(parts, self.way.rerun), True, False

    def after_batch(self, costs: Costs, trained: Trained | None = None, moves_live: bool = True) -> LayerLook:
        """Call this after each batch, with the same measurements on all ranks. The caller must put the returned way in
        force: the decider assumes that it is. moves_live: whether layers can move during a batch."""
        if self._since_move >= 0:
            self._since_move += 1
        self._seconds.add(costs.seconds)
        self._again.add(costs.again)
        self._held.append(([*costs.kept], [*costs.rerun]))
        kept, rerun = ([max(sizes) for sizes in zip(*lists)] for lists in zip(*self._held))
        costs = costs._replace(seconds=self._seconds.means(), again=self._again.means(), kept=kept, rerun=rerun)
        now = price(costs, self._pipe, self.way)
        own = best_kinds(costs, self._pipe, self.parts)
        target = self._target(costs, trained)
        change = self._change(costs, target[1].way, trained, moves_live) if target else Price((), 0.0, 0.0)
        if own is None:
            if target is None:
                return self._look("over_budget", costs, now, now)
            return self._take(target[1], "to_fit", costs, now, change)
        verdict = self._move_verdict(own, target[0] if target else own, change)
        if target is not None and verdict == "pays":
            return self._take(target[1], verdict, costs, now, change)
        if not now.fits or not self._has_chosen:
            return self._take(own, verdict if now.fits else "to_fit", costs, now)
        return self._relax(verdict, costs, now)

    def _relax(self, verdict: str, costs: Costs, now: Priced) -> LayerLook:
        """Takes another choice if it was faster in two successive batches and leaves some of the budget."""
        calm = best_kinds(costs, self._pipe._replace(budget=int(_REST * self._pipe.budget)), self.parts)
        is_faster = calm is not None and calm.slowest * NEAR < now.slowest
        self._is_faster = self._is_faster + 1 if is_faster else 0
        if calm is None or self._is_faster < 2:
            return self._look(verdict, costs, now, now)
        return self._take(calm, verdict, costs, now)

    def _take(self, found: Priced, verdict: str, costs: Costs, now: Priced, change: Price | None = None) -> LayerLook:
        look, way = self._look(verdict, costs, now, found), found.way
        if change is not None:
            look = look._replace(steps=change.steps, live_s=change.live_s, drained_s=change.drained_s)
        self._is_faster, self._has_chosen = 0, way.parts == self.parts  # more fits after the layers have arrived
        if way.parts != self.parts:
            self._since_move, self.num_moves = 0, self.num_moves + 1
        self.way = way
        return look

    def _look(self, verdict: str, costs: Costs, now: Priced, then: Priced) -> LayerLook:
        parts, rerun = then.way
        moved = moved_bytes_of(self.parts, parts, costs.resident)
        return LayerLook(verdict, now.slowest, then.slowest, parts, moved, tuple(sorted(rerun)))

    def _change(self, costs: Costs, way: Way, trained: Trained | None, moves_live: bool) -> Price:
        """Returns the price of the cheaper kind of move to these parts, with the recomputation during the move."""
        seconds = [costs.seconds[n] + (costs.again[n] if n in way.rerun else 0.0) for n in range(way.parts[-1])]
        enough = trains_enough(trained)

        def allows(stage: int, before: tuple[int, int], after: tuple[int, int]) -> bool:
            if enough is not None and not enough(stage, before, after):
                return False
            return before == after or self._bytes_of_both(costs, way, stage, before, after) <= self._pipe.budget

        sizes, count = costs.resident, self._pipe.micro_batches
        return priced(self.parts, way.parts, seconds, sizes, self._rates, count, allows, moves_live)

    def _bytes_of_both(
        self, costs: Costs, way: Way, stage: int, before: tuple[int, int], after: tuple[int, int]
    ) -> int:
        """Returns bytes of a stage in a batch that moves its layers from `before` to `after`, as if all layers ran."""
        layers = range(min(before[0], after[0]), max(before[1], after[1]))
        held = sum(costs.rerun[n] if n in way.rerun else costs.kept[n] for n in layers)
        working = max([0, *(costs.kept[n] - costs.rerun[n] for n in layers if n in way.rerun)])
        given = max([0, *costs.output[max(layers[0] - 1, 0) : max(before[0], after[0])]])
        handed_on = max(costs.output[min(before[1], after[1]) - 1 : layers[-1] + 1])
        return (
            sum(costs.resident[n] for n in layers) + self._pipe.in_flight[stage] * (held + handed_on) + working + given
        )

    def _move_verdict(self, own: Priced, goal: Priced, change: Price) -> str:
        batches = (each.slowest * self._pipe.micro_batches for each in (own, goal))
        return verdict_of(*batches, change, self._options, self._since_move, self._seconds.is_settling())

    # ---- where layers should go ----

    def _target(self, costs: Costs, trained: Trained | None) -> tuple[Priced, Priced] | None:
        """Returns the best plan that can be reached and in which each stage trains something, and the same plan with
        the recomputation while its layers arrive. None: there is no such plan, or its partition is in force."""
        less = [0] * len(self._pipe.in_flight)
        if self._is_pinned:
            return None
        for _ in range(_MOST_TRIES):
            found = best_way(costs, self._pipe, less)
            if found is None or found.way.parts == self.parts:
                return None
            found = self._nearer(costs, found, trained)
            parts = found.way.parts
            if parts == self.parts or self._lacks(parts, trained):
                return None
            twice = [self._arrives(costs, parts, stage) for stage in range(len(less))]
            on_the_way = best_kinds(costs, self._pipe, parts, twice)
            if on_the_way is not None:
                return best_kinds(costs, self._pipe, parts) or found, on_the_way
            less = [max(pair) for pair in zip(less, twice)]
        return None

    def _arrives(self, costs: Costs, parts: Sequence[int], stage: int) -> int:
        """Returns the bytes of a stage's new layers, which exist on both stages until they have arrived."""
        stays = range(self.parts[stage], self.parts[stage + 1])
        return sum(costs.resident[n] for n in range(parts[stage], parts[stage + 1]) if n not in stays)

    def _lacks(self, parts: Sequence[int], trained: Trained | None) -> bool:
        runs = enumerate(zip(parts, parts[1:]))
        return trained is not None and any(
            not trained.allows(begin, end, self.parts[stage : stage + 2]) for stage, (begin, end) in runs
        )

    def _nearer(self, costs: Costs, target: Priced, trained: Trained | None) -> Priced:
        """Moves cuts of the target back towards those in force while that costs almost nothing, to move fewer bytes."""
        limit = target.slowest * NEAR
        for cut in range(1, len(self.parts) - 1):
            while target.way.parts[cut] != self.parts[cut]:
                parts = list(target.way.parts)
                parts[cut] += 1 if self.parts[cut] > parts[cut] else -1
                if not parts[cut - 1] < parts[cut] < parts[cut + 1]:
                    break
                found = best_kinds(costs, self._pipe, parts)
                if found is None or found.slowest > limit or self._lacks(parts, trained):
                    break
                target = found
        return target
