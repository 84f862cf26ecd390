# SPDX-License-Identifier: Apache-2.0
"""Predicts steps of a model on many ranks, layer by layer.

Every exchange synchronizes all ranks, so a layer takes as long as its most loaded rank. The skew, from Zipf's law or a
recorded trace, is a field of the planner's workload. The time between MoE layers is `other_seconds`, 0 by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import restore
from . import stock
from .errors import BadInput
from .planner import Choice, Planner, Prediction, Workload, size, way_by_price, weight_bytes
from .rates import Rates
from .routing import Routing, zipf_skew

MOST_RANKS = 16384
UNSPLIT = Choice(1, *restore.KEPT, "deferred")


@dataclass(frozen=True)
class Stock:
    """Describes a modelled step of all layers by a stock framework, with `other_seconds` between the layers.
    kept_bytes: bytes of a rank that the forwards of all layers keep for the backward."""

    seconds: float
    computation: float
    exchange: float
    rows_over_real: float  # rows that a rank's experts multiply, divided by the rows routed to the most loaded rank
    kept_bytes: int


@dataclass(frozen=True)
class Point:
    """Has the prediction for one number of ranks. Seconds are of one step over all layers. Bytes are of a rank: of the
    passes of all layers (computed from the layer with the most bytes, both for the worst routing and for this skew) and
    of the experts' parameters with their gradients."""

    ranks: int
    experts: int
    tokens: int
    skew_median: float
    skew_max: float
    choice: Choice | None
    seconds: float
    unsplit_seconds: float
    balanced_seconds: float
    compute_busy: float
    comm_busy: float
    total_bytes: int
    usual_bytes: int = 0
    expert_bytes: int = 0
    shortfall: str = ""
    deduplicate: bool | str = False  # of the layers with the reported choice
    stock: dict[str, Stock] = field(default_factory=dict)  # by framework; empty: not modelled

    @property
    def tokens_per_second(self) -> float:
        return self.ranks * self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        policy = self.choice.policy if self.choice else None
        return {**asdict(self), "policy": policy, "tokens_per_second": self.tokens_per_second}


class Simulator:
    """Predicts points. Caches its answers, so that layers of equal skew are priced once."""

    def __init__(self, planner: Planner, layers: int, wanted: Choice, other_seconds: float = 0.0) -> None:
        self.planner, self.layers, self.other_seconds = planner, layers, other_seconds
        self.newest: Prediction | None = None
        rates, is_device = Rates(planner), planner.machine.memory_bytes > 0
        self._price = functools.cache(planner.predict)
        self._decide = functools.cache(lambda work: planner.choose(work, wanted))
        self._way = functools.cache(lambda work: way_by_price(planner, work, wanted))
        self._stock_step = functools.cache(
            lambda name, work, expert_skew: stock.MODELS[name](work, rates, expert_skew, is_device=is_device)
        )

    def way(self, work: Workload) -> Workload:
        """Returns the workload with its deduplication chosen, if that is open."""
        return self._way(work)

    def stock(self, work: Workload, layer_skews: Sequence[float], expert_skews: Sequence[float]) -> dict[str, Stock]:
        """Returns the modelled steps by framework. Frozen experts and their adapters are not modelled."""
        if work.is_frozen:
            return {}
        found = {}
        for name in stock.MODELS:
            steps: list[stock.Step] = [
                self._stock_step(name, work.with_(skew=round(skew, 2)), round(expert_skew, 2))
                for skew, expert_skew in zip(layer_skews, expert_skews)
            ]
            real = sum(work.num_tokens * work.top_k * skew for skew in layer_skews)
            found[name] = Stock(
                sum(step.total + self.other_seconds for step in steps),
                sum(step.seconds["computation"] for step in steps),
                sum(step.seconds["exchange"] for step in steps),
                sum(step.rows for step in steps) / real,
                round(sum(step.kept for step in steps)),
            )
        return found

    def point(self, work: Workload, layer_skews: Sequence[float], expert_skews: Sequence[float] | None = None) -> Point:
        """Predicts one step. Each layer has its own choice; the most frequent one is reported. expert_skews: rows of
        the most loaded expert divided by the mean; None: equal to the ranks' skews."""
        works = [self.way(work.with_(skew=round(skew, 2))) for skew in layer_skews]
        choices: dict[tuple[Choice, bool | str], int] = {}
        sums = dict.fromkeys(("seconds", "unsplit", "balanced", "compute", "comm"), 0.0)
        most = usual_bytes = 0
        ordered = sorted(layer_skews)
        place = (work.world_size, work.num_experts, work.num_tokens, ordered[len(ordered) // 2], ordered[-1])
        for one in works:
            decision = self._decide(one)
            choice = decision.chosen
            if choice is None:
                return Point(*place, None, 0.0, 0.0, 0.0, 0.0, 0.0, 0, shortfall=decision.shortfall)
            key = choice, one.deduplicate
            choices[key] = choices.get(key, 0) + 1
            made = self.newest = self._price(one, choice)
            sums["seconds"] += made.seconds + self.other_seconds
            sums["compute"] += made.busy("compute")
            sums["comm"] += made.busy("comm")
            sums["unsplit"] += self._price(one.with_(memory_budget=0), UNSPLIT).seconds + self.other_seconds
            even = one.with_(skew=1.0)
            sums["balanced"] += self._price(even, choice).seconds + self.other_seconds
            most, usual_bytes = max(most, made.bytes["total"]), max(usual_bytes, made.usual_bytes)
        usual, way = max(choices, key=lambda key: choices[key])
        times = sums["seconds"], sums["unsplit"], sums["balanced"], sums["compute"], sums["comm"]
        experts = self.layers * expert_bytes(work)
        by_stock = self.stock(work, layer_skews, expert_skews or layer_skews)
        return self.checked(Point(*place, usual, *times, most, usual_bytes, experts, deduplicate=way, stock=by_stock))

    def checked(self, point: Point) -> Point:
        """Adds a shortfall if passes and experts with this skew need more memory than the device has."""
        memory = self.planner.machine.memory_bytes
        if not memory or point.usual_bytes + point.expert_bytes <= memory:
            return point
        left = memory - point.expert_bytes
        advice = f"try --budget {left // 2**20}MiB" if left > 2**20 else "use more ranks"
        return replace(
            point,
            shortfall=f"{size(point.usual_bytes)} of rows and {size(point.expert_bytes)} of experts on a device of "
            f"{size(memory)}: {advice}",
        )


def expert_bytes(work: Workload) -> int:
    """Returns the bytes of one layer's experts on a rank: parameters and gradients, in the layer's dtype. Frozen
    experts have no gradients, but adapters with gradients, in f32: a pair of factors for each matrix."""
    M, H, up = work.model_width, work.hidden_width, 2 if work.gated else 1
    shapes = [(H, M)] * up + [(M, H)]
    one = sum(sum(weight_bytes(work.weight_format, work.dtype, *shape)) for shape in shapes)
    adapters = 4 * work.lora_rank * (2 * M + (up + 1) * H)  # gate and up share a factor
    return (work.num_experts // work.world_size) * (one + 2 * adapters if work.is_frozen else 2 * one)


SkewOf = Callable[[int, int, int], float]  # (layer, experts, ranks)


def skew_source(fixed: float | None, zipf: float | None, trace: Routing | None, top_k: int, seed: int) -> SkewOf:
    """Returns the source of skews: one of the three arguments. Without any, routing is balanced."""
    if sum(one is not None for one in (fixed, zipf, trace)) > 1:
        raise BadInput("--skew, --zipf and --routing exclude each other; give one")
    if trace is not None:
        return lambda layer, experts, ranks: trace.skew(layer, ranks, experts)
    if zipf is not None:
        return lambda layer, experts, ranks: zipf_skew(experts, ranks, zipf, top_k, seed + layer)
    return lambda layer, experts, ranks: 1.0 if fixed is None else fixed


def check_ranks(counts: Sequence[int]) -> None:
    """Raises BadInput unless the numbers of ranks ascend and are within bounds."""
    for count in counts:
        if not 1 <= count <= MOST_RANKS:
            raise BadInput(f"--ranks: {count} is not in [1, {MOST_RANKS}]")
    if list(counts) != sorted(set(counts)):
        raise BadInput(f"--ranks: {','.join(map(str, counts))} must ascend without repeats")


def weak(
    simulator: Simulator, work: Workload, per_rank: int, counts: Sequence[int], skew_of: SkewOf,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Point]:  # fmt: skip
    """Predicts weak scaling: tokens and experts of a rank are constant."""
    works = [work.with_(world_size=ranks, num_experts=per_rank * ranks) for ranks in counts]
    for one in works:
        if one.top_k > one.num_experts:
            raise BadInput(
                f"weak scaling: {one.num_experts} experts at {one.world_size} ranks, fewer than --top-k {one.top_k}"
            )
    return _points(simulator, "weak", works, skew_of, progress)


def strong(
    simulator: Simulator, work: Workload, experts: int, counts: Sequence[int], skew_of: SkewOf,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Point]:  # fmt: skip
    """Predicts strong scaling: total tokens and experts are constant, as with the first number of ranks."""
    tokens = work.num_tokens * counts[0]
    for ranks in counts:
        for what, total in (("experts", experts), ("tokens", tokens)):
            if total % ranks != 0:
                raise BadInput(f"strong scaling: {total} {what} do not divide over {ranks} ranks; choose others")
    works = [work.with_(world_size=ranks, num_experts=experts, num_tokens=tokens // ranks) for ranks in counts]
    return _points(simulator, "strong", works, skew_of, progress)


def _points(
    simulator: Simulator, how: str, works: Sequence[Workload], skew_of: SkewOf, progress: Callable[[str], None]
) -> list[Point]:
    points = []
    for work in works:
        progress(f"{how} scaling: {work.world_size} ranks")
        skews = (
            [skew_of(layer, work.num_experts, parts) for layer in range(simulator.layers)]
            for parts in (work.world_size, work.num_experts)
        )
        points.append(simulator.point(work, *skews))
    return points


def efficiency(points: Sequence[Point]) -> list[float]:
    """Returns throughput per rank relative to the first point (0 for a point that does not fit)."""
    first = next((p for p in points if p.seconds), None)
    if first is None:
        return [0.0 for _ in points]
    each = first.tokens_per_second / first.ranks
    return [p.tokens_per_second / p.ranks / each for p in points]
