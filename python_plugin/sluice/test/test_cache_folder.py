# SPDX-License-Identifier: Apache-2.0
"""Tests which folder keeps files for later runs, and which files are read back."""

import json
import os
import pwd

import pytest
from sluice import _library, cache_folder, decision_cache, decision_log, doctor, file_trust
from sluice.planning import machines

SOMEBODY = 4242  # another user
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("SLUICE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def _nobody(uid):
    raise KeyError(uid)


def test_Place_ByTheEnvironment_IsAbsolute(home, monkeypatch):
    usual = str(home / ".cache" / "sluice")
    assert cache_folder.place() == cache_folder.for_code() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder.place() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder.place() == "/elsewhere/sluice"
    monkeypatch.setenv("SLUICE_CACHE_DIR", "/named")
    assert cache_folder.place() == "/named" and cache_folder.place("as/given") == "as/given"


@pytest.mark.parametrize("named", [None, "", "relative", "~"])
def test_Place_HomeThatIsNone_IsThatOfTheListOfUsers(home, monkeypatch, named):
    if named is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", named)
    assert cache_folder.place() == os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "sluice")
    monkeypatch.setattr(cache_folder.pwd, "getpwuid", _nobody)
    with pytest.raises(cache_folder.NoCacheFolder, match="set SLUICE_CACHE_DIR"):
        cache_folder.place()


def test_NoHome_DoctorAndTheLogOfDecisions_GoOnWithout(home, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(cache_folder.pwd, "getpwuid", _nobody)
    monkeypatch.chdir(home)
    assert decision_log.append([{"why": "raced"}]) is None and os.listdir(home) == []
    kept = [finding for finding in doctor.examine() if finding.check in ("calibration", "kept decisions")]
    assert [finding.state for finding in kept] == [doctor.NOTE] * 2
    assert all("set SLUICE_CACHE_DIR" in finding.advice for finding in kept)


def test_MakeFolder_AllThatIsNew_IsForThisUserAlone(home):
    file_trust.make_folder(str(home / "a" / "b"))
    assert [(home / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    file_trust.make_folder(str(home / "a" / "b"))


def _change(path, how):
    if how == "owner":
        os.chown(path, SOMEBODY, -1)
    elif how == "link":
        os.rename(path, f"{path}.real")
        os.symlink(f"{path}.real", path)
    elif how == "fifo":
        os.remove(path)
        os.mkfifo(path)
    else:
        os.chmod(path, 0o606)


CHANGES = [
    ("mode", "every user can write it"),
    ("link", "it is a symbolic link"),
    ("fifo", "not a regular file"),
    pytest.param("owner", "it belongs to user 4242", marks=as_root),
]


@pytest.mark.parametrize(("how", "says"), CHANGES)
def test_Decisions_OfOthersInTheDefaultFolder_AreLeftAloneWithAWord(home, capsys, how, says):
    path = decision_log.append([{"why": "raced"}])
    assert path is not None and len(decision_log.read(path)) == 1
    _change(path, how)
    with pytest.raises(file_trust.NotOurs) as refused:
        decision_log.read(path)
    assert says in refused.value.strerror
    (finding,) = doctor._decisions()
    assert finding.state == doctor.NOTE and says in finding.detail
    before = os.lstat(path)
    assert decision_log.append([{"why": "raced"}]) is None
    assert says in capsys.readouterr().err and os.lstat(path).st_ino == before.st_ino


@pytest.mark.parametrize(("how", "says"), CHANGES)
def test_Machines_OfOthersInTheDefaultFolder_AreNotRead(home, how, says):
    folder = home / ".cache" / "sluice"
    folder.mkdir(parents=True)
    path = folder / "machine-0.json"
    path.write_text(f"{machines.FORM}\nkey\n{json.dumps({})}")
    (entry,) = machines.entries()
    assert entry.problem == "of another form"
    _change(str(path), how)
    (entry,) = machines.entries()
    assert entry.problem == "not ours" and says in entry.refusal
    findings = list(doctor._calibration())
    assert findings[0].state == doctor.NOTE and says in findings[0].advice and findings[1].state == doctor.OK


@pytest.mark.parametrize(("how", "says"), CHANGES)
def test_KeptDecisions_OfOthersInTheDefaultFolder_AreLeftAloneWithAWord(home, capsys, how, says):
    path = decision_cache.place(True, None)
    answer = {"layer": "one", "rows": 64}
    decision_cache.merge(path, "machine", [answer])
    assert decision_cache.read(path, "machine") == [answer] and os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    _change(path, how)
    before = os.lstat(path)
    assert decision_cache.take(path, "machine", lambda text: pytest.fail(text)) == ""
    said = capsys.readouterr().err
    assert "cannot be read" in said and says in said
    decision_cache.merge(path, "machine", [answer])
    assert says in capsys.readouterr().err and os.lstat(path).st_ino == before.st_ino


def test_Decisions_WhereTheUserSaysSo_AreReadWithAWord(home, capsys):
    """A user may choose a folder that a team shares."""
    path = decision_log.append([{"why": "raced"}], str(home / "team"))
    assert path is not None and decision_log.read(path) and capsys.readouterr().err == ""
    os.chmod(path, 0o666)
    assert len(decision_log.read(path)) == len(decision_log.read(path)) == 1
    assert capsys.readouterr().err.count(f"{path} is used although every user can write it: chmod go-w") == 1


def test_Library_ThatOthersCanWrite_IsLoadedWithAWord(home, monkeypatch, capsys):
    path = home / "libsluice.so.0"
    path.write_bytes(b"none")
    path.chmod(0o666)
    monkeypatch.setenv("SLUICE_LIBRARY", str(path))
    with pytest.raises(_library.LibraryNotFound):
        _library.load.__wrapped__()
    assert "is used although every user can write it" in capsys.readouterr().err


@as_root
def test_Folder_OutsideOfTheContainer_CountsAsRootsOnTheWayOnly(home, monkeypatch):
    """In a user namespace all files of users outside of it, root included, seem to belong to one user."""
    (home / "way" / "last").mkdir(parents=True)
    os.chown(home / "way", SOMEBODY, -1)
    with pytest.raises(file_trust.NotOurs):
        file_trust.check_folder(str(home / "way" / "last"))
    monkeypatch.setattr(file_trust, "_outside", lambda: SOMEBODY)
    file_trust.check_folder(str(home / "way" / "last"))
    os.chown(home / "way" / "last", SOMEBODY, -1)
    with pytest.raises(file_trust.NotOurs):
        file_trust.check_folder(str(home / "way" / "last"))


def test_GroupOfOneUserAlone_MayWrite_ButNoOther(home, monkeypatch):
    """With umask 002, the group of a user's name can write all files of that user."""
    (home / "way" / "last").mkdir(parents=True)
    (home / "way" / "last").chmod(0o770)
    group = (home / "way" / "last").stat().st_gid
    me = pwd.struct_passwd(("me", "x", 1234, group, "", "/", "/bin/sh"))
    monkeypatch.setattr(file_trust.pwd, "getpwuid", lambda uid: me)
    for name, members, fits in (("me", [], True), ("me", ["me"], True), ("me", ["her"], False), ("staff", [], False)):
        known = file_trust.grp.struct_group((name, "x", group, members))
        monkeypatch.setattr(file_trust.grp, "getgrgid", lambda gid, known=known: known)
        if fits:
            file_trust.check_folder(str(home / "way" / "last"))
        else:
            with pytest.raises(file_trust.NotOurs, match="its group can write it"):
                file_trust.check_folder(str(home / "way" / "last"))
