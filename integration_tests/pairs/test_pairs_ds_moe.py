# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's `MoE`: every pair of features trains as in stock, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import ds_moe_table
import pytest
from pair_ranks import PairRanks, check, check_table
from pair_table import Case

TABLE = ds_moe_table.table()


@pytest.fixture(scope="module")
def ranks() -> Iterator[PairRanks]:
    """Yields two ranks."""
    yield from PairRanks.pair()


@pytest.mark.parametrize("case", TABLE.params())
def test_Row_TrainedSixSteps_AsStockOrRefusedByName(ranks: PairRanks, case: Case) -> None:
    check(ranks, "ds_moe_ranks:run", case)


def test_Rows_EveryTwoValues_MeetInOne() -> None:
    check_table(TABLE)
