# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's `MoE`: every pair of features trains as in stock, or is refused by name."""

import ds_moe_table
from pair_ranks import *  # noqa: F403

TABLE, JOB = ds_moe_table.table(), "ds_moe_ranks:run"
