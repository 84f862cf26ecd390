# SPDX-License-Identifier: Apache-2.0
"""Builds the library once for the tests of this folder."""

import os
import subprocess

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def bazel(*arguments):
    done = subprocess.run(["bazel", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"bazel {' '.join(arguments)}:\n{done.stderr[-3000:]}", pytrace=False)
    return done.stdout


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def include_dir():
    return os.path.join(ROOT, "capi", "include")


@pytest.fixture(scope="session")
def libsluice():
    """Builds the library as it is shipped, and returns its path."""
    bazel("build", "--noshow_progress", "//capi:libsluice.so.0")
    return os.path.join(bazel("info", "bazel-bin").strip(), "capi", "libsluice.so.0")
