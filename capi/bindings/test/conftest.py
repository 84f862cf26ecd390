# SPDX-License-Identifier: Apache-2.0
"""Fixtures that build programs in other languages, and the library with which they are linked."""

import os
import shutil
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
sys.path[:0] = [os.path.dirname(HERE), os.path.join(ROOT, "capi", "packaging")]


@pytest.fixture(scope="session")
def run():
    def run(*command, cwd=None, **environment):
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            pytest.fail(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}", pytrace=False)
        return done.stdout

    return run


@pytest.fixture(scope="session")
def need():
    def need(program, package):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here (Debian: apt-get install {package})")

    return need


@pytest.fixture(scope="session")
def library(run):
    """Returns the path of libsluice.so.0, built here or from the folder in SLUICE_EXAMPLES_LIB."""
    given = os.environ.get("SLUICE_EXAMPLES_LIB")
    if given is None:
        run("bazel", "build", "--noshow_progress", "//capi:libsluice.so.0", cwd=ROOT)
        given = os.path.join(run("bazel", "info", "bazel-bin", cwd=ROOT).strip(), "capi")
    return os.path.join(given, "libsluice.so.0")
