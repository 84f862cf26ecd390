# SPDX-License-Identifier: Apache-2.0
"""Fixtures with ranks that the tests of a file share. A set of ranks starts at its first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rank_harness import Ranks, ranks_rest  # noqa: F401

# SLUICE in the environment of the test run must not affect the tests.
os.environ.pop("SLUICE", None)


def _ranks(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[Ranks]:
    """Two ranks."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def ranks4() -> Iterator[Ranks]:
    """Four ranks."""
    yield from _ranks(4)


# Pipelines need their own sets, because the host keeps a pipe's topology in a global until the process ends.


@pytest.fixture(scope="module")
def pipe2() -> Iterator[Ranks]:
    """Two stages."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def pipe4() -> Iterator[Ranks]:
    """Four stages."""
    yield from _ranks(4)


@pytest.fixture(scope="module")
def pipe2x2() -> Iterator[Ranks]:
    """Two stages of two replicas."""
    yield from _ranks(4)


@pytest.fixture
def fresh2() -> Iterator[Ranks]:
    """Two ranks that a test may break."""
    yield from _ranks(2)
