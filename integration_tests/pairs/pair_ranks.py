# SPDX-License-Identifier: Apache-2.0
"""The tests of each host's rows, for a module with `HOST`: two ranks run a row, and the results are checked.

A module whose ranks are not those of integration_tests/deepspeed has `make_ranks(world)`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pair_table import SLUICE, Case, met, table_of
from rank_harness import Ranks

__all__ = ["ranks", "test_Row_TrainedSixSteps_AsStockOrRefusedByName", "test_Rows_EveryTwoValues_MeetInOne"]
HERE = Path(__file__).resolve().parent


class PairRanks(Ranks):
    """Starts ranks like those of integration_tests/deepspeed, which also import from this folder."""

    python_path = str(HERE)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Yields the two ranks of a module."""
    ranks = getattr(request.module, "make_ranks", PairRanks)(2)
    yield ranks
    ranks.stop()


def test_Row_TrainedSixSteps_AsStockOrRefusedByName(request: pytest.FixtureRequest, ranks: Ranks, case: Case) -> None:
    """A row is equal on every rank, or refused by the side and in the words of its rule."""
    row = {**case.row, "stock": "hangs" if case.rule is not None and case.rule.stock_hangs else "runs"}
    for rank, found in enumerate(ranks.run("pair_compare:both_ways", host=request.module.HOST, row=row)):
        if case.rule is None:
            assert "refused_by" not in found, f"rank {rank}: {found['refused_by']} refused: {found['words']}"
            assert not found["differences"], f"rank {rank}:\n" + "\n".join(found["differences"])
        else:
            assert "refused_by" in found, f"rank {rank}: {case.rule.by} does not refuse it: {found['differences']}"
            assert found["refused_by"] == case.rule.by and case.rule.words in found["words"], (rank, found)
            if case.rule.by == SLUICE:
                assert found["type"] != "AssertionError", (rank, found)


def test_Rows_EveryTwoValues_MeetInOne(request: pytest.FixtureRequest) -> None:
    """Rows contain all pairs but those that a third value refuses, and the last row is needed."""
    table = table_of(request.module)
    assert not table.pairs() - met(table.array), sorted(table.pairs() - met(table.array))
    assert table.pairs() - met(table.array[:-1])
    assert all(table.is_allowed(row) for row in table.array)
    chosen = [row for row in table.array if table.name_of(row) in table.daily()]
    assert {(name, row[name]) for row in chosen for name in row} == {
        pair for row in table.array for pair in row.items()
    }
