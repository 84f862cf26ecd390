# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice simulate --device`: counts equal the table, times are within 2 % of it, the clock, and errors.

    .venv/bin/python python_plugin/sluice/test/test_sluice_device.py --update      writes the table for a change that is
                                                                                   meant to move it

python_plugin/sluice/planning/prices/README.md says when the table may change.
"""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sluice.planning import device_prices, device_step, simulate_command
from sluice.planning.errors import BadInput

TABLE = Path(__file__).resolve().parent / "priced_steps.json"
SIZES = [(1, 1), (8, 1), (8, 3)]  # ranks, chunks
CASES = [
    (f"{shape} {ranks}" + (f" in {chunks}" if chunks > 1 else ""), shape, ranks, chunks)
    for shape in device_step.SHAPES
    for ranks, chunks in SIZES
]
NEAR = 0.02  # of milliseconds


def _row(step: device_step.Step) -> dict[str, Any]:
    return {**vars(step.counts), "ms": round(step.seconds * 1e3, 3)}


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Returns the differences of a step from the table that are not allowed."""
    names = [name for name in wanted if name != "ms" and found[name] != wanted[name]]
    if abs(found["ms"] - wanted["ms"]) > NEAR * wanted["ms"]:
        names.append("ms")
    return [f"{name} is {found[name]}, the table has {wanted[name]}" for name in names]


@pytest.fixture(autouse=True)
def _engine_chooses(monkeypatch) -> None:
    monkeypatch.delenv(device_step.GEMMS_BY, raising=False)


@pytest.fixture(scope="module")
def prices() -> device_prices.Prices:
    return device_prices.load("h200")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("name, shape, ranks, chunks", CASES)
def test_Step_OfAShape_CountsAndTimesAreTheTables(
    prices, table, name: str, shape: str, ranks: int, chunks: int
) -> None:
    step, _ = device_step.run(shape, ranks, chunks, prices)
    different = _differences(_row(step), table[name])
    assert not different, f"{name}: {'; '.join(different)} (prices/README.md says how the table may change)"


# Row bytes of an earlier version, whose messages were not ordered by expert. At most three quarters may remain.
PACKED_BY_SOURCE = {"mixtral": 4913285592, "qwen3": 9392960448, "deepseek": 32870131800}


@pytest.mark.parametrize("shape", device_step.SHAPES)
def test_Table_EightRanks_IsWithinTheBoundsOfAStep(table, shape: str) -> None:
    row = table[f"{shape} 8"]
    forward, backward = row["forward_launches"], row["launches"] - row["forward_launches"]
    assert (forward <= 30, backward <= 45) == (True, True), f"{forward} + {backward} launches"
    assert row["launches"] == table["mixtral 8"]["launches"], "launches depend on the number of experts"
    assert (row["groups"] <= 5, row["waits"], row["headers"]) == (True, 1, 2)
    assert row["row_bytes"] <= 0.75 * PACKED_BY_SOURCE[shape]
    # Three chunks make at most three times as many launches and groups, but do not read more.
    divided = table[f"{shape} 8 in 3"]
    assert divided["forward_launches"] <= 3 * forward and divided["groups"] <= 3 * row["groups"]
    assert divided["launches"] - divided["forward_launches"] <= 3 * 45
    assert (divided["waits"], divided["headers"]) == (row["waits"], row["headers"])


@pytest.mark.parametrize("shape", device_step.SHAPES)
def test_Table_OneRank_MovesHardlyMoreThanTheLeast(table, shape: str) -> None:
    of = device_step.SHAPES[shape]
    # Each token is read once and written K times, once in forward and twice in backward; K rows are summed in both.
    least = 2 * of.model_width * of.tokens * 5 * (of.top_k + 1)
    assert least <= table[f"{shape} 1"]["row_bytes"] <= 1.15 * least


KINDS = {
    **{"launch": "launches", "host_wait": "waits", "wait": "event_waits", "messages": "groups", "header": "headers"},
    **{"gemm": "single_calls", "copy": "copies", "host_call": "other_calls"},
}


def test_Count_OneMoreCallOfEachKind_IsCounted(prices) -> None:
    events = device_step.record(device_step.SHAPES["mixtral"], 8, 1, prices)
    rank = device_step.busiest(events)
    before = vars(device_step.count(events))
    for kind, name in KINDS.items():
        calls = [["host_call", rank, "cuMemAlloc"], *(event for event in events if event[:2] == [kind, rank])]
        after = vars(device_step.count([*events, next(call for call in calls if call[0] == kind)]))
        assert after[name] == before[name] + 1, kind


def test_Step_OtherWayOfGemms_IsSaidAndCounted(prices, table, monkeypatch) -> None:
    monkeypatch.setenv(device_step.GEMMS_BY, "grouped")
    step, _ = device_step.run("mixtral", 1, 1, prices)
    assert (step.gemms_by, step.counts.single_calls) == ("grouped", 0)
    assert step.counts.grouped_calls > 0 == table["mixtral 1"]["grouped_calls"]
    # Each grouped call has written its tables of pointers by three launches.
    assert step.counts.launches - table["mixtral 1"]["launches"] == 3 * step.counts.grouped_calls


# ---- the clock in cases with a known result


def _prices(prices: device_prices.Prices, **sections: Any) -> device_prices.Prices:
    data = copy.deepcopy(prices.data)
    data["host"] = dict.fromkeys(data["host"], 1e-9)
    for name, values in sections.items():
        data[name] = {**data[name], **values} if isinstance(values, dict) else values
    return device_prices.Prices(data, "a test")


def _launch(rank: int, stream: int, units: int = 10**6, moved: int = 3_600_000_000) -> list[Any]:
    """Returns a move of rows whose bytes take a millisecond, and which fills the SMs unless it has few units."""
    return ["launch", rank, stream, "sluice_move_rows", units, 16, moved, 0]


def _group(rank: int, number: int, size: int, stream: int = 1, messages: int = 2) -> list[Any]:
    return ["messages", rank, stream, 5, number, [[1 - rank, size, size]], messages]


FILLS, SHORT, MB = _launch(0, 0), _launch(0, 0, units=8, moved=1), 10**6
SLOW_HOST = {"host": {"launch": 1e-3, "synchronize": 5e-3, "query": 1e-9, "query_period": 4e-3}}
SLOW_HEADER = {"host": {"header": 2e-3, "launch": 1e-3}}
SLOW_LINK = {"link": {"bytes_per_second": 1e9, "start_seconds": 1e-6}}
SLOW_MESSAGES = {"host": {"messages": 1e-3, "message": 1e-4}, "link": {"bytes_per_second": 1e15, "start_seconds": 1e-9}}
# What runs: the changed prices, the calls, milliseconds.
CLOCK = {
    "one launch": ({}, [FILLS], 1),
    "a stream adds": ({}, [FILLS, FILLS], 2),
    "two streams share the SMs": ({}, [FILLS, _launch(0, 1)], 2),
    "a quarter of the SMs each": ({}, [_launch(0, stream, units=8 * 33) for stream in range(4)], 1),
    "an event orders streams": ({}, [_launch(0, 0, 8), ["record", 0, 0, 7], ["wait", 0, 1, 7], _launch(0, 1, 8)], 2),
    "an old event has passed": ({}, [_launch(0, 0, 8), ["wait", 0, 1, 3], _launch(0, 1, 8)], 1),
    "launches cost the host": (SLOW_HOST, [SHORT] * 3, 3),
    "a wait": (SLOW_HOST, [SHORT, ["record", 0, 0, 1], ["host_wait", 0, 1, "synchronize"], SHORT], 7),
    "a query": (SLOW_HOST, [FILLS, ["record", 0, 0, 1], ["host_wait", 0, 1, "query"], SHORT], 6),  # ready after 1 ms
    "a late host": (SLOW_HEADER, [["header", 0], _launch(1, 0, units=8, moved=1), ["header", 1]], 3),
    "headers meet on the hosts alone": (SLOW_HEADER, [FILLS, ["header", 0], ["header", 1], SHORT], 4),
    "messages cost the host each": (SLOW_MESSAGES, [_group(rank, 0, 1, messages=20) for rank in (0, 1)], 3),
    "a group": (SLOW_LINK, [_group(0, 0, MB), _group(1, 0, MB)], 1),
    "a group with a late rank": (SLOW_LINK, [_group(0, 0, MB), _launch(1, 1), _group(1, 0, MB)], 2),
    "groups of a communicator": (SLOW_LINK, [_group(r, n, MB, stream=1 + n) for n in (0, 1) for r in (0, 1)], 2),
}


@pytest.mark.parametrize("what", CLOCK)
def test_Clock_KnownCase_TakesItsTime(prices, what: str) -> None:
    sections, events, milliseconds = CLOCK[what]
    found = device_step.priced(_prices(prices, **sections), events).seconds
    assert found == pytest.approx(1e-3 * milliseconds, rel=1e-2 if sections else 1e-3)


@pytest.mark.parametrize(
    ("events", "ranks"),
    [
        ([["header", 0], ["header", 0], ["header", 1]], "0"),
        ([_group(0, 0, 1), ["messages", 1, 1, 5, 1, [[0, 1, 1]], 2]], "0, 1"),
    ],
)
def test_Clock_CallsThatNobodyAnswers_AreRefused(prices, events: list, ranks: str) -> None:
    with pytest.raises(BadInput, match=rf"ranks \[{ranks}\] wait for events that no rank produces"):
        device_step.priced(_prices(prices), events)


@pytest.mark.parametrize(
    "units, priority, wanted",
    [
        (8448 * 100, 0, 0.3125e-3),  # a quarter of the SMs for 0.25 ms, next to work for all: 0.8 of its speed
        (8448 * 100, -1, 0.25e-3),  # that work has short blocks, which soon make room
        (8448, -1, 0.3125e-3),  # each of its blocks runs for a millisecond
    ],
)
def test_Clock_WorkOfHigherPriority_GoesAheadAsBlocksEnd(prices, units: int, priority: int, wanted: float) -> None:
    events = [["priority", 0, 2, priority], _launch(0, 1, units), _launch(0, 2, 8 * 33, 900_000_000)]
    result = device_step.priced(_prices(prices), [*events, ["record", 0, 2, 7]])
    assert result.ranks[0].done[7] == pytest.approx(wanted, rel=0.02)
    assert result.seconds == pytest.approx(1.0625e-3, rel=0.01)  # no work is lost


# ---- refusals


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--device a100 --shape qwen3", r"profile a100-8x8-1600g has no prices of a device's calls: there are .* h200"),
        ("--device h200-8x8 --shape qwen3", "profile h200-8x8 has no prices of a device's calls"),
        ("--device b300 --shape qwen3", r"'b300': neither a device with prices nor a file: there are prices of h200"),
        ("--device h200 --shape qwen4", r"--shape 'qwen4': known are mixtral, qwen3, deepseek"),
        ("--device h200 --shape mixtral --ranks 3", r"--ranks 3: 8 experts are held by one of 1, 2, 4, 8 ranks"),
        ("--device h200 --shape qwen3 --ranks 16", r"--ranks 16: 128 experts are held by one of 1, 2, 4, 8 ranks"),
        ("--device h200 --shape qwen3 --chunks 0", r"--chunks is 0; it must be above 0"),
        ("--device h200 --shape qwen3 --chunks 65", r"chunks is 65; it must be from 1 to 64"),
        ("--device h200 --shape qwen3 --events .", r"--events \.: it is a folder"),
    ],
)
def test_Command_WrongInput_IsRefusedByName(capsys, words: str, expected: str) -> None:
    status = simulate_command.main(words.split())
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith("sluice simulate: ") and captured.err.count("\n") == 1
    assert re.search(expected, captured.err), captured.err


def _changed(prices: device_prices.Prices, path: Path, change) -> str:
    data = copy.deepcopy(prices.data)
    change(data)
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda data: data.pop("sluice_device_prices"), "not a file of prices"),
        (lambda data: data["host"].pop("launch"), "no price for host.launch"),
        (lambda data: data["kernel"].update(least_seconds=0), "no price for kernel.least_seconds"),
        (lambda data: data["kernels"]["gather_rows"].pop("elements"), "no price for kernels.gather_rows.elements"),
        (lambda data: data["gemm"]["grouped"].update(tiles=[]), "gemm.grouped.tiles must be a list"),
        (lambda data: data["kernels"].pop("combine_rows"), "combine_rows_bf16 has no price: add it to 'kernels'"),
        (lambda data: data.update(device_bytes=10**9), "ask for more ranks or fewer tokens"),
        (lambda data: data.update(device_bytes=3 * 10**9), "does not hold this layer on 1 ranks: ask for more ranks"),
    ],
)
def test_Command_PricesThatLackSomething_AreRefusedByName(capsys, prices, tmp_path, change, expected: str) -> None:
    path = _changed(prices, tmp_path / "own.json", change)
    assert simulate_command.main(["--device", path, "--shape", "qwen3"]) == 2
    assert expected in capsys.readouterr().err


def test_Command_MissingProgram_SaysWhatToDo(capsys, monkeypatch) -> None:
    monkeypatch.setenv(device_step.ENVIRONMENT, "nowhere/sluice-dry-step")
    assert simulate_command.main("--device h200 --shape qwen3".split()) == 2
    assert "does not exist, which records a step: unset SLUICE_DRY_STEP" in capsys.readouterr().err


def test_Command_Step_IsPrintedAsAModelAndItsCallsAreWritten(capsys, tmp_path, table) -> None:
    path = tmp_path / "calls.json"
    words = ["--device", "H200", "--shape", "mixtral", "--ranks", "1", "--events", str(path)]
    assert simulate_command.main(words) == 0
    text = capsys.readouterr().out
    wanted = table["mixtral 1"]
    for line in ("mixtral on 1 H200, n = 1: a model, not a measurement", "never publish one as a result"):
        assert line in text
    for part in (f"{wanted['ms']:.2f} ms", f"{wanted['launches']}: {wanted['forward_launches']} forward", " of NCCL"):
        assert part in text
    events = json.loads(path.read_text())
    assert vars(device_step.count(events)) == {name: wanted[name] for name in vars(device_step.count(events))}


def _update() -> None:
    prices = device_prices.load("h200")
    rows = {name: _row(device_step.run(*case, prices)[0]) for name, *case in CASES}
    lines = ",\n".join(f" {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    _update()
