# SPDX-License-Identifier: Apache-2.0
"""Provides ranks with Megatron-Core, a set for each release; SLUICE in the environment must not affect the tests."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]  # the latter for its harness of ranks
from mg_ranks import EVERY, NEWEST, OLDEST, MegatronRanks  # noqa: E402
from rank_harness import fixture_of, ranks_rest  # noqa: E402, F401

for name in ("SLUICE", "SLUICE_OPTIONS"):
    os.environ.pop(name, None)


Sets = Callable[[int, str], MegatronRanks]


@pytest.fixture(scope="module")
def sets() -> Iterator[Sets]:
    """Keeps one set of ranks for each number and release, which a test of the file starts on first use."""
    made: dict[tuple[int, str], MegatronRanks] = {}

    def of(world: int, release: str) -> MegatronRanks:
        if (world, release) not in made:
            made[world, release] = MegatronRanks(world, release)
        return made[world, release]

    yield of
    for ranks in made.values():
        ranks.stop()


@pytest.fixture(params=EVERY)
def ranks2(request: pytest.FixtureRequest, sets: Sets) -> MegatronRanks:
    """Yields two ranks."""
    return sets(2, request.param)


@pytest.fixture(params=[OLDEST, pytest.param(NEWEST, marks=pytest.mark.full)])
def ranks4(request: pytest.FixtureRequest, sets: Sets) -> MegatronRanks:
    """Yields four ranks; those of the newest release run in the full tests alone."""
    return sets(4, request.param)


def _of_one_release(world: int, release: str) -> Any:
    @pytest.fixture
    def ranks(sets: Sets) -> MegatronRanks:
        return sets(world, release)

    return ranks


oldest2, newest2, oldest4 = _of_one_release(2, OLDEST), _of_one_release(2, NEWEST), _of_one_release(4, OLDEST)
fresh2 = fixture_of(lambda: MegatronRanks(2), "function")
fresh4 = fixture_of(lambda: MegatronRanks(4), "function")
