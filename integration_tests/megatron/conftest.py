"""Ranks with Megatron-Core in them, one set for each release; the machine's switch must not decide what tests see."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]  # the latter for its harness of ranks
from mg_ranks import RELEASES, MegatronRanks  # noqa: E402

for name in ("SLUICE", "SLUICE_OPTIONS"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session", params=RELEASES)
def ranks2(request: pytest.FixtureRequest) -> Iterator[MegatronRanks]:
    """Two ranks."""
    ranks = MegatronRanks(2, request.param)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session", params=RELEASES)
def ranks4(request: pytest.FixtureRequest) -> Iterator[MegatronRanks]:
    """Four ranks."""
    ranks = MegatronRanks(4, request.param)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def oldest2() -> Iterator[MegatronRanks]:
    """Two ranks with the oldest release."""
    ranks = MegatronRanks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def oldest4() -> Iterator[MegatronRanks]:
    """Four ranks with the oldest release."""
    ranks = MegatronRanks(4)
    yield ranks
    ranks.stop()


@pytest.fixture
def fresh2() -> Iterator[MegatronRanks]:
    """Two ranks that a test may break."""
    ranks = MegatronRanks(2)
    yield ranks
    ranks.stop()
