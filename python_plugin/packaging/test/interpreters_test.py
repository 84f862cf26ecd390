"""The wheel in each Python that it says it runs in: every module imports, the library loads and runs."""

import glob
import os
import shutil
import subprocess
import sys

import pytest

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13"]
# Without a host: the adapters import theirs.
PROGRAM = """
import importlib, pkgutil, sluice, sys
from sluice import _library
names = [found.name for found in pkgutil.walk_packages(sluice.__path__, "sluice.")]
names = [name for name in names if not name.startswith("sluice.adapters.") and not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
library = _library.load()
context = library.ffi.new("sluice_context_t **")
library.check(library.lib.sluice_context_create(library.new("context_config"), library.ffi.NULL, context))
library.lib.sluice_context_destroy(context[0])
print(len(names), sluice.__version__, "{}.{}".format(*sys.version_info))
"""


def interpreter(version):
    """On PATH, or of pyenv; itself a real one, since a shim of pyenv is there for versions that are not."""
    pattern = os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions", f"{version}.*")
    places = [shutil.which(f"python{version}"), *sorted(glob.glob(os.path.join(pattern, "bin", "python")))]
    for path in filter(None, places):
        done = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True)
        if done.returncode == 0:
            return path
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, os.path.join(PACKAGING, "install.py"), "--wheel-dir", str(folder), "--no-install"]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_Wheel_InThisPython_ImportsAndRuns(wheel, version, tmp_path):
    path = interpreter(version)
    if path is None:
        pytest.skip(f"this machine has no Python {version}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([path, "-m", "venv", tmp_path / "venv"], check=True, env=environment)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([python, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules, found, ran = done.stdout.split()
    assert int(modules) > 40 and ran == version and wheel.name.startswith(f"sluice-{found}-")
