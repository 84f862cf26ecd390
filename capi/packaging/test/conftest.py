# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run the packaging once for all tests."""

import os
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGING = os.path.dirname(HERE)
sys.path[:0] = [HERE, PACKAGING]


@pytest.fixture(scope="session")
def make():
    """Returns a function that runs the command as a user does, with a folder for its output, and returns the folder."""

    def run(out, *options, **env):
        command = [sys.executable, os.path.join(PACKAGING, "make.py"), "--out", str(out), *options]
        done = subprocess.run(command, env=dict(os.environ, **env), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return out

    return run


@pytest.fixture(scope="session")
def made(make, tmp_path_factory):
    return make(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def unpacked(made, tmp_path_factory):
    """Returns the folder of the unpacked archive."""
    folder = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["tar", "-xzf", next(made.glob("*.tar.gz")), "-C", folder], check=True)
    return next(folder.iterdir())
