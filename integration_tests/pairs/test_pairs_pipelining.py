# SPDX-License-Identifier: Apache-2.0
"""Tests torch.distributed.pipelining: every pair of features trains with 1F1B's bits, or is refused by name."""

from pair_ranks import *  # noqa: F403

HOST = "pipelining"
