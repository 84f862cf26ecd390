# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's pipeline engine: every pair of features trains as by its own schedule, or is refused by name.

The ranks are for this file alone, as the host can never change its topology.
"""

from pair_ranks import *  # noqa: F403

HOST = "ds_pipe"
