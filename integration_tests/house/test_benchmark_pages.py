"""The tables of docs/benchmarks have the numbers of the committed records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.measuring import records, records_page
from integration_tests.benchmarks.optimizer import optimizer_page
from integration_tests.benchmarks.stages import stages_page

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
SHAPES = ("deepseek", "qwen3", "mixtral")


def record(name: str) -> dict[str, Any]:
    return json.loads((records.FOLDER / f"{name}.json").read_text())


def cells(page: str, first: str, section: str = "") -> list[str]:
    """The cells of the row of a page that begins so, behind the place where `section` stands."""
    text = (PAGES / f"{page}.md").read_text()
    (_, _, after) = text.partition(section) if section else ("", "", text)
    rows = [line.split("|")[2:-1] for line in after.splitlines() if line.startswith(f"| {first} |")]
    assert rows, f"{page}.md has no row {first!r}"
    return [cell.strip().replace("**", "") for cell in rows[0]]


def differ(cell: str, values: list[float]) -> bool:
    """Whether the numbers of a cell are others than these, rounded to the digits that it shows."""
    shown = NUMBER.findall(cell)
    if len(shown) != len(values):
        return True
    slack = [0.501 * 10.0 ** -len(text.partition(".")[2]) + 1e-5 * abs(v) for text, v in zip(shown, values)]
    return any(abs(float(text) - v) > s for text, v, s in zip(shown, values, slack))


def spread(found: dict[str, float]) -> list[float]:
    return [found["median"], found["q1"], found["q3"]]


@pytest.mark.parametrize("file", sorted(records.FOLDER.glob("layer-*drop-*[gm].json")), ids=lambda file: file.stem)
def test_Layer_EachCase_IsThatOfItsRecord(file: Path) -> None:
    found = record(file.stem)
    row = cells("layer", found["cell"]["name"])
    assert not differ(row[0], [found["sides"]["stock"]["wall"]])
    assert not differ(row[1], [found["possible"]])
    assert not differ(row[2], spread(found["speedup"]))
    assert not differ(row[3], [found["cell"]["must_reach"]])
    assert not differ(row[4], [found["one_chunk_over_chosen"]["median"]])
    assert not differ(row[5], [max(stats["chunks"] for stats in found["sluice_stats"])])


@pytest.mark.parametrize("link", ["0.2gbit", "1gbit"])
def test_TwoLevels_EachLink_IsThatOfItsRecord(link: str) -> None:
    (found,) = (line for line in record("two_levels")["lines"] if line["link"] == link)
    row = cells("layer", f"{link.removesuffix('gbit')} Gbit/s", "two_levels.json")
    for cell, side in zip(row, ("one", "two")):
        assert not differ(cell, [found[side]["median"], found["n"][side]])
    assert not differ(row[2], spread(found["speedup"]))
    assert not differ(row[4], [found["between_bytes"][side] / 1e6 for side in ("one", "two")])


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("`train --link none`", "none-k1-float32-zero0"),
        ("`train` (1 Gbit/s)", "1gbit-k1-float32-zero0"),
        ("`train --link 0.2gbit`", "0.2gbit-k1-float32-zero0"),
        ("the same `--top-k 2 --no-drop --zero 1`", "0.2gbit-k2-float32-zero1"),
    ],
)
def test_Training_EachCommand_IsThatOfItsRecord(first: str, name: str) -> None:
    found, row = record(f"train-w2-{name}"), cells("training", first)
    sides = [found["sides"][side] for side in ("stock", "sluice")]
    assert not any(differ(cell, [1e3 * side["wall"]]) for cell, side in zip(row, sides))
    assert not differ(row[2], spread(found["speedup"])) and not differ(row[3], [side["cpu"] for side in sides])


@pytest.mark.parametrize(
    ("first", "name", "section", "begin"),
    [
        ("loopback", "ep-loopback", "", 0),
        ("4 Gbit/s", "ep-4gbit", "", 0),
        ("1 Gbit/s", "ep-1gbit", "", 0),
        ("0.4 Gbit/s", "ep-0.4gbit", "", 0),
        ("1 Gbit/s, 4 ranks", "ep-1gbit-4-ranks", "", 0),
        ("1 Gbit/s", "ep-deduplicated", "ep-deduplicated", 0),
        ("0.4 Gbit/s", "ep-deduplicated", "ep-deduplicated", 3),
        ("1 Gbit/s", "ep-bf16", "ep-bf16", 0),
    ],
)
def test_ExpertParallelism_EachLink_IsThatOfItsRecord(first: str, name: str, section: str, begin: int) -> None:
    lines = records.rows_of(record(name)["lines"])[begin:]
    for cell, line in zip(cells("expert-parallelism", first, section), lines):
        assert cell.endswith(".json`") or not differ(cell, [line["speedup"]["median"]]), (line["name"], cell)


@pytest.mark.parametrize(
    ("first", "name", "threads"),
    [
        ("f32, 1", "f32-kept", 1),
        ("f32, 2", "f32-kept-2-threads", 2),
        ("bf16, 1, AMX", "bf16-kept", 1),
        ("bf16, 1", "bf16-kept-no-amx", 1),
        ("bf16, 2", "bf16-kept-no-amx", 2),
    ],
)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_Experts_EachRow_IsThatOfItsRecord(first: str, name: str, threads: int, tokens: int) -> None:
    found = {
        cell["shape"]: cell
        for cell in records.rows_of(record(f"experts-{name}")["cells"])
        if (cell["threads"], cell["tokens"]) == (threads, tokens)
    }
    row = cells("experts", f"{first} | {tokens}")[1:]  # the number of tokens is part of the row's beginning
    assert not differ(row[0], [found[shape]["speedup_over"]["grouped_mm"]["median"] for shape in SHAPES])
    assert not differ(row[1], [found[shape]["of_roofline"]["sluice"] for shape in SHAPES])


@pytest.mark.parametrize(
    ("first", "name"), [("`adaptive`, calibrated", "adaptive"), ("`profile`", "profile"), ("`model`", "model")]
)
def test_Tuner_Regret_IsThatOfItsRecord(first: str, name: str) -> None:
    regret = record("tuner")["summary"]["regret"][name]
    row = cells("tuner", first)
    assert not differ(row[0], [100 * regret["median"]]) and not differ(row[1], [100 * regret["worst"]])


@pytest.mark.parametrize(
    ("first", "name"), [("none", "none"), ("S3", "S3"), ("S4", "S4"), ("T_DI kept, T_M recomputed", "k/rec")]
)
def test_Memory_EachPolicy_IsThatOfItsRecord(first: str, name: str) -> None:
    lines = [line for line in records.rows_of(record("restore")["lines"]) if line["policy"] == name]
    for cell, line in zip(cells("memory", first), lines, strict=True):
        assert not differ(cell, [line["peak_bytes"] / 2**20, 1e3 * line["median_s"]])


@pytest.mark.parametrize("name", ["constant", "changing"])
def test_Overhead_EachWorkload_IsThatOfItsRecord(name: str) -> None:
    judged = record("overhead")["workloads"][name]["judged"]
    row = cells("overhead", name)
    for cell, clock in zip(row, ("wall", "cpu")):
        assert not differ(cell, [100 * judged[clock][of] for of in ("cost", "low", "high")])
    assert not differ(row[2], [100 * judged["account"]])


def test_Machines_EachRecord_IsListedAtItsProcessor() -> None:
    (found,) = records_page.BETWEEN.findall(records_page.PAGE.read_text())
    assert found == records_page.tables(records_page.by_record()), "run records_page"


def test_Machines_MadeUpRecords_StandTogetherWhereAllAreOfOneMachine() -> None:
    machines = {"ep-1gbit": "A", "ep-4gbit": "A", "experts-bf16": "B", "experts-f32": "A", "walk": "B"}
    assert records_page.names_of(machines, "A") == ["ep*", "experts-f32"]
    assert records_page.names_of(machines, "B") == ["experts-bf16", "walk"]
    assert records_page.machine_of({"cpu": "AMD EPYC", "isa": ["avx2"]}) == "D"
    with pytest.raises(LookupError, match="no Other with avx2"):
        records_page.machine_of({"cpu": "Other", "isa": ["avx2"]})


def test_Optimizer_Tables_AreThoseOfTheRecords() -> None:
    (found,) = optimizer_page.BETWEEN.findall(optimizer_page.PAGE.read_text())
    assert found == optimizer_page.of_records(), "run optimizer_page"


def test_Optimizer_TablesOfRecords_SayWhatIsMissed() -> None:
    good, bad = ({"median": m, "low": m - 0.1, "high": m + 0.1} for m in (1.5, 1.0))
    ratios = {"over_deepspeed": good, "over_torch_fused": bad, "over_stream": bad, "over_checked": good}
    plain = {"date": "D", "threads": {"1": {"seconds": {"sluice": 0.2}, **ratios}}}
    mixed = {"seconds": {"stock": 0.3, "sluice": 0.2}, "stock_over_sluice": {"median": 1.35, "low": 1.2, "high": 1.5}}
    seconds = {"update": 0.05, "sum": 0.06, "serial": 0.11, "beside": 0.08}
    overlap = {"date": "D", "seconds": seconds, "at_most": 0.07, "serial_over_beside": bad, "k": 2}
    lines = optimizer_page.tables(plain, {"date": "D", "wanted": 1.3, "threads": {"2": mixed}}, overlap).splitlines()
    kept, missed = "1.50 [1.40, 1.60]", "1.00 [0.90, 1.10]"
    assert f"| 1 | 200 | {kept} | **{missed}** | {missed} | {kept} |" in lines
    assert "| 2 | 300 | 200 | **1.35 [1.20, 1.50]** |" in lines
    assert f"| 50 | 60 | 110 | **80** | 70 | **{missed}** | 2 |" in lines


def test_Stages_Tables_AreThoseOfTheRecord() -> None:
    (found,) = stages_page.BETWEEN.findall(stages_page.PAGE.read_text())
    assert found == stages_page.tables(stages_page.record()), "run stages_page"


def test_Stages_TablesOfARecord_SayWhatIsMissed() -> None:
    quartiles = {"count": 5, "q1": 1.2, "median": 1.3, "q3": 1.4}
    case = {"stages": 4, "in_flight": 8}
    found = {"case": case, "stock_s": quartiles, "sluice_s": quartiles, "speedup": quartiles, "wanted": 1.25}
    deep = {**found, "simulated": {"speedup": 1.341}}
    jitter = {**found, "wanted": 1.31, "over_fixed": {**quartiles, "median": 1.04}, "most_over_fixed": 1.03}
    policy = {"bubble": {**quartiles, "median": 0.31}, "simulated": 0.304, "points": 1.5, "most_in_flight": 8}
    bubbles = {
        "1f1b": {**policy, "predicted": 0.309, "most_held": 0},
        "v": {**policy, "simulated": 0.086, "most_held": 16},
    }
    settings = {"link": "1gbit", "megabytes": 8.0, "micro_batches": 16}
    lines = stages_page.tables(
        {
            "date": "D",
            "settings": settings,
            "cases": {"two": found, "deep": deep, "jitter": jitter, "bubbles": {"policies": bubbles}},
        }
    ).splitlines()
    assert "| two | 4 | 8 | 1.30 | 1.30 | 1.30 [1.20, 1.40] | | 1.25 | |" in lines
    assert "| deep | 4 | 8 | 1.30 | 1.30 | 1.30 [1.20, 1.40] | 1.34 | 1.25 | |" in lines
    assert "| jitter | 4 | 8 | 1.30 | 1.30 | **1.30 [1.20, 1.40]** | | 1.31 | **1.040** |" in lines
    assert "| `1f1b` | 31.0 | 30.4 | 30.9 | 8 | 0 |" in lines and "| `v` | **31.0** | 8.6 | | 8 | 16 |" in lines


def test_Differ_AnotherDigitOrNumber_IsSeen() -> None:
    assert not differ("1.34 [1.31, 1.38]", [1.3411, 1.3086, 1.3754])
    assert differ("1.35 [1.31, 1.38]", [1.3411, 1.3086, 1.3754]) and differ("1.34", [1.34, 1.3])


def test_LayersThatMove_EachLine_IsThatOfTheRecord() -> None:
    page = " ".join((PAGES / "stages.md").read_text().split())
    found = record("live")
    for name in ("stall", "latencies", "decided"):
        for line in found[name]["said"]:
            assert f"- {name}: {line}" in page, line
