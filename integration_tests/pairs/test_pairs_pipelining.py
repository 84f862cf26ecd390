# SPDX-License-Identifier: Apache-2.0
"""Tests torch.distributed.pipelining: every pair of features trains with 1F1B's bits, or is refused by name."""

import pipelining_table
from pair_ranks import *  # noqa: F403

TABLE, JOB = pipelining_table.table(), "pipelining_ranks:run"
