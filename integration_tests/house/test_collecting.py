# SPDX-License-Identifier: Apache-2.0
"""Tests pytest's collection of folders of this checkout whose names are also those of installed packages."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Runs after a test of a package of adapters, in the same process.
LATER = """
import sys
import pytest


class Look:
    def pytest_runtest_teardown(self, item):
        folders = [path for path in sys.path if path.rstrip("/").endswith("/adapters")]
        assert not folders, folders


sys.exit(pytest.main(["-q", "-p", "no:xdist", "adapters/common/migration/test/test_rounds.py"], plugins=[Look()]))
"""


def test_PackageOfAdapters_ItsTests_PutNoNameBeforeThatOfTheHost() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
