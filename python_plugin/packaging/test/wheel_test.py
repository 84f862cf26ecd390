# SPDX-License-Identifier: Apache-2.0
"""Tests that the wheel's tag is true, its libraries are stripped, its bits are the same each time, and that the source
package suffices to make it."""

import base64
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch
from auditwheel.wheel_abi import analyze_wheel_abi
from auditwheel.wheeltools import get_wheel_architecture, get_wheel_libc

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(PACKAGING))
sys.path[:0] = [os.path.join(ROOT, "capi", "packaging"), os.path.dirname(os.path.abspath(__file__))]
import elf  # noqa: E402
import training  # noqa: E402

WHEEL_BYTES = 5 << 20  # images of CUDA kernels take 2.2 MiB; with debug information it takes twice that
ADAPTER = "_torch_{}.so".format(torch.__version__.partition("+")[0].replace(".", "_"))
PROGRAM = "sluice-dry-step"  # of `sluice simulate --device`
GLIBCXX_CAPACITY = (3, 4, 29)  # the C++ library that manylinux_2_34 stands for: GCC 11's
# Libraries that the adapter and the MPI plugin use from the process, and that the wheel must not contain.
HOSTS = frozenset({"libtorch_cpu.so", "libc10.so", "libmpi.so.*"})


def make(folder, *options, **env):
    command = [sys.executable, os.path.join(PACKAGING, "install.py"), "--wheel-dir", str(folder), "--no-install"]
    command += options
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
    found = [*folder.rglob("*.so*"), folder / "sluice/lib" / PROGRAM]
    return {path.name: path for path in sorted(found) if path.suffix != ".stamp"}


def test_Wheel_MadeAgainElsewhere_HasTheSameBits(wheel, tmp_path):
    before = os.umask(0o077)
    try:
        again = make(tmp_path, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    finally:
        os.umask(before)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


@pytest.mark.full  # compiles the adapter
def test_Wheel_WithEverythingCompiledAnew_HasTheSameBits(wheel, tmp_path):
    again = make(tmp_path, "--force")
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_Wheel_Tag_IsTheCLibraryThatItsLibrariesNeed(wheel, shared_objects):
    measured = max(elf.needs(path)[:2] for path in shared_objects.values())
    tag = "py3-none-manylinux_{}_{}_x86_64".format(*measured)
    assert wheel.name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert re.findall(r"^Tag: (.*)$", archive.read(info).decode(), re.MULTILINE) == [tag]
    assert (2, 2) < measured <= elf.GLIBC_CAPACITY


def test_Wheel_Libraries_NeedNoNewerCxxLibraryAndNoFolderOfTheBuilder(shared_objects):
    assert sorted(shared_objects) == [ADAPTER, "libsluice.so.0", "libsluice_mpi.so", PROGRAM]
    for name, path in shared_objects.items():
        if name == ADAPTER:
            assert (3, 4) < elf.needs(path, "GLIBCXX") <= GLIBCXX_CAPACITY
        else:
            assert elf.needs(path, "GLIBCXX") == elf.needs(path, "CXXABI") == ()
        assert elf.dynamic(path, "RPATH") == elf.dynamic(path, "RUNPATH") == []


def test_Wheel_Libraries_AreStripped(wheel, shared_objects):
    for path in shared_objects.values():
        assert not {".symtab", ".debug_info"} & elf.sections(path), path.name
    assert wheel.stat().st_size < WHEEL_BYTES


def test_Wheel_Binaries_AreExecutable(wheel, shared_objects):
    with zipfile.ZipFile(wheel) as archive:
        modes = {os.path.basename(entry.filename): entry.external_attr >> 16 for entry in archive.infolist()}
    assert {modes[name] for name in shared_objects} == {0o100755} and modes["_library.py"] == 0o100644


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


def audited(wheel, without):
    """Returns the tag that auditwheel computes without these libraries."""
    libc, architecture = get_wheel_libc(wheel.name), get_wheel_architecture(wheel.name)
    options = {"disable_isa_ext_check": False, "allow_graft": True}
    found = analyze_wheel_abi(libc, architecture, wheel, without, **options)
    return found.overall_policy.name, set(found.external_refs[found.policies.highest.name].libs)


def test_Auditwheel_AgreesWithTheTag(wheel):
    tag, foreign = audited(wheel, HOSTS)
    assert wheel.name.endswith(f"-{tag}.whl") and foreign == set()
    _, foreign = audited(wheel, frozenset())
    assert {"libtorch_cpu.so", "libc10.so"} <= foreign


def test_Wheel_WhereThereIsNoCompiler_TrainsWithTheAdapterThatItBrings(wheel, tmp_path):
    text = training.run(sys.executable, wheel, tmp_path)
    version = "{}.{}".format(*sys.version_info)
    assert text.split() == [version, torch.__version__, ADAPTER, wheel.name.split("-")[1]]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, os.path.join(PACKAGING, "backend.py"), folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / os.path.basename(done.stdout.strip())


def test_Sdist_IsOneAsPipKnowsIt(sdist):
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        about = archive.extractfile(f"{sdist.name[: -len('.tar.gz')]}/PKG-INFO").read().decode()
    assert {name.partition("/")[0] for name in names} == {sdist.name[: -len(".tar.gz")]}
    assert "\nName: sluice\n" in about and "\nRequires-Python: >=3.9\n" in about
    assert not [name for name in names if name.endswith((".pyc", ".so", ".o"))]


@pytest.mark.full  # bazel compiles the library once more
@pytest.mark.timeout(3000)
def test_Wheel_MadeOfTheSdist_HasTheBitsOfTheCheckouts(sdist, tmp_path):
    """The environment has only cffi, so both are wheels without an adapter. Both take the CUDA compiler of .venv."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    tree = tmp_path / sdist.name[: -len(".tar.gz")]
    (tree / ".venv").symlink_to(os.path.join(ROOT, ".venv"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, env=environment)
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in ("cffi", "pycparser")]
    subprocess.run([*pip, "install", "--quiet", *pinned], check=True, env=environment)
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "out", tree]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made, own = next((tmp_path / "out").glob("*.whl")), make(tmp_path / "own", "--no-torch")
    assert made.name == own.name and made.read_bytes() == own.read_bytes()
