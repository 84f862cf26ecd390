# SPDX-License-Identifier: Apache-2.0
"""Makes a wheel or a source package for pip, build and uv (PEP 517): pyproject.toml names this build backend.

    .venv/bin/python python_plugin/packaging/backend.py DIR    # DIR/sluice-0.1.0.tar.gz
    pip wheel --no-deps DIR/sluice-0.1.0.tar.gz                # needs gcc and Bazel 4.2.3 (Debian: bazel-bootstrap)

install.py makes the wheel. It ships an adapter for the torch of the building Python, if that has torch: with pip's
`--no-build-isolation`. Builds of one commit give the same bits for both packages.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import install
from install import ROOT

sys.path.insert(0, os.path.join(ROOT, "capi", "packaging"))
import archive
import libraries
import tree

# The sources of a wheel and of its tests.
FOLDERS = ("adapters", "backend", "capi", "python_plugin", "third_party/bazel")
FILES = (".bazelrc", "BUILD", "CHANGELOG.md", "LICENSE", "README.md", "WORKSPACE", "pyproject.toml", "tools/bazel")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    torch = [sys.executable] if importlib.util.find_spec("torch") is not None else []
    try:
        return os.path.basename(install.make(wheel_directory, torch))
    finally:
        if not os.path.exists(os.path.join(ROOT, ".git")):  # a source package, unpacked for this build only
            subprocess.run(["bazel", "clean", "--expunge"], cwd=ROOT, capture_output=True)


def sources() -> list[str]:
    """Returns the paths of the source package in a fixed order: tracked files; in a source package, all its files."""
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
            tree.copy(os.path.join(ROOT, path), os.path.join(top, path))
        tree.write(os.path.join(top, "PKG-INFO"), install.metadata(version))
        archive.write(os.path.join(sdist_directory, f"{name}.tar.gz"), top, name, archive.source_date())
    return f"{name}.tar.gz"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    os.makedirs(sys.argv[1], exist_ok=True)
    print(os.path.join(sys.argv[1], build_sdist(sys.argv[1])))
