# SPDX-License-Identifier: Apache-2.0
"""Decides, while a pipeline trains, when layers should move to another stage, and which layers.

All ranks have the same times of layers and make the same decisions without communication. A stage takes as long as its
layers, and the slowest stage determines the time of a batch (times `micro_batches`). Layers move if
`sluice_planner_move_verdict` says that the move pays: the gain over the horizon is above the cost and above noise.

A new partition takes effect between two batches, after a drain, or in steps, each during a batch, whichever is cheaper
(`priced`).

Source: chains by dynamic programming (PipeDream, SOSP 2019); layers that move while training: vPipe (TPDS 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from .errors import BadInput
from .moving_batch import batch_of
from .placement import move_verdict

OTHER_VERDICTS = {
    "unknown": "nothing has been measured yet",
    "settling": "it may be one slow batch",
    "to_fit": "layers run again or move because a stage takes more than its budget",
    "over_budget": "a stage takes more than its budget, and nothing takes less",
}
NEAR = 1.005  # if the slowest stage of a partition is within this factor of the best, the bytes moved decide


class MoveOptions(NamedTuple):
    """Conditions of a move."""

    least_gain: float = 0.04  # share of a batch's time
    horizon: float = 200.0  # batches in which a move must save more than it costs
    least_batches: int = 2  # between two moves
    unsure: float = 2.0  # the horizon if only one batch has shown the change


class Trained(NamedTuple):
    """groups: by layer, the optimizer's parameter groups that have parameters of the layer. needs_all: a stage needs
    parameters in every group; else it needs one parameter, if it has one now. stays: layers that cannot move.
    between: layers that can move only between two batches."""

    groups: Sequence[frozenset[int]]
    needs_all: bool
    stays: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()

    def missing(self, begin: int, end: int, now: Sequence[int]) -> list[int]:
        """Returns the groups that a stage with layers [begin, end) would lack. now: the range of the stage's layers."""
        there, was, every = (frozenset().union(*self.groups[a:b]) for a, b in ((begin, end), now, (0, None)))
        return sorted((every if self.needs_all else frozenset() if there else was) - there)

    def allows(self, begin: int, end: int, now: Sequence[int]) -> bool:
        """Returns whether a stage may have these layers: it trains something, and layers of `stays` do not move."""
        return not _crossing(self.stays, now, (begin, end)) and not self.missing(begin, end, now)

    def allows_live(self, begin: int, end: int, now: Sequence[int]) -> bool:
        """Returns the same for a move during a batch, in which no layer of `between` moves either."""
        return not _crossing(self.between, now, (begin, end)) and self.allows(begin, end, now)


def _crossing(layers: frozenset[int], before: Sequence[int], after: Sequence[int]) -> bool:
    """Returns whether one of these layers enters or leaves a stage."""
    return any((before[0] <= layer < before[1]) != (after[0] <= layer < after[1]) for layer in layers)


class LayerLook(NamedTuple):
    """Has the decision after one batch."""

    verdict: str  # of placement.VERDICTS, or of OTHER_VERDICTS
    slowest: float  # seconds of a micro-batch in the slowest stage now
    planned: float  # the same in the best partition
    parts: tuple[int, ...]  # the partition to put in force; the current one if nothing moves
    moved_bytes: int
    recomputed: tuple[int, ...] = ()  # layers to recompute
    steps: tuple[tuple[int, ...], ...] = ()  # partitions by batch, up to `parts`; empty: between two batches
    live_s: float = 0.0  # price of these steps; 0: no steps lead to `parts`
    drained_s: float = 0.0  # price of the move between two batches

    @property
    def why_drained(self) -> str:
        """Returns why the layers do not move during batches; "": they do, or nothing moves."""
        if self.steps or not self.drained_s:
            return ""
        if not self.live_s:
            return "no steps lead there: in a step layers pass to the neighbouring stage only, and no stage gets slower"
        return f"steps during batches would cost {self.live_s:.3g} s, and the drain {self.drained_s:.3g} s"


def slowest_stage(seconds: Sequence[float], parts: Sequence[int]) -> float:
    """Returns the seconds of a micro-batch in the slowest stage."""
    sums = [0.0, *accumulate(seconds)]
    return max(sums[end] - sums[begin] for begin, end in zip(parts, parts[1:]))


def best_parts(
    seconds: Sequence[float],
    parts: Sequence[int],
    sizes: Sequence[int],
    trained: Trained | None = None,
) -> tuple[int, ...]:
    """Returns the partition that moves the fewest bytes from `parts` among those whose slowest stage is within NEAR of
    the fastest possible. Every stage has a layer, and `trained` allows its layers. sizes: bytes that move with each
    layer. Empty: there is none. Pure."""
    sums, layers = [0.0, *accumulate(seconds)], len(seconds)
    _, least, _ = _fewest_moved(sums, parts, [0] * layers, float("inf"), trained)
    if least == float("inf"):
        return ()
    return (*_fewest_moved(sums, parts, sizes, least * NEAR, trained)[2], layers)


def _fewest_moved(
    sums: Sequence[float],
    parts: Sequence[int],
    sizes: Sequence[int],
    limit: float,
    trained: Trained | None,
) -> tuple[float, float, tuple[int, ...]]:
    """Returns (bytes that move, the slowest stage, where stages begin) of the partition that moves the fewest bytes,
    then is the fastest, and whose stages take at most `limit`. Infinite: there is none."""
    layers, stages = len(sums) - 1, len(parts) - 1
    none = (float("inf"), float("inf"), ())
    # The same by number of layers placed, with the stages so far.
    least: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ()), *[none] * layers]
    for stage in range(stages):
        stays = range(parts[stage], parts[stage + 1])
        comes = [0, *accumulate(0 if layer in stays else sizes[layer] for layer in range(layers))]
        found = [none] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(end - 1, stage - 1, -1):
                took = sums[end] - sums[begin]
                if took > limit or found[end][:2] < (0.0, took):
                    break  # more layers on this stage take longer
                if trained and not trained.allows(begin, end, parts[stage : stage + 2]):
                    continue
                before = least[begin]
                found[end] = min(
                    found[end], (before[0] + comes[end] - comes[begin], max(before[1], took), (*before[2], begin))
                )
        least = found
    return least[layers]


# ---- how a partition is put in force ----

Allows = Callable[[int, tuple[int, int], tuple[int, int]], bool]
"""Whether a stage may go from one range of layers to another during a batch, in which it has both."""


class Price(NamedTuple):
    """Seconds of training that a change of the partition costs. steps: empty if a drain is cheaper or required."""

    steps: tuple[tuple[int, ...], ...]
    live_s: float  # 0: no steps lead to the partition
    drained_s: float

    @property
    def seconds(self) -> float:
        """Returns the price of the cheaper kind."""
        return self.live_s if self.steps else self.drained_s


class MoveRates(NamedTuple):
    """link: bytes per second that a stage sends, and receives at the same time; drain_s: seconds of a drain in addition
    to its transfers; commit_s: seconds of a step in addition to its batch. Both grow with the bytes of the busiest
    stage, which builds the layers and copies their tensors: by drain_byte_s and commit_byte_s for each byte."""

    link: float
    commit_s: float = 0.0
    drain_s: float = 0.0
    commit_byte_s: float = 0.0
    drain_byte_s: float = 0.0

    def commit(self, size: float) -> float:
        """Returns the seconds of a step in addition to its batch. size: bytes of the busiest stage."""
        return self.commit_s + self.commit_byte_s * size

    def drain(self, size: float) -> float:
        """Returns the seconds of a drain. size: bytes of the busiest stage."""
        return self.drain_s + (self.drain_byte_s + 1 / self.link) * size


class LearnedRates:
    """Learns the rates of a pipeline's moves. size: bytes of the busiest stage; seconds: of a drain, or of a step in
    addition to its batch; travel_s: of these, in transfers. fades: with each move of one kind the seconds of the other
    are halved, since one slow measurement must not exclude it for ever."""

    def __init__(self, link: float, fades: bool = True) -> None:
        self._link, self._fades, self._drains, self._commits = link, fades, _Line(), _Line()

    def drained(self, size: float, seconds: float, travel_s: float) -> None:
        """Notes a drain."""
        self._link = size / max(travel_s, 1e-9)
        self._drains.add(size, max(0.0, seconds - travel_s))
        if self._fades:
            self._commits.halve()

    def stepped(self, size: float, seconds: float, travel_s: float) -> None:
        """Notes a step."""
        self._commits.add(size, max(0.0, seconds - travel_s))
        if self._fades:
            self._drains.halve()

    @property
    def rates(self) -> MoveRates:
        """Returns the rates as they are known now."""
        (commit_s, commit_byte_s), (drain_s, drain_byte_s) = self._commits.fit(), self._drains.fit()
        return MoveRates(self._link, commit_s, drain_s, commit_byte_s, drain_byte_s)


class _Line:
    """Fits seconds = a + b * size with a, b >= 0 by least squares. Each measurement weighs more than older ones. If all
    sizes are equal, b is 0."""

    _FADES = 0.75

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights, sizes, seconds, squares of sizes, products

    def add(self, size: float, seconds: float) -> None:
        new = (1.0, size, seconds, size * size, size * seconds)
        self._sums = [self._FADES * old + each for old, each in zip(self._sums, new)]

    def halve(self) -> None:
        self._sums[2] /= 2
        self._sums[4] /= 2

    def fit(self) -> tuple[float, float]:
        if not self._sums[0]:
            return 0.0, 0.0
        size, seconds, squares, products = (each / self._sums[0] for each in self._sums[1:])
        spread = squares - size * size
        if spread <= 1e-9 * squares:
            return seconds, 0.0
        slope = min(max((products - size * seconds) / spread, 0.0), seconds / size)
        return seconds - slope * size, slope


def towards(
    parts: Sequence[int], target: Sequence[int], seconds: Sequence[float], allows: Allows | None = None
) -> tuple[int, ...]:
    """Returns the partition nearest to `target` that one batch can reach from `parts`: layers move to the neighbouring
    stage only, as `sluice_layer_move_*` requires. Its slowest stage is no slower than that of `parts`. Empty: there is
    none, so a drain is required. Pure."""
    sums, stages = [0.0, *accumulate(seconds)], len(parts) - 1
    limit = slowest_stage(seconds, parts) * (1 + 1e-9)  # sums of the same layers differ by rounding
    # By first layer of a stage: distance of bounds from the target, the slowest stage so far, where stages begin.
    found: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
    for stage in range(stages):
        least: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for end in _reached(parts, target, stage + 1):
            for begin, (left, slowest, bounds) in found.items():
                took = sums[end] - sums[begin] if end > begin else float("inf")
                if took > limit or (allows and not allows(stage, (parts[stage], parts[stage + 1]), (begin, end))):
                    continue
                new = left + abs(target[stage + 1] - end), max(slowest, took), (*bounds, begin)
                least[end] = min(least.get(end, new), new)
        found = least
    best = (*found[parts[-1]][2], parts[-1]) if parts[-1] in found else tuple(parts)
    return best if best != tuple(parts) else ()


def _reached(parts: Sequence[int], target: Sequence[int], cut: int) -> range:
    """Returns the positions that a bound can reach in one batch, in which layers move to the neighbouring stage."""
    now = parts[cut]
    if cut == len(parts) - 1:
        return range(now, now + 1)
    least, most = max(min(now, target[cut]), parts[cut - 1]), min(max(now, target[cut]), parts[cut + 1])
    return range(least, most + 1)


def steps_to(
    parts: Sequence[int], target: Sequence[int], seconds: Sequence[float], allows: Allows | None = None
) -> tuple[tuple[int, ...], ...]:
    """Returns the partitions of successive batches up to `target`, by `towards`. Empty: a drain is required. Pure."""
    steps: list[tuple[int, ...]] = []
    now = tuple(parts)
    while now != tuple(target):
        now = towards(now, target, seconds, allows)
        if not now:
            return ()
        steps.append(now)
    return tuple(steps)


def priced(
    parts: Sequence[int],
    target: Sequence[int],
    seconds: Sequence[float],
    sizes: Sequence[int],
    rates: MoveRates,
    micro_batches: int,
    allows: Allows | None = None,
    moves_live: bool = True,
) -> Price:
    """Prices both kinds of move to `target` and selects the cheaper one.

    A drain costs the seconds that the bytes take over the link, since nothing else runs, and those of `MoveRates`. The
    bubble around a drain costs nothing, since each batch ends with a flush in any case. Steps cost the time by which
    their batches are slower than a batch of the target (`moving_batch.batch_of`), and the commits. moves_live: whether
    layers can move during a batch. Pure."""
    drained = rates.drain(busiest_bytes_of(parts, target, sizes))
    steps = steps_to(parts, target, seconds, allows) if moves_live else ()
    if not steps:
        return Price((), 0.0, drained)
    found = Steps(seconds, sizes, rates, micro_batches, allows)
    path = found.cheaper((tuple(parts), *steps))
    live = found.price(path)
    return Price(path[1:] if live < drained else (), live, drained)


Path = tuple[tuple[int, ...], ...]
_MOST_OPS = 1 << 13  # ops of a stage that are simulated in the search for cheaper steps, about 40 ms


class Steps:
    """Prices steps, and replaces them by cheaper ones."""

    def __init__(
        self,
        seconds: Sequence[float],
        sizes: Sequence[int],
        rates: MoveRates,
        micro_batches: int,
        allows: Allows | None,
    ) -> None:
        self._seconds, self._sizes, self._rates = seconds, sizes, rates
        self._micro_batches, self._allows = micro_batches, allows
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}  # seconds of batches by step

    def price(self, path: Path) -> float:
        """The price of the steps along these partitions."""
        after = self._batch(path[-1], path[-1])
        # The first batches may be faster than those of the target.
        return sum(max(0.0, self._batch(a, b) - after) + self._commit(a, b) for a, b in zip(path, path[1:]))

    def _commit(self, old: tuple[int, ...], new: tuple[int, ...]) -> float:
        return self._rates.commit(busiest_bytes_of(old, new, self._sizes))

    def cheaper(self, path: Path) -> Path:
        """Moves the bounds of intermediate partitions by one layer as long as that is cheaper: the nearest step to the
        target may send more bytes than its batch hides, or send a layer that the next step sends again."""
        least = self._micro_batches * (len(path[0]) - 1)
        best, is_better = self.price(path), True
        while is_better:
            is_better = False
            for step, bound, by in itertools.product(range(1, len(path) - 1), range(1, len(path[0]) - 1), (-1, 1)):
                if len(self._known) * least >= _MOST_OPS:
                    return path
                now = (*path[step][:bound], path[step][bound] + by, *path[step][bound + 1 :])
                if not (self._reaches(path[step - 1], now) and self._reaches(now, path[step + 1])):
                    continue
                other = (*path[:step], now, *path[step + 1 :])
                price = self.price(other)
                if price < best - 1e-9:
                    path, best, is_better = other, price, True
        return path

    def _reaches(self, old: Sequence[int], new: Sequence[int]) -> bool:
        """Whether one batch can lead from `old` to `new`, by the rules of `towards`."""
        stages = list(zip(old, old[1:], new, new[1:]))
        return (
            all(c < d and max(a, c) <= min(b, d) for a, b, c, d in stages)
            and slowest_stage(self._seconds, new) <= slowest_stage(self._seconds, old) * (1 + 1e-9)
            and (not self._allows or all(self._allows(n, (a, b), (c, d)) for n, (a, b, c, d) in enumerate(stages)))
        )

    def _batch(self, old: tuple[int, ...], new: tuple[int, ...]) -> float:
        if (old, new) not in self._known:
            arrivals = [count / self._rates.link for count in _bytes_at_bounds(old, new, self._sizes)]
            self._known[old, new] = batch_of(self._seconds, old, new, arrivals, self._micro_batches).seconds
        return self._known[old, new]


def _bytes_at_bounds(old: Sequence[int], new: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Returns, by bound of a step, the bytes sent until its layers have arrived. Runs that the same stage sends, or
    receives, share its link until all have arrived."""
    moved = [sum(sizes[min(a, b) : max(a, b)]) for a, b in zip(old, new)]
    goes_up = [b > a for a, b in zip(old, new)]
    found = list(moved)
    for bound in range(1, len(old) - 1):
        for other in (bound - 1, bound + 1):
            if moved[bound] and moved[other] and goes_up[other] != goes_up[bound]:
                found[bound] += moved[other]
    return found


class LayerDecider:
    """Decides for the layers of one pipeline. parts: in force; sizes: bytes that move with each layer; link: bytes per
    second that a stage sends, and receives at the same time, until `set_rates` is called."""

    def __init__(self, parts: Sequence[int], sizes: Sequence[int], link: float, micro_batches: int) -> None:
        if len(parts) < 2 or parts[0] != 0 or parts[-1] != len(sizes) or any(b <= a for a, b in zip(parts, parts[1:])):
            raise BadInput(
                f"parts are {list(parts)}: each stage needs a layer, and the last number must be {len(sizes)}"
            )
        self.parts = tuple(parts)
        self.num_moves = 0  # times that layers have moved
        self._sizes, self._rates, self._micro_batches = list(sizes), MoveRates(link), micro_batches
        self._times = LayerTimes(len(sizes))
        self._since_move = -1

    def set_rates(self, rates: MoveRates) -> None:
        """Sets the rates that moves have measured."""
        self._rates = rates

    def after_batch(
        self, seconds: Sequence[float], trained: Trained | None = None, moves_live: bool = True
    ) -> LayerLook:
        """Call this after each batch. seconds: of one micro-batch in each layer, forward and backward, the same on all
        ranks. The caller must move the layers to the returned parts: the decider assumes that they have moved.
        trained: None: all of each layer; moves_live: whether layers can move during a batch."""
        if self._since_move >= 0:
            self._since_move += 1
        self._times.add(seconds)
        means = self._times.means()
        if not means:
            return LayerLook("unknown", 0.0, 0.0, self.parts, 0)
        now = slowest_stage(means, self.parts)
        planned = best_parts(means, self.parts, self._sizes, trained) or self.parts
        then = slowest_stage(means, planned)
        moved = moved_bytes_of(self.parts, planned, self._sizes)
        way = priced(
            *(self.parts, planned, means, self._sizes, self._rates, self._micro_batches),
            *(trains_enough(trained), moves_live),
        )
        batches = (slowest * self._micro_batches for slowest in (now, then))
        verdict = verdict_of(*batches, way, MoveOptions(), self._since_move, self._times.is_settling())
        look = LayerLook(verdict, now, then, self.parts, moved)
        if verdict == "pays":
            self.parts, self._since_move = planned, 0
            self.num_moves += 1
            return look._replace(parts=planned, steps=way.steps, live_s=way.live_s, drained_s=way.drained_s)
        return look


def verdict_of(now_s: float, then_s: float, way: Price, options: MoveOptions, since_move: int, is_unsure: bool) -> str:
    """Returns whether a move pays, by the seconds of batches before and after it. is_unsure: one batch has shown it."""
    horizon = options.unsure if is_unsure else options.horizon
    verdict = move_verdict(now_s, then_s, way.seconds, horizon, options.least_gain, since_move, options.least_batches)
    return "settling" if is_unsure and verdict == "costs_more" else verdict


def trains_enough(trained: Trained | None) -> Allows | None:
    """Returns an `Allows`: stages of a step have the trained parameters that they need, and layers that can move."""
    if trained is None:
        return None
    return lambda stage, before, after: trained.allows_live(*after, before)


def stages_of(parts: Sequence[int]) -> list[int]:
    """Returns the stage of each layer."""
    return [stage for stage, (begin, end) in enumerate(zip(parts, parts[1:])) for _ in range(begin, end)]


def busiest_bytes_of(old: Sequence[int], new: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the most bytes of moved layers that a stage sends or receives."""
    stages = len(old) - 1
    sent, got = [0] * stages, [0] * stages
    for source, target, size in zip(stages_of(old), stages_of(new), sizes):
        if source != target:
            sent[source] += size
            got[target] += size
    return max(sent + got)


def moved_bytes_of(old: Sequence[int], new: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the bytes of layers that change their stage."""
    return sum(size for was, now, size in zip(stages_of(old), stages_of(new), sizes) if was != now)


# ---- the seconds of each layer, from measurements that are noisy and may change abruptly ----

LONGEST = 16  # batches that are averaged while nothing changes: reduces noise of 10 % to 2.5 %
JUMP = 0.25  # a layer may have changed if a sample differs from its mean by this share
RARE = 200  # batches in which at most one change may be due to chance
MEMORY = 32  # batches over which the share of dropped samples is estimated


class LayerTimes:
    """Means over the newest batches. If successive samples of a layer differ from its mean in the same direction, the
    layer has changed: its mean restarts with these samples. Samples that differ for fewer batches are dropped.

    Two samples show a change. On a machine that other work loads, many samples are dropped; then as many samples are
    needed as are not a coincidence more than once in RARE batches."""

    def __init__(self, num_layers: int) -> None:
        self._samples: list[list[float]] = [[] for _ in range(num_layers)]  # near their mean
        self._off: list[list[float]] = [[] for _ in range(num_layers)]  # newer ones, which differ in one direction
        self._side = [0] * num_layers  # the direction: 1: above, -1: below
        self._seen = self._dropped = 0.0  # samples, with weights that decrease over MEMORY batches
        self._needed = 2  # samples that show a change

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a batch: seconds of one micro-batch in each layer, forward and backward."""
        dropped = 0
        for layer, value in enumerate(seconds):
            samples, off = self._samples[layer], self._off[layer]
            side = _side(value, samples)
            if side != self._side[layer]:
                dropped += len(off)
                off.clear()
            self._side[layer] = side
            (off if side else samples).append(value)
            if len(off) >= self._needed:
                samples[:], self._side[layer] = off, 0
                off.clear()
            del samples[:-LONGEST]
        self._seen = self._seen * (1 - 1 / MEMORY) + len(seconds)
        self._dropped = self._dropped * (1 - 1 / MEMORY) + dropped
        share, self._needed = self._dropped / self._seen, 2
        while self._needed < LONGEST and RARE * len(seconds) * share**self._needed > 1:
            self._needed += 1

    def is_settling(self) -> bool:
        """Returns whether a layer differs in the newest batch, and the next batch shows whether that lasts."""
        return self._needed == 2 and any(self._side)

    def means(self) -> list[float]:
        """Returns each layer's mean, or the newest sample of a settling layer. Empty before the first batch."""
        if not all(self._samples):
            return []
        newest = [off[-1:] if off and self._needed == 2 else s for s, off in zip(self._samples, self._off)]
        return [sum(samples) / len(samples) for samples in newest]


def _side(value: float, samples: Sequence[float]) -> int:
    if not samples:
        return 0
    mean = sum(samples) / len(samples)
    return (value > mean * (1 + JUMP)) - (value < mean * (1 - JUMP))
