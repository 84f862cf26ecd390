# SPDX-License-Identifier: Apache-2.0
"""Runs the rows of a host on two ranks, and checks their results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pair_table import SLUICE, Case, Table, met
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent


class PairRanks(Ranks):
    """Starts ranks like those of integration_tests/deepspeed, which also import from this folder."""

    python_path = str(HERE)

    @classmethod
    def pair(cls) -> Iterator[PairRanks]:
        """Yields two ranks, for a fixture."""
        ranks = cls(2)
        yield ranks
        ranks.stop()


def check(ranks: Ranks, target: str, case: Case) -> None:
    """Checks that a row is equal on every rank, or refused by the side and in the words of its rule."""
    for rank, found in enumerate(ranks.run(target, row=dict(case.row))):
        if case.rule is None:
            assert "refused_by" not in found, f"rank {rank}: {found['refused_by']} refused: {found['words']}"
            assert not found["differences"], f"rank {rank}:\n" + "\n".join(found["differences"])
        else:
            assert "refused_by" in found, f"rank {rank}: {case.rule.by} does not refuse it: {found['differences']}"
            assert found["refused_by"] == case.rule.by and case.rule.words in found["words"], (rank, found)
            if case.rule.by == SLUICE:
                assert found["type"] != "AssertionError", (rank, found)


def check_table(table: Table) -> None:
    """Checks that rows contain all pairs but those that a third value refuses, and that the last row is needed."""
    assert not table.pairs() - met(table.array), sorted(table.pairs() - met(table.array))
    assert table.pairs() - met(table.array[:-1])
    assert all(table.is_allowed(row) for row in table.array)
    chosen = [row for row in table.array if table.name_of(row) in table.daily()]
    assert {(name, row[name]) for row in chosen for name in row} == {
        pair for row in table.array for pair in row.items()
    }
