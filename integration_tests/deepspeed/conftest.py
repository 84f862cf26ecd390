"""Ranks shared by all tests of this folder; a set starts when a test first asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rank_harness import Ranks

# The switch of the machine that runs the tests must not decide what they see.
os.environ.pop("SLUICE", None)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    """Two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def fresh2() -> Iterator[Ranks]:
    """Two ranks that a test may break."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
