# SPDX-License-Identifier: Apache-2.0
"""Tests that the table of the papers' figures is complete, and that simulated values have the claimed shape."""

import json
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
COMMAND = [sys.executable, "-m", "integration_tests.benchmarks", "papers", "--json"]


@pytest.fixture(scope="module")
def rows():
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("]")[0] + "]")


def _row(rows, start):
    return next(row for row in rows if row["what"].startswith(start))


def test_Papers_EveryLine_IsPublishedAndSimulated(rows):
    assert len(rows) >= 40
    figures = " ".join(row["source"] for row in rows)
    papers = ("MPipeMoE", (2, 3, 8, 9, 10, 11, 12, 13)), ("MPMoE", (2, 3, 10, 11, 13, 15, 16, 17))
    for paper, numbers in (*papers, ("Myelin", (5, 6, 8, 10, 11))):
        for number in numbers:
            assert re.search(rf"{paper} Fig. {number}\b", figures), (paper, number)
    for row in rows:
        assert row["published"] and row["source"] and all(row["simulated"].values())


def test_Papers_BestN_GrowsWithB(rows):
    for found in _row(rows, "best n")["simulated"].values():
        values = [int(n) for n in re.findall(r":(\d+)", found)]
        assert values == sorted(values) and len(values) == 9
    assert "6k:2 8k:4" in _row(rows, "best n")["simulated"]["a100-8x8-1600g"]


def test_Papers_Selectors_NoModelBeatsTrialsAndEq10IsWorseThanFig8(rows):
    regrets = {row["what"]: row["simulated"] for row in rows if row["what"].startswith("regret")}
    assert len(regrets) == 4
    for cluster in ("a100-8x8-1600g", "a100-8x8-200g", "v100-4x4-56g"):
        means = {what: float(found[cluster].split(" %")[0]) for what, found in regrets.items()}
        assert min(means.values()) >= 0
        assert means["regret: MPipeMoE (Alg. 1, then eq. 10)"] > means["regret: Fig. 8 (pm)"]
    for found in _row(rows, "throughput of 8 servers over one, pb and pm")["simulated"].values():
        trials, model = map(float, re.findall(r"p[bm] ([\d.]+)", found))
        assert trials >= model


def test_Papers_Exchanges_GrowWithNAndFasterMoEsAreAboveAFewChunks(rows):
    for found in _row(rows, "dispatch and recovery")["simulated"].values():
        times = [float(value) for value in re.findall(r"n \d: ([\d.]+)", found)]
        assert times == sorted(times) and times[0] < times[-1]
        assert float(re.search(r"FasterMoE: ([\d.]+)", found)[1]) > times[1]


def test_Papers_Memory_GrowsWithN(rows):
    shares = [int(re.match(r"-(\d+)", _row(rows, f"memory at n = {n}")["simulated"]["eq. 6"])[1]) for n in (2, 4, 8)]
    assert shares == sorted(shares) and len(set(shares)) == 3


def test_Papers_PlanBytes_ReachTheBoundUnderEveryStrategy(rows):
    for n in (2, 4, 8):
        found = _row(rows, f"saved of eq. 5's bound at n = {n}")["simulated"]["plan"]
        shares = {name: float(value) for name, value in re.findall(r"(S\d) ([\d.]+) %", found)}
        assert set(shares) == {"S1", "S2", "S3", "S4"} and min(shares.values()) >= 99, found


def test_Papers_Strategies_S4BeforeS2WithNothingFitted(rows):
    for found in _row(rows, "order of S1 to S4, GPT-XL")["simulated"].values():
        order = {int(part.split(":")[0]): re.findall(r"S\d", part) for part in found.split(";")}
        for ranks in (32, 64):
            assert order[ranks].index("S4") < order[ranks].index("S2")


def test_Papers_Myelin_PageHasTheCommandsNumbers(rows):
    """Each line of the page's table is a line of the command with the same published and simulated values, and says
    whether they agree."""
    page = open(os.path.join(ROOT, "docs", "papers.md"), encoding="utf-8").read()
    section = page.split("## Myelin", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if re.match(r"\| .*\[(Fig|Table|V-)", line)]
    own = [row for row in rows if row["source"].startswith("Myelin ")]
    wanted = []
    for row in own:
        place = row["source"].removeprefix("Myelin ")
        (simulated,) = row["simulated"].values()
        wanted.append(f"| {row['what']} [{place}] | {row['published']} | {simulated} ")
    assert [line.rpartition("| Agrees")[0] for line in lines] == wanted


def test_Papers_Myelin_TableTwosGridsAndMicroBatchesAreChosen(rows):
    assert list(_row(rows, "G_inter x G_data")["simulated"].values()) == ["6x8, 12x8, 24x8, 48x8"]
    found = [float(value) for value in _row(rows, "time with the published")["simulated"]["v100-8x6-edr"].split(", ")]
    assert all(1 <= value <= 1.01 for value in found)
    k = re.findall(r"k (\d+): ([\d.]+) s", _row(rows, "all-reduce with the optimizer")["simulated"]["v100-8x6-edr"])
    assert min(k, key=lambda pair: float(pair[1]))[0] in ("2", "4")
