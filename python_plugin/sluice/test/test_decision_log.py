# SPDX-License-Identifier: Apache-2.0
"""Tests the file of last decisions: no lost or partial writes; a damaged file is replaced with a warning; doctor."""

import json
import os

import pytest
from sluice import decision_log, doctor

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
