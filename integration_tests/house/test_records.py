"""Records of benchmarks: small summaries that say how to repeat them; raw samples stay where they were measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.measuring import records, stats

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted(records.FOLDER.glob("*.json"))
COMMITTED = [file for file in COMMITTED if not file.name.endswith(".raw.json")]
MOST_BYTES, MOST_BYTES_OF_ALL = 20_000, 260_000


def samples(value: Any, name: str = "") -> list[str]:
    """Names of lists of numbers that are longer than two ranks need. Rows of tables are of words and numbers."""
    if name in records.SETTINGS:
        return []
    if isinstance(value, dict):
        return [each for key, part in value.items() for each in samples(part, key)]
    if isinstance(value, list):
        if len(value) > records.PAIR and all(isinstance(part, (int, float)) for part in value):
            return [name]
        return [each for part in value for each in samples(part, name)]
    return []


def test_Committed_AllFiles_AreSmall() -> None:
    sizes = {f.name: f.stat().st_size for f in records.FOLDER.iterdir() if not f.name.endswith(".raw.json")}
    assert len(sizes) > 30
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}
    assert sum(sizes.values()) <= MOST_BYTES_OF_ALL


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_Committed_EachRecord_SaysHowToRepeatItAndHasNoSamples(file: Path) -> None:
    record = json.loads(file.read_text())
    assert list(record)[:4] == ["command", "date", "machine", "versions"]
    assert record["command"].startswith("python -m integration_tests.benchmarks.")
    module = record["command"].split()[2].rpartition(".")[2]
    benchmarks = ROOT / "integration_tests" / "benchmarks"
    assert (benchmarks / f"{module}.py").exists() or (benchmarks / module / "__main__.py").exists()
    assert len(record["date"]) == 10 and {"cpu", "cores", "kernel"} <= set(record["machine"])
    assert {"python", "torch", "sluice"} <= set(record["versions"])
    assert samples(record) == []
    assert records.reduced(record) == record  # as `write` leaves it


def test_Samples_PlantedInARecord_AreFound() -> None:
    assert samples({"plan": {"chunks": [1, 2, 4]}, "lines": [{"wall_s": [1.0, 2.0, 3.0], "ranks": [0, 1]}]}) == [
        "wall_s"
    ]


def test_RawFiles_AreIgnoredByGit() -> None:
    raw = records.raw_file(records.FOLDER / "grid.json").relative_to(ROOT)
    assert subprocess.run(["git", "check-ignore", "-q", str(raw)], cwd=ROOT).returncode == 0
    listed = subprocess.run(["git", "ls-files", str(records.FOLDER)], cwd=ROOT, capture_output=True, text=True).stdout
    assert ".raw.json" not in listed


MEASURED = {
    "plan": {"chunks": [1, 2, 4]},
    "seed": 1,
    "sides": {"stock": {"wall_s": [1.0, 2.0, 4.0], "wall": {"count": 3, "q1": 1.5, "median": 2.0, "q3": 3.0}}},
    "steps_s": [1.0, 2.0, 4.0],
    "gflops_before_rounds": [3, 1, 2],
    "raced": [True, False, False],
    "ranks": [0.25, 0.5],
    "sluice_stats": {"chunks": 2, "num_walks": 7, "gemm": "native"},
    "lines": [{"n": 1, "name": "a", "none": []}, {"n": 2, "name": "b"}, {"n": 3, "name": "c", "more": 1 / 3}],
    "bytes": 123456789.0,
}


def test_Write_Samples_StandInTheRawFileAndTheirQuartilesInTheRecord(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["/some/where/layer.py", "--pairs", "3", "--records", "/else/where", "--routing", "/here/loads.json"]
    monkeypatch.setattr("sys.argv", argv)
    file = tmp_path / "folder" / "layer.json"
    records.write(file, MEASURED, {"seed": 2})
    whole, record = json.loads(records.raw_file(file).read_text()), json.loads(file.read_text())
    assert {key: whole[key] for key in MEASURED} == MEASURED
    command = "python -m integration_tests.benchmarks.layer --pairs 3 --routing loads.json"
    assert whole["command"] == record["command"] == command
    assert record["seed"] == 2 and record["plan"] == MEASURED["plan"]
    assert record["sides"] == {"stock": {"wall": 2.0}}
    assert record["steps_s"] == {"count": 3, "q1": 1.5, "median": 2.0, "q3": 3.0}
    assert record["gflops_before_rounds"] == {"count": 3, "least": 1, "most": 3}
    assert record["raced"] == {"count": 3, "true": 1} and record["ranks"] == [0.25, 0.5]
    assert record["sluice_stats"] == {"chunks": 2, "gemm": "native"} and record["bytes"] == 123456789
    assert record["lines"]["rows"] == [[1, "a", None], [2, "b", None], [3, "c", 0.33333]]
    assert records.rows_of(record["lines"])[1:] == [{"n": 2, "name": "b"}, {"n": 3, "name": "c", "more": 0.33333}]
    assert records.reduced(record) == record and sorted(path.name for path in file.parent.iterdir()) == [
        "layer.json",
        "layer.raw.json",
    ]


def test_RowsOf_ShortList_IsTheListItself() -> None:
    assert records.rows_of([{"n": 1}]) == [{"n": 1}]


def test_TextOf_ManyFields_FillsLinesAndReadsBackTheSame() -> None:
    value = {"row": {f"name {at}": at for at in range(40)}, "rows": [["a", 1, {"b": 2}]] * 30, "empty": []}
    text = records.text_of(value)
    assert json.loads(text) == value
    assert max(map(len, text.splitlines())) <= records.WIDTH and len(text.splitlines()) < 45


def test_LossDifferences_LaterOnesLarger_FirstTenStandApart() -> None:
    stock = [2.0] * 10 + [1.0, 1.0]
    sluice = [2.0] * 9 + [2.5, 2.0, 1.5]
    found = stats.loss_differences(stock, sluice)
    assert found == {"max_loss_difference": 1.0, "max_loss_difference_share_of_first_10": 0.25}
