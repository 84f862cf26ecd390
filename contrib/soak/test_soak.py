# SPDX-License-Identifier: Apache-2.0
"""Runs soak tests for a few minutes. For longer ones, run soak.py, soak_mpi.py or soak_deepspeed.py directly."""

import os
import shutil
import sys
import time

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import command
import soak
import soak_mpi

MINUTES = 1.25


def _seed():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return seed


def test_LongSoak_TellsItsProgress_AndEnds(capsys):
    numbers = []
    for number in command.numbers_for(0.002, tell_s=0):
        numbers.append(number)
        time.sleep(0.05)
    assert numbers == list(range(1, len(numbers) + 1)) and 1 <= len(numbers) <= 3
    assert capsys.readouterr().err.splitlines()[0] == "soak: 0 of 0.002 minutes, 0 ended"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_RanksOfACProgram_KilledAndStoppedAtRandom_GoOnWithTheSameLosses(ranks):
    print(soak.run(MINUTES, ranks, _seed()))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_RanksOfAJobUnderMPI_KilledAndStoppedAtRandom_EndItAndGoOnWithTheSameLosses():
    if shutil.which("mpirun") is None or shutil.which("mpicc") is None:
        pytest.skip("needs mpirun and mpicc: apt-get install openmpi-bin libopenmpi-dev")
    print(soak_mpi.run(MINUTES, 3, _seed()))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_RanksOfADeepSpeedJob_KilledAndStoppedAtRandom_GoOnWithTheSameLosses():
    pytest.importorskip("deepspeed")
    import soak_deepspeed

    print(soak_deepspeed.run(2 * MINUTES, _seed()))
