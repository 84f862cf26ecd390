# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's `MoE`: every pair of features trains as in stock, or is refused by name."""

from pair_ranks import *  # noqa: F403

HOST = "ds_moe"
