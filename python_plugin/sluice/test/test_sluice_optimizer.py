# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice plan --optimizer` and `sluice simulate --optimizer`: bytes by tier, what fits, seconds by k, errors."""

import json

import pytest
from sluice import doctor

PHI = 1_500_000_000
BUCKET = 1 << 22


@pytest.fixture
def run(command):
    return lambda *words, of="plan": command(of, "--optimizer", *words)


@pytest.mark.parametrize("slots", [1, 2])
def test_Optimizer_StatesInHostMemory_TakesThePapersBytes(run, slots: int) -> None:
    status, out, err = run("1.5e9", "--slots", str(slots), "--sum-buckets", "1", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["tiers"] == {"near": 4 * PHI + 16 * slots * BUCKET, "far": 12 * PHI, "file": 0}
    assert found["prediction"]["bytes"]["whole"] == 20 * PHI


def test_Optimizer_Budgets_SayWhatDoesNotFitAndBySoMuch(run) -> None:
    words = ("1.5e9", "--tier", "file", "--budget", "near=6GiB", "--budget", "file=30GiB")
    status, out, _ = run(*words)
    assert status == 1
    assert "DOES NOT FIT: file by 3.528 GiB" in out
    assert "no rates were given" in out
    assert run(*words[:-1], "file=40GiB")[0] == 0


def test_Optimizer_WithRates_PrintsSecondsForEachK(run) -> None:
    words = ("1.28e8", "--tier", "near", "--ranks", "2", "--update-rate", "10e9", "--sum-rate", "1e9")
    status, out, _ = run(*words)
    assert status == 0
    rows = [line.split() for line in out.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["1", "2", "4", "inf"]
    seconds = [float(row[1]) for row in rows]
    assert seconds == sorted(seconds)  # a sum has no fixed cost
    assert f"a step takes {rows[0][1]} ms with k = 1" in out
    found = json.loads(run(*words, "--sum-buckets", "inf", "--json")[1])["prediction"]
    assert found["seconds"] == pytest.approx(found["parts"]["sum"] + found["parts"]["update"])


RATES = ("--update-rate", "20e9", "--copy-rate", "12e9", "--file-rate", "2e9")


def test_Simulate_OfEveryTierAndBucket_IsWhatPlanSaysOfEach(run) -> None:
    status, out, err = run("1.5e9", *RATES, "--buckets", "1048576,4194304", "--json", of="simulate")
    assert (status, err) == (0, "")
    found = json.loads(out)
    steps = {(each["tier"], each["bucket"]): each for each in found["steps"]}
    assert list(steps) == [(tier, bucket) for tier in ("near", "far", "file") for bucket in (1 << 20, 1 << 22)]
    for (tier, bucket), each in steps.items():
        rate = {"near": "0", "far": "12e9", "file": "2e9"}[tier]
        words = ("--tier", tier, "--bucket", str(bucket), "--update-rate", "20e9", "--copy-rate", rate)
        alone = json.loads(run("1.5e9", *words, "--sum-buckets", "1", "--json")[1])
        assert each["seconds"] == alone["prediction"]["seconds"] > 0
        assert each["tiers"] == alone["tiers"]
    assert found["best"] == min(found["steps"], key=lambda each: each["seconds"])
    assert steps["far", 1 << 22]["seconds"] < steps["file", 1 << 22]["seconds"]


def test_Simulate_OverRanks_HasAColumnForEachK(run) -> None:
    words = ("1.28e8", "--tiers", "near", "--ranks", "4", "--update-rate", "20e9", "--sum-rate", "1e9")
    status, out, _ = run(*words, "--sum-seconds", "1e-3", "--buckets", "1048576,16777216", of="simulate")
    assert status == 0
    head, *rows = out.splitlines()[2:5]
    assert [f"k = {k}" in head for k in ("1", "2", "4", "inf")] == [True] * 4
    small, large = ([float(word) for word in row.split()[2:6]] for row in rows)
    assert small[0] > small[2]  # a sum has a fixed cost of a millisecond, so small buckets are summed together
    assert large[0] < large[3]  # and large ones during the updates
    assert out.count("best: k = ") == 1


def test_Simulate_Budgets_SayWhatDoesNotFit(run) -> None:
    status, out, _ = run("1.5e9", *RATES, "--budget", "near=7GiB", of="simulate")
    assert status == 0
    assert [line.endswith("does not fit") for line in out.splitlines()[3:12]] == [True] * 3 + [False] * 6
    assert "best: k = 1" in next(line for line in out.splitlines() if line.startswith("  far"))
    assert run("1.5e9", *RATES, "--budget", "near=1GiB", of="simulate")[0] == 1


@pytest.mark.parametrize(
    "words, of, named",
    [
        (("many",), "plan", "--optimizer is 'many'"),
        (("0",), "plan", "--optimizer is '0'"),
        (("1e9", "--bucket", "0"), "plan", "bucket is 0"),
        (("1e9", "--sum-buckets", "0"), "plan", "--sum-buckets is '0'"),
        (("1e9", "--ranks", "0"), "plan", "world_size is 0"),
        (("1e9", "--update-rate", "-1"), "plan", "update_rate is -1"),
        (("1e9", "--budget", "moon=1GiB"), "plan", "--budget is 'moon=1GiB'"),
        (("1e9", "--budget", "near=lots"), "plan", "lots"),
        (("1e9",), "simulate", "--update-rate is missing"),
        (("1e9", *RATES, "--tiers", "moon"), "simulate", "--tiers has 'moon'"),
        (("1e9", "--update-rate", "1e9", "--tiers", "file"), "simulate", "--file-rate is missing"),
        (("1e9", *RATES, "--buckets", "0"), "simulate", "--buckets is '0'"),
    ],
)
def test_Optimizer_WrongWords_AreRefusedByName(run, words: tuple[str, ...], of: str, named: str) -> None:
    status, _, err = run(*words, of=of)
    assert status == 2 and named in err


def test_Tiers_OfAFolder_AreMeasuredAndLeaveNothing(tmp_path) -> None:
    memory, file = doctor._tiers(str(tmp_path))
    assert (memory.state, file.state) == ("ok", "ok")
    assert memory.advice.startswith("--update-rate ") and float(memory.advice.split()[1]) > 0
    assert str(tmp_path) in file.detail and file.advice.startswith("--copy-rate ")
    assert list(tmp_path.iterdir()) == []


def test_Tiers_OfNoFolder_AreBadAndSayWhatToDo(tmp_path) -> None:
    (found,) = doctor._tiers(str(tmp_path / "none"))
    assert found.state == "bad" and "none" in found.detail and "128 MiB" in found.advice
