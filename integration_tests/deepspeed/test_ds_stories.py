# SPDX-License-Identifier: Apache-2.0
"""Tests stories, each of which uses several features together in a way that no test of one feature covers."""

import functools
import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from host_release import LOADING, old_host_fails
from rank_harness import Ranks
from test_ds_parity import least_budget

SOON = 40  # seconds, enough for a busy machine and far below the layers' deadline of 120
TWO_SIZES = [{"ep_size": 2, "k": 2, "expert": "gated"}, {"ep_size": 4, "k": 1, "num_experts": 8, "drop_tokens": False}]


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a story, also one that is refused, leaves no context on ranks that continue."""
    shared = [request.getfixturevalue(name) for name in ("ranks2", "ranks4") if name in request.fixturenames]
    before = [ranks.run("cases_stories:contexts_alive") for ranks in shared]
    yield
    for ranks, known in zip(shared, before):
        left = [set(now) - set(then) for now, then in zip(ranks.run("cases_stories:contexts_alive"), known)]
        assert not any(left), f"contexts of this test are alive: {[len(each) for each in left]} by rank"


ZERO_TWO, BF16 = {"zero_optimization": {"stage": 2}}, {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "config, loss, form",
    [({}, 1e-5, "nonreentrant"), (ZERO_TWO, 1e-5, "reentrant"), (BF16, 0.02, "nonreentrant")],
    ids=["zero 0", "zero 2", "bf16"],
)
def test_TwoEpSizesBudgetCheckpointingAccumulation_SavedUnswappedAndLoadedByStock(
    ranks4: Ranks, tmp_path: Path, config: dict[str, Any], loss: float, form: str
) -> None:
    old_host_fails(LOADING)
    budget = 40 << 20  # for both contexts together, which each get a share; the minimum is 9 MB
    answers = ranks4.run(
        "cases_stories:train_save_leave",
        folder=str(tmp_path),
        layers=TWO_SIZES,
        checkpointing=form,
        config=config,
        sluice={"chunks": None, "memory_budget": budget},
    )
    for answer in answers:
        assert answer["sluice"] == pytest.approx(answer["stock"], rel=loss)
        assert answer["loaded"] == pytest.approx(answer["sluice"][8:], rel=loss)
        assert 0 < answer["peak"] <= budget
        assert answer["classes"] == ["MOELayer"] and not answer["left"]


@pytest.mark.parametrize("lengths", [[40, 7, 90, 0], [0, 0, 33, 1]])
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("expert", ["relu", "tuple"])
def test_UnevenTokens_OneRankWithNone_AgreeWithAPlainLoopOverAllExperts(
    ranks4: Ranks, lengths: list[int], hot: bool, expert: str
) -> None:
    answers = ranks4.run("cases_stories:uneven_against_plain", lengths=lengths, hot=hot, sluice={}, expert=expert)
    _agree(answers, lengths, hot)


def test_UnevenTokens_HotExpertUnderTheLeastBudget_AgreeAndStayWithin(ranks4: Ranks) -> None:
    case: dict[str, Any] = {"lengths": [40, 7, 90, 0], "hot": True}
    small = {"memory_budget": 32 << 10, "gemm": "ref"}
    budget = least_budget(ranks4.try_run("cases_stories:uneven_against_plain", **case, sluice=small))
    tight = {"memory_budget": budget, "gemm": "ref"}
    answers = ranks4.run("cases_stories:uneven_against_plain", **case, sluice=tight)
    _agree(answers, case["lengths"], True)
    assert all(answer["peak"] <= budget for answer in answers)


def _agree(answers: list[Any], lengths: list[int], hot: bool) -> None:
    # f32 sums run in another order than in the loop. Expert gradients are sums over all tokens of all ranks.
    for answer, tokens in zip(answers, lengths):
        assert sum(answer["counts"]) in (tokens, 2 * tokens)  # some releases count first choices only
        for what in ("output", "tokens", "gate", "experts"):
            assert answer[what] <= 2e-5, answer
    if hot:
        assert sum(answer["counts"][5] for answer in answers) >= 0.9 * sum(lengths)


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


def test_RankOfAnotherGroupRefuses_MessageSaysWhichGlobalRanksAreMeant(ranks4: Ranks) -> None:
    told = ranks4.run("cases_stories:refused_in_the_second_group")
    assert told[:2] == ["", ""]
    assert told[2].startswith("PeerRefused") and "rank 1" in told[2]
    assert "the group of global ranks 2, 3" in told[2]
    assert told[3].startswith("ValueError") and "'moes.0.deepspeed_moe'" in told[3]


def test_DecisionsKept_SecondRun_BeginsWithThemAndRacesNothing(ranks2: Ranks, tmp_path: Path) -> None:
    kept = {"decisions": True}
    first = ranks2.run("cases_stories:decides_and_leaves", folder=str(tmp_path), tuner=kept)
    assert all(answer["why"] and "imported" not in answer["why"] and answer["exported"] for answer in first)
    said = [ranks2.output(rank).count("sluice: decision: M ") for rank in range(2)]
    assert said == [len(first[0]["why"]), 0]  # SLUICE_LOG=decision
    text = (tmp_path / "cache0" / "kept_decisions.json").read_text()
    assert not (tmp_path / "cache1" / "kept_decisions.json").exists()  # only the first rank has the file
    again = ranks2.run("cases_stories:decides_and_leaves", folder=str(tmp_path), tuner=kept)
    for answer, before in zip(again, first):
        assert set(answer["why"]) == {"imported"} and answer["race_passes"] == 0, again
        assert answer["chunks"] == before["chunks"]
    assert json.loads((tmp_path / "cache0" / "kept_decisions.json").read_text()) == json.loads(text)
    pinned = {"pinned": str(tmp_path / "exported0.json")}
    pins = ranks2.run("cases_stories:decides_and_leaves", folder=str(tmp_path), tuner=pinned)
    assert all(set(answer["why"]) == {"imported"} for answer in pins)
