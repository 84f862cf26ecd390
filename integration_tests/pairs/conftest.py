# SPDX-License-Identifier: Apache-2.0
"""Configures the ranks of a host's rows: those of integration_tests/deepspeed, which also import from this folder."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / host) for host in ("deepspeed", "megatron", "transformers"))]
from pair_table import table_of  # noqa: E402
from rank_harness import ranks_rest  # noqa: E402, F401

# SLUICE in the environment must not affect the tests.
os.environ.pop("SLUICE", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test once for each row of its module's table."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", table_of(metafunc.module).params())
