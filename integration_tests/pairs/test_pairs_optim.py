# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim`: every pair of features trains as with torch.optim, or is refused by name."""

import optim_table
from pair_ranks import *  # noqa: F403

TABLE, JOB = optim_table.table(), "optim_ranks:run"
