# SPDX-License-Identifier: Apache-2.0
"""What pip, build and uv call to make a wheel or a source package (PEP 517): pyproject.toml names it.

    .venv/bin/python python_plugin/packaging/backend.py DIR    # DIR/sluice-0.1.0.tar.gz
    pip wheel --no-deps DIR/sluice-0.1.0.tar.gz                # needs gcc and Bazel 4.2.3 (Debian: bazel-bootstrap)

The wheel is install.py's. It brings an adapter for the torch of the Python that builds, if that has one: with pip's
`--no-build-isolation`. Both are the same bits each time they are made from one commit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import install
from install import ROOT

sys.path.insert(0, os.path.join(ROOT, "capi", "packaging"))
import archive
import libraries

# What a wheel and its tests are made from.
FOLDERS = ("adapters", "backend", "capi", "python_plugin", "third_party/bazel")
FILES = (".bazelrc", "BUILD", "CHANGELOG.md", "LICENSE", "README.md", "WORKSPACE", "pyproject.toml", "tools/bazel")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    torch = [sys.executable] if importlib.util.find_spec("torch") is not None else []
    try:
        return os.path.basename(install.make(wheel_directory, torch))
    finally:
        if not os.path.exists(os.path.join(ROOT, ".git")):  # unpacked for this build, and soon gone
            subprocess.run(["bazel", "clean", "--expunge"], cwd=ROOT, capture_output=True)


def sources() -> list[str]:
    """Paths of the source package, in a fixed order: what git tracks; in a source package all that it holds."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--", *FOLDERS, *FILES]
    done = subprocess.run(command, capture_output=True, text=True)
    if os.path.exists(os.path.join(ROOT, ".git")) and done.returncode == 0:
        return sorted(done.stdout.strip("\0").split("\0"))
    found = [os.path.join(folder, path) for folder in FOLDERS for path in archive.entries(os.path.join(ROOT, folder))]
    return sorted([*FILES, *(path for path in found if os.path.isfile(os.path.join(ROOT, path)))])


def build_sdist(sdist_directory, config_settings=None):
    version = libraries.version()
    name = f"sluice-{version}"
    with tempfile.TemporaryDirectory() as top:
        for path in sources():
            to = os.path.join(top, path)
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copyfile(os.path.join(ROOT, path), to)
            shutil.copymode(os.path.join(ROOT, path), to)
        with open(os.path.join(top, "PKG-INFO"), "w") as file:
            file.write(install.metadata(version))
        archive.write(os.path.join(sdist_directory, f"{name}.tar.gz"), top, name, archive.source_date())
    return f"{name}.tar.gz"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    os.makedirs(sys.argv[1], exist_ok=True)
    print(os.path.join(sys.argv[1], build_sdist(sys.argv[1])))
