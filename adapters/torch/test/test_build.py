# SPDX-License-Identifier: Apache-2.0
"""Tests the builder of the shared object with a compiler that only records its calls: its output is not loaded.

Its cache loads only files that this user or root could have written, for this platform; an object in a wheel is
preferred if it fits this release of torch.
"""

import hashlib
import json
import os
import pathlib
import stat
import subprocess
import sys
import zipfile

import pytest
import torch
from sluice import cache_folder, doctor
from sluice.adapters.torch import build, stamps, tuner
from sluice.adapters.torch.build import SOURCES
from sluice.config import TunerOptions
from sluice.errors import InvalidArgument, NotFound

OTHER_TORCH = "2.11.0"  # of the GPU machines on which integration_tests/gpu will run first
VENDOR = pathlib.Path(__file__).resolve().parents[3] / ".venv-vendor"
ONCE = len(SOURCES) + 1  # calls of the compiler: each source, and the link
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo stub {version}; exit 0; fi
echo "$@" >> {log}
sleep {pause}
{extra}
while [ "$1" != "-o" ]; do shift; done
echo made > "$2"
"""


def compiler(folder, extra="", version="1", pause=0.3):
    path = folder / "cxx"
    path.write_text(COMPILER.format(log=folder / "log", extra=extra, version=version, pause=pause))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def calls(folder):
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "sluice.adapters.torch.build", *arguments],
        env=dict(os.environ, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    text = process.communicate(timeout=280)[0]
    return process.returncode, text


@pytest.mark.parametrize("module", ["sluice", "sluice.run", "sluice.adapters.torch.build"])
def test_Modules_RunByName_WarnOfNothing(module):
    """runpy warns if the package has imported the module already."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stderr == "", done


def test_Build_Interrupted_GoesOnWithWhatWasFinished(tmp_path):
    """The last source fails at first. Then only this source is compiled, and no kept objects remain."""
    out, last = tmp_path / "out", SOURCES[-1]
    refuse = f'case "$*" in *{last}*) echo "error: such a pity"; exit 1;; esac'
    code, text = finish(start("--out", str(out), CXX=compiler(tmp_path, refuse)))
    assert code == 1 and calls(tmp_path) == len(SOURCES) and "such a pity" in text and "Traceback" not in text
    assert [name for name in os.listdir(out) if not name.startswith(".")] == []
    code, text = finish(start("--out", str(out), CXX=compiler(tmp_path)))
    assert code == 0 and calls(tmp_path) == len(SOURCES) + 2, text
    assert text.count("compiling") == 1 and last in text
    (made,) = out.glob("_torch_*.so")
    assert sorted(os.listdir(out)) == [".build.lock", made.name, f"{made.name}.stamp"]
    assert finish(start("--out", str(out), CXX=compiler(tmp_path)))[0] == 0 and calls(tmp_path) == len(SOURCES) + 2
    assert finish(start("--out", str(out), "--force", CXX=compiler(tmp_path)))[0] == 0
    assert calls(tmp_path) == len(SOURCES) + 2 + ONCE


def test_Build_FileSystemWithoutLocks_CompilesAndSaysSo(tmp_path):
    """On some network file systems two concurrent builds may both compile; the result is valid."""
    source, library, out = tmp_path / "flock.c", tmp_path / "libflock.so", tmp_path / "out"
    source.write_text("#include <errno.h>\nint flock(int fd, int how) { errno = ENOLCK; return -1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    started = [start("--out", str(out), CXX=compiler(tmp_path), LD_PRELOAD=str(library)) for _ in range(2)]
    results = [finish(process) for process in started]
    assert all("cannot be locked (No locks available)" in text for _, text in results), results
    assert all(code == 0 for code, _ in results), results
    again = finish(start("--out", str(out), CXX=compiler(tmp_path), LD_PRELOAD=str(library)))
    assert again[0] == 0 and "is ready" not in again[1] and calls(tmp_path) <= 2 * ONCE


def headers_of(torch_version):
    """Returns the headers from that release's wheel. 530 MB are downloaded the first time. 62 MB stay, where
    `./test --vendor` keeps its downloads.
    """
    folder = VENDOR / f"torch-{torch_version}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, f"torch=={torch_version}"]
        subprocess.run(pip, check=True)
        (wheel,) = part.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [name for name in archive.namelist() if name.startswith("torch/include/")])
        wheel.unlink()
        part.rename(folder)
    return folder / "torch" / "include"


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_Sources_WithTheTorchOfAGpuMachine_Compile():
    """Two ranks on CUDA compile the adapter there, against another torch than the one that is installed here."""
    include = headers_of(OTHER_TORCH)
    folders = [*("-I", build.include_dir()), *("-isystem", include), *("-isystem", include / "torch/csrc/api/include")]
    flags = [flag for flag in build.FLAGS if "prefix-map" not in flag]
    for name in SOURCES:
        command = ["g++", *flags, *folders, "-fsyntax-only", os.path.join(build.HERE, name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]


SOMEBODY = 4242  # a user that is not this one
STRANGE = f"it belongs to user {SOMEBODY}"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns an empty cache of a package without a shared object of its own, with a compiler that counts."""
    package = tmp_path / "package"
    package.mkdir(mode=0o755)
    for name in build.SOURCES:
        (package / name).write_text(f"// {name}")
    include = build.include_dir()
    monkeypatch.setattr(build, "HERE", str(package))
    monkeypatch.setattr(build, "include_dir", lambda: include)
    monkeypatch.setenv("CXX", compiler(tmp_path, pause=0))
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("mask", [0o022, 0])
def test_Ensure_SecondTime_LoadsWhatItMade(cache, tmp_path, capfd, mask):
    """Files of users with a umask of 002 or 0 are not treated as files that others could have written."""
    before = os.umask(mask)
    try:
        path = build.ensure()
    finally:
        os.umask(before)
    assert path.startswith(f"{cache}/") and calls(tmp_path) == ONCE
    assert build.ensure() == path and calls(tmp_path) == ONCE
    assert not os.stat(path).st_mode & 0o022 and not os.stat(f"{path}.stamp").st_mode & 0o022
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert "not loaded" not in capfd.readouterr().err


def _linked(path):
    os.rename(path, f"{path}.real")
    os.symlink(f"{path}.real", path)


def _stamped(name):
    """Returns a function that changes this field of the stamp."""

    def change(path):
        stamp = pathlib.Path(f"{path}.stamp")
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), name: "another"}))

    return change


# By name: a change of the object at a path, or of its stamp, and the reason why it is made again.
CHANGES = {
    "tampered": (lambda path: pathlib.Path(path).write_text("x"), "not what its stamp says"),
    "link": (_linked, "it is a symbolic link"),
    "owner": (lambda path: os.chown(path, SOMEBODY, -1), STRANGE),
    "owner of the stamp": (lambda path: os.chown(f"{path}.stamp", SOMEBODY, -1), STRANGE),
    "mode": (lambda path: os.chmod(path, 0o757), "every user can write it"),
    "no stamp": (lambda path: os.remove(f"{path}.stamp"), ""),
    "torn stamp": (lambda path: os.truncate(f"{path}.stamp", 20), "it has no valid stamp"),
    "hash alone": (lambda path: pathlib.Path(f"{path}.stamp").write_text("f" * 64), "it has no valid stamp"),
    "sha256": (_stamped("sha256"), "not what its stamp says"),
    "compiler": (_stamped("compiler"), "its compiler is 'another', here it is 'stub 1'"),
}
for field in ("machine", "libc", "torch", "python", "made_from"):
    CHANGES[field] = (_stamped(field), f"its {field} is 'another'")


@pytest.mark.parametrize("how", [pytest.param(how, marks=as_root) if "owner" in how else how for how in CHANGES])
def test_Ensure_FileThatIsNotWhatWeMade_IsMadeAgainWithAWord(cache, tmp_path, capfd, how):
    change, says = CHANGES[how]
    path = build.ensure()
    change(path)
    capfd.readouterr()
    assert build.ensure() == path and calls(tmp_path) == 2 * ONCE
    assert says in capfd.readouterr().err
    assert build.ensure() == path and calls(tmp_path) == 2 * ONCE
    assert not os.path.islink(path) and os.stat(path).st_uid == os.geteuid()


@pytest.mark.parametrize("which", ["folder", "cache", "parent"])
@pytest.mark.parametrize("how", ["group", "all", pytest.param("owner", marks=as_root)])
def test_Ensure_FolderThatOthersCanWrite_IsRefused(cache, tmp_path, monkeypatch, which, how):
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o755)
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(parent / "cache"))
    path = build.ensure()
    folder = {"folder": os.path.dirname(path), "cache": str(parent / "cache"), "parent": str(parent)}[which]
    if how == "owner":
        os.chown(folder, SOMEBODY, -1)
    else:
        os.chmod(folder, 0o770 if how == "group" else 0o707)
        os.chown(folder, -1, 1 if os.geteuid() == 0 else os.getegid())  # a group of others
    says = {"group": "its group can write it", "all": "every user can write it", "owner": STRANGE}[how]
    with pytest.raises(NotFound, match=says) as refused:
        build.ensure()
    assert folder in str(refused.value) and "set SLUICE_CACHE_DIR" in str(refused.value)
    assert calls(tmp_path) == ONCE


def test_Ensure_StickyParent_IsFineButAStickyFolderIsNot(cache, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(shared))
    path = build.ensure()
    assert build.ensure() == path and calls(tmp_path) == ONCE
    os.chmod(os.path.dirname(path), 0o1777)
    with pytest.raises(NotFound, match="every user can write it"):
        build.ensure()
    os.chmod(os.path.dirname(path), 0o700)
    if os.geteuid() == 0:  # another user's cache matches this user's machine, torch and compiler exactly
        for planted in (os.path.dirname(path), path, f"{path}.stamp"):
            os.chown(planted, SOMEBODY, -1)
        with pytest.raises(NotFound, match=f"{os.path.dirname(path)}: {STRANGE}"):
            build.ensure()


def test_Ensure_LinksOnTheWay_AreFollowedUnlessOthersMadeThem(cache, tmp_path, monkeypatch):
    """~/.cache is a link to another disk in many places."""
    (tmp_path / "disk").mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to("disk")
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(link / "cache"))
    path = build.ensure()
    assert build.ensure() == path and calls(tmp_path) == ONCE
    os.chmod(tmp_path / "disk", 0o777)  # seen through the link
    with pytest.raises(NotFound, match="every user can write it"):
        build.ensure()
    os.chmod(tmp_path / "disk", 0o755)
    if os.geteuid() == 0:
        os.lchown(link, SOMEBODY, -1)
        with pytest.raises(NotFound, match=STRANGE):
            build.ensure()


def test_Ensure_NextToThePackage_IsAsTrustedAsItsOwner(cache, tmp_path, capfd):
    """The owner of the package could change its Python; a file that others can write is still skipped."""
    shipped = os.path.join(build.HERE, build.file_name())
    build.make(shipped)
    assert build.ensure() == shipped
    os.chmod(shipped, 0o777)
    cached = build.ensure()
    assert cached.startswith(f"{cache}/") and "every user can write it" in capfd.readouterr().err
    os.chmod(shipped, 0o755)
    if os.geteuid() == 0:
        os.chown(shipped, SOMEBODY, -1)
        assert build.ensure() == cached


@pytest.fixture
def give_package(cache, tmp_path, monkeypatch):
    """Returns a function that gives the package to another user."""

    def give():
        module = tmp_path / "package" / "build.py"
        module.write_text("")
        os.chown(module, SOMEBODY, -1)
        monkeypatch.setattr(build, "__file__", str(module))

    return give


@as_root
def test_Ensure_OwnerOfThePackage_IsAsGoodAsThisUserThereAlone(cache, tmp_path, give_package):
    give_package()
    cached = build.ensure()
    os.chown(cached, SOMEBODY, -1)
    assert build.ensure() == cached and os.stat(cached).st_uid == 0 and calls(tmp_path) == 2 * ONCE
    shipped = os.path.join(build.HERE, build.file_name())
    build.make(shipped)
    os.chown(shipped, SOMEBODY, -1)
    assert build.ensure() == shipped


def test_Doctor_PlaceAndFileThatOthersCanWrite_AreNamedWithAdvice(cache, tmp_path):
    path = build.ensure()
    (finding,) = doctor._torch_adapter()
    assert finding.state == doctor.OK and path in finding.detail
    os.chmod(path, 0o757)
    reason, remedy = doctor._torch_adapter()
    assert reason.state == remedy.state == doctor.NOTE and "every user can write it" in reason.detail
    cache.chmod(0o707)
    *_, refused = doctor._torch_adapter()
    assert refused.state == doctor.BAD and f"chmod go-w {cache}" in refused.advice and calls(tmp_path) == ONCE


def test_KeptDecisions_WithoutHome_AreLetGoWithAWord(monkeypatch, capsys):
    """Training never fails because of decisions."""
    monkeypatch.delenv("SLUICE_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache_folder, "default", lambda: None)
    tuner.keep(None, TunerOptions(decisions=True))
    assert "no decisions are kept" in (said := capsys.readouterr().err) and "set SLUICE_CACHE_DIR" in said


def test_Ensure_OtherCompiler_HasAFolderOfItsOwn(cache, tmp_path, monkeypatch):
    first = build.ensure()
    compiler(tmp_path, version="2", pause=0)
    second = build.ensure()
    assert os.path.dirname(second) != os.path.dirname(first) and calls(tmp_path) == 2 * ONCE
    compiler(tmp_path, version="1", pause=0)
    assert build.ensure() == first and calls(tmp_path) == 2 * ONCE
    monkeypatch.setenv("CXX", "no-such-compiler")  # a node without a compiler ignores this field
    assert build.ensure() in (first, second)
    monkeypatch.setattr(stamps.platform, "machine", lambda: "vax")
    with pytest.raises(NotFound, match="no C\\+\\+ compiler.*install g\\+\\+"):
        build.ensure()


def test_Ensure_SeveralAtOnce_CompileOnceAndAllLoadIt(cache, tmp_path):
    compiler(tmp_path)  # a slow one, so that all arrive before it ends
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if os.path.exists(build.ensure()) else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert calls(tmp_path) == ONCE


def test_CacheDir_RelativeNames_AreNotTaken(cache, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE_DIR", "cache")
    with pytest.raises(InvalidArgument, match="'cache'.*absolute"):
        build.ensure()


# ---- objects in a wheel ----------------------------------------------------------------------------------------------

FITTING = {"compiler": "another", "libc": "another", "python": "another"}  # a shipped object need not match these


def ship(**changes):
    """Adds a shipped object, as packaging does."""
    path = build.shipped_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("shipped")
    stamp = {**stamps.for_any_build(build.wanted()), "sha256": hashlib.sha256(b"shipped").hexdigest(), **changes}
    with open(f"{path}.stamp", "w") as file:
        json.dump(stamp, file)
    return path


def test_Ensure_ShippedOne_IsTakenBeforeOthersAndNeedsNoCompiler(cache, tmp_path, monkeypatch):
    build.make(os.path.join(build.HERE, build.file_name()))
    before = calls(tmp_path)
    path = ship()
    assert os.path.basename(path) == f"_torch_{torch.__version__.partition('+')[0].replace('.', '_')}.so"
    assert build.ensure() == path and calls(tmp_path) == before
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure() == path
    (finding,) = doctor._torch_adapter()
    assert finding.detail == f"shipped for this torch: {path}"


@pytest.mark.parametrize("local", ["+cpu", "+cu130", ""])
def test_Ensure_ShippedOne_FitsEveryBuildOfItsRelease(cache, monkeypatch, local):
    path = ship(**FITTING)
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + local)
    assert build.ensure() == path


@pytest.mark.parametrize("field", ["torch", "made_from", "machine", "sha256"])
def test_Ensure_ShippedOneThatDoesNotFit_IsPassedOverWithAWord(cache, capfd, field):
    _stamped(field)(ship())
    assert build.ensure().startswith(f"{cache}/") and CHANGES[field][1] in capfd.readouterr().err


def test_Ensure_AnotherRelease_HasNone(cache, monkeypatch):
    path = ship()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.shipped_path() != path and build.ensure().startswith(f"{cache}/")


@as_root
def test_Ensure_ShippedOne_IsAsTrustedAsThePackagesOwner(cache, capfd, give_package):
    path = ship()
    os.chown(path, SOMEBODY, -1)
    assert build.ensure() != path and STRANGE in capfd.readouterr().err
    os.chown(f"{path}.stamp", SOMEBODY, -1)
    give_package()
    assert build.ensure() == path
