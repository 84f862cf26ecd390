# SPDX-License-Identifier: Apache-2.0
"""Tests Megatron-Core: every pair of features trains as in stock, or is refused by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron_table
import pytest
from pair_ranks import HERE, check, check_table
from pair_table import Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "megatron"))
from mg_ranks import MegatronRanks

TABLE = megatron_table.table()


@pytest.fixture(scope="module")
def ranks() -> Iterator[MegatronRanks]:
    """Yields two ranks, which also import from this folder and from DeepSpeed's."""
    ranks = MegatronRanks(2)
    ranks.python_path = os.pathsep.join([ranks.python_path, str(HERE), str(HERE.parent / "deepspeed")])
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("case", TABLE.params())
def test_Row_TrainedSixSteps_AsStockOrRefusedByName(ranks: MegatronRanks, case: Case) -> None:
    check(ranks, "megatron_ranks:run", case)


def test_Rows_EveryTwoValues_MeetInOne() -> None:
    check_table(TABLE)
