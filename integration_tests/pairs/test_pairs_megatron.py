# SPDX-License-Identifier: Apache-2.0
"""Tests Megatron-Core: every pair of features trains as in stock, or is refused by name."""

import os

import megatron_table
from mg_ranks import MegatronRanks
from pair_ranks import *  # noqa: F403
from pair_ranks import HERE

TABLE, JOB = megatron_table.table(), "megatron_ranks:run"


def make_ranks(world: int) -> MegatronRanks:
    """Makes ranks which also import from this folder and from DeepSpeed's."""
    ranks = MegatronRanks(world)
    ranks.python_path = os.pathsep.join([ranks.python_path, str(HERE), str(HERE.parent / "deepspeed")])
    return ranks
