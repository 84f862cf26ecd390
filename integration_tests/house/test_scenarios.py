"""The drawn list of scenarios: it is what its page says, its best pairs differ, and adaptive gains where it is
simulated; the benchmark writes a whole record from tiny runs."""

import json
import subprocess
import sys

import pytest

from integration_tests.benchmarks.scenarios import scenarios, scenarios_drawn, scenarios_page, scenarios_priced
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
    # 5 of 8 parts go to one expert, 3 of 7 others lie beside it.
    assert scenarios_drawn.replace(one, E=8, skew=5).rank_skew(2) == pytest.approx(2 * (5 / 8 + 3 / 8 * 3 / 7))
    assert scenarios_drawn.replace(one, E=4, skew=10).rank_skew(2) == pytest.approx(2.0)


def test_Scenarios_Simulated_BestPairsDifferAndAdaptiveIsNeverBehind(simulated):
    lines, found = simulated
    picks = {pair for line in lines for pair in line["picks"].values()}
    assert len(picks) >= 8, picks
    assert len({pair.split()[0] for pair in picks}) >= 5  # n
    for line in lines:
        others = {name: ratio for name, ratio in line["over_adaptive"].items() if name != "adaptive"}
        assert min(others.values()) >= 1 - 1e-9, line["name"]
    assert found["kept"]["list's pair"]["mean"] > 1.01 and found["reuse"]["list's pair"]["mean"] > 1.01
    assert found["kept"]["best fixed"]["most"] > 1.01  # sizes of one run want different n
    assert found["budget"]["best fixed"]["most"] > 1.05  # small batches have room for policies that large ones lack
    assert found["kept"]["split"]["mean"] > 1.01 and found["kept"]["unsplit"]["mean"] > 1.03
    for name, (held, of) in found["hypotheses"].items():
        assert of >= 15 and held >= 0.9 * of, name  # of the schedule in virtual time, which no closed form made


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
    """The argmin over pairs is the planner's own choice where everything is kept."""
    for one in scenarios_drawn.draw():
        if one.kind != "kept":
            continue
        priced = Priced(made_up(scenarios_drawn.LINKS[one.link]), one, RANKS)
        for tokens, pair in priced.adaptive.items():
            chosen = priced.planner.choose(priced.load(tokens), Choice(0, "keep", "keep", "deferred")).chosen
            assert priced.seconds(tokens, chosen) == pytest.approx(priced.seconds(tokens, pair), rel=0.01)


def test_Scenarios_Marks_AreNamedWhereTheyAreMissed():
    found = {
        "over_best_fixed": {"median": 1.005, "p90": 1.05, "worst": 1.05},
        "gain": {"kept": {"measured": 1.08, "simulated": 1.10}, "reuse": {"measured": 1.095, "simulated": 1.10}},
    }
    short = scenarios.missed(found)
    assert [text.split(":")[0] for text in short] == [
        "adaptive over the best fixed pair, p90",
        "gain over the list's pair, kept",
    ]


def test_Page_TablesOfMeasuredScenarios_AreThoseOfTheRecords():
    (found,) = scenarios_page.BETWEEN.findall(scenarios_page.PAGE.read_text())
    assert found == scenarios_page.tables(), "run scenarios_page"


def test_Page_RecordsOfTwoLinks_AreOneTable():
    def line(link, kind, fixed, of_list):
        ratios = {"best fixed": fixed, "list's pair": of_list, "unsplit": None}
        return {"link": link, "kind": kind, "over_adaptive": ratios}

    def record(lines, measured, simulated):
        gain = {"kept": {"measured": measured, "simulated": simulated}}
        return {"lines": lines, "summary": {"gain": gain}}

    several = [line("none", "kept", 1.0, 1.2), line("none", "kept", 0.9, 1.0), line("none", "kept", 1.0, 1.1)]
    first = record(several, 1.1, 1.05)
    second = record([line("1gbit", "kept", 1.25, 1.3)], 1.3, 1.2)
    text = scenarios_page.table("Some", [first, second]).splitlines()
    assert text[0] == "Some, 4 runs over none, 1gbit:"
    assert text[2].endswith("| kept (4 runs) |")
    assert text[4] == "| the best one pair of the run | 1.03 [0.90, 1.25] |"
    assert not any("unsplit" in row for row in text)
    said = " ".join(text[text.index("", 4) :])
    assert "1.000 in the median, 1.111 at the 90th percentile (**missed**), 1.111 at worst (**missed**)." in said
    assert said.endswith("kept 0.147 of 0.086.")  # 1.1^3 * 1.3 and 1.05^3 * 1.2, to the power of a quarter


@pytest.mark.timeout(900)
def test_ScenariosBenchmark_Smoke_WritesAWholeRecord(root, tmp_path):
    command = [sys.executable, "-m", "integration_tests.benchmarks.scenarios", "--smoke", "--records", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "scenarios.raw.json").read_text())
    assert {line["kind"] for line in record["lines"]} == {"kept", "reuse", "budget"}
    assert [line["name"] for line in record["in_full"]] == [line["name"] for line in record["lines"]]
    for line in record["in_full"]:
        assert {"adaptive", "best fixed", "pm", "mpipemoe"} <= set(line["seconds"])
        assert set(line["seconds"]["adaptive"]) == {str(tokens) for tokens in line["tokens"]}
        assert all(len(each) == 2 for by_size in line["seconds"].values() for each in by_size.values())
        assert all(ratio > 0 for ratio in line["over_adaptive"].values())
        if line["kind"] == "kept":
            assert {"pipemoe", "split", "unsplit"} <= set(line["seconds"])
        if line["kind"] == "reuse":
            policies = {pick.split(" ", 1)[1] for pick in line["picks"].values()}
            assert policies <= {"S1", "S2", "S3", "S4", "on trial"}  # of so few steps the tuner may have no answer yet
            fixed = {pair.split()[1] for by_size in line["pairs"].values() for pair in by_size.values()}
            assert fixed <= {"S1", "S2", "S3", "S4"}
    assert "adaptive over the best fixed pair: median" in done.stdout
    assert {"kept", "reuse", "budget"} <= set(record["simulated"]["summary"])
