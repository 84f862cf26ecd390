# SPDX-License-Identifier: Apache-2.0
"""Tests Megatron-Core: every pair of features trains as in stock, or is refused by name."""

import os

from mg_ranks import MegatronRanks
from pair_ranks import *  # noqa: F403
from pair_ranks import HERE

HOST = "megatron"


def make_ranks(world: int) -> MegatronRanks:
    """Makes ranks which also import from this folder and from DeepSpeed's."""
    ranks = MegatronRanks(world)
    ranks.python_path = os.pathsep.join([ranks.python_path, str(HERE), str(HERE.parent / "deepspeed")])
    return ranks
