"""The file of kept decisions: by machine, merged, whole, and never a reason to stop."""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

import pytest
from sluice import kept_decisions

HERE, THERE = "this machine", "that machine"


def _answer(layer: int, rows: int, n: int = 2, **more: Any) -> dict[str, Any]:
    return {"layer": f"{layer:016x}", "rows": rows, "num_chunks": n, "wgrad_mode": "deferred", **more}


def _merge_many(path: str, who: int) -> None:
    for number in range(10):
        kept_decisions.merge(path, HERE, [_answer(100 * who + number, 64)])


def test_Merge_ManyProcesses_LosesNothing(tmp_path) -> None:
    path = str(tmp_path / "folder" / "kept.json")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_merge_many, args=(path, who)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = kept_decisions.read(path, HERE)
    assert sorted(int(answer["layer"], 16) for answer in found) == [
        100 * who + n for who in range(4) for n in range(10)
    ]
    assert set(os.listdir(tmp_path / "folder")) == {"kept.json", "kept.json.lock"}


def test_Merge_SameLayersAndSize_TheNewestStays(tmp_path) -> None:
    path = str(tmp_path / "kept.json")
    plan = {"restore_input": "keep", "restore_middle": "recompute"}
    kept_decisions.merge(path, THERE, [_answer(1, 64, 8)])
    kept_decisions.merge(path, HERE, [_answer(1, 64, 2), _answer(1, 128, 4), _answer(1, 64, 3, **plan)])
    kept_decisions.merge(path, HERE, [_answer(1, 66, 6)])  # of the same size, in steps of 2^(1/4)
    assert kept_decisions.read(path, THERE) == [_answer(1, 64, 8)]
    assert kept_decisions.read(path, HERE) == [_answer(1, 128, 4), _answer(1, 64, 3, **plan), _answer(1, 66, 6)]
    assert kept_decisions.read(path, "another") == []


def test_Merge_Exported_IsThisMachines(tmp_path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(kept_decisions.text_of([_answer(1, 64)]))
    assert kept_decisions.read(str(path), HERE) == [_answer(1, 64)]
    kept_decisions.merge(str(path), HERE, [_answer(2, 64)])
    assert kept_decisions.read(str(path), HERE) == [_answer(1, 64), _answer(2, 64)]
    assert list(json.loads(path.read_text())["machines"]) == [HERE]


def test_Take_RefusedByTheLibrary_MovedAsideWithAWord(tmp_path, capsys) -> None:
    path = tmp_path / "kept.json"
    kept_decisions.merge(str(path), HERE, [_answer(1, 64)])

    def refuse(text: str) -> None:
        assert json.loads(text)["answers"] == [_answer(1, 64)]
        raise ValueError("field nine is odd")

    assert kept_decisions.take(str(path), HERE, refuse) == ""
    said = capsys.readouterr().err
    assert "field nine is odd" in said and "training goes on" in said
    assert os.listdir(tmp_path).count("kept.json.damaged") == 1 and not path.exists()
    assert kept_decisions.take(str(path), HERE, refuse) == ""  # there is none: nobody is asked


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"train_batch_size": 4}',
        '{"sluice_kept_decisions": 9, "machines": {}}',
        '{"sluice_kept_decisions": 1, "machines": {"x": 3}}',
        '{"sluice_decisions": 2, "answers": 3}',
        '{"sluice_decisions": 2, "answers": [{"layer": "00", "rows": "many"}]}',
    ],
)
def test_Merge_DamagedFile_MovedAsideAndBegunAnew(tmp_path, capsys, text: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(text)
    kept_decisions.merge(str(path), HERE, [_answer(1, 64)])
    assert "is damaged" in capsys.readouterr().err
    assert (tmp_path / "kept.json.damaged").read_text() == text
    assert kept_decisions.read(str(path), HERE) == [_answer(1, 64)]


def test_Folder_NotToBeWrittenOrRead_SaidAndLetGo(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    kept_decisions.merge(str(tmp_path / "file" / "kept.json"), HERE, [_answer(1, 64)])
    assert "are not kept" in capsys.readouterr().err
    assert kept_decisions.take(str(tmp_path), HERE, lambda text: None) == ""
    assert "goes on without" in capsys.readouterr().err


@pytest.mark.parametrize("cache, where", [("/named", "/named/kept_decisions.json"), (None, "/env/kept_decisions.json")])
def test_Place_TrueOrPath(monkeypatch, cache: str | None, where: str) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", "/env")
    assert kept_decisions.place(True, cache) == where
    assert kept_decisions.place("/a/path", cache) == "/a/path"


def test_Words_NameWhatAnswersDependOn(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = kept_decisions.machine_words("cpu", "host", 4, "auto", "1.2")
    assert words.startswith("version 1.2; device cpu, ") and ", 3 threads; link host, 4 ranks; products auto" in words
