# SPDX-License-Identifier: Apache-2.0
"""Configures the ranks of a host's rows: those of integration_tests/deepspeed, which also import from this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]
from rank_harness import ranks_rest  # noqa: E402, F401

# SLUICE in the environment must not affect the tests.
os.environ.pop("SLUICE", None)
