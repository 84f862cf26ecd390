# SPDX-License-Identifier: Apache-2.0
"""Tests the drawn scenarios: they match their page, their best pairs differ, and adaptive gains in virtual time."""

import pytest

from integration_tests.benchmarks.scenarios import scenarios, scenarios_drawn, scenarios_priced
from integration_tests.benchmarks.scenarios.scenarios_priced import Choice, Priced, made_up

RANKS = 2


@pytest.fixture(scope="module")
def simulated():
    return scenarios.simulate(scenarios_drawn.draw(), RANKS)


def test_Scenarios_List_IsDrawnBySeedAndDealsEveryAxis():
    drawn = scenarios_drawn.draw()
    assert drawn == scenarios_drawn.draw() != scenarios_drawn.draw(seed=1)
    assert len(drawn) == scenarios_drawn.COUNT
    for axis, cards in (
        ("link", scenarios_drawn.LINKS),
        ("skew", scenarios_drawn.SKEWS),
        ("kind", scenarios_drawn.KINDS),
    ):
        counts = [sum(getattr(one, axis) == card for one in drawn) for card in cards]
        assert min(counts) == max(counts), axis
    assert {one.tokens[0] for one in drawn} == {256, 512} and max(one.tokens[-1] for one in drawn) == 16384
    assert all(len(one.tokens) >= 2 and one.tokens == tuple(sorted(one.tokens)) for one in drawn)
    assert all(1 <= one.rank_skew(RANKS) <= RANKS for one in drawn)


def test_Scenarios_RankSkew_IsThatOfTheHotExpert():
    one = scenarios_drawn.draw()[0]
    even = scenarios_drawn.replace(one, E=8, skew=1)
    assert even.rank_skew(2) == pytest.approx(1.0)
    # 5 of 8 parts go to one expert, and 3 of the 7 others are on its rank.
    assert scenarios_drawn.replace(one, E=8, skew=5).rank_skew(2) == pytest.approx(2 * (5 / 8 + 3 / 8 * 3 / 7))
    assert scenarios_drawn.replace(one, E=4, skew=10).rank_skew(2) == pytest.approx(2.0)


def test_Scenarios_Simulated_BestPairsDifferAndAdaptiveIsNeverSlower(simulated):
    lines, found = simulated
    picks = {pair for line in lines for pair in line["picks"].values()}
    assert len(picks) >= 8, picks
    assert len({pair.split()[0] for pair in picks}) >= 5  # n
    for line in lines:
        others = {name: ratio for name, ratio in line["over_adaptive"].items() if name != "adaptive"}
        assert min(others.values()) >= 1 - 1e-9, line["name"]
    assert found["kept"]["list's pair"]["mean"] > 1.01 and found["reuse"]["list's pair"]["mean"] > 1.01
    assert found["kept"]["best fixed"]["most"] > 1.01  # the best n differs between batch sizes of a run
    assert found["budget"]["best fixed"]["most"] > 1.05  # small batches fit policies that large ones do not
    assert found["kept"]["split"]["mean"] > 1.01 and found["kept"]["unsplit"]["mean"] > 1.03
    for name, (held, of) in found["hypotheses"].items():
        assert of >= 15 and held >= 0.9 * of, name  # for the schedule in virtual time, without closed forms


def test_Scenarios_BudgetPairs_FitTheLargestBatchAndTheListsPairFitsAll():
    priced = [
        Priced(made_up(scenarios_drawn.LINKS[one.link]), one, RANKS)
        for one in scenarios_drawn.draw()
        if one.kind == "budget"
    ]
    (pair,) = scenarios_priced.best_over_list(priced).values()
    for one in priced:
        assert pair in one.pairs
        asked = one.load(one.drawn.tokens[-1], memory_budget=one.budget)
        assert all(one.predict(asked, each).fits for each in one.pairs)
        wide = Choice(1, "keep", "keep", "deferred")
        assert wide not in one.pairs, "the budget must exclude something"


def test_Scenarios_Adaptive_IsWhatThePlannerChooses():
    """If everything is kept, the best pair is the planner's own choice."""
    for one in scenarios_drawn.draw():
        if one.kind != "kept":
            continue
        priced = Priced(made_up(scenarios_drawn.LINKS[one.link]), one, RANKS)
        for tokens, pair in priced.adaptive.items():
            chosen = priced.planner.choose(priced.load(tokens), Choice(0, "keep", "keep", "deferred")).chosen
            assert priced.seconds(tokens, chosen) == pytest.approx(priced.seconds(tokens, pair), rel=0.01)
