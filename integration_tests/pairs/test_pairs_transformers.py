# SPDX-License-Identifier: Apache-2.0
"""Tests transformers' expert parallelism: every pair of features trains as by its own transport, or is refused."""

from pair_ranks import *  # noqa: F403
from pair_ranks import HERE
from tf_ranks import TransformersRanks

HOST = "transformers"


def make_ranks(world: int) -> TransformersRanks:
    """Makes ranks that also import from this folder."""
    ranks = TransformersRanks(world)
    ranks.python_path = str(HERE)
    return ranks
