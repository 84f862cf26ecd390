# SPDX-License-Identifier: Apache-2.0
"""Fixtures with ranks that the tests of a file share. A set of ranks starts at its first use."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from host_release import host_errors
from rank_harness import Ranks, fixture_of, ranks_rest  # noqa: F401

# SLUICE in the environment of the test run must not affect the tests.
os.environ.pop("SLUICE", None)

ranks2, ranks4, ranks8 = (fixture_of(lambda world=world: Ranks(world)) for world in (2, 4, 8))
fresh2, fresh4 = fixture_of(lambda: Ranks(2), "function"), fixture_of(lambda: Ranks(4), "function")
# Pipelines need their own sets, because the host keeps a pipe's topology in a global until the process ends: two and
# four stages, and two stages of two replicas.
pipe2, pipe4, pipe2x2 = fixture_of(lambda: Ranks(2)), fixture_of(lambda: Ranks(4)), fixture_of(lambda: Ranks(4))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Runs a test that may be marked as one that the oldest release fails."""
    with host_errors():
        return (yield)
