# SPDX-License-Identifier: Apache-2.0
"""Tests transformers' expert parallelism: every pair of features trains as by its own transport, or is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers_table
from pair_ranks import HERE, check, check_table
from pair_table import Case

sys.path.append(str(Path(__file__).resolve().parents[1] / "transformers"))
from tf_ranks import TransformersRanks

TABLE = transformers_table.table()


class PairTransformersRanks(TransformersRanks):
    """Starts ranks that also import from this folder."""

    python_path = str(HERE)


@pytest.fixture(scope="module")
def ranks() -> Iterator[PairTransformersRanks]:
    """Yields two ranks, which download no models."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    ranks = PairTransformersRanks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("case", TABLE.params())
def test_Row_TrainedSixSteps_AsStockOrRefusedByName(ranks: PairTransformersRanks, case: Case) -> None:
    check(ranks, "transformers_ranks:run", case)


def test_Rows_EveryTwoValues_MeetInOne() -> None:
    check_table(TABLE)
