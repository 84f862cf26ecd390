"""The wheel: its tag is true, its libraries are stripped, and it has the same bits each time."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(PACKAGING))
sys.path.insert(0, os.path.join(ROOT, "capi", "packaging"))
import elf  # noqa: E402

WHEEL_BYTES = 3 << 20  # with what debuggers read it takes twice that


def make(folder, **env):
    command = [sys.executable, os.path.join(PACKAGING, "install.py"), "--wheel-dir", str(folder), "--no-install"]
    done = subprocess.run(command, env=dict(os.environ, **env), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return make(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def shared_objects(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {path.name: path for path in sorted(folder.rglob("*.so*"))}


def test_Wheel_MadeAgainElsewhere_HasTheSameBits(wheel, tmp_path):
    before = os.umask(0o077)
    try:
        again = make(tmp_path, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    finally:
        os.umask(before)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_Wheel_Tag_IsTheCLibraryThatItsLibrariesNeed(wheel, shared_objects):
    measured = max(elf.needs(path)[:2] for path in shared_objects.values())
    tag = "py3-none-manylinux_{}_{}_x86_64".format(*measured)
    assert wheel.name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert re.findall(r"^Tag: (.*)$", archive.read(info).decode(), re.MULTILINE) == [tag]
    assert (2, 2) < measured <= elf.GLIBC_CAPACITY


def test_Wheel_Libraries_NeedNoCxxLibraryAndNoFolderOfTheBuilder(shared_objects):
    assert sorted(shared_objects) == ["libsluice.so.0", "libsluice_mpi.so"]
    for path in shared_objects.values():
        assert elf.needs(path, "GLIBCXX") == elf.needs(path, "CXXABI") == ()
        assert elf.dynamic(path, "RPATH") == elf.dynamic(path, "RUNPATH") == []


def test_Wheel_Libraries_AreStripped(wheel, shared_objects):
    for path in shared_objects.values():
        assert not {".symtab", ".debug_info"} & elf.sections(path), path.name
    assert wheel.stat().st_size < WHEEL_BYTES


def test_Wheel_Record_NamesEveryFile(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in files if name.endswith("/RECORD"))
    lines = [line.split(",") for line in files.pop(record).decode().splitlines()]
    assert lines.pop() == [record, "", ""]
    made = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        made.append([name, f"sha256={digest}", str(len(data))])
    assert lines == made


def test_Auditwheel_AgreesWithTheTag(wheel, tmp_path):
    """Without the plugin that is opened where the machine has an MPI: auditwheel would want that MPI in the wheel."""
    checked = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(checked, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            if name.endswith("/RECORD"):
                data = re.sub(rb"^.*libsluice_mpi.*\n", b"", data, flags=re.MULTILINE)
            if not name.endswith("libsluice_mpi.so"):
                copy.writestr(name, data)
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(checked)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["overall_tag"] in wheel.name, report
