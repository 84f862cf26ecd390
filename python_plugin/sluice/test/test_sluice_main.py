# SPDX-License-Identifier: Apache-2.0
"""Tests properties of the command line that hold for every command."""

import os
import signal
import subprocess
import sys

import pytest

MODEL = "--machine a100-8x8-1600g --ranks 8,16 --experts 64 --top-k 2 --tokens 256 --model-width 64 --hidden-width 128"


@pytest.mark.parametrize("words", ["version", "help", "plan --help", f"simulate {MODEL}"])
def test_Output_ThatNobodyReads_EndsQuietly(words: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "sluice", *words.split()], stdout=nobody, stderr=subprocess.PIPE)
    assert done.stderr == b"" and done.returncode in (0, 128 + signal.SIGPIPE), done
