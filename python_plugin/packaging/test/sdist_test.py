# SPDX-License-Identifier: Apache-2.0
"""Tests that the source package has the same bits each time, and that a wheel can be made from it alone."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile

import pytest

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def make(folder, **environment):
    command = [sys.executable, os.path.join(PACKAGING, "backend.py"), str(folder)]
    done = subprocess.run(command, env=dict(os.environ, **environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / os.path.basename(done.stdout.strip())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return make(tmp_path_factory.mktemp("sdist"))


def test_Sdist_MadeAgainElsewhere_HasTheSameBits(sdist, tmp_path):
    before = os.umask(0o077)
    try:
        again = make(tmp_path, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    finally:
        os.umask(before)
    assert again.name == sdist.name and again.read_bytes() == sdist.read_bytes()


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
    """The environment has only cffi, so both are wheels without an adapter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, env=environment)
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in ("cffi", "pycparser")]
    subprocess.run([*pip, "install", "--quiet", *pinned], check=True, env=environment)
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "out", sdist]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = next((tmp_path / "out").glob("*.whl"))
    command = [sys.executable, os.path.join(PACKAGING, "install.py"), "--no-install", "--no-torch", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path / "own")], check=True, capture_output=True)
    own = next((tmp_path / "own").glob("*.whl"))
    assert made.name == own.name and made.read_bytes() == own.read_bytes()
