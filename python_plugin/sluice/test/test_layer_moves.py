# SPDX-License-Identifier: Apache-2.0
"""Tests when layers move between stages: decisions over a list of changes, compared with the best partition at each
time and with no moves; and the simulated batch in which they move, against a slow search for the next op."""

import itertools
import random
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sluice.planning.errors import BadInput
from sluice.planning.layer_moves import (
    LayerDecider,
    LayerLook,
    LayerTimes,
    LearnedRates,
    MoveRates,
    Price,
    Steps,
    Trained,
    best_parts,
    busiest_bytes_of,
    priced,
    slowest_stage,
    stages_of,
    steps_to,
    towards,
    trains_enough,
)
from sluice.planning.moving_batch import batch_of

LINK = 1e9  # bytes per second
SIZE = 4 << 20  # bytes of a layer, with its optimizer states
BATCHES = 20  # between two changes

# Thirty changes: the first layer that changes, the number of layers, and the factor on their initial seconds. Each
# change replaces the previous one.
CHANGES = [
    (0, 6, 4.0), (6, 6, 3.0), (18, 6, 3.5), (3, 2, 8.0), (12, 8, 2.5), (20, 4, 5.0), (0, 12, 0.3), (9, 3, 6.0),
    (15, 5, 3.0), (1, 4, 5.0), (22, 2, 7.0), (7, 9, 2.5), (0, 3, 6.0), (14, 6, 0.2), (10, 5, 4.0), (19, 5, 3.0),
    (4, 5, 4.5), (12, 12, 0.35), (2, 7, 3.0), (16, 4, 5.0), (8, 2, 9.0), (0, 8, 3.0), (21, 3, 6.0), (5, 10, 0.25),
    (13, 4, 5.0), (17, 7, 2.8), (3, 5, 4.0), (11, 3, 6.5), (0, 5, 4.0), (18, 3, 6.0),
]  # fmt: skip


def _costs(layers: int) -> Iterator[list[float]]:
    """The seconds of each layer after each change."""
    for first, count, factor in CHANGES:
        scale = layers / 24
        begin, end = round(first * scale), round((first + count) * scale)
        yield [0.01 * (factor if begin <= layer < end else 1.0) for layer in range(layers)]


def _batch(seconds: Sequence[float], parts: Sequence[int], micro_batches: int) -> float:
    """Seconds of a batch by recurrence: a stage starts a micro-batch when the stage and the one before are done."""
    stages = [sum(seconds[a:b]) for a, b in zip(parts, parts[1:])]
    free = [0.0] * len(stages)
    for _ in range(micro_batches):
        ready = 0.0
        for stage, took in enumerate(stages):
            ready = free[stage] = max(ready, free[stage]) + took
    return free[-1]


def _uniform(layers: int, stages: int) -> list[int]:
    return [layers * stage // stages for stage in range(stages + 1)]


def _run(layers: int, stages: int, noise: Callable[[], float]) -> tuple[float, float, float, list[list[float]], int]:
    """Seconds of all batches (decided, ideal, static), and by change the distance of each batch from the best."""
    micro_batches, uniform = 4 * stages, _uniform(layers, stages)
    decider = LayerDecider(uniform, [SIZE] * layers, LINK, micro_batches)
    own = ideal = static = 0.0
    off: list[list[float]] = []
    for seconds in _costs(layers):
        best = best_parts(seconds, uniform, [SIZE] * layers)
        off.append([])
        for _ in range(BATCHES):
            off[-1].append(slowest_stage(seconds, decider.parts) / slowest_stage(seconds, best) - 1)
            own += _batch(seconds, decider.parts, micro_batches)
            ideal += _batch(seconds, best, micro_batches)
            static += _batch(seconds, uniform, micro_batches)
            look = decider.after_batch([value * noise() for value in seconds])
            own += look.moved_bytes / LINK if look.verdict == "pays" else 0.0
    return own, ideal, static, off, decider.num_moves


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("layers", "stages"), [(24, 4), (32, 8)])
def test_Layers_ThirtyChanges_AreNearTheBestWithinFiveBatches(layers: int, stages: int, noise: float) -> None:
    draw = random.Random(32)
    own, ideal, static, off, moves = _run(layers, stages, lambda: draw.uniform(1 - noise, 1 + noise))
    print(f"{stages} stages: {ideal / own:.3f} of the ideal, {static / own:.2f} times static, {moves} moves")
    assert noise or all(each <= 0.05 for batches in off for each in batches[5:])
    assert ideal / own >= 0.90
    assert static / own >= 1.3


@pytest.mark.parametrize(("layers", "stages"), [(24, 4), (32, 8), (48, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_Layers_NoiseAlone_MoveOnceAtMostIn200Batches(layers: int, stages: int, seed: int) -> None:
    draw = random.Random(seed)
    decider = LayerDecider(_uniform(layers, stages), [SIZE] * layers, LINK, 4 * stages)
    for _ in range(200):
        decider.after_batch([0.01 * draw.uniform(0.9, 1.1) for _ in range(layers)])
    assert decider.num_moves <= 1


@pytest.mark.parametrize(("share", "slowest"), [(0.1, 3.0), (0.3, 2.0), (0.3, 3.0), (1.0, 2.0)])
@pytest.mark.parametrize("seed", range(3))
def test_Layers_SlowedAtRandomByOtherWork_SeldomMove_AndFollowAChange(share: float, slowest: float, seed: int) -> None:
    """As on a machine that other processes load: in each batch, some layers take up to `slowest` times as long."""
    layers, stages = 16, 4
    draw = random.Random(seed)
    decider = LayerDecider(_uniform(layers, stages), [SIZE] * layers, LINK, 4 * stages)

    def train(seconds: Sequence[float], batches: int) -> None:
        for _ in range(batches):
            factors = [draw.uniform(1, slowest) if draw.random() < share else draw.uniform(0.9, 1.1) for _ in seconds]
            decider.after_batch([value * factor for value, factor in zip(seconds, factors)])

    train([0.01] * layers, 200)
    assert decider.num_moves <= 6
    changed = [0.06] * 4 + [0.01] * (layers - 4)
    train(changed, 40)
    best = best_parts(changed, decider.parts, [SIZE] * layers)
    assert slowest_stage(changed, decider.parts) <= 1.2 * slowest_stage(changed, best)


def _moved(old: Sequence[int], new: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(stages_of(old), stages_of(new)))


def _lacks(groups: list[frozenset[int]], needs_all: bool, old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a stage would train nothing, or would lack a group."""
    every, lacking = {group for layer in groups for group in layer}, False
    for (was, ended), (begin, end) in zip(zip(old, old[1:]), zip(new, new[1:])):
        there = {group for layer in groups[begin:end] for group in layer}
        lacking |= there < every if needs_all else not there and any(groups[was:ended])
    return lacking


@pytest.mark.parametrize("kind", ["free", "trained", "needs all", "stays"])
def test_BestParts_SmallChains_AreThoseOfExhaustiveSearch(kind: str) -> None:
    draw, empty, constrained, needs_all = random.Random(3), 0, 0, kind == "needs all"
    for _ in range(250):
        layers = draw.randint(2, 9)
        stages = draw.randint(1, min(4, layers))
        seconds = [draw.choice((1, 1, 2, 3, 5, 8)) for _ in range(layers)]
        share = {"trained": 0.2, "needs all": 0.5}.get(kind, 1.0)
        groups = [frozenset(group for group in (0, 1) if draw.random() < share) for _ in range(layers)]
        every = [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1)]
        old = draw.choice(every) if kind == "stays" else _uniform(layers, stages)
        stays = frozenset(layer for layer in range(layers) if kind == "stays" and draw.random() < 0.4)
        was = stages_of(old)
        allowed = [
            parts
            for parts in every
            if not _lacks(groups, needs_all, old, parts) and all(stages_of(parts)[n] == was[n] for n in stays)
        ]
        trained = None if kind == "free" else Trained(groups, needs_all, stays)
        found = best_parts(seconds, old, [SIZE] * layers, trained)
        constrained += found != best_parts(seconds, old, [SIZE] * layers)
        if not allowed:
            assert found == ()
            empty += 1
            continue
        least = min(slowest_stage(seconds, parts) for parts in allowed)
        assert found in allowed and slowest_stage(seconds, found) == least
        assert _moved(old, found) == min(_moved(old, p) for p in allowed if slowest_stage(seconds, p) <= least)
    assert (constrained > 30) == (kind != "free") and (empty > 30) == needs_all


def _after(decider: LayerDecider, *batches: Sequence[float]) -> LayerLook:
    return [decider.after_batch(seconds) for seconds in batches][-1]


def test_Decider_EachReason_IsSaid() -> None:
    even, slow = [1.0] * 8, [4.0, 4.0, *[1.0] * 6]

    def made(link: float = LINK) -> LayerDecider:
        return LayerDecider([0, 4, 8], [SIZE] * 8, link, 4)

    assert _after(made(), even).verdict == "no_gain"
    assert _after(made(), even, even, slow).verdict == "pays"  # the move costs almost nothing
    assert _after(made(link=1e6), even, even, slow).verdict == "pays"
    assert _after(made(link=1e5), even, even, slow).verdict == "settling"
    assert _after(made(link=1e5), even, even, slow, slow).verdict == "pays"
    assert _after(made(link=1e5), even, even, slow, even).verdict == "no_gain"  # one slow batch
    assert _after(made(link=1e3), even, even, slow, slow).verdict == "costs_more"
    assert _after(made(), [1.0, 1.0, 1.0, 1.08, *[1.0] * 4]).verdict != "pays"
    twice = made()
    assert _after(twice, even, even, slow, slow).parts == (0, 2, 8)
    assert _after(twice, slow).verdict == "no_gain"
    ways = []
    for rates, moves_live in ((MoveRates(LINK, drain_s=5.0), True), (MoveRates(LINK), True), (MoveRates(LINK), False)):
        decider = made()
        decider.set_rates(rates)
        ways.append([decider.after_batch(each, None, moves_live).why_drained for each in (even, even, slow)][-1])
    assert [why[:12] for why in ways] == ["", "steps during", "no steps lea"], ways


@pytest.mark.parametrize("parts", [[0], [0, 8], [1, 4, 9], [0, 4, 4, 9], [0, 5, 3, 9]])
def test_Decider_PartsThatAreNone_AreRefused(parts: list[int]) -> None:
    with pytest.raises(BadInput, match="each stage needs a layer"):
        LayerDecider(parts, [1] * 9, LINK, 4)


def test_Times_LayerThatHasChanged_IsMeasuredAgain() -> None:
    times = LayerTimes(2)
    assert times.means() == []
    for _ in range(10):
        times.add([1.0, 1.0])
    times.add([3.0, 1.0])
    assert times.is_settling()
    assert times.means() == [3.0, 1.0]
    times.add([3.2, 1.0])
    assert not times.is_settling()
    assert times.means() == [pytest.approx(3.1), 1.0]
    times.add([1.0, 1.0])
    times.add([3.1, 1.0])
    assert not times.is_settling()
    assert times.means() == [pytest.approx(3.1), 1.0]


def _benchmark_changes(layers: int) -> Iterator[list[float]]:
    """The changes that integration_tests/benchmarks/live draws."""
    path = Path(__file__).resolve().parents[3] / "integration_tests/benchmarks/live/live_changes.py"
    yield from runpy.run_path(str(path))["changes"](layers, 0.009)


def _reachable(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether one batch can reach the partition: layers move to the neighbouring stage only."""
    return all(max(a, c) <= min(b, d) for a, b, c, d in zip(old, old[1:], new, new[1:]))


def test_Towards_SmallChains_IsTheNearestStepOfExhaustiveSearch() -> None:
    draw, drains, several = random.Random(5), 0, 0
    for _ in range(300):
        layers = draw.randint(3, 9)
        stages = draw.randint(2, min(4, layers))
        seconds = [draw.choice((1.0, 2.0, 3.0, 5.0, 8.0)) for _ in range(layers)]
        every = [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1)]
        old, target = draw.choice(every), draw.choice(every)
        limit = draw.choice((2, layers))  # of layers on a stage during the batch
        allowed = [
            new
            for new in every
            if new != old
            and _reachable(old, new)
            and all(min(a, b) <= n <= max(a, b) for a, b, n in zip(old, target, new))
            and slowest_stage(seconds, new) <= slowest_stage(seconds, old)
            and all(max(b, d) - min(a, c) <= limit for a, b, c, d in zip(old, old[1:], new, new[1:]))
        ]
        found = towards(
            old, target, seconds, lambda _, was, then, most=limit: max(was[1], then[1]) - min(was[0], then[0]) <= most
        )
        assert (found != ()) == (allowed != []), (old, target)
        drains += not allowed
        several += len(allowed) > 1
        if found:
            left = [sum(abs(n - t) for n, t in zip(new, target)) for new in (found, *allowed)]
            assert found in allowed and left[0] == min(left)
    assert drains > 50 and several > 30


def test_Steps_DrawnChangesOfTheBenchmark_TakeThreeBatchesAtMostAndAreNeverSlower() -> None:
    parts: tuple[int, ...] = (0, 6, 12, 18, 24)
    counts = []
    for seconds in _benchmark_changes(24):
        target = best_parts(seconds, parts, [SIZE] * 24)
        steps = steps_to(parts, target, seconds)
        if target != parts:
            counts.append(len(steps))
            assert steps[-1] == target
        for old, new in zip((parts, *steps), steps):
            assert _reachable(old, new)
            assert slowest_stage(seconds, new) <= slowest_stage(seconds, old) * (1 + 1e-9)
            assert _batch(seconds, new, 8) <= 1.01 * _batch(seconds, old, 8)  # filling and draining count too
        parts = target
    assert sorted(counts) == [1] * 17 + [2] * 9 + [3] * 3


# The cell "stall" of records/live.json, for 25 MB at 1 Gbit/s.
RECORDED = MoveRates(125e6, commit_s=0.055, drain_s=0.017)


def _ways(size: int, micro_batches: int, rates: MoveRates) -> list[tuple[float, float, bool]]:
    """By move of the benchmark, for layers of `size` bytes: the price of its steps, that of the steps nearest to the
    target, and whether it is made during batches."""
    parts: tuple[int, ...] = (0, 6, 12, 18, 24)
    found = []
    for seconds in _benchmark_changes(24):
        sizes = [size] * 24
        target = best_parts(seconds, parts, sizes)
        if target != parts:
            way = priced(parts, target, seconds, sizes, rates, micro_batches)
            assert way.seconds == min(way.live_s, way.drained_s) and way.live_s > 0
            drained = priced(parts, target, seconds, sizes, rates, micro_batches, moves_live=False)
            assert drained.steps == () and drained.seconds == way.drained_s
            path = (parts, *way.steps)
            assert path[-1] in (parts, target) and len(path) <= 4
            for old, new in zip(path, path[1:]):
                assert _reachable(old, new)
                assert slowest_stage(seconds, new) <= slowest_stage(seconds, old) * (1 + 1e-9)
            nearest = (parts, *steps_to(parts, target, seconds))
            greedy = Steps(seconds, sizes, rates, micro_batches, None).price(nearest)
            found.append((way.live_s, greedy, bool(way.steps)))
        parts = target
    return found


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_Priced_DrawnChanges_TheCheaperWayIsTaken(micro_batches: int) -> None:
    """The choice depends on the size of a layer. Small layers drain, which takes no longer than the agreement. Of the
    moves of layers from 32 MiB on, 0.89 are made during batches. The steps are never more expensive than those nearest
    to the target, which send more bytes."""
    ways = {mib: _ways(mib << 20, micro_batches, RECORDED) for mib in (1, 4, 16, 32, 64, 128, 256)}
    share = {mib: sum(is_live for *_, is_live in found) / len(found) for mib, found in ways.items()}
    print(micro_batches, {mib: round(value, 2) for mib, value in share.items()})
    assert share[1] < 0.05 and share[4] < 0.15
    assert min(share[32], share[64], share[128], share[256]) >= 0.89 and share[16] > 0.75
    assert all(price <= greedy * (1 + 1e-9) for found in ways.values() for price, greedy, _ in found)
    live, greedy = (sum(each[which] for each in ways[64]) for which in (0, 1))
    assert live < 0.9 * greedy


# As in two stages with layers of 1 and 32 MiB: processor time of the busiest rank.
UNLOADED = MoveRates(125e6, commit_s=0.03, drain_s=0.01, commit_byte_s=1.1e-9, drain_byte_s=0.5e-9)


@pytest.mark.parametrize("size", [32 << 20, 64 << 20])
@pytest.mark.parametrize(("load", "least"), [(1, 0.9), (2, 0.8), (4, 0.0), (8, 0.0)])
def test_Priced_RatesThatMovesHaveShown_TheWayIsTheCheaperOne(load: float, least: float, size: int) -> None:
    """Each drawn change is made in both ways, which shows what they take. On a machine that other work loads, commits
    take longer, and fewer moves should be made during batches."""
    true = MoveRates(125e6, *(load * value for value in UNLOADED[1:]))
    learned, parts, sizes, is_right, is_live = LearnedRates(1e8, fades=False), (0, 6, 12, 18, 24), [size] * 24, [], []
    for seconds in _benchmark_changes(24):
        target = best_parts(seconds, parts, sizes)
        if target == parts:
            continue
        way, right = (priced(parts, target, seconds, sizes, rates, 8) for rates in (learned.rates, true))
        is_right.append(bool(way.steps) == bool(right.steps))
        is_live.append(bool(way.steps))
        for old, new in itertools.pairwise((parts, *steps_to(parts, target, seconds))):
            moved = busiest_bytes_of(old, new, sizes)
            learned.stepped(moved, true.commit(moved), 0.0)
        moved = busiest_bytes_of(parts, target, sizes)
        learned.drained(moved, true.drain(moved), moved / true.link)
        parts = target
    assert sum(is_right[1:]) >= len(is_right) - 2
    assert sum(is_live[1:]) >= least * len(is_live[1:])


def test_Learned_MovesOfTwoSizes_AreALine_AndOtherKindsFade() -> None:
    def values(rates: MoveRates) -> list[float]:
        return [rates.link, rates.commit_s, rates.commit_byte_s, rates.drain_s, rates.drain_byte_s]

    learned = LearnedRates(1.0)
    assert learned.rates == MoveRates(1.0)
    learned.drained(100, 30.0, 20.0)  # 10 in addition to its transfers, at 5 bytes per second
    assert values(learned.rates) == [5.0, 0.0, 0.0, 10.0, 0.0]
    learned.stepped(100, 9.0, 1.0)
    assert values(learned.rates) == [5.0, 8.0, 0.0, 5.0, 0.0]
    learned.stepped(300, 12.0, 0.0)
    assert values(learned.rates) == pytest.approx([5.0, 6.0, 0.02, 2.5, 0.0])
    learned.stepped(500, 0.0, 1.0)  # a larger move that takes nothing
    assert learned.rates.commit_byte_s == 0.0 and 0.0 < learned.rates.commit_s < 8.0
    for _ in range(20):
        learned.stepped(500, 500.0, 0.0)
        learned.stepped(100, 0.0, 0.0)
    assert learned.rates.commit_s == 0.0 and learned.rates.commit(500) > 350  # no constant below 0


def test_Priced_LayersThatMoveBetweenBatches_StayInSteps() -> None:
    """Of six layers on two stages two move down. If one of them moves only between batches, all of them drain; if both
    stay on their stages, the others can move in a batch. A drain costs its bytes: those of the layer count."""
    seconds, sizes = [4.0, 4.0, *[1.0] * 4], [100] * 6

    def way(between: set[int], sizes: list[int]) -> Price:
        enough = trains_enough(Trained([frozenset({0})] * 6, False, frozenset(), frozenset(between)))
        return priced((0, 4, 6), (0, 2, 6), seconds, sizes, MoveRates(1.0), 4, enough)

    assert way({1, 5}, sizes).steps == way(set(), sizes).steps == ((0, 2, 6),)
    for layer in (2, 3):
        drained = way({layer}, [100 if n != layer else 900 for n in range(6)])
        assert drained == Price((), 0.0, 1000.0)
    trained = Trained([frozenset({0})] * 6, False, frozenset(), frozenset({1}))
    assert trained.allows(0, 1, (0, 4)) and not trained.allows_live(0, 1, (0, 4))


def test_Priced_TwoStages_IsTheSumOfItsParts() -> None:
    """Two of the layers that take 4, 4, 1, 1, ... seconds move to the lower stage, 100 bytes each. A batch of four
    takes 36 seconds with the target. If the layers arrive within 2 seconds, the third micro-batch is the first to run
    them below, and the batch takes 37 1/3; within 20 the fourth, and 38 2/3; within 200 the batch waits for them."""
    seconds, sizes = [4.0, 4.0, *[1.0] * 6], [100] * 8
    for link, batch in ((100.0, 37 + 1 / 3), (10.0, 38 + 2 / 3), (1.0, 200.0)):
        way = priced((0, 4, 8), (0, 2, 8), seconds, sizes, MoveRates(link, 0.5, 0.25), 4)
        assert way.drained_s == 0.25 + 200 / link
        assert way.live_s == pytest.approx(batch - 36 + 0.5)
        assert way.steps == ((0, 2, 8),)
    assert priced((0, 4, 8), (0, 2, 8), seconds, sizes, MoveRates(100.0, 1.0, 0.25), 4).steps == ()


def test_Priced_RunsThatShareALink_ArriveTogether() -> None:
    """Stage 1 sends a layer to each neighbour, or receives one from each, so its link carries twice the bytes."""
    for old, new in (((0, 2, 6, 8), (0, 3, 5, 8)), ((0, 3, 5, 8), (0, 2, 6, 8))):
        ways = [priced(old, parts, [1.0] * 8, [100] * 8, MoveRates(1.0), 2) for parts in (new, (0, new[1], old[2], 8))]
        assert [way.drained_s for way in ways] == [200.0, 100.0]
        assert ways[0].live_s == 0.0 or ways[0].live_s > 1.9 * ways[1].live_s


Done = dict[tuple[str, int, int], float]


def _orders(stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """The ops of 1F1B: the last stage alternates from the start, and each earlier stage runs one more forward first."""
    orders = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        order = [("F", i) for i in range(warm_up)]
        for i in range(micro_batches):
            order += [("B", i)] + ([("F", warm_up + i)] if warm_up + i < micro_batches else [])
        orders.append(order)
    return orders


def _slow(
    seconds: Sequence[float], old: Sequence[int], new: Sequence[int], arrivals: Sequence[float], micro_batches: int
) -> tuple[float, list[int]]:
    """Searches all stages for the op that starts first, and all gradients for one that reports the arrival."""
    stages = len(old) - 1
    orders, done, free, triggers = _orders(stages, micro_batches), Done(), [0.0] * stages, [-1] * (stages + 1)
    while any(orders):
        starts = []
        for stage, order in enumerate(orders):
            if order:
                kind, i = order[0]
                last = stage == stages - 1
                needed = ("F", stage - 1, i) if kind == "F" else ("F", stage, i) if last else ("B", stage + 1, i)
                given = 0.0 if kind == "F" and stage == 0 else done.get(needed)
                starts += [] if given is None else [(max(free[stage], given), stage)]
        start, stage = min(starts)
        kind, i = orders[stage].pop(0)
        below = stage + 1
        if kind == "F" and below < stages and new[below] != old[below] and triggers[below] < 0:
            told = [end for (op, where, _), end in done.items() if (op, where) == ("B", below)]
            goes_down = new[below] < old[below]
            if any(arrivals[below] <= end <= start for end in (told if goes_down else [arrivals[below]])):
                triggers[below] = i
        first, end = ((new if 0 <= triggers[at] <= i else old)[at] for at in (stage, below))
        free[stage] = start + sum(seconds[first:end]) * (1 / 3 if kind == "F" else 2 / 3)
        done[kind, stage, i] = free[stage]
    return max(*free, *arrivals), triggers


def test_Batch_DrawnMoves_IsThatOfASlowSearch() -> None:
    draw, kinds = random.Random(4), {"down": 0, "up": 0, "late": 0}
    for _ in range(300):
        layers = draw.randint(4, 14)
        stages = draw.randint(2, min(4, layers))
        seconds = [float(draw.choice((1, 2, 3, 6))) for _ in range(layers)]
        old = (0, *sorted(draw.sample(range(1, layers), stages - 1)), layers)
        moved = [draw.randint(a + 1, b) for a, b in zip(old[:-2], old[1:-1])]
        new = (0, *(draw.choice((bound, down)) for bound, down in zip(old[1:-1], moved)), layers)
        if draw.random() < 0.5:
            old, new = new, old
        arrivals = [draw.choice((0.0, draw.uniform(0, 80))) if a != b else 0.0 for a, b in zip(old, new)]
        micro_batches = draw.randint(1, 12)
        found = batch_of(seconds, old, new, arrivals, micro_batches)
        took, triggers = _slow(seconds, old, new, arrivals, micro_batches)
        assert abs(found.seconds - took) < 1e-9 and list(found.triggers) == triggers
        for a, b, trigger in zip(old, new, triggers):
            if a != b:
                kinds["late" if trigger < 0 else "up" if b > a else "down"] += 1
    assert min(kinds.values()) >= 30, kinds
