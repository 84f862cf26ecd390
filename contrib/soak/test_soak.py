# SPDX-License-Identifier: Apache-2.0
"""Runs soak tests for a few minutes. For longer ones, run soak.py or soak_deepspeed.py directly."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import soak

MINUTES = 1.25


def _seed():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return seed


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_RanksOfACProgram_KilledAndStoppedAtRandom_GoOnWithTheSameLosses(ranks):
    print(soak.run(MINUTES, ranks, _seed()))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_RanksOfADeepSpeedJob_KilledAndStoppedAtRandom_GoOnWithTheSameLosses():
    pytest.importorskip("deepspeed")
    import soak_deepspeed

    print(soak_deepspeed.run(2 * MINUTES, _seed()))
