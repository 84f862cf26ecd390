# SPDX-License-Identifier: Apache-2.0
"""Ranks for the rows of a host: those of integration_tests/deepspeed, which also find the modules of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]
from rank_harness import ranks_rest  # noqa: E402, F401

# The switch of the test machine must not affect the tests.
os.environ.pop("SLUICE", None)
