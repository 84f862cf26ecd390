# SPDX-License-Identifier: Apache-2.0
"""Tests transformers' expert parallelism: every pair of features trains as by its own transport, or is refused."""

import transformers_table
from pair_ranks import *  # noqa: F403
from pair_ranks import HERE
from tf_ranks import TransformersRanks

TABLE, JOB = transformers_table.table(), "transformers_ranks:run"


def make_ranks(world: int) -> TransformersRanks:
    """Makes ranks that also import from this folder."""
    ranks = TransformersRanks(world)
    ranks.python_path = str(HERE)
    return ranks
