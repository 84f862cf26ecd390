# SPDX-License-Identifier: Apache-2.0
"""Tests stories, each of which uses several features together in a way that no test of one feature covers."""

import functools
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_parity import least_budget

SOON = 40  # seconds, enough for a busy machine and far below the layers' deadline of 120


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a story, also one that is refused, leaves no context on ranks that continue."""
    shared = [request.getfixturevalue(name) for name in ("ranks2", "ranks4") if name in request.fixturenames]
    before = [ranks.run("cases_stories:contexts_alive") for ranks in shared]
    yield
    for ranks, known in zip(shared, before):
        left = [set(now) - set(then) for now, then in zip(ranks.run("cases_stories:contexts_alive"), known)]
        assert not any(left), f"contexts of this test are alive: {[len(each) for each in left]} by rank"


def _agree(answers: list[Any], total: int, hot: bool) -> None:
    for uneven, even in answers:
        assert uneven["losses"] == pytest.approx(even["losses"], rel=1e-5)
        assert uneven["counts"] == even["counts"]
        assert sum(uneven["counts"]) in (3 * total, 6 * total)  # some releases count first choices only
        assert not hot or uneven["counts"][5] >= 0.9 * 3 * total
        for name, norm in even["norms"].items():
            assert uneven["norms"][name] == pytest.approx(norm, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("lengths", [[40, 7, 90, 0], [0, 0, 33, 1]])
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("expert", ["relu", "tuple"])
def test_UnevenTokens_OneRankWithNone_TrainAsTokensSpreadEvenly(
    ranks4: Ranks, lengths: list[int], hot: bool, expert: str
) -> None:
    answers = ranks4.run("cases_stories:spread", lengths=lengths, hot=hot, sluice={}, expert=expert)
    _agree(answers, sum(lengths), hot)


def test_UnevenTokens_HotExpertUnderTheLeastBudget_AgreeAndStayWithin(ranks4: Ranks) -> None:
    case: dict[str, Any] = {"lengths": [40, 7, 90, 0], "hot": True}
    small = {"memory_budget": 32 << 10, "gemm": "ref"}
    budget = least_budget(ranks4.try_run("cases_stories:spread", **case, sluice=small))
    answers = ranks4.run("cases_stories:spread", **case, sluice={"memory_budget": budget, "gemm": "ref"})
    _agree(answers, sum(case["lengths"]), True)
    assert all(uneven["peak"] <= budget for uneven, _ in answers)


ENDS = [(how, where) for how in ("stops", "dies") for where in ("forward", "backward")]


def _ends(case: tuple[str, str]) -> list[dict[str, Any]]:
    how, where = case
    gone = {"stopping": (1,)} if how == "stops" else {"dying": (1,)}
    with Ranks(3) as ranks:
        return ranks.try_run("cases_stories:one_expert_stops", where=where, how=how, **gone)


@functools.cache
def _all_ends() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs all cases concurrently, because they mostly wait for a deadline."""
    with futures.ThreadPoolExecutor(len(ENDS)) as pool:
        return dict(zip(ENDS, pool.map(_ends, ENDS)))


@pytest.mark.parametrize("how, where", ENDS)
def test_RankEndsInsideACalledExpert_OthersNameItAndGoOn(how: str, where: str) -> None:
    first, second, third = _all_ends()[how, where]
    assert second == ({"stopped": True} if how == "stops" else {"died": True})
    for answer in (first, third):
        found = answer["result"]
        assert found["error"].startswith("TimedOut" if how == "stops" else "PeerLost"), found
        assert found["peer"] == 1 and "rank 1" in found["error"], found
        assert found["s"] < 20 + SOON and found["unswap_s"] < SOON, found
        assert found["goes_on"], found


def test_NoTokensAndNoAuxLoss_EveryParameterHasItsGradient(ranks2: Ranks) -> None:
    for answer in ranks2.run("cases_stories:no_tokens_without_aux", lengths=[12, 0], config={}):
        assert answer["without"] == []


@pytest.mark.parametrize("stage", [1, 2])
def test_NoTokensAndNoAuxLossUnderZero_TrainAndStayEqual(ranks2: Ranks, stage: int) -> None:
    config = {"zero_optimization": {"stage": stage}}
    first, second = ranks2.run("cases_stories:no_tokens_without_aux", lengths=[12, 0], config=config)
    assert first["gates"] == second["gates"]
    assert len(first["losses"]) == len(second["losses"]) == 3
