# SPDX-License-Identifier: Apache-2.0
"""Two ranks that run the rows of a host, and the expected result of a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pair_table import SLUICE, Case, Table, met
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent


class PairRanks(Ranks):
    """Those of integration_tests/deepspeed, which also find the modules of this folder."""

    python_path = str(HERE)

    @classmethod
    def pair(cls) -> Iterator[PairRanks]:
        """Two of them, for a fixture."""
        ranks = cls(2)
        yield ranks
        ranks.stop()


def check(ranks: Ranks, target: str, case: Case) -> None:
    """A row is equal on every rank, or refused by whom and in which words its rule says."""
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
    """All pairs meet but for those that a third value refuses; and it is the rows that see to that."""
    assert not table.pairs() - met(table.array), sorted(table.pairs() - met(table.array))
    assert table.pairs() - met(table.array[:-1])
    assert all(table.is_allowed(row) for row in table.array)
    chosen = [row for row in table.array if table.name_of(row) in table.daily()]
    assert {(name, row[name]) for row in chosen for name in row} == {
        pair for row in table.array for pair in row.items()
    }
