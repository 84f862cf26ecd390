# SPDX-License-Identifier: Apache-2.0
"""Runs the soak test for a few minutes. For a longer one, run soak.py directly."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_RanksOfADeepSpeedJob_KilledAndStoppedAtRandom_GoOnWithTheSameLosses():
    pytest.importorskip("deepspeed")
    import soak

    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    print(soak.run(2.5, seed))
