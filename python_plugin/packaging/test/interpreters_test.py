# SPDX-License-Identifier: Apache-2.0
"""Tests the wheel in each supported Python: every module imports, the library loads and runs, torch trains.

Torch for other Pythons than this one is several GB each: third_party/setup/interpreters.sh installs it.
"""

import ast
import glob
import os
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import training

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(os.path.dirname(PACKAGING))
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13"]
# Imports all modules that need no host.
PROGRAM = """
import importlib, pkgutil, sluice, sys
from sluice import _library
names = [found.name for found in pkgutil.walk_packages(sluice.__path__, "sluice.")]
names = [name for name in names if not name.startswith(("sluice.adapters.", "sluice.megatron", "sluice.optim"))]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
library = _library.load()
context = library.ffi.new("sluice_context_t **")
library.check(library.lib.sluice_context_create(library.new("context_config"), library.ffi.NULL, context))
library.lib.sluice_context_destroy(context[0])
print(len(names), sluice.__version__, "{}.{}".format(*sys.version_info))
"""


def interpreter(version):
    """Returns an interpreter on PATH or of pyenv, but no shim, since pyenv has shims for versions not installed."""
    pattern = os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions", f"{version}.*")
    places = [shutil.which(f"python{version}"), *sorted(glob.glob(os.path.join(pattern, "bin", "python")))]
    for path in filter(None, places):
        done = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True)
        if done.returncode == 0:
            return path
    return None


def with_torch(version):
    """Returns a Python of that version that has torch, or None."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    path = os.path.join(ROOT, f".venv-python{version}")
    return os.path.join(path, "bin", "python") if os.path.exists(os.path.join(path, ".stamp")) else None


def release(python):
    """Returns the version of its torch."""
    done = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    return done.stdout.strip().partition("+")[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Makes a wheel with an adapter for each release of torch in these Pythons."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, os.path.join(PACKAGING, "install.py"), "--wheel-dir", str(folder), "--no-install"]
    others = {release(python): python for python in map(with_torch, VERSIONS) if python is not None}
    others.pop(release(sys.executable))
    for python in others.values():
        command += ["--torch", python]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}", pytrace=False)
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


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_Wheel_InThisPythonWithTorch_TrainsWithoutACompiler(wheel, version, tmp_path):
    python = with_torch(version)
    if python is None:
        pytest.skip(f"no torch for Python {version} here: third_party/setup/interpreters.sh {version} (several GB)")
    ran, torch, adapter, _ = training.run(python, wheel, tmp_path).split()
    assert (ran, adapter) == (version, f"_torch_{torch.partition('+')[0].replace('.', '_')}.so")


def newer(text):
    """Returns lines that Python 3.9 parses but cannot run: unions of types outside of annotations, `zip(strict=)`."""
    tree, annotations = ast.parse(text), set()
    for node in ast.walk(tree):
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            annotations.update(map(id, ast.walk(found)) if isinstance(found, ast.AST) else ())
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and id(node) not in annotations:
            if any(isinstance(side, ast.Constant) and side.value is None for side in (node.left, node.right)):
                yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "zip" and node.keywords:
            yield node.lineno


def test_Package_RunsNothingNewerThanItsOldestPython():
    """The test includes adapters, whose hosts do not exist for every Python."""
    paths = [path for folder in ("adapters", "python_plugin/sluice") for path in sources(folder)]
    assert len(paths) > 100
    found = {}
    for path in paths:
        with open(path) as file:
            found[path] = list(newer(file.read()))
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert list(newer("def f(a: int | None): ...\nX = int | None\nzip(a, b, strict=True)\n")) == [2, 3]


def sources(folder):
    found = glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True)
    return [path for path in found if f"{os.sep}test{os.sep}" not in path]
