# SPDX-License-Identifier: Apache-2.0
"""Tests the file of kept decisions: by machine, merged, whole; only Sluice's own files are moved or written. Also tests
that of last decisions: no lost or partial writes; a damaged file is replaced with a warning; doctor."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
from typing import Any

import pytest
from sluice import decision_cache, decision_log, doctor
from sluice.errors import NoMemory

HERE, THERE = "this machine", "that machine"


def _answer(layer: int, rows: int, n: int = 2, **more: Any) -> dict[str, Any]:
    return {"layer": f"{layer:016x}", "rows": rows, "num_chunks": n, "wgrad_mode": "deferred", **more}


def _merge_many(path: str, who: int) -> None:
    for number in range(10):
        rows = 1 << (10 * who + number)  # each of another size
        decision_cache.merge(path, HERE, [_answer(1, rows)])
        decision_log.append([{"rows": rows}], os.path.dirname(path))


def test_Merge_ManyProcesses_LosesNothing(tmp_path) -> None:
    """The same holds for the log of last decisions."""
    path = tmp_path / "folder" / "kept.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_merge_many, args=(str(path), who)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    for found in (decision_cache.read(str(path), HERE), decision_log.read(str(path.with_name(decision_log.NAME)))):
        assert sorted(each["rows"] for each in found) == [1 << n for n in range(40)]
    names = ("kept.json", decision_log.NAME)
    assert set(os.listdir(path.parent)) == {*names, *(f"{name}.lock" for name in names)}


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_Merge_FileSystemWithoutLocks_KeepsThemAndSaysItOnce(tmp_path, monkeypatch, capfd, error: int) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = str(tmp_path / "kept.json")
    for rows in (64, 128):
        decision_cache.merge(path, HERE, [_answer(1, rows)])
    assert decision_cache.read(path, HERE) == [_answer(1, 64), _answer(1, 128)]
    assert decision_log.append([{"rows": 3}], str(tmp_path)) is not None
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and all("cannot be locked" in line for line in said), said  # one for each file


def test_Merge_LockThatFailsOtherwise_IsToldAsBefore(tmp_path, monkeypatch, capfd) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    decision_cache.merge(str(tmp_path / "kept.json"), HERE, [_answer(1, 64)])
    assert "Input/output error" in capfd.readouterr().err and not (tmp_path / "kept.json").exists()


def test_Merge_SameLayersAndSize_TheNewestStays(tmp_path) -> None:
    path = str(tmp_path / "kept.json")
    plan = {"restore_input": "keep", "restore_pre_activation": "recompute"}
    decision_cache.merge(path, THERE, [_answer(1, 64, 8)])
    decision_cache.merge(path, HERE, [_answer(1, 64, 2), _answer(1, 128, 4), _answer(1, 64, 3, **plan)])
    decision_cache.merge(path, HERE, [_answer(1, 66, 6)])  # of the same size, in steps of 2^(1/4)
    assert decision_cache.read(path, THERE) == [_answer(1, 64, 8)]
    assert decision_cache.read(path, HERE) == [_answer(1, 128, 4), _answer(1, 64, 3, **plan), _answer(1, 66, 6)]
    assert decision_cache.read(path, "another") == []


def test_Merge_Exported_IsThisMachines(tmp_path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(decision_cache.text_of([_answer(1, 64)]))
    assert decision_cache.read(str(path), HERE) == [_answer(1, 64)]
    decision_cache.merge(str(path), HERE, [_answer(2, 64)])
    assert decision_cache.read(str(path), HERE) == [_answer(1, 64), _answer(2, 64)]
    assert list(json.loads(path.read_text())["machines"]) == [HERE]


def test_Take_RefusedByTheLibrary_MovedAsideWithAWord(tmp_path, capsys) -> None:
    path = tmp_path / "kept.json"
    decision_cache.merge(str(path), HERE, [_answer(1, 64)])

    def refuse(text: str) -> None:
        assert json.loads(text)["answers"] == [_answer(1, 64)]
        raise ValueError("field nine is odd")

    assert decision_cache.take(str(path), HERE, refuse) == ""
    said = capsys.readouterr().err
    assert "field nine is odd" in said and "training continues" in said
    assert os.listdir(tmp_path).count("kept.json.damaged") == 1 and not path.exists()
    assert decision_cache.take(str(path), HERE, refuse) == ""  # there is none: the library is not called


def test_Take_LibraryFailsForAnotherReason_TheFileStays(tmp_path) -> None:
    """The file is valid; the error has another cause."""
    path = tmp_path / "kept.json"
    decision_cache.merge(str(path), HERE, [_answer(1, 64)])
    before = path.read_text()

    def fail(text: str) -> None:
        raise NoMemory("no room for 3 answers")

    with pytest.raises(NoMemory):
        decision_cache.take(str(path), HERE, fail)
    assert path.read_text() == before and set(os.listdir(tmp_path)) == {"kept.json", "kept.json.lock"}


OURS = {
    "torn": '{\n "sluice_kept_decisions": 2,\n "machines": {"th',
    "torn, exported": '{"sluice_decisions": 3, "answers": [{"la',
    "no lists": '{"sluice_kept_decisions": 2, "machines": {"x": 3}}',
    "no answers": '{"sluice_decisions": 3, "answers": 3}',
    "odd rows": '{"sluice_decisions": 3, "answers": [{"layer": "00", "rows": "many"}]}',
}


STRANGE = {
    "a script": "import torch\n",
    "empty": "",
    "torn": "{",
    "a list": "[]",
    "a ds_config": '{"train_batch_size": 4, "sluice": {"tuner": {"decisions": "sluice_kept_decisions"}}}',
    "a machine": '{"sluice_machine": 2}',
    "last decisions": '{"sluice_last_decisions": 2, "entries": []}',
    "no text": "\x00\x7fELF\udc80",
    "of a later version": '{"sluice_kept_decisions": 9, "machines": {}}',
    "exported by a later version": '{"sluice_decisions": 9, "answers": []}',
}


@pytest.mark.parametrize("what", STRANGE)
def test_Strange_FileOfTheUsers_IsRefusedAndStays(tmp_path, capsys, what: str) -> None:
    """A path may be mistyped: an existing file is neither moved nor written."""
    path = tmp_path / "train.py"
    data = STRANGE[what].encode(errors="surrogateescape")
    path.write_bytes(data)
    with pytest.raises(decision_cache.NotOurs) as caught:
        decision_cache.take(str(path), HERE, lambda text: None)
    assert str(path) in str(caught.value) and "is not changed" in str(caught.value)
    assert "Give a" in str(caught.value)
    decision_cache.merge(str(path), HERE, [_answer(1, 64)])  # at the end of a run, which does not fail for it
    assert "the decisions of this run are not kept" in capsys.readouterr().err
    assert path.read_bytes() == data
    left = set(os.listdir(tmp_path))
    assert left == {"train.py"} or ("version" in what and left == {"train.py", "train.py.lock"})


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("kept.json", text) for text in OURS.values()), *((decision_cache.NAME, text) for text in STRANGE.values())],
    ids=[*OURS, *STRANGE],
)
def test_Damaged_FileOfOurs_MovedAsideAndBegunAnew(tmp_path, capsys, name: str, text: str) -> None:
    """With "decisions": true Sluice chooses the name, so any file of it is ours."""
    path, data = tmp_path / name, text.encode(errors="surrogateescape")
    for move in (
        lambda: decision_cache.take(str(path), HERE, lambda text: None),
        lambda: decision_cache.merge(str(path), HERE, [_answer(1, 64)]),
    ):
        path.write_bytes(data)
        assert not move() and "is damaged" in capsys.readouterr().err
        assert path.with_name(f"{name}.damaged").read_bytes() == data
    assert decision_cache.read(str(path), HERE) == [_answer(1, 64)]


def test_Folder_NotToBeWrittenOrRead_SaidAndLetGo(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    decision_cache.merge(str(tmp_path / "file" / "kept.json"), HERE, [_answer(1, 64)])
    assert "are not kept" in capsys.readouterr().err
    assert decision_cache.take(str(tmp_path), HERE, lambda text: None) == ""
    assert "continues without" in capsys.readouterr().err


@pytest.mark.parametrize("cache, where", [("/named", "/named/kept_decisions.json"), (None, "/env/kept_decisions.json")])
def test_Place_TrueOrPath(monkeypatch, cache: str | None, where: str) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", "/env")
    assert decision_cache.place(True, cache) == where
    assert decision_cache.place("/a/path", cache) == "/a/path"


def test_Words_NameWhatAnswersDependOn(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    words = decision_cache.machine_words("cpu", "host", 4, "1 host", "auto", "1.2")
    assert words.startswith("version 1.2; device cpu, ")
    assert ", 3 threads; link host, 4 ranks on 1 host; GEMMs auto" in words
    assert decision_cache.machine_words("cpu", "host", 4, "2 hosts (0 0 2 2)", "auto", "1.2") != words
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        try:
            os.sched_setaffinity(0, {min(allowed)})
            assert decision_cache.machine_words("cpu", "host", 4, "1 host", "auto", "1.2") != words
        finally:
            os.sched_setaffinity(0, allowed)


ENTRY = {
    "model_width": 8,
    "hidden_width": 16,
    "num_experts": 4,
    "rows": 64,
    "num_chunks": 2,
    "why": "raced",
    "ranks": 2,
}


def test_Append_MoreThanAreKept_DropsTheOldest(tmp_path) -> None:
    decision_log.append([{**ENTRY, "rows": n} for n in range(40)], str(tmp_path))
    path = decision_log.append([{**ENTRY, "rows": n} for n in range(40, 80)], str(tmp_path))
    assert path is not None
    assert [entry["rows"] for entry in decision_log.read(path)] == list(range(16, 80))
    assert decision_log.append([], str(tmp_path)) is None


def test_Replace_File_IsOnTheDiskBeforeItHasItsName(tmp_path, monkeypatch) -> None:
    seen, sync, rename = [], os.fsync, os.replace

    def note_sync(handle: int) -> None:
        seen.append(("synced", os.fstat(handle).st_ino, os.fstat(handle).st_size))
        sync(handle)

    def note_rename(old: str, new: str) -> None:
        seen.append(("renamed", os.stat(old).st_ino, os.stat(old).st_size))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    decision_log.replace(str(tmp_path / "file"), "text")
    assert [what for what, *_ in seen] == ["synced", "renamed"]
    assert seen[0][1:] == seen[1][1:] and seen[0][2] == 4


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"sluice_last_decisions": 9}', '{"sluice_last_decisions": 2, "entries": 3}']
)
def test_Append_DamagedFile_BeginsAnewWithAWord(tmp_path, capsys, monkeypatch, text) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    path = tmp_path / decision_log.NAME
    path.write_text(text)
    (finding,) = doctor._decisions()
    assert finding.state == doctor.NOTE and "damaged" in finding.detail and finding.advice
    decision_log.append([ENTRY])
    assert "is damaged" in capsys.readouterr().err
    assert len(decision_log.read(str(path))) == 1
    assert (tmp_path / (decision_log.NAME + ".damaged")).read_text() == text


def test_Append_FolderCannotBeMade_IsLetGo(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert decision_log.append([ENTRY], str(tmp_path / "file" / "below")) is None


WAYS = [{"chose_deduplication": True, "deduplicate": way} for way in (False, "node")]


def test_Doctor_LastDecisions_AreShown(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    (finding,) = doctor._decisions()
    assert finding.state == doctor.OK and "none in" in finding.detail
    plan = {"restore_input": "keep", "restore_pre_activation": "recompute"}
    part = {**plan, "kept_chunks": 1}
    decision_log.append(
        [{**ENTRY, "rows": n} for n in range(7)]
        + [{**ENTRY, **way} for way in WAYS]
        + [{**ENTRY, **part}, {**ENTRY, **plan}]
    )
    found = list(doctor._decisions())
    assert len(found) == doctor.LAST and all(finding.state == doctor.OK for finding in found)
    assert "M 8, H 16, E 4 on 2 ranks, 64 rows: n 2, T_DI keep, T_M recompute (raced)" in found[-1].detail
    assert "n 2, T_DI keep, T_M recompute in the first 1 (raced)" in found[-2].detail
    assert "n 2, rows sent (raced)" in found[-4].detail and "n 2, deduplicated by node (raced)" in found[-3].detail
    assert json.loads((tmp_path / decision_log.NAME).read_text())["sluice_last_decisions"] == 2
