# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim`: every pair of features trains as with torch.optim, or is refused by name."""

from pair_ranks import *  # noqa: F403

HOST = "optim"
