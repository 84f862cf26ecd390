# SPDX-License-Identifier: Apache-2.0
"""Tests which layers are recomputed, and the partition, under a budget: compared with all alternatives."""

import itertools
import random

import pytest
from sluice.planning.layer_kinds import Costs, KindDecider, Pipe, Way, price
from sluice.planning.layer_moves import MoveOptions
from sluice.planning.stages import Link

LAYERS, STAGES = 10, 3
FAST = 1e12  # bytes a second: a move costs nothing
EXACT = MoveOptions(least_gain=0.002)


def _drawn(draw: random.Random) -> tuple[Costs, Pipe]:
    """Draws backwards of 0 to 4 times the forward, messages that may take longest, budgets from minimal to large."""
    forward = [draw.uniform(1, 3) for _ in range(LAYERS)]
    frozen = draw.choice((0, 0, draw.randrange(6)))
    ratio = [0.0 if n < frozen else draw.uniform(0, 4) for n in range(LAYERS)]
    kept = [draw.randint(50, 300) for _ in range(LAYERS)]
    output = [draw.randint(5, 20) for _ in range(LAYERS)]
    costs = Costs(
        seconds=[f * (1 + r) for f, r in zip(forward, ratio)],
        again=[0.0 if n < frozen else f * draw.uniform(0.9, 1.1) for n, f in enumerate(forward)],
        resident=[draw.randint(2, 10) for _ in range(LAYERS)],
        kept=kept,
        rerun=[min(k, o) for k, o in zip(kept, [10, *output])],
        output=output,
        may_rerun=[draw.random() > 0.1 for _ in range(LAYERS)],
    )
    links = tuple(Link(draw.uniform(1, 20), 0.01, draw.random() < 0.5) for _ in range(STAGES - 1))
    in_flight = [STAGES - s for s in range(STAGES)]
    even = sum(kept) / STAGES * STAGES
    return costs, Pipe(round(draw.uniform(0.3, 1.1) * even), in_flight, 8, links)


def _stage_bytes(costs: Costs, pipe: Pipe, way: Way, stage: int) -> int:
    """Computes the bytes by the formula of sluice/stages.h, in a second implementation."""
    begin, end = way.parts[stage : stage + 2]
    layers = range(begin, end)
    held = sum(costs.rerun[n] if n in way.rerun else costs.kept[n] for n in layers)
    working = max([0, *(costs.kept[n] - costs.rerun[n] for n in layers if n in way.rerun)])
    given = costs.output[begin - 1] if begin else 0
    handed_on = costs.output[end - 1] if end < LAYERS else 0
    count = pipe.in_flight[stage]
    return sum(costs.resident[begin:end]) + count * (held + handed_on) + working + given


def _stage_seconds(costs: Costs, pipe: Pipe, way: Way, stage: int) -> float:
    begin, end = way.parts[stage : stage + 2]
    took = [sum(costs.seconds[n] + (costs.again[n] if n in way.rerun else 0.0) for n in range(begin, end))]
    for number, cut in ((stage - 1, begin), (stage, end)):
        if 0 <= number < len(pipe.links):
            link = pipe.links[number]
            once = link.latency_seconds + costs.output[cut - 1] / link.bytes_per_second
            took.append(once if link.full_duplex else 2 * once)
    return max(took)


def _slowest(costs: Costs, pipe: Pipe, way: Way) -> float:
    return max(_stage_seconds(costs, pipe, way, stage) for stage in range(len(way.parts) - 1))


def _fits(costs: Costs, pipe: Pipe, way: Way) -> bool:
    return all(_stage_bytes(costs, pipe, way, stage) <= pipe.budget for stage in range(len(way.parts) - 1))


def _exhaustive(costs: Costs, pipe: Pipe) -> float:
    """Returns the slowest stage of the best partition and choice; infinite: nothing fits."""
    best: dict[tuple[int, int, int], float] = {}
    for stage in range(STAGES):
        for begin, end in itertools.combinations(range(LAYERS + 1), 2):
            found = float("inf")
            able = [n for n in range(begin, end) if costs.may_rerun[n]]
            for count in range(len(able) + 1):
                for again in itertools.combinations(able, count):
                    parts = [0] * (STAGES + 1)
                    parts[stage : stage + 2] = begin, end
                    way = Way(tuple(parts), frozenset(again))
                    if _stage_bytes(costs, pipe, way, stage) <= pipe.budget:
                        found = min(found, _stage_seconds(costs, pipe, way, stage))
            best[stage, begin, end] = found
    return min(
        max(best[0, 0, a], best[1, a, b], best[2, b, LAYERS]) for a, b in itertools.combinations(range(1, LAYERS), 2)
    )


@pytest.mark.parametrize("problems", [40, pytest.param(200, marks=pytest.mark.full)])
def test_Decider_DrawnProblems_AreWithinAHundredthOfTheBestAndTheirBudget(problems: int) -> None:
    draw, moved, switched, nothing = random.Random(7), 0, 0, 0
    for _ in range(problems):
        costs, pipe = _drawn(draw)
        best = _exhaustive(costs, pipe)
        decider = KindDecider(Way((0, 3, 7, LAYERS), frozenset()), pipe, FAST, EXACT)
        looks = [decider.after_batch(costs) for _ in range(10)]
        if best == float("inf"):
            assert looks[-1].verdict == "over_budget"
            nothing += 1
            continue
        assert _slowest(costs, pipe, decider.way) <= 1.01 * best
        assert _fits(costs, pipe, decider.way)
        priced = price(costs, pipe, decider.way)
        assert priced.fits and abs(priced.slowest / _slowest(costs, pipe, decider.way) - 1) < 1e-12
        assert looks[-1].recomputed == tuple(sorted(decider.way.rerun)) and looks[-1].parts == decider.way.parts
        moved += decider.num_moves > 0
        switched += bool(decider.way.rerun)
    assert moved > problems / 4 and switched > problems / 4 and nothing < problems / 2, (moved, switched, nothing)


def _alike(count: int = 8, seconds: float = 3.0) -> Costs:
    each = [seconds] * count, [1.0] * count, [10] * count, [100] * count, [10] * count, [0] * count, [True] * count
    return Costs(*each)


def test_Decider_StageOverItsBudget_RunsLayersAgainBeforeItGivesAny() -> None:
    """Four layers save 100 bytes for each of two micro-batches. The budget suffices for two, so two are recomputed."""
    pipe = Pipe(740, [2, 1], 8)
    decider = KindDecider(Way((0, 4, 8), frozenset()), pipe, 1e-6)  # moving costs more than it gains
    look = decider.after_batch(_alike())
    assert (look.verdict, look.parts, len(look.recomputed)) == ("to_fit", (0, 4, 8), 2)
    assert _fits(_alike(), pipe, decider.way)
    # If no choice within the stages fits, layers move at any cost.
    heavy = _alike()._replace(resident=[100] * 8, rerun=[90] * 8)
    pipe = Pipe(1420, [2, 1], 8)
    decider = KindDecider(Way((0, 6, 8), frozenset()), pipe, 1e-6)
    assert decider.after_batch(heavy).verdict == "to_fit"
    assert decider.parts[1] < 6 and _fits(heavy, pipe, decider.way)


def test_Decider_WhileLayersArrive_NoStageTakesMore() -> None:
    draw, moved = random.Random(11), 0
    for _ in range(60):
        costs, pipe = _drawn(draw)
        costs = costs._replace(resident=[12 * size for size in costs.resident])
        decider = KindDecider(Way((0, 3, 7, LAYERS), frozenset()), pipe, FAST, EXACT)
        for _ in range(6):
            before = decider.parts
            look = decider.after_batch(costs)
            if look.verdict == "over_budget":
                break
            assert _fits(costs, pipe, decider.way)
            for stage, (begin, end) in enumerate(zip(look.parts, look.parts[1:])):
                new = [n for n in range(begin, end) if not before[stage] <= n < before[stage + 1]]
                taken = _stage_bytes(costs, pipe, decider.way, stage) + sum(costs.resident[n] for n in new)
                assert taken <= pipe.budget
            moved += before != look.parts
    assert moved > 10


@pytest.mark.parametrize("seed", [n if n < 3 else pytest.param(n, marks=pytest.mark.full) for n in range(10)])
def test_Decider_NoisyBatches_HardlyChangesAnything(seed: int) -> None:
    draw = random.Random(seed)
    costs, pipe = _drawn(draw)
    decider = KindDecider(Way((0, 3, 7, LAYERS), frozenset()), pipe, FAST)
    ways = [decider.way]
    for _ in range(200):
        noisy = costs._replace(
            seconds=[value * draw.uniform(0.9, 1.1) for value in costs.seconds],
            kept=[round(size * draw.uniform(0.99, 1.0)) for size in costs.kept],
        )
        decider.after_batch(noisy)
        ways.append(decider.way)
    moves = sum(a.parts != b.parts for a, b in zip(ways, ways[1:]))
    switches = sum(a.parts == b.parts and a.rerun != b.rerun for a, b in zip(ways, ways[1:]))
    assert moves <= 1 and switches <= 2, (moves, switches)
    assert _fits(costs, pipe, decider.way)


def test_Decider_BytesThatFall_AreBelievedAfterSomeBatches() -> None:
    pipe = Pipe(740, [2, 1], 8)
    decider = KindDecider(Way((0, 4, 8), frozenset()), pipe, 1e-6)
    small = _alike()._replace(kept=[20] * 8)
    for _ in range(3):
        assert len(decider.after_batch(_alike()).recomputed) == 2
    counts = [len(decider.after_batch(small).recomputed) for _ in range(10)]
    assert counts == [2] * 8 + [0] * 2
    assert len(decider.after_batch(_alike()).recomputed) == 2  # bytes that grow count at once


@pytest.mark.parametrize("budget", [10**6, 700])
@pytest.mark.parametrize(
    ("front", "back", "parts"),
    [(2.0, 3.0, (0, 7, 12)), (1.0, 3.0, (0, 8, 12)), (2.0, 4.0, (0, 8, 12)), (2.0, 4.0, (0, 7, 12))],
)
def test_Decider_FrozenOrCheapBackwards_NeverLeavesABestPartition(
    front: float, back: float, parts: tuple[int, ...], budget: int
) -> None:
    """Of twelve layers, the first are frozen, with or without gradients of their inputs, or have backwards of one and
    three forwards: under a budget without effect, and under one in which layers are recomputed at no cost in time."""
    costs = _alike(12)._replace(seconds=[front] * 6 + [back] * 6, again=[0.0] * 12)
    pipe = Pipe(budget, [2, 1], 8)
    decider = KindDecider(Way(parts, frozenset()), pipe, FAST)
    for _ in range(20):
        assert decider.after_batch(costs).parts == parts
    assert _fits(costs, pipe, decider.way) and bool(decider.way.rerun) == (budget == 700)
